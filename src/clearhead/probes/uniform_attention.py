"""Uniform: every visible key gets the same weight (Wiegreffe & Pinter, 2019, here in a model that is trained already).

Layer by layer and in all layers at once: how far the answer moves, and how often another class is predicted. Beside it
the milder ablation: in place of an input's own weights, the mean of the other inputs' at the same places, which keeps
what attention does whatever the input is (the class token, the previous word) and takes away what it selects in this.
"""

from collections.abc import Iterable, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from clearhead.adapters.base import Sample
from clearhead.errors import InputError
from clearhead.interventions.attention_patch import Patch, Replacing, Visible, Weights
from clearhead.probes.base import Batch, Probed, Progress, Scope
from clearhead.probes.divergences import total_variation
from clearhead.probes.probe_result import ProbeResult, findings

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

INPUTS = 16
SAYS = (
    "Attention was made uniform in a trained model. Where predictions stay, the model does not need what its attention "
    "selects there, at least not on these inputs; where they change, it does need it, but the change may also come "
    "from states that the model never met in training. Only a model trained with uniform attention tells these apart. "
    "With the mean attention of the other inputs, place by place, only what attention selects in this input is lost: "
    "where predictions stay under the mean and not under uniform weights, the model needs a habit of its attention, "
    "not a choice."
)
MEAN = "mean attention, "


def flat(attention: Weights, visible: Visible, layer: int) -> Weights:
    """1 / n on each of the n visible keys (the patcher divides by their number)."""
    return visible.to(attention.dtype).expand_as(attention)


class MeanAttention:
    """The mean weights of the other inputs at the same query and key; 1 / n in rows that no other input reaches."""

    def __init__(self, probed: Probed, batches: Iterable[Batch]) -> None:
        self.width = max(len(probed.units(sample)) for sample in probed.samples)
        self.pools = probed.pools
        self.sums: list[Float[Tensor, "head query key"]] = []
        self.count = torch.zeros(())
        for batch in batches:
            self._add(batch)

    def _add(self, batch: Batch) -> None:
        real = _cells(batch).to(batch.attention[0])
        whole = [self._wide((own * real[:, None]).double().sum(0)) for own in batch.attention]
        self.sums = [old + new for old, new in zip(self.sums, whole, strict=True)] if self.sums else whole
        self.count = self.count.to(real) + self._wide(real.sum(0))

    def _wide(self, cells: Float[Tensor, "*head query key"]) -> Float[Tensor, "*head query key"]:
        """Padded to the longest input."""
        more = self.width - cells.shape[-1]
        return pad(cells, (0, more, 0, 0 if self.pools else more))

    def without(self, batch: Batch) -> Replacing:
        """What replaces the weights of each input of a batch: the mean over all the others."""
        real = _cells(batch).to(batch.attention[0])
        queries, keys = batch.attention[0].shape[-2:]
        others = (self.count[:queries, :keys] - real)[:, None]

        def mean(attention: Weights, visible: Visible, layer: int) -> Weights:
            own = (batch.attention[layer] * real[:, None]).double()
            total = (self.sums[layer][:, :queries, :keys] - own).clamp(min=0)
            weights = (total * (others > 0) / others.clamp(min=1)).to(attention) * visible
            return torch.where(weights.sum(-1, keepdim=True) > 0, weights, flat(attention, visible, layer))

        return mean


def _cells(batch: Batch) -> Float[Tensor, "batch query key"]:
    """Which queries and keys of each input are no padding."""
    rows = batch.valid[:, :1] if batch.probed.pools else batch.valid
    return rows[:, :, None] & batch.valid[:, None]


def levelled(probed: Probed, scope: Scope, samples: Sequence[Sample]) -> Patch:
    """Uniform attention in the reach of a scope."""
    rows = None
    if scope.only_row and not probed.pools:
        width = max(len(probed.units(sample)) for sample in samples)
        rows = torch.tensor([probed.row(sample) for sample in samples])[:, None] == torch.arange(width)
    return Patch(flat, scope.layers(probed.layers), scope.heads, rows)


def uniform(
    ex: "Explainer",
    inputs: Any,
    labels: Sequence[str | int] | None = None,
    *,
    frozen: bool = False,
    target: Any = None,
    candidates: Sequence[str | int] | None = None,
    progress: Progress = False,
) -> ProbeResult:
    """Make attention uniform, in the row that is read, layer by layer, and everywhere.

    labels: one for each input, to say how many predictions are right with and without
    candidates: compare the probabilities of these labels (or masked words) among themselves, and not of all

    What training with uniform attention does is among the points of `frontier`.
    """
    probed = Probed(ex, inputs, target, candidates)
    if labels is not None and len(labels) != len(probed.samples):
        raise InputError(f"{len(labels)} labels for {len(probed.samples)} inputs: give one for each")
    true = None if labels is None else [probed.subject.label_name(probed.subject.label_index(one)) for one in labels]
    scopes = {f"layer {layer}": Scope("S3", layer) for layer in range(probed.layers)} | {"all layers": Scope("S4")}
    if all(len(probed.rows(sample)) == 1 for sample in probed.samples):
        scopes = {"row that is read": Scope("S1"), **scopes}
    lines: list[dict[str, Any]] = [{}] * len(probed.samples)
    mean = MeanAttention(probed, (batch for _, batch in probed.batches(INPUTS)))
    for places, batch in probed.batches(INPUTS, progress):
        own = None if true is None else [true[place] for place in places]
        for place, line in zip(places, _lines(batch, scopes, mean, frozen, own), strict=True):
            lines[place] = line
    ways = {"": "uniform attention there", MEAN: "the other inputs' mean attention there"}
    meanings = {} if true is None else {"accuracy": "share of predictions that are right, untouched"}
    for way, put in ways.items():
        meanings |= {f"TVD, {way}{name}": f"how far the answer moves with {put}" for name in scopes}
        meanings |= {f"flips, {way}{name}": f"share of inputs whose class changes with {put}" for name in scopes}
        if true is not None:
            meanings |= {f"accuracy, {way}{name}": f"share of predictions right with {put}" for name in scopes}
    settings = {"frozen": frozen}
    return ProbeResult("uniform", probed.subject.name, settings, lines, findings(lines, meanings), SAYS)


def _lines(
    batch: Batch, scopes: dict[str, Scope], mean: MeanAttention, frozen: bool, true: Sequence[str] | None
) -> list[dict[str, Any]]:
    probed, clean = batch.probed, batch.probabilities
    best = clean.argmax(-1)
    lines: list[dict[str, Any]] = [
        {"input": batch.name(i), "prediction": probed.label(answer)} for i, answer in enumerate(clean)
    ]
    ways = {"": flat, MEAN: mean.without(batch)}
    for (way, weights), (place, scope) in product(ways.items(), scopes.items()):
        name = way + place
        with torch.no_grad():
            found = batch.under(weights, scope, frozen)
        moved = total_variation(found, clean, probed.multi_label)
        for i, line in enumerate(lines):
            line[f"TVD, {name}"] = float(moved[i])
            line[f"flips, {name}"] = float(found[i].argmax() != best[i])
            if true is not None:
                line["accuracy"] = float(line["prediction"] == true[i])
                line[f"accuracy, {name}"] = float(probed.label(found[i]) == true[i])
    return lines
