"""Uniform: every visible key gets the same weight (Wiegreffe & Pinter, 2019, here in a model that is trained already).

Layer by layer and in all layers at once: how far the answer moves, and how often another class is predicted.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from clearhead.errors import InputError
from clearhead.probes.measures import total_variation
from clearhead.probes.results import ProbeResult, findings
from clearhead.probes.subjecting import Batch, Probed, Progress, Scope
from clearhead.recording.patch import Patch, Visible, Weights
from clearhead.subjects.base import Sample

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

INPUTS = 16
SAYS = (
    "Attention was made uniform in a trained model. Where predictions stay, the model does not need what its attention "
    "selects there, at least not on these inputs; where they change, it does need it, but the change may also come "
    "from states that the model never met in training. Only a model trained with uniform attention tells these apart."
)


def flat(attention: Weights, visible: Visible, layer: int) -> Weights:
    """1 / n on each of the n visible keys (the patcher divides by their number)."""
    return visible.to(attention.dtype).expand_as(attention)


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
    for places, batch in probed.batches(INPUTS, progress):
        own = None if true is None else [true[place] for place in places]
        for place, line in zip(places, _lines(batch, scopes, frozen, own), strict=True):
            lines[place] = line
    meanings = {f"TVD, {name}": "how far the answer moves" for name in scopes}
    meanings |= {f"flips, {name}": "share of inputs whose predicted class changes" for name in scopes}
    if true is not None:
        meanings |= {"accuracy": "share of predictions that are right, untouched"}
        meanings |= {f"accuracy, {name}": "the same with uniform attention there" for name in scopes}
    settings = {"frozen": frozen}
    return ProbeResult("uniform", probed.subject.name, settings, lines, findings(lines, meanings), SAYS)


def _lines(batch: Batch, scopes: dict[str, Scope], frozen: bool, true: Sequence[str] | None) -> list[dict[str, Any]]:
    probed, clean = batch.probed, batch.probabilities
    best = clean.argmax(-1)
    lines: list[dict[str, Any]] = [
        {"input": batch.name(i), "prediction": probed.label(answer)} for i, answer in enumerate(clean)
    ]
    for name, scope in scopes.items():
        with torch.no_grad():
            found = batch.under(flat, scope, frozen)
        moved = total_variation(found, clean, probed.multi_label)
        for i, line in enumerate(lines):
            line[f"TVD, {name}"] = float(moved[i])
            line[f"flips, {name}"] = float(found[i].argmax() != best[i])
            if true is not None:
                line["accuracy"] = float(line["prediction"] == true[i])
                line[f"accuracy, {name}"] = float(probed.label(found[i]) == true[i])
    return lines
