"""How far scores are from what they should add up to: one meaning for every method."""

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor


def compute_completeness_gap(
    residual: Float[Tensor, "batch"], scores: "Iterable[Float[Tensor, 'batch *row unit']]"
) -> Float[Tensor, "batch"]:
    """What the scores of all streams together miss, relative to the largest of them."""
    every = torch.cat([part.double().flatten(1).abs().cpu() for part in scores], dim=1)
    return residual.double().cpu().abs() / every.amax(1).clamp(min=1e-30)
