"""Gradient SHAP: the expected gradient at random places between random baselines and the input.

    r_i = E_{x′, α, ε} Σ_k (x_ik + ε_ik − x′_ik) · ∂y(x′ + α(x + ε − x′))/∂x_ik

α is uniform on 0…1, ε Gaussian with σ = `noise` in the units of the input, x′ one of the `baselines` (by name, as in
integrated gradients) or of the `examples`: texts, or paths of pictures, whose vectors take the place of the input's (a
shorter text is filled up with the default baseline). Random numbers are keyed by seed and content. With one baseline
the scores are an estimate of integrated gradients; how uncertain their sum is (`standard_error`, of the mean over the
draws) is in the certificate, and with one baseline how far it is from y(x) − y(x′), relative to the largest
score (`completeness_gap`).
"""

from collections.abc import Iterable

import torch

from clearhead.capture.tape import Tape
from clearhead.methods._path import PathFold, Point, Step, counted, named
from clearhead.methods.base import Scores, register
from clearhead.methods.input_x_gradient import Reduce, reduced


@register(
    "gradient-shap",
    kind="path",
    family="gradient",
    asks=("inputs", "input_gradient"),
    cost="50 forward and backward passes (one a sample), several at once",
    citation="Lundberg & Lee (2017), A unified approach to interpreting model predictions, NeurIPS; expected gradients "
    "as in Erion et al. (2021), Nature Machine Intelligence",
    signed=True,
    target="any",
    linear_in_target=True,
    axioms=("nothing for what does not count", "implementation invariant"),
)
class GradientShap(PathFold):
    samples: int = 50
    noise: float = 0.0
    baselines: str | tuple[str, ...] | None = None
    examples: str | tuple[str, ...] = ()
    reduce: Reduce = "sum"

    @property
    def linear_in_target(self) -> bool:
        return self.reduce == "sum"

    def begin(self) -> None:
        counted(self.samples, name="samples")
        self.among = named(self.baselines, self.examples)
        self.baseline = self.among if len(self.among) > 1 else next(iter(self.among), None)
        self.mean: torch.Tensor | float = 0.0
        self.sums: list[torch.Tensor] = []

    def points(self) -> Iterable[Point]:
        drawn = [Point(None, self.baseline, self.noise, draw=draw) for draw in range(self.samples)]
        return drawn if len(self.among) > 1 else [*drawn, Point(0.0, self.baseline)]

    def at(self, step: Step) -> None:
        assert step.tape.input_gradient is not None
        if step.point.along == 0:
            self.base_value = step.tape.value
            return
        product = step.way[self.frame.stream] * step.tape.input_gradient[self.frame.stream]
        product = product * self.frame.valid[..., None]
        self.mean = self.mean + product / self.samples
        self.sums.append(product.sum((1, 2)))

    def finish(self, tape: Tape) -> Scores:
        assert isinstance(self.mean, torch.Tensor)
        checks = {}
        if self.samples > 1:
            checks["standard_error"] = torch.stack(self.sums).std(0) / self.samples**0.5
        if self.base_value is not None:
            self.explained = torch.stack(self.sums).mean(0)
        return Scores(reduced(self.mean, self.reduce)[:, None], base_value=self.base_value, checks=checks)
