"""Saliency: how steeply the target changes with each unit's input vector.

    r_i = ‖∂y/∂x_i‖

x_i is a token's word embedding, or the pixels of a patch.
"""

from clearhead.capture.tape import Tape
from clearhead.methods.base import Fold, Scores, register
from clearhead.methods.input_x_gradient import Reduce, reduced


@register(
    "saliency",
    family="gradient",
    asks=("input_gradient",),
    cost="one forward and one backward",
    citation="Simonyan, Vedaldi & Zisserman (2014), Deep inside convolutional networks, ICLR workshop",
    signed=False,
    target="any",
)
class Saliency(Fold):
    reduce: Reduce = "l2"

    def finish(self, tape: Tape) -> Scores:
        assert tape.input_gradient is not None
        return Scores(reduced(tape.input_gradient[self.frame.stream], self.reduce)[:, None])
