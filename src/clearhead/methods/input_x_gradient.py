"""Input × gradient: the first-order share of each unit's input vector in the target.

    r_i = Σ_k x_ik · ∂y/∂x_ik

x_i is a token's word embedding, or the pixels of a patch.
"""

from typing import Literal

from jaxtyping import Float
from torch import Tensor

from clearhead.capture.tape import Tape
from clearhead.methods.base import Fold, Scores, register

Reduce = Literal["sum", "l2", "abs"]


def reduced(vectors: Float[Tensor, "batch unit feature"], how: Reduce) -> Float[Tensor, "batch unit"]:
    """One number per unit: the signed sum, the Euclidean norm, or the sum of absolute values."""
    if how == "sum":
        return vectors.sum(-1)
    if how == "l2":
        return vectors.norm(dim=-1)
    return vectors.abs().sum(-1)


@register(
    "input-x-gradient",
    family="gradient",
    asks=("inputs", "input_gradient"),
    cost="one forward and one backward",
    citation="Shrikumar et al. (2016), Not just a black box: learning important features through propagating "
    "activation differences",
    signed=True,
    target="any",
    linear_in_target=True,
    axioms=("exact on linear models",),
)
class InputXGradient(Fold):
    reduce: Reduce = "sum"

    @property
    def linear_in_target(self) -> bool:
        return self.reduce == "sum"  # absolute values and norms are not linear, whatever they are taken of

    def finish(self, tape: Tape) -> Scores:
        assert tape.inputs is not None and tape.input_gradient is not None
        stream = self.frame.stream
        return Scores(reduced(tape.inputs[stream] * tape.input_gradient[stream], self.reduce)[:, None])
