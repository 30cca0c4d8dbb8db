"""Integrated gradients: the gradient gathered on the straight way from a baseline to the input.

    r_i = Σ_k (x_ik − x′_ik) · ∫₀¹ ∂y(x′ + α(x − x′))/∂x_ik dα

x_i is a token's word embedding, or the pixels of a patch; the class is the one that is predicted at the input. The
scores add up to y(x) − y(x′), and y(x′) is the base value. How far they are from that (`completeness_gap`), and how
much they moved when half the steps became all of them (`step_doubling_error`), both relative to
the largest, is in the certificate.

Baselines by name: of words `pad`, `mask`, `mean` (of the whole vocabulary) – these leave special tokens as they are –
or `zero`; of pictures `zero` (after normalisation, so the mean colour), `black`, `mean` (of the picture) or `blur`. By
default the padding's embedding, or the mean where that is zero or unknown, and `zero` for pictures. A baseline of zero
is refused where words go through a norm before positions are added: it forgets the length of a vector, so the integrand
piles up at α = 0.
"""

from collections.abc import Iterable

import torch

from clearhead.capture.tape import Tape
from clearhead.errors import Refusal
from clearhead.methods._path import PathFold, Point, Rule, Step, quadrature
from clearhead.methods.base import Scores, of_authors, register
from clearhead.methods.input_x_gradient import Reduce, reduced


@register(
    "integrated-gradients",
    kind="path",
    family="gradient",
    asks=("inputs", "input_gradient"),
    cost="76 forward and backward passes (one and a half a step), several at once",
    citation="Sundararajan, Taly & Yan (2017), Axiomatic attribution for deep networks, ICML",
    signed=True,
    target="any",
    linear_in_target=True,
    axioms=("complete", "nothing for what does not count", "implementation invariant"),
)
class IntegratedGradients(PathFold):
    steps: int = 50
    rule: Rule = of_authors("gauss-legendre")
    baseline: str | None = None
    reduce: Reduce = "sum"
    captum: bool = of_authors(False)

    @property
    def linear_in_target(self) -> bool:
        return self.reduce == "sum"

    def begin(self) -> None:
        self.fine = dict(quadrature(self.rule, self.steps, self.captum))
        least = 2 if self.rule == "riemann-trapezoid" else 1
        half = self.steps // 2
        self.coarse = dict(quadrature(self.rule, half, self.captum)) if half >= least else {}
        self.sums: list[torch.Tensor | float] = [0.0, 0.0]

    def points(self) -> Iterable[Point]:
        return [Point(along, self.baseline) for along in (0.0, *self.fine, *self.coarse)]

    def at(self, step: Step) -> None:
        assert step.tape.input_gradient is not None and step.point.along is not None
        along, stream = step.point.along, self.frame.stream
        if along == 0:
            self.base_value = step.tape.value
        product = step.way[stream] * step.tape.input_gradient[stream]
        for i, weights in enumerate((self.fine, self.coarse)):
            if along in weights:
                self.sums[i] = self.sums[i] + weights[along] * product

    def finish(self, tape: Tape) -> Scores:
        fine, coarse = self.sums
        assert isinstance(fine, torch.Tensor)
        fine = fine * self.frame.valid[..., None]
        if not torch.isfinite(fine).all():
            raise Refusal(
                f"the gradient is not finite on the way from baseline={self.baseline!r}: a norm of the model is given "
                "a vector of zeros there. Choose another baseline, or a rule that leaves the ends out, such as "
                "'gauss-legendre'"
            )
        self.explained = fine.sum((1, 2))
        scores, checks = reduced(fine, self.reduce), {}
        if isinstance(coarse, torch.Tensor):
            moved = (scores - reduced(coarse * self.frame.valid[..., None], self.reduce)).abs().amax(1)
            checks["step_doubling_error"] = moved / scores.abs().amax(1).clamp(min=1e-30)
        return Scores(scores[:, None], base_value=self.base_value, checks=checks)
