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
from clearhead.probes.measures import attainable, jensen_shannon, total_variation
from clearhead.probes.results import ProbeResult, findings
from clearhead.probes.subjecting import Batch, Probed, Progress, Scope, Short, scope_of, shortens
from clearhead.recording.patch import Visible, Weights

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

#: set × layer × head × row × key
Free = Float[Tensor, "set layer head row key"]


@dataclass
class _Room:
    """One input at one scope: the weights in reach, and the answers that others give."""

    own: Float[Tensor, "layer head row key"]
    visible: Bool[Tensor, "layer 1 row key"]
    clean: Float[Tensor, "label"]
    answers: Callable[[Free], Float[Tensor, "set label"]]


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
    for places, batch in probed.batches(1, progress):
        room = _room(batch, reach, sets)
        lines[places[0]] = _searched(room, batch, reach, sets, steps, margin, tolerance, seed)
    settings = {"scope": str(reach), "tolerance": tolerance, "margin": margin, "sets": sets, "steps": steps}
    return ProbeResult("adversary", probed.subject.name, settings, lines, findings(lines, MEANINGS), SAYS)


def _room(batch: Batch, scope: Scope, sets: int) -> _Room:
    probed = batch.probed
    layers, chosen = scope.layers(probed.layers), list(scope.heads or range(probed.heads))
    if scope.name == "S1" and shortens(probed):
        short = Short(batch)

        def by_row(free: Free) -> Float[Tensor, "set label"]:
            weights = short.attention[0].repeat(len(free), 1, 1)
            weights[:, chosen] = free[:, 0, :, 0].to(weights.dtype)
            return short.answers(weights[None])[0]

        own = short.attention[0, chosen][None, :, None]
        return _Room(own, short.visible[0][None, None, None], short.clean[0], by_row)
    rows = [int(batch.rows[0].long().argmax())] if scope.only_row else list(range(batch.lengths[0]))
    every, seen = batch.repeated(sets), dict[int, Visible]()

    def in_whole(free: Free) -> Float[Tensor, "set label"]:
        def put(attention: Weights, visible: Visible, layer: int) -> Weights:
            weights = attention.detach().clone()
            mine = free[:, layers.index(layer)].to(weights.dtype)
            for place, head in enumerate(chosen):
                weights[:, head, rows] = mine[:, place]
            return weights

        return every.under(put, scope)

    def look(attention: Weights, visible: Visible, layer: int) -> Weights:
        seen[layer] = visible[:1]
        return attention

    with torch.no_grad():
        batch.under(look, scope)
    own = torch.stack([batch.attention[layer][0, chosen][:, rows] for layer in layers])
    visible = torch.stack([seen[layer][0, :1][:, rows] for layer in layers])
    return _Room(own, visible, batch.probabilities[0], in_whole)


def _searched(
    room: _Room, batch: Batch, scope: Scope, sets: int, steps: int, margin: float, tolerance: float, seed: int
) -> dict[str, Any]:
    probed, own = batch.probed, room.own.detach()
    generator = torch.Generator().manual_seed(batch.samples[0].seed(seed) % 2**63)
    noise = SPREAD * torch.randn(sets, *own.shape, generator=generator, dtype=torch.float64).to(own)
    logits = noise.requires_grad_()
    search = torch.optim.Adam([logits], lr=RATE, amsgrad=True)
    farthest, best, moved_by = own.new_zeros(()), own, 0.0
    for _ in range(steps):
        with torch.enable_grad():
            free = logits.masked_fill(~room.visible, -torch.inf).softmax(-1)
            moved = total_variation(room.answers(free), room.clean, probed.multi_label)
            apart = _smooth(free, own).mean((1, 2, 3))
            between = [_smooth(free[i], free[j]).mean() for i in range(sets) for j in range(i)]
            gain = apart.sum() + (torch.stack(between).sum() / (sets * (sets - 1)) if between else 0)
            loss = PENALTY / sets * (moved - margin).clamp(min=0).sum() - gain
        # what was just measured, before the step away from it
        allowed = apart.detach().masked_fill(moved.detach() > tolerance, -1)
        if allowed.max() > farthest:
            which = int(allowed.argmax())
            farthest, best, moved_by = allowed.max(), free[which].detach(), float(moved[which].detach())
        search.zero_grad()
        (logits.grad,) = torch.autograd.grad(loss, [logits])
        search.step()
    bound = attainable(own, room.visible.expand_as(own)).mean()
    line = {
        "input": batch.name(0),
        "prediction": probed.label(room.clean),
        "JSD": float(jensen_shannon(best, own).mean()),
        "attainable JSD": float(bound),
        "JSD of the mean head": float(jensen_shannon(best.mean(1), own.mean(1)).mean()),
        "TVD": moved_by,
        "largest weight": float(own.mean(1).amax(-1).mean()),
    }
    if scope.only_row:  # heat maps to lay side by side: of the last layer in reach
        line |= {"tokens": list(batch.samples[0].units.names), "own weights": own[-1, :, 0].mean(0).tolist()}
        line["other weights"] = best[-1, :, 0].mean(0).tolist()
    return line


def _smooth(p: Float[Tensor, "*batch key"], q: Float[Tensor, "*batch key"]) -> Float[Tensor, "*batch"]:
    """The Jensen–Shannon divergence with slopes that stay finite where a weight is zero."""
    p, q = torch.broadcast_tensors(p, q)
    middle = ((p + q) / 2).clamp(min=TINY).log()
    return (p * (p.clamp(min=TINY).log() - middle) + q * (q.clamp(min=TINY).log() - middle)).sum(-1) / 2
