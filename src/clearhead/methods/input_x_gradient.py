"""Input × gradient: the first-order contribution of each unit's input vector to the target.

    r_i = Σ_k x_ik · ∂y/∂x_ik

x_i is a token's word embedding, or the pixels of a patch.
"""

from typing import Literal

from jaxtyping import Float
from torch import Tensor

from clearhead.capture.tape import Tape
from clearhead.methods.base import AttributionMethod, MethodScores, register_method
from clearhead.methods.cost import Cost

VectorReduction = Literal["sum", "l2", "abs"]


def reduce_vectors(
    vectors: Float[Tensor, "batch unit feature"], reduction: VectorReduction
) -> Float[Tensor, "batch unit"]:
    """Reduce vectors to one number per unit: the signed sum, the Euclidean norm, or the sum of absolute values."""
    if reduction == "sum":
        return vectors.sum(-1)
    if reduction == "l2":
        return vectors.norm(dim=-1)
    return vectors.abs().sum(-1)


@register_method(
    "input-x-gradient",
    family="gradient",
    requires=("inputs", "input_gradient"),
    cost=Cost(forward=1, backward=1),
    citation="Shrikumar et al. (2016), Not just a black box: learning important features through propagating "
    "activation differences",
    signed=True,
    target="any",
    measures="the contribution of each unit to the target, to first order",
    misleads="gradients vanish where the model is saturated, and the scores do not add up to the target",
    linear_in_target=True,
    axioms=("exact on linear models",),
)
class InputXGradient(AttributionMethod):
    """Input vectors times their gradient.

    Attributes:
        reduce: How vectors become scores: signed sum, Euclidean norm, or sum of absolute values.
    """

    reduce: VectorReduction = "sum"

    @property
    def linear_in_target(self) -> bool:
        """True for the signed sum only."""
        return self.reduce == "sum"  # absolute values and norms are not linear

    def compute_scores(self, tape: Tape) -> MethodScores:
        """Reduce x_i ⊙ ∂y/∂x_i to one score per unit; by default its sum."""
        assert tape.inputs is not None and tape.input_gradient is not None
        stream = self.unit_context.stream
        return MethodScores(reduce_vectors(tape.inputs[stream] * tape.input_gradient[stream], self.reduce)[:, None])
