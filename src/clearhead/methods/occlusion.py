"""Occlusion: what the target loses when a unit is taken away.

    r_u = y(x) − y(x without u)

`replacement` says what stands in its place: in texts the mask token (or `delete`, `pad`, `unk`), in pictures their
mean (or `blur`, `black`). `unit="word"` takes words away as a whole, and each of its tokens gets an equal share.
`window` neighbours (in pictures, a square with that side) go at a time: a unit then gets the mean of what its windows
lose, per unit of a window.
"""

import torch

from clearhead.methods._perturbation import Game, Perturbation, Play, Shares, whole_number
from clearhead.methods.base import register


@register(
    "occlusion",
    kind="values",
    family="perturbation",
    cost="one forward for each unit, in batches",
    citation="Zeiler & Fergus (2014), Visualizing and understanding convolutional networks; Li, Monroe & Jurafsky "
    "(2016), Understanding neural networks through representation erasure",
    signed=True,
    target="any",
    linear_in_target=True,
    model_agnostic=True,
    axioms=("exact on additive games",),
)
class Occlusion(Perturbation):
    window: int = 1

    def play(self, game: Game) -> Play:
        hidden = game.windows(whole_number("window", self.window, 1))
        worth = yield torch.cat([game.everybody[None], ~hidden])
        lost = worth[0] - worth[1:]
        share = hidden.double() / hidden.sum(1, keepdim=True)
        return Shares((lost @ share) / hidden.sum(0))
