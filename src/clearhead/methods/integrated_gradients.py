"""Integrated gradients: the gradient integrated along the straight path from a baseline to the input.

    r_i = Σ_k (x_ik − x′_ik) · ∫₀¹ ∂y(x′ + α(x − x′))/∂x_ik dα

x_i is a token's word embedding, or the pixels of a patch; the class is the one predicted at the input. The scores sum
to y(x) − y(x′), and y(x′) is the base value. The certificate has the error of the sum (`completeness_gap`), and the
largest change of a score when the number of steps was doubled (`step_doubling_error`), both relative to the largest
score.

Baselines by name: for texts `pad`, `mask`, `mean` (of the whole vocabulary), which leave special tokens unchanged, or
`zero`; for images `zero` (after normalisation, so the mean colour), `black`, `mean` (of the image) or `blur`. The
default is the embedding of the padding token, or `mean` if that is zero or unknown, and `zero` for images. The baseline
`zero` is refused if token embeddings go through a norm before positions are added: the norm removes the length of a
vector, so the integrand is concentrated at α = 0.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from clearhead.capture.tape import Tape
from clearhead.errors import UnsupportedError
from clearhead.methods._path import PathMethod, PathPoint, PathPointResult, QuadratureRule, compute_quadrature
from clearhead.methods.base import MethodScores, compat_option, register_method
from clearhead.methods.cost import Cost
from clearhead.methods.input_x_gradient import VectorReduction, reduce_vectors
from clearhead.methods.pass_type import PassType


@register_method(
    "integrated-gradients",
    pass_type=PassType.PATH,
    family="gradient",
    requires=("inputs", "input_gradient"),
    cost=Cost(forward=77, backward=76, note="one and a half per step, batched"),
    citation="Sundararajan, Taly & Yan (2017), Axiomatic attribution for deep networks, ICML",
    signed=True,
    target="any",
    measures="how the target changes from a baseline to the input, along a straight line; the scores add up",
    misleads="points on the line are not real inputs, and the scores depend on the baseline",
    linear_in_target=True,
    axioms=("complete", "zero for units without effect", "implementation invariant"),
)
class IntegratedGradients(PathMethod):
    """Gradient integrated along the straight path from a baseline.

    Attributes:
        steps: Number of points of the quadrature.
        rule: The quadrature rule.
        baseline: The baseline x′ by name; None for the default of the model.
        reduce: How vectors become scores: signed sum, Euclidean norm, or sum of absolute values.
        captum: Whether points and weights are those of captum.
    """

    steps: int = 50
    rule: QuadratureRule = compat_option("gauss-legendre")
    baseline: str | None = None
    reduce: VectorReduction = "sum"
    captum: bool = compat_option(False)

    @classmethod
    def count_points(cls, options: Mapping[str, Any]) -> int:
        """Return the number of x′ and the points of both quadratures, which may have some in common."""
        fine_weights, coarse_weights = compute_fine_and_coarse_weights(
            options.get("rule", cls.rule), options.get("steps", cls.steps), options.get("captum", cls.captum)
        )
        return len({0.0, *fine_weights, *coarse_weights})

    @property
    def linear_in_target(self) -> bool:
        """True for the signed sum; norms and absolute values are not linear."""
        return self.reduce == "sum"

    def setup(self) -> None:
        self.fine_weights, self.coarse_weights = compute_fine_and_coarse_weights(self.rule, self.steps, self.captum)
        self.fine_and_coarse_sums: list[torch.Tensor | float] = [0.0, 0.0]

    def iter_points(self) -> Iterable[PathPoint]:
        """Return x′, the points of the rule, and those of half as many steps."""
        return [PathPoint(alpha, self.baseline) for alpha in (0.0, *self.fine_weights, *self.coarse_weights)]

    def on_point(self, result: PathPointResult) -> None:
        """Add weight · (x − x′) ⊙ ∂y/∂x to each of the two quadratures that have this point."""
        assert result.tape.input_gradient is not None and result.point.alpha is not None
        alpha = result.point.alpha
        stream = self.unit_context.stream
        if alpha == 0:
            self.base_value = result.tape.value
        product = result.input_delta[stream] * result.tape.input_gradient[stream]
        for i, weights in enumerate((self.fine_weights, self.coarse_weights)):
            if alpha in weights:
                self.fine_and_coarse_sums[i] = self.fine_and_coarse_sums[i] + weights[alpha] * product

    def compute_scores(self, tape: Tape) -> MethodScores:
        """Reduce the finer integral to scores; the coarser one gives `step_doubling_error`."""
        fine, coarse = self.fine_and_coarse_sums
        assert isinstance(fine, torch.Tensor)
        fine = fine * self.unit_context.valid_mask[..., None]
        if not torch.isfinite(fine).all():
            raise UnsupportedError(
                f"the gradient is not finite on the path from baseline={self.baseline!r}: the input of a norm of the "
                "model is a zero vector there. Choose another baseline, or a quadrature rule without the end points, "
                "such as rule='gauss-legendre'"
            )
        self.attributed_total = fine.sum((1, 2))
        scores = reduce_vectors(fine, self.reduce)
        diagnostics = {}
        if isinstance(coarse, torch.Tensor):
            coarse_scores = reduce_vectors(coarse * self.unit_context.valid_mask[..., None], self.reduce)
            largest_change = (scores - coarse_scores).abs().amax(1)
            diagnostics["step_doubling_error"] = largest_change / scores.abs().amax(1).clamp(min=1e-30)
        return MethodScores(scores[:, None], base_value=self.base_value, diagnostics=diagnostics)


def compute_fine_and_coarse_weights(
    rule: QuadratureRule, steps: int, captum_compatible: bool = False
) -> tuple[dict[float, float], dict[float, float]]:
    """Return the weight of each point of a quadrature, and of one with half as many steps (empty for too few).

    Example:
        >>> compute_fine_and_coarse_weights("riemann-middle", 2)
        ({0.25: 0.5, 0.75: 0.5}, {0.5: 1.0})
    """
    fine_weights = dict(compute_quadrature(rule, steps, captum_compatible))
    min_steps = 2 if rule == "riemann-trapezoid" else 1
    coarse_steps = steps // 2
    if coarse_steps < min_steps:
        return fine_weights, {}
    return fine_weights, dict(compute_quadrature(rule, coarse_steps, captum_compatible))
