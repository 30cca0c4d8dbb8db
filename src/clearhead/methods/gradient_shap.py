"""Gradient SHAP: the expected gradient at random points between random baselines and the input.

    r_i = E_{x′, α, ε} Σ_k (x_ik + ε_ik − x′_ik) · ∂y(x′ + α(x + ε − x′))/∂x_ik

α is uniform on 0…1, ε Gaussian with σ = `noise` in the units of the input, x′ one of the `baselines` (by name, as in
integrated gradients) or of the `examples`: texts, or paths of images, whose vectors replace those of the input (a
shorter text is padded with the default baseline). Random numbers are keyed by seed and content. With a single baseline
the scores estimate integrated gradients. The certificate has the standard error of their sum (`standard_error`, of the
mean over the draws), and with a single baseline the difference between the sum and y(x) − y(x′), relative to the
largest score (`completeness_gap`).
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from clearhead.capture.tape import Tape
from clearhead.methods._path import PathMethod, PathPoint, PathPointResult, build_baseline_names, check_step_count
from clearhead.methods.base import MethodScores, register_method
from clearhead.methods.cost import Cost
from clearhead.methods.input_x_gradient import VectorReduction, reduce_vectors
from clearhead.methods.pass_type import PassType


@register_method(
    "gradient-shap",
    pass_type=PassType.PATH,
    family="gradient",
    requires=("inputs", "input_gradient"),
    cost=Cost(forward=52, backward=51, note="one per sample, batched"),
    citation="Lundberg & Lee (2017), A unified approach to interpreting model predictions, NeurIPS; expected gradients "
    "as in Erion et al. (2021), Nature Machine Intelligence",
    signed=True,
    target="any",
    measures="the average gradient between noisy inputs and random baselines, multiplied by their difference",
    misleads="random points lie outside the data distribution, and few samples make the scores noisy",
    linear_in_target=True,
    axioms=("zero for units without effect", "implementation invariant"),
)
class GradientShap(PathMethod):
    """Expected gradients over random baselines, noise and path positions.

    Attributes:
        samples: Number of random points.
        noise: σ of the Gaussian noise, in the units of the input.
        baselines: Baselines by name; None for the default (see the module).
        examples: Other inputs (texts, or paths of images) to use as baselines.
        reduce: How vectors become scores: signed sum, Euclidean norm, or sum of absolute values.
    """

    samples: int = 50
    noise: float = 0.0
    baselines: str | tuple[str, ...] | None = None
    examples: str | tuple[str, ...] = ()
    reduce: VectorReduction = "sum"

    @classmethod
    def count_points(cls, options: Mapping[str, Any]) -> int:
        """Return one point per sample, and a single baseline."""
        baseline_names = build_baseline_names(options.get("baselines"), options.get("examples", ()))
        return int(options.get("samples", cls.samples)) + int(len(baseline_names) < 2)

    @property
    def linear_in_target(self) -> bool:
        """True for the signed sum; norms and absolute values are not linear."""
        return self.reduce == "sum"

    def setup(self) -> None:
        check_step_count(self.samples, name="samples")
        self.baseline_names = build_baseline_names(self.baselines, self.examples)
        self.baseline: str | tuple[str, ...] | None = self.baseline_names
        if len(self.baseline_names) < 2:
            self.baseline = next(iter(self.baseline_names), None)
        self.mean_product: torch.Tensor | float = 0.0
        self.sample_totals: list[torch.Tensor] = []

    def iter_points(self) -> Iterable[PathPoint]:
        """Return `samples` random points; with a single baseline also x′, for the completeness gap."""
        points = [PathPoint(None, self.baseline, self.noise, sample_index=index) for index in range(self.samples)]
        if len(self.baseline_names) < 2:
            points.append(PathPoint(0.0, self.baseline))
        return points

    def on_point(self, result: PathPointResult) -> None:
        """Add (x + ε − x′) ⊙ ∂y/∂x of a random point to the mean; the point x′ gives the base value."""
        assert result.tape.input_gradient is not None
        if result.point.alpha == 0:
            self.base_value = result.tape.value
            return
        product = result.input_delta[self.unit_context.stream] * result.tape.input_gradient[self.unit_context.stream]
        product = product * self.unit_context.valid_mask[..., None]
        self.mean_product = self.mean_product + product / self.samples
        self.sample_totals.append(product.sum((1, 2)))

    def compute_scores(self, tape: Tape) -> MethodScores:
        """Reduce the mean product to scores; the standard error is that of their signed sum."""
        assert isinstance(self.mean_product, torch.Tensor)
        diagnostics = {}
        if self.samples > 1:
            diagnostics["standard_error"] = torch.stack(self.sample_totals).std(0) / self.samples**0.5
        if self.base_value is not None:
            self.attributed_total = torch.stack(self.sample_totals).mean(0)
        return MethodScores(
            reduce_vectors(self.mean_product, self.reduce)[:, None], base_value=self.base_value, diagnostics=diagnostics
        )
