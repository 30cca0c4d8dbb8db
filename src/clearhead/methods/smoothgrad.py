"""SmoothGrad: the mean gradient at noisy copies of the input.

    r_i = ‖E_ε ∂y(x + ε)/∂x_i‖

ε is Gaussian with σ = `noise` times the range of the input: the largest minus the smallest pixel, or the largest minus
the smallest norm of the token embeddings. x_i is a token's word embedding, or the pixels of a patch. Random numbers are
keyed by seed and content.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from clearhead.capture.tape import Tape
from clearhead.methods._path import PathMethod, PathPoint, PathPointResult, check_step_count
from clearhead.methods.base import MethodScores, register_method
from clearhead.methods.cost import Cost
from clearhead.methods.input_x_gradient import VectorReduction, reduce_vectors
from clearhead.methods.pass_type import PassType


@register_method(
    "smoothgrad",
    pass_type=PassType.PATH,
    family="gradient",
    requires=("input_gradient",),
    cost=Cost(forward=51, backward=50, note="one per sample, batched"),
    citation="Smilkov et al. (2017), SmoothGrad: removing noise by adding noise, ICML workshop",
    signed=False,
    target="any",
    measures="the sensitivity of the target to each unit, averaged over noisy copies of the input",
    misleads="noise moves images and embeddings outside the data distribution",
    axioms=("zero for units without effect", "implementation invariant"),
)
class SmoothGrad(PathMethod):
    """Mean gradient at noisy inputs.

    Attributes:
        samples: Number of noisy inputs.
        noise: σ of the Gaussian noise, relative to the range of the input.
        reduce: How vectors become scores: signed sum, Euclidean norm, or sum of absolute values.
    """

    samples: int = 50
    noise: float = 0.15
    reduce: VectorReduction = "l2"

    @classmethod
    def count_points(cls, options: Mapping[str, Any]) -> int:
        """Return one point per sample."""
        return int(options.get("samples", cls.samples))

    def setup(self) -> None:
        check_step_count(self.samples, name="samples")
        self.mean_gradient: torch.Tensor | float = 0.0

    def iter_points(self) -> Iterable[PathPoint]:
        """Return `samples` noisy copies of the input; σ is relative to its range."""
        return [
            PathPoint(noise_std=self.noise, noise_relative_to="range", sample_index=index)
            for index in range(self.samples)
        ]

    def on_point(self, result: PathPointResult) -> None:
        """Add the gradient at one noisy copy to the mean."""
        assert result.tape.input_gradient is not None
        self.mean_gradient = self.mean_gradient + result.tape.input_gradient[self.unit_context.stream] / self.samples

    def compute_scores(self, tape: Tape) -> MethodScores:
        """Reduce the mean gradient to scores; the norm is taken after the mean."""
        assert isinstance(self.mean_gradient, torch.Tensor)
        return MethodScores(reduce_vectors(self.mean_gradient, self.reduce)[:, None])
