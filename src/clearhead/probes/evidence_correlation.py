"""Correlation: does attention order units as other evidence does (Jain & Wallace, 2019)?

    g_t = Σ_o |∂ŷ_o/∂x_t · x_t|        gradient × input, attention detached (theirs) or not
    Δ_t = mean_o |ŷ_o(x without t) − ŷ_o(x)|        leave one out, deleted or masked
    τ(a, g), τ(a, Δ)        tau-b of the scores, special tokens left out; τ(g, Δ) is what evidence has in common

with ŷ the probabilities. Pieces of a word are added up where units are words. The chance level is the mean tau with
the evidence in random orders: for the best of several heads it is not zero.
"""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from clearhead.adapters.base import How, Sample
from clearhead.adapters.custom.tokens import OwnTokens
from clearhead.errors import InputError, Refusal, unknown
from clearhead.interventions.attention_patch import Patch, Visible, Weights, patched
from clearhead.perturbation.multi_stream import players_of, why_not
from clearhead.perturbation.players import Players
from clearhead.perturbation.text import InText
from clearhead.probes.base import Batch, Probed, Progress
from clearhead.probes.divergences import tau_b
from clearhead.probes.probe_result import ProbeResult, findings

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

#: How many inputs share a pass; with more classes than these, the gradient is that of the predicted one.
INPUTS, CLASSES = 32, 10
#: So many random orders make the chance level.
ORDERS = 20
ALPHA = 0.05
UNITS = ("token", "word", "patch")
BEST = "best head"
SAYS = (
    "The figures say whether attention orders units as gradients and leaving units out do. A low tau counts against "
    "attention only as far as the evidence is right: compare it with what the two kinds of evidence have in common, "
    "and with chance. The best head is chosen with the answer in hand, so hold it against its own chance level. With "
    "attention detached, the gradient leaves out that attention itself depends on the input. Agreement would not show "
    "that attention is the cause of the answer."
)


def correlation(
    ex: "Explainer",
    inputs: Any,
    *,
    unit: str | None = None,
    seed: int = 0,
    target: Any = None,
    progress: Progress = False,
) -> ProbeResult:
    """Rank correlation of attention with gradients and with leaving units out.

    unit: "token" or "word" (default), whose pieces are added up and left out together; of a picture "patch"
    """
    probed = Probed(ex, inputs, target)
    unit = unit or ("patch" if probed.units(probed.samples[0]).grid is not None else "word")
    if unit not in UNITS:
        raise unknown("unit", unit, UNITS)
    own = isinstance(probed.subject, OwnTokens)
    if not own and (reason := why_not(probed.subject, probed.samples[0])):
        raise Refusal(f"leaving out cannot be tried: {reason}")
    if probed.tested.cuts:
        raise Refusal(f"{probed.subject.name} cuts its own gradients off, so that attention cannot be detached in it")
    lines: list[dict[str, Any]] = [{}] * len(probed.samples)
    for places, batch in probed.batches(1, progress):
        lines[places[0]] = _line(batch, unit, seed)
    names = [name for name in lines[0] if name.startswith(("τ(", "chance"))]
    meanings = {name: "rank correlation, 1 the same order" for name in names if name.startswith("τ(")}
    meanings |= {name: "the same with the evidence in random orders" for name in names if name.startswith("chance")}
    pairs = [name for name in names if name.startswith("τ(")]
    table = {name: float(np.nanmean([line[f"p of {name}"] <= ALPHA for line in lines])) for name in pairs}
    spread = {name: float(np.nanstd([line[name] for line in lines])) for name in pairs}
    settings = {"unit": unit, "seed": seed}
    shown = findings(lines, meanings)
    tables = {"share significant": table, "standard deviation": spread}
    return ProbeResult("correlation", probed.subject.name, settings, lines, shown, SAYS, tables)


def _line(batch: Batch, unit: str, seed: int) -> dict[str, Any]:
    (sample,) = batch.samples
    masked = _players(batch.probed, sample, unit)
    evidence = {
        "gradient, attention detached": _summed(_gradient(batch, detached=True), masked),
        "gradient": _summed(_gradient(batch, detached=False), masked),
        f"left out ({masked.replacement})": _left_out(batch, masked),
    }
    if isinstance(masked, InText) and masked.replacement != "delete":
        deleted = players_of(batch.probed.subject, sample, unit, "delete")
        evidence["left out (delete)"] = _left_out(batch, deleted)
    said = batch.probed.label(batch.probabilities[0])
    line: dict[str, Any] = {"input": batch.name(0), "prediction": said, "units": masked.count}
    rng = np.random.default_rng(sample.seed(seed))
    for name, heads in _summaries(batch).items():
        own = [_summed(one, masked) for one in heads]
        for kind, scores in evidence.items():
            _note(line, f"τ({name}, {kind})", *_best(own, scores))
        some = evidence["gradient"]
        line[f"chance, {name}"] = float(np.mean([_best(own, rng.permutation(some))[0] for _ in range(ORDERS)]))
    gradient, *_, left_out = evidence
    _note(line, "τ(gradient, left out)", *tau_b(evidence[gradient], evidence[left_out]))
    return line


class _InRow:
    """The tokens of a model of one's own: each is a unit by itself, and is deleted."""

    replacement = "delete"

    def __init__(self, subject: OwnTokens, sample: Sample) -> None:
        self.subject, (self.tokens,) = subject, sample.inputs.values()
        stays = torch.tensor(subject.units_of(sample).special)
        self.owner = torch.where(stays, -1, (~stays).cumsum(0) - 1)
        self.count = int((~stays).sum())

    def without(self, keep: Bool[Tensor, "player"]) -> Sample:
        kept = (self.owner < 0) | keep[self.owner.clamp(min=0)]
        if not kept.any():
            raise InputError("of a text of one token nothing can be left out: give longer ones")
        return self.subject.samples(self.tokens[kept], How())[0]


def _players(probed: Probed, sample: Sample, unit: str) -> "Players | _InRow":
    if isinstance(probed.subject, OwnTokens):
        return _InRow(probed.subject, sample)
    return players_of(probed.subject, sample, unit, None)


def _note(line: dict[str, Any], name: str, tau: float, p: float) -> None:
    line[name], line[f"p of {name}"] = tau, p


def _best(heads: list[Float[np.ndarray, "unit"]], scores: Float[np.ndarray, "unit"]) -> tuple[float, float]:
    """The largest tau of several lists, with its p."""
    found = [tau_b(own, scores) for own in heads]
    return max(found, key=lambda one: -np.inf if np.isnan(one[0]) else one[0])


def _summaries(batch: Batch) -> Mapping[str, Float[Tensor, "list unit"]]:
    """What attention says about each unit, in several ways; of heads, each by itself."""
    row = batch.pooled()[0]
    if batch.probed.pools:
        return {"last row": row.mean(0)[None]}
    maps = [layer[0].mean(0) for layer in batch.attention]
    rolled = batch.rows[0].to(row)
    for attention in reversed(maps):
        rolled = (rolled + rolled @ attention) / 2
    received = torch.stack(maps).mean((0, 1))
    return {"last row": row.mean(0)[None], BEST: row, "rollout": rolled[None], "received": received[None]}


def _summed(scores: Float[Tensor, "unit"], players: "Players | _InRow") -> Float[np.ndarray, "player"]:
    """The scores of all units of a player, added up; units that always stay are left out."""
    if isinstance(players, InText | _InRow):
        owner = players.owner
    else:  # patches, in their order
        patch = ~torch.tensor(players.sample.units.special)
        owner = torch.where(patch, patch.cumsum(0) - 1, -1)
    keep = owner >= 0
    return np.bincount(owner[keep].numpy(), weights=scores.detach().double().cpu()[keep].numpy())


def _detached(attention: Weights, visible: Visible, layer: int) -> Weights:
    return attention.detach()


def _gradient(batch: Batch, detached: bool) -> Float[Tensor, "unit"]:
    """Σ_o |∂ŷ_o/∂x_t · x_t| over all classes, or of the predicted one where there are many."""
    patches = [Patch(_detached, normalised=False)] if detached else []
    plan = batch.plan
    with torch.enable_grad():
        output, _, starts = patched(batch.probed.recorder, plan.batch, patches, leaves=plan.leaves)
        answer = batch.answer(output)[0]
        classes = range(len(answer)) if len(answer) <= CLASSES else [int(answer.argmax())]
        (start,) = (starts[leaf] for leaf in plan.leaves)
        slopes = [torch.autograd.grad(answer[o], start, retain_graph=True)[0] for o in classes]
    each = [batch.probed.subject.arranged({plan.leaves[0]: slope * start}, batch.samples) for slope in slopes]
    return torch.stack([next(iter(part.values()))[0].sum(-1).abs() for part in each]).sum(0)


def _left_out(batch: Batch, players: "Players | _InRow") -> Float[np.ndarray, "player"]:
    """mean_o |ŷ_o(x without t) − ŷ_o(x)|."""
    everyone = torch.ones(players.count, players.count, dtype=torch.bool)
    samples = list(map(players.without, everyone.fill_diagonal_(False)))
    parts = [samples[start : start + INPUTS] for start in range(0, len(samples), INPUTS)]
    found = torch.cat([part.probabilities for part in map(partial(Batch, batch.probed), parts)])
    return (found - batch.probabilities).abs().mean(-1).double().cpu().numpy()
