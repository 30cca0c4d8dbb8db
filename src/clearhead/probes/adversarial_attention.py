"""Adversary: weights as far as possible from the model's own, with the same answer (Jain & Wallace, 2019).

    max  Σ_i JSD(α_i, α̂) + 1/(k(k−1)) Σ_{i<j} JSD(α_i, α_j) − λ/k Σ_i max(0, TVD(ŷ(α_i), ŷ(α̂)) − ε)

over k free sets of weights, JSD being the mean over all heads, rows and layers in reach. Of everything that was met on
the way, the farthest whose answer stays within the tolerance is kept; the model's own weights (JSD 0) are among them.
With it goes the largest divergence that any weights could have: a short or evenly weighted row leaves little room.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from clearhead.errors import InputError
from clearhead.interventions.attention_patch import Visible, Weights
from clearhead.probes.base import Batch, Probed, Progress, Scope, Short, scope_of, shortens
from clearhead.probes.divergences import attainable, jensen_shannon, total_variation
from clearhead.probes.probe_result import ProbeResult, findings

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

#: The authors' settings.
PENALTY, RATE, SPREAD = 500.0, 0.01, 3.0
#: What stands in for nothing inside a logarithm while weights are searched for.
TINY = 1e-10
MEANINGS = {
    "JSD": "how far weights with the same answer were found, mean over heads: 0 to 0.693",
    "attainable JSD": "the farthest that any weights could be",
    "JSD of the mean head": "heads can cancel each other out in it",
    "TVD": "how far the answer moved",
    "largest weight": "of the rows in reach, mean over heads",
}
SAYS = (
    "Weights were searched for that lie far from the model's own and leave its answer within the tolerance. Where they "
    "come near the attainable divergence, the answer does not fix where attention goes, so that the map shown is one "
    "of many with the same answer. They were never made by this model, and what it computes below them is kept: it is "
    "no proof that another model trained as this one was would attend there. That little was found may be the search's "
    "fault, too."
)

#: How many inputs are searched together where the row that is read alone is in reach.
INPUTS = 32
#: The weights that are searched for: a few sets for each input.
Free = Float[Tensor, "batch set layer head row key"]


@dataclass
class _Room:
    """Some inputs at one scope: the weights in reach, and the answers that others give."""

    own: Float[Tensor, "batch layer head row key"]
    visible: Bool[Tensor, "batch layer 1 row key"]
    clean: Float[Tensor, "batch label"]
    answers: Callable[[Free], Float[Tensor, "batch set label"]]


def adversary(
    ex: "Explainer",
    inputs: Any,
    scope: str = "S1",
    *,
    layer: int | None = None,
    heads: Sequence[int] | None = None,
    tolerance: float = 0.05,
    margin: float = 0.01,
    sets: int = 5,
    steps: int = 500,
    seed: int = 0,
    target: Any = None,
    candidates: Sequence[str | int] | None = None,
    progress: Progress = False,
) -> ProbeResult:
    """Search for weights far from the model's own that leave its answer as it is.

    tolerance: how far (TVD) an answer may move and still be the same; margin: from where on the search is punished
    """
    if sets < 1 or steps < 1:
        raise InputError(f"sets={sets}, steps={steps}: both must be at least 1")
    reach, probed = scope_of(scope, layer, heads), Probed(ex, inputs, target, candidates)
    probed.check(reach)
    lines: list[dict[str, Any]] = [{}] * len(probed.samples)
    for places, batch in probed.batches(INPUTS if reach.only_row else 1, progress):
        found = _searched(_room(batch, reach, sets), batch, reach, sets, steps, margin, tolerance, seed)
        for place, line in zip(places, found, strict=True):
            lines[place] = line
    settings = {"scope": str(reach), "tolerance": tolerance, "margin": margin, "sets": sets, "steps": steps}
    return ProbeResult("adversary", probed.subject.name, settings, lines, findings(lines, MEANINGS), SAYS)


def _room(batch: Batch, scope: Scope, sets: int) -> _Room:
    probed = batch.probed
    layers, chosen = scope.layers(probed.layers), list(scope.heads or range(probed.heads))
    if scope.name == "S1" and shortens(probed):
        short = Short(batch)

        def by_row(free: Free) -> Float[Tensor, "batch set label"]:
            weights = short.attention[:, None].repeat(1, free.shape[1], 1, 1)
            weights[:, :, chosen] = free[:, :, 0, :, 0].to(weights.dtype)
            return short.answers(weights)

        own = short.attention[:, None, chosen][:, :, :, None]
        return _Room(own, short.visible[:, None, None, None], short.clean, by_row)
    who, read = torch.arange(len(batch.samples)), batch.rows.long().argmax(1)
    every, seen = batch.repeated(sets), dict[int, Visible]()

    def rows_of(maps: Float[Tensor, "batch head query key"]) -> Float[Tensor, "batch head row key"]:
        return maps[who, :, read][:, :, None] if scope.only_row else maps

    def in_whole(free: Free) -> Float[Tensor, "batch set label"]:
        def put(attention: Weights, visible: Visible, layer: int) -> Weights:
            weights = attention.detach().clone()
            mine = free[:, :, layers.index(layer)].flatten(0, 1).to(weights.dtype)
            # of other rows than the one that is read, the patcher takes nothing
            weights[:, chosen] = mine.expand(-1, -1, weights.shape[2], -1)
            return weights

        return every.under(put, scope).unflatten(0, (len(who), sets))

    def look(attention: Weights, visible: Visible, layer: int) -> Weights:
        seen[layer] = visible.expand(len(who), -1, -1, -1)[:, :1]
        return attention

    with torch.no_grad():
        batch.under(look, scope)
    own = torch.stack([rows_of(batch.attention[layer][:, chosen]) for layer in layers], dim=1)
    visible = torch.stack([rows_of(seen[layer]) for layer in layers], dim=1)
    return _Room(own, visible, batch.probabilities, in_whole)


def _searched(
    room: _Room, batch: Batch, scope: Scope, sets: int, steps: int, margin: float, tolerance: float, seed: int
) -> list[dict[str, Any]]:
    probed, own, clean = batch.probed, room.own.detach(), room.clean[:, None]
    logits = _noise(batch, own, sets, seed).requires_grad_()
    search = torch.optim.Adam([logits], lr=RATE, amsgrad=True)
    who, farthest = torch.arange(len(own), device=own.device), own.new_zeros(len(own))
    best, moved_by = own.clone(), own.new_zeros(len(own))
    for _ in range(steps):
        with torch.enable_grad():
            free = logits.masked_fill(~room.visible[:, None], -torch.inf).softmax(-1)
            moved = total_variation(room.answers(free), clean, probed.multi_label)
            apart = _smooth(free, own[:, None]).mean((2, 3, 4))
            between = [_smooth(free[:, i], free[:, j]).mean((1, 2, 3)) for i in range(sets) for j in range(i)]
            gain = apart.sum() + (torch.stack(between).sum() / (sets * (sets - 1)) if between else 0)
            loss = PENALTY / sets * (moved - margin).clamp(min=0).sum() - gain
        # what was just measured, before the step away from it
        allowed, which = apart.detach().masked_fill(moved.detach() > tolerance, -1).max(1)
        better = allowed > farthest
        farthest = torch.where(better, allowed, farthest)
        best[better] = free.detach()[who, which][better].to(best)
        moved_by = torch.where(better, moved.detach()[who, which].to(moved_by), moved_by)
        search.zero_grad()
        (logits.grad,) = torch.autograd.grad(loss, [logits])
        search.step()
    bound = attainable(own, room.visible.expand_as(own))
    return [_line(batch, i, scope, room, best[i], bound[i], float(moved_by[i])) for i in range(len(own))]


def _noise(batch: Batch, own: Float[Tensor, "batch layer head row key"], sets: int, seed: int) -> Free:
    """Where each search starts. The random numbers belong to the input, whatever batch it is in."""
    noise = own.new_zeros(len(own), sets, *own.shape[1:])
    for i, (sample, length) in enumerate(zip(batch.samples, batch.lengths, strict=True)):
        generator = torch.Generator().manual_seed(sample.seed(seed) % 2**63)
        drawn = torch.randn(sets, *own.shape[1:-1], length, generator=generator, dtype=torch.float64)
        noise[i, ..., :length] = SPREAD * drawn.to(own)
    return noise


def _line(
    batch: Batch,
    i: int,
    scope: Scope,
    room: _Room,
    best: Float[Tensor, "layer head row key"],
    bound: Float[Tensor, "layer head row"],
    moved_by: float,
) -> dict[str, Any]:
    own, probed = room.own[i], batch.probed
    line: dict[str, Any] = {
        "input": batch.name(i),
        "prediction": probed.label(room.clean[i]),
        "JSD": float(jensen_shannon(best, own).mean()),
        "attainable JSD": float(bound.mean()),
        "JSD of the mean head": float(jensen_shannon(best.mean(1), own.mean(1)).mean()),
        "TVD": moved_by,
        "largest weight": float(own.mean(1).amax(-1).mean()),
    }
    if scope.only_row:  # heat maps to lay side by side: of the last layer in reach
        length = batch.lengths[i]
        line["tokens"] = list(probed.units(batch.samples[i]).names)
        line["own weights"] = own[-1, :, 0, :length].mean(0).tolist()
        line["other weights"] = best[-1, :, 0, :length].mean(0).tolist()
    return line


def _smooth(p: Float[Tensor, "*batch key"], q: Float[Tensor, "*batch key"]) -> Float[Tensor, "*batch"]:
    """The Jensen–Shannon divergence with slopes that stay finite where a weight is zero."""
    p, q = torch.broadcast_tensors(p, q)
    middle = ((p + q) / 2).clamp(min=TINY).log()
    return (p * (p.clamp(min=TINY).log() - middle) + q * (q.clamp(min=TINY).log() - middle)).sum(-1) / 2
