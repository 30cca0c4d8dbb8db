"""LIME: the weights of a linear model that fits the target's values near the input.

    φ = argmin Σ_z w(z) (v(z) − c − z·φ)² + α |φ|²,     w(z) = exp(−d(z)² / σ²),     d(z) = 1 − cos(z, 1) = 1 − √(|z|/M)

over coalitions z with each unit present with probability ½, and the whole input. σ is 0.25·√M unless `width` is given;
`ridge` is α. Units are tokens (`unit="word"` for words) and the superpixels of a picture (`unit="patch"` for patches);
a picture that falls into too few of them, such as noise, is cut along a grid, and provenance says so (`players`).
LIME is not complete: the certificate holds how badly the linear model fits (`misfit`, 1 − R²) and how far off it is
at the input itself (`completeness_gap`).
"""

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.errors import InputError
from clearhead.methods._perturbation import NOTHING, Game, Perturbation, Play, Shares, whole_number
from clearhead.methods.base import register


@register(
    "lime",
    kind="values",
    family="perturbation",
    cost="1000 forward passes (evaluations=), in batches",
    citation='Ribeiro, Singh & Guestrin (2016), "Why should I trust you?" Explaining the predictions of any classifier',
    signed=True,
    target="any",
    linear_in_target=True,
    model_agnostic=True,
)
class Lime(Perturbation):
    pictures = "superpixel"

    evaluations: int = 1000
    width: float | None = None
    ridge: float = 1.0

    def play(self, game: Game) -> Play:
        count = game.players
        drawn = torch.rand(whole_number("evaluations", self.evaluations, 2) - 1, count, generator=game.generator())
        z = torch.cat([game.everybody[None], drawn < 0.5])
        worth = yield z
        width = 0.25 * count**0.5 if self.width is None else self.width
        if width <= 0 or self.ridge < 0:
            raise InputError(f"width={width} must be above zero, and ridge={self.ridge} not below it")
        distance = 1 - (z.sum(1).double() / count).sqrt()
        weights = (-(distance**2) / width**2).exp()
        slopes, start = ridge_fit(z.double(), worth, weights, self.ridge)
        rest = worth - start - z.double() @ slopes
        spread = worth - (weights @ worth) / weights.sum()
        misfit = float(weights @ rest**2) / max(float(weights @ spread**2), 1e-300)
        return Shares(slopes, float(start), checks={"misfit": misfit})


def ridge_fit(
    z: Float[Tensor, "row player"], y: Float[Tensor, "row"], weights: Float[Tensor, "row"], ridge: float
) -> tuple[Float[Tensor, "player"], Float[Tensor, ""]]:
    """Slopes and start of a weighted ridge regression; the start is not held small."""
    middle, mean = (weights @ z) / weights.sum(), (weights @ y) / weights.sum()
    x = z - middle
    root = weights.sqrt()
    rows = torch.cat([root[:, None] * x, ridge**0.5 * torch.eye(z.shape[1], dtype=z.dtype)])
    slopes = torch.linalg.pinv(rows, rtol=NOTHING) @ torch.cat([root * (y - mean), y.new_zeros(z.shape[1])])
    return slopes, mean - middle @ slopes
