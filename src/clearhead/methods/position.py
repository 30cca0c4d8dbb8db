"""Position control: high scores for early tokens and central patches, whatever the model.

    r_i = 1 − ‖p_i‖

p_i is the distance of unit i from the start of the text, or from the centre of the image.
"""

from clearhead.capture.tape import Tape
from clearhead.methods.base import AttributionMethod, MethodScores, register_method
from clearhead.methods.cost import Cost


@register_method(
    "position",
    family="control",
    cost=Cost(forward=1),
    citation="–",
    signed=False,
    target="none",
    measures="nothing about the model: the distance from the start or the centre, as a control",
    misleads="a method that does no better than this control may only reflect where evidence usually is in the data",
    model_agnostic=True,
)
class PositionControl(AttributionMethod):
    """Scores by the position of each unit; no property of the model is used."""

    def compute_scores(self, tape: Tape) -> MethodScores:
        """r_i = 1 − ‖p_i‖."""
        return MethodScores((1 - self.unit_context.positions.norm(dim=-1))[:, None])
