"""Saliency: the norm of the gradient of the target with respect to each unit's input vector.

    r_i = ‖∂y/∂x_i‖

x_i is a token's word embedding, or the pixels of a patch.
"""

from clearhead.capture.tape import Tape
from clearhead.methods.base import AttributionMethod, MethodScores, register_method
from clearhead.methods.cost import Cost
from clearhead.methods.input_x_gradient import VectorReduction, reduce_vectors


@register_method(
    "saliency",
    family="gradient",
    requires=("input_gradient",),
    cost=Cost(forward=1, backward=1),
    citation="Simonyan, Vedaldi & Zisserman (2014), Deep inside convolutional networks, ICLR workshop",
    signed=False,
    target="any",
    measures="how sensitive the target is to each unit",
    misleads="sensitivity is not contribution: it has no sign, and it vanishes where the model is saturated",
)
class Saliency(AttributionMethod):
    """Norm of the input gradient.

    Attributes:
        reduce: How vectors become scores: signed sum, Euclidean norm, or sum of absolute values.
    """

    reduce: VectorReduction = "l2"

    def compute_scores(self, tape: Tape) -> MethodScores:
        """Reduce ∂y/∂x_i to one score per unit; by default its norm."""
        assert tape.input_gradient is not None
        return MethodScores(reduce_vectors(tape.input_gradient[self.unit_context.stream], self.reduce)[:, None])
