"""Position alone: early words, patches near the middle. A reference that knows nothing of the model.

    r_i = 1 − ‖p_i‖

p_i says how far unit i lies from the start of the text, or from the middle of the picture.
"""

from clearhead.capture.tape import Tape
from clearhead.methods.base import Fold, Scores, register


@register(
    "position",
    family="control",
    cost="one forward",
    citation="–",
    signed=False,
    target="none",
    model_agnostic=True,
)
class Position(Fold):
    def finish(self, tape: Tape) -> Scores:
        return Scores((1 - self.frame.places.norm(dim=-1))[:, None])
