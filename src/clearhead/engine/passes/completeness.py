"""The relative completeness gap: |value − Σ scores| divided by the largest score, for certificates."""

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor


def compute_completeness_gap(
    residual: Float[Tensor, "batch"], scores: "Iterable[Float[Tensor, 'batch *row unit']]"
) -> Float[Tensor, "batch"]:
    """Return the absolute residual of each sample, relative to its largest score.

    Args:
        residual: The value minus the sum of the scores.
        scores: The scores of each stream.
    """
    magnitudes = torch.cat([stream_scores.double().flatten(1).abs().cpu() for stream_scores in scores], dim=1)
    return residual.double().cpu().abs() / magnitudes.amax(1).clamp(min=1e-30)
