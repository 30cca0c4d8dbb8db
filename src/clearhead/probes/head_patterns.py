"""Attention patterns of heads: statistics of one map, and a name that suggests what the head attends to."""

import math
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from clearhead.probes.divergences import compute_entropy

#: A head is named after a pattern that takes at least this fraction of its weight …
MIN_PATTERN_FRACTION = 0.4
#: … or after its entropy, as a fraction of the largest.
MIN_BROAD_ENTROPY = 0.85
#: The patterns that a name is chosen from, with their meaning.
PATTERN_DESCRIPTIONS = {
    "previous_token": "attends to the previous unit, which reflects local order or the subword tokens of a word",
    "next_token": "attends to the next unit",
    "self": "attends to its own unit: adds little to the residual stream",
    "class_token": "attends to the first special token, which often absorbs attention that is not needed",
    "separator": "attends to separators, which often absorb attention that is not needed",
    "same_word": "attends to other occurrences of the same unit",
    "single_key": "all queries attend to the same key, which is not a special token",
    "broad": "spreads over all units, close to an average",
    "mixed": "no pattern takes most of the weight: inspect single inputs",
}


def compute_head_statistics(
    attention: Float[Tensor, "head query key"], special: Bool[Tensor, "key"], names: Sequence[str]
) -> dict[str, Float[Tensor, "head"]]:
    """Compute statistics of each head's map, as means over rows.

    Args:
        attention: The attention weights of one layer.
        special: Which keys are special tokens.
        names: Names of the keys.

    Returns:
        By name: the fractions of the weight that follow a pattern, the entropy (1 is uniform), the weight of the most
        attended key ("sink"), and the mean distance; the distance is NaN for a single query that is not a unit.
    """
    num_queries, num_keys = attention.shape[1:]
    device = attention.device
    # a single pooling query is not a unit: its distance from every key exceeds all positions, so no pattern matches
    is_pooled = num_queries != num_keys
    if is_pooled:
        offsets = torch.full((num_queries, num_keys), num_keys, device=device)
        is_same_word = torch.zeros_like(offsets, dtype=torch.bool)
    else:
        positions = torch.arange(num_keys, device=device)
        offsets = positions[None, :] - positions[:, None]
        word_ids = {name: word_id for word_id, name in enumerate(dict.fromkeys(names))}
        words = torch.tensor([word_ids[name] for name in names], device=device)
        is_same_word = words[None] == words[:, None]
    is_same_word = is_same_word & (offsets != 0) & ~special.to(device)[None]
    is_first_special = special & (torch.arange(num_keys) == 0)
    distance = (attention * offsets.abs()).sum(-1).mean(-1)
    if is_pooled:
        distance = distance * math.nan
    entropy = torch.zeros(len(attention))
    if num_keys > 1:
        entropy = compute_entropy(attention).mean(-1) / math.log(num_keys)
    return {
        "previous_token": _compute_mean_weight_on(attention, offsets == -1),
        "next_token": _compute_mean_weight_on(attention, offsets == 1),
        "self": _compute_mean_weight_on(attention, offsets == 0),
        "class_token": (attention * is_first_special.to(attention)).sum(-1).mean(-1),
        "separator": (attention * (special & ~is_first_special).to(attention)).sum(-1).mean(-1),
        "same_word": _compute_mean_weight_on(attention, is_same_word),
        "single_key": attention.mean(1).masked_fill(special.to(device), 0).amax(-1),
        "sink": attention.mean(1).amax(-1),
        "entropy": entropy,
        "distance": distance,
    }


def _compute_mean_weight_on(
    attention: Float[Tensor, "head query key"], mask: Bool[Tensor, "query key"]
) -> Float[Tensor, "head"]:
    """The weight on the masked keys, mean over the rows that have any; 0 where none has."""
    rows = mask.any(-1)
    if not rows.any():
        return attention.new_zeros(len(attention))
    return (attention * mask).sum(-1)[:, rows].mean(-1)


def format_head_pattern(name: str) -> str:
    """Return the name of a pattern for tables and figures: with spaces in place of underscores."""
    return name.replace("_", " ")


def classify_head_pattern(statistics: Mapping[str, float]) -> str:
    """Return the name of a head's pattern: the strongest pattern, or "broad" or "mixed" if none is strong.

    >>> quiet = dict.fromkeys(PATTERN_DESCRIPTIONS, 0.0) | {"entropy": 0.5}
    >>> classify_head_pattern(quiet | {"previous_token": 0.9})
    'previous_token'
    >>> classify_head_pattern(quiet | {"entropy": 0.95}), classify_head_pattern(quiet)
    ('broad', 'mixed')
    """
    strongest = max((name for name in PATTERN_DESCRIPTIONS if name in statistics), key=lambda name: statistics[name])
    if statistics[strongest] >= MIN_PATTERN_FRACTION:
        return strongest
    return "broad" if statistics["entropy"] >= MIN_BROAD_ENTROPY else "mixed"
