"""Attention guidance: a term of the loss that rewards chosen heads for looking where they are told to.

    guidance = mean over guided heads and real rows of KL(T_q ‖ A_q),   loss = task + λ(t) · guidance

Target rows T are distributions over real tokens, as attention rows are; padding neither looks nor is looked at; one
target per head, compared with that head alone; all texts of an input are guided. λ is constant, then falls to zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from clearhead.errors import InputError, unknown

PATTERNS = ("identity", "next", "previous", "first", "class")


def target_rows(
    pattern: str,
    real: Bool[Tensor, "batch token"],
    member: Bool[Tensor, "batch token"] | None = None,
) -> tuple[Float[Tensor, "batch query key"], Bool[Tensor, "batch query"]]:
    """Where each row is to look, and which rows are told at all.

    identity, next, previous, first: one token each; class: evenly at the tokens in `member` (a syntax class). A row
    that would look at nothing (the last one at its next; any row where the class has no token) is left alone.
    """
    batch, n = real.shape
    if pattern == "class":
        if member is None:
            raise InputError("the pattern 'class' needs member: which tokens are of the class")
        wanted = (member & real)[:, None, :].expand(batch, n, n).float()
    elif pattern in PATTERNS:
        step = {"identity": 0, "next": 1, "previous": -1}.get(pattern)
        if step is None:
            one = torch.zeros(n, n, device=real.device)
            one[:, 0] = 1.0
        else:
            one = torch.diag(torch.ones(n - abs(step), device=real.device), step)
        wanted = one * real[:, None, :]
    else:
        raise unknown("pattern", pattern, PATTERNS)
    total = wanted.sum(-1)
    told = (total > 0) & real
    return wanted / total.clamp(min=1)[..., None], told


@dataclass(frozen=True)
class Guide:
    """One pattern for some heads of some layers."""

    pattern: str
    heads: Sequence[int]
    layers: Sequence[int] | None = None


def guidance_loss(
    attention: Mapping[int, Float[Tensor, "batch head query key"]],
    guides: Sequence[Guide],
    real: Bool[Tensor, "batch token"],
    member: Bool[Tensor, "batch token"] | None = None,
) -> Float[Tensor, ""]:
    """Mean KL(T ‖ A) over guided heads, and over the rows that are told.

    attention: by layer; member: the tokens of the class that "class" guides to
    """
    parts = []
    for guide in guides:
        target, told = target_rows(guide.pattern, real, member)
        for layer in attention if guide.layers is None else guide.layers:
            for head in guide.heads:
                parts.append(_divergence(target, attention[layer][:, head], told))
    if not parts:
        raise InputError("no head is guided: give at least one guide with heads")
    return torch.stack(parts).mean()


def _divergence(
    target: Float[Tensor, "batch query key"],
    attention: Float[Tensor, "batch query key"],
    told: Bool[Tensor, "batch query"],
) -> Float[Tensor, ""]:
    # xlogy is zero where the target is zero; attention may underflow there and must not give NaN
    log = attention.float().clamp(min=1e-12).log()
    rows = (torch.special.xlogy(target, target) - target * log).sum(-1)
    return (rows * told).sum() / told.sum().clamp(min=1)


def mass_on(
    attention: Float[Tensor, "batch head query key"],
    member: Bool[Tensor, "batch token"],
    real: Bool[Tensor, "batch token"],
) -> Float[Tensor, " head"]:
    """The share of attention that real rows give to the class, by head: report it before and after."""
    rows = (attention * (member & real)[:, None, None, :]).sum(-1)
    return (rows * real[:, None]).sum((0, 2)) / real.sum()


def strength(fraction: float, start: float, constant: float = 0.5) -> float:
    """λ after a fraction of the run: `start` for a while, then linearly down to zero.

    >>> strength(0.2, 1.0), strength(0.75, 1.0), strength(1.0, 1.0)
    (1.0, 0.5, 0.0)
    """
    return start if fraction <= constant else start * (1 - fraction) / (1 - constant)
