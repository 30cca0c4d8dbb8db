"""LIME: the weights of a linear surrogate model fitted to the target's values near the input.

    φ = argmin Σ_z w(z) (v(z) − c − z·φ)² + α |φ|²,     w(z) = exp(−d(z)² / σ²),     d(z) = 1 − cos(z, 1) = 1 − √(|z|/M)

over random coalitions z, each unit being present with probability ½, and the full input. σ is 0.25·√M unless `width` is
given; `ridge` is α. Units are tokens (`unit="word"` for words) and the superpixels of an image (`unit="patch"` for
patches). An image with too few superpixels, such as noise, is divided by a grid, and the provenance has this
(`players`). LIME is not complete: the certificate has the misfit of the surrogate model (`misfit`, 1 − R²) and its
error at the input itself (`completeness_gap`).
"""

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.errors import InputError
from clearhead.methods._perturbation import (
    PINV_RTOL,
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
    "lime",
    pass_type=PassType.PERTURBATION,
    family="perturbation",
    cost=Cost(forward=1001, is_upper_bound=True, note="one per evaluation (evaluations=), batched"),
    citation='Ribeiro, Singh & Guestrin (2016), "Why should I trust you?" Explaining the predictions of any classifier',
    signed=True,
    target="any",
    measures="the weights of a linear model that predicts the target for masked inputs",
    misleads="masked inputs are not real inputs, and a linear model ignores interactions between units",
    linear_in_target=True,
    model_agnostic=True,
)
class Lime(PerturbationMethod):
    """Coefficients of a local linear surrogate model.

    Attributes:
        evaluations: Number of coalitions, the full input included.
        width: σ of the kernel; None for 0.25·√M.
        ridge: α of the ridge penalty.
    """

    default_image_unit = "superpixel"

    evaluations: int = 1000
    width: float | None = None
    ridge: float = 1.0

    def iter_coalitions(self, game: CoalitionGame) -> CoalitionGenerator:
        """Request the input and random coalitions, and fit the weighted ridge regression."""
        count = game.num_players
        num_samples = check_min_int("evaluations", self.evaluations, 2) - 1
        uniform = torch.rand(num_samples, count, generator=game.make_generator())
        z = torch.cat([game.full_coalition[None], uniform < 0.5])
        values = yield z
        width = 0.25 * count**0.5 if self.width is None else self.width
        if width <= 0 or self.ridge < 0:
            raise InputError(f"width={width} must be above 0, and ridge={self.ridge} must not be negative")
        distance = 1 - (z.sum(1).double() / count).sqrt()
        weights = (-(distance**2) / width**2).exp()
        coefficients, intercept = fit_weighted_ridge(z.double(), values, weights, self.ridge)
        residuals = values - intercept - z.double() @ coefficients
        deviations = values - (weights @ values) / weights.sum()
        misfit = float(weights @ residuals**2) / max(float(weights @ deviations**2), 1e-300)
        return PlayerScores(coefficients, float(intercept), diagnostics={"misfit": misfit})


def fit_weighted_ridge(
    coalitions: Float[Tensor, "row player"], values: Float[Tensor, "row"], weights: Float[Tensor, "row"], ridge: float
) -> tuple[Float[Tensor, "player"], Float[Tensor, ""]]:
    """Return the coefficients and the intercept of a weighted ridge regression; the intercept is not penalised."""
    mean_coalition = (weights @ coalitions) / weights.sum()
    mean_value = (weights @ values) / weights.sum()
    x = coalitions - mean_coalition
    root = weights.sqrt()
    rows = torch.cat([root[:, None] * x, ridge**0.5 * torch.eye(coalitions.shape[1], dtype=coalitions.dtype)])
    targets = torch.cat([root * (values - mean_value), values.new_zeros(coalitions.shape[1])])
    coefficients = torch.linalg.pinv(rows, rtol=PINV_RTOL) @ targets
    return coefficients, mean_value - mean_coalition @ coefficients
