"""SmoothGrad: the mean gradient at noisy copies of the input.

    r_i = ‖E_ε ∂y(x + ε)/∂x_i‖

ε is Gaussian, its σ `noise` times the range of the input: of pixels the largest minus the smallest, of words that of
the lengths of their embeddings. x_i is a token's word embedding, or the pixels of a patch. Random numbers are keyed by
seed and content.
"""

from collections.abc import Iterable

import torch

from clearhead.capture.tape import Tape
from clearhead.methods._path import PathFold, Point, Step, counted
from clearhead.methods.base import Scores, register
from clearhead.methods.input_x_gradient import Reduce, reduced


@register(
    "smoothgrad",
    kind="path",
    family="gradient",
    asks=("input_gradient",),
    cost="50 forward and backward passes (one a sample), several at once",
    citation="Smilkov et al. (2017), SmoothGrad: removing noise by adding noise, ICML workshop",
    signed=False,
    target="any",
    axioms=("nothing for what does not count", "implementation invariant"),
)
class SmoothGrad(PathFold):
    samples: int = 50
    noise: float = 0.15
    reduce: Reduce = "l2"

    def begin(self) -> None:
        counted(self.samples, name="samples")
        self.mean: torch.Tensor | float = 0.0

    def points(self) -> Iterable[Point]:
        return [Point(noise=self.noise, noise_of="range", draw=draw) for draw in range(self.samples)]

    def at(self, step: Step) -> None:
        assert step.tape.input_gradient is not None
        self.mean = self.mean + step.tape.input_gradient[self.frame.stream] / self.samples

    def finish(self, tape: Tape) -> Scores:
        assert isinstance(self.mean, torch.Tensor)
        return Scores(reduced(self.mean, self.reduce)[:, None])
