"""Occlusion (leave-one-out): the decrease of the target when a unit is masked.

    r_u = y(x) − y(x without u)

`replacement` is the masking value: in texts the mask token (or `delete`, `pad`, `unk`), in images their mean (or
`blur`, `black`). `unit="word"` masks whole words, and each token of a word gets an equal part of the score. With
`window`, several neighbours (in images, a square with that side) are masked at a time: a unit then gets the mean
decrease of its windows, per unit of a window.
"""

import torch

from clearhead.methods._perturbation import (
    CoalitionGame,
    CoalitionGenerator,
    PerturbationMethod,
    PlayerScores,
    check_min_int,
)
from clearhead.methods.base import register_method
from clearhead.methods.cost import Cost
from clearhead.methods.pass_type import PassType


@register_method(
    "occlusion",
    pass_type=PassType.PERTURBATION,
    family="perturbation",
    cost=Cost(forward=2, per_unit=1, note="batched"),
    citation="Zeiler & Fergus (2014), Visualizing and understanding convolutional networks; Li, Monroe & Jurafsky "
    "(2016), Understanding neural networks through representation erasure",
    signed=True,
    target="any",
    measures="how much the target decreases when one unit is removed",
    misleads="removing a redundant unit has no effect, and inputs without a unit lie outside the data distribution",
    linear_in_target=True,
    model_agnostic=True,
    axioms=("exact on additive games",),
)
class Occlusion(PerturbationMethod):
    """Decrease of the target when units are masked.

    Attributes:
        window: Number of neighbouring units that are masked together; in images the side of a square.
    """

    window: int = 1

    def iter_coalitions(self, game: CoalitionGame) -> CoalitionGenerator:
        """Request the input and each masked window; a unit gets its windows' mean decrease per unit."""
        windows = game.get_windows(check_min_int("window", self.window, 1))
        values = yield torch.cat([game.full_coalition[None], ~windows])
        decreases = values[0] - values[1:]
        unit_weights = windows.double() / windows.sum(1, keepdim=True)
        return PlayerScores((decreases @ unit_weights) / windows.sum(0))
