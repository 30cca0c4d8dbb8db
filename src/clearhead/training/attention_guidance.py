"""Attention guidance: a loss term that trains chosen heads to follow given attention patterns.

    guidance = mean over guided heads and valid rows of KL(T_q ‖ A_q),   loss = task + λ(t) · guidance

The target rows T are distributions over valid tokens, as attention rows are; padding is excluded as query and key. Each
guided head is compared with its own target, for all texts of an input. λ is constant at first, then falls to zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from clearhead.errors import InputError, unknown_value_error

GUIDANCE_PATTERNS = ("identity", "next", "previous", "first", "class")


def build_target_rows(
    pattern: str,
    valid_mask: Bool[Tensor, "batch token"],
    class_mask: Bool[Tensor, "batch token"] | None = None,
) -> tuple[Float[Tensor, "batch query key"], Bool[Tensor, "batch query"]]:
    """Build the target attention of a pattern.

    Args:
        pattern: "identity", "next", "previous" or "first" attend to one token; "class" attends uniformly to the tokens
            in `class_mask`.
        valid_mask: True for tokens, False for padding.
        class_mask: The tokens of a syntactic class, for the pattern "class".

    Returns:
        The target rows, and which rows have a target. Rows without any target token have none: the last row of "next",
        and every row of "class" in a text without tokens of the class.

    Raises:
        InputError: If the pattern is unknown, or `class_mask` is missing.
    """
    batch, n = valid_mask.shape
    if pattern == "class":
        if class_mask is None:
            raise InputError("the pattern 'class' requires class_mask, which selects the tokens of the class")
        weights = (class_mask & valid_mask)[:, None, :].expand(batch, n, n).float()
    elif pattern in GUIDANCE_PATTERNS:
        offset = {"identity": 0, "next": 1, "previous": -1}.get(pattern)
        if offset is None:
            matrix = torch.zeros(n, n, device=valid_mask.device)
            matrix[:, 0] = 1.0
        else:
            matrix = torch.diag(torch.ones(n - abs(offset), device=valid_mask.device), offset)
        weights = matrix * valid_mask[:, None, :]
    else:
        raise unknown_value_error("pattern", pattern, GUIDANCE_PATTERNS)
    total = weights.sum(-1)
    has_target = (total > 0) & valid_mask
    return weights / total.clamp(min=1)[..., None], has_target


@dataclass(frozen=True)
class HeadGuidance:
    """A pattern for some heads of some layers.

    Attributes:
        pattern: Name of the pattern, as in `build_target_rows`.
        heads: Indices of the guided heads.
        layers: Indices of the guided layers. Default: all.
    """

    pattern: str
    heads: Sequence[int]
    layers: Sequence[int] | None = None


def compute_guidance_loss(
    attention: Mapping[int, Float[Tensor, "batch head query key"]],
    guides: Sequence[HeadGuidance],
    valid_mask: Bool[Tensor, "batch token"],
    class_mask: Bool[Tensor, "batch token"] | None = None,
) -> Float[Tensor, ""]:
    """Compute the mean KL(T ‖ A) over guided heads and rows with a target.

    Args:
        attention: Attention weights by layer.
        guides: The guided heads and their patterns.
        valid_mask: True for tokens, False for padding.
        class_mask: The tokens of the class for the pattern "class".

    Returns:
        The loss.

    Raises:
        InputError: If no head is guided, or a pattern is invalid.
    """
    losses = []
    for guide in guides:
        target, has_target = build_target_rows(guide.pattern, valid_mask, class_mask)
        for layer in attention if guide.layers is None else guide.layers:
            for head in guide.heads:
                losses.append(_compute_masked_kl(target, attention[layer][:, head], has_target))
    if not losses:
        raise InputError("no attention head is guided: pass at least one guide that selects heads")
    return torch.stack(losses).mean()


def _compute_masked_kl(
    target: Float[Tensor, "batch query key"],
    attention: Float[Tensor, "batch query key"],
    has_target: Bool[Tensor, "batch query"],
) -> Float[Tensor, ""]:
    """Return the mean of KL(target ‖ attention) over the query rows that have a target."""
    # xlogy is zero where the target is zero; attention may underflow there and must not give NaN
    log_attention = attention.float().clamp(min=1e-12).log()
    row_losses = (torch.special.xlogy(target, target) - target * log_attention).sum(-1)
    return (row_losses * has_target).sum() / has_target.sum().clamp(min=1)


def compute_class_attention(
    attention: Float[Tensor, "batch head query key"],
    class_mask: Bool[Tensor, "batch token"],
    valid_mask: Bool[Tensor, "batch token"],
) -> Float[Tensor, " head"]:
    """Compute for each head the share of attention that goes to a class of tokens.

    Args:
        attention: Attention weights of one layer.
        class_mask: The tokens of the class.
        valid_mask: True for tokens, False for padding.

    Returns:
        One share per head. Report it before and after training.
    """
    rows = (attention * (class_mask & valid_mask)[:, None, None, :]).sum(-1)
    return (rows * valid_mask[:, None]).sum((0, 2)) / valid_mask.sum()


def compute_guidance_weight(fraction: float, initial_weight: float, constant_fraction: float = 0.5) -> float:
    """Compute λ at a point of the run: constant at first, then linearly down to zero.

    Args:
        fraction: Completed fraction of the run.
        initial_weight: λ at the start.
        constant_fraction: The fraction of the run with constant λ.

    Returns:
        λ.

    Example:
        >>> compute_guidance_weight(0.2, 1.0), compute_guidance_weight(0.75, 1.0), compute_guidance_weight(1.0, 1.0)
        (1.0, 0.5, 0.0)
    """
    if fraction <= constant_fraction:
        return initial_weight
    return initial_weight * (1 - fraction) / (1 - constant_fraction)
