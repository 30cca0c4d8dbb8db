"""Heads: how much each matters, by three measures, what it looks at, and how many can be silenced.

gradient   E_x |Σ_qk A_qk ∂y/∂A_qk|        what a small change of the head's part does (Michel et al., 2019)
ablation   E_x TVD(ŷ, ŷ without the head)        all its weights zero
patching   E_x TVD(ŷ, ŷ with the head's attention uniform)        it still passes values on, but selects nothing
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.interventions.attention_patch import Patch, Replacing, Visible, Weights, patched
from clearhead.probes.base import Batch, Probed, Progress, Scope
from clearhead.probes.divergences import total_variation
from clearhead.probes.head_patterns import READINGS, figures, pattern
from clearhead.probes.probe_result import Finding, ProbeResult
from clearhead.probes.uniform_attention import flat
from clearhead.stats import interval

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

INPUTS, POINTS, SHOWN = 16, 8, 10
MEASURES = ("gradient", "ablation", "patching")
SAYS = (
    "A head matters to these answers as far as they move without it. Heads that do the same work hide each other: each "
    "alone seems idle, and silencing both is not, so read the pruning curve, too. The gradient sees small changes "
    "alone. A pattern's name describes where a head looks on average over these inputs, not what it is for."
)


def silent(attention: Weights, visible: Visible, layer: int) -> Weights:
    return torch.zeros_like(attention)


def heads(ex: "Explainer", inputs: Any, *, target: Any = None, progress: Progress = False) -> ProbeResult:
    """How much each head matters, what it looks at, and what is left when the least important are silenced."""
    probed = Probed(ex, inputs, target)
    found: dict[str, list[Float[np.ndarray, "input layer head"]]] = {name: [] for name in MEASURES}
    seen: list[dict[str, Float[np.ndarray, "layer head"]]] = []
    batches = [batch for _, batch in probed.batches(INPUTS, progress)]
    for batch in batches:
        found["gradient"].append(_gradient(batch))
        found["ablation"].append(_moved(batch, silent, normalised=False))
        found["patching"].append(_moved(batch, flat, normalised=True))
        seen += [looks(batch, i) for i in range(len(batch.samples))]
    measured = {name: np.concatenate(parts) for name, parts in found.items()}
    means = {name: np.mean([one[name] for one in seen], axis=0) for name in seen[0]}
    lines = [_line(layer, head, measured, means) for layer in range(probed.layers) for head in range(probed.heads)]
    first = sorted(lines, key=lambda line: -line["ablation"])[:SHOWN]
    shown = [
        Finding(
            f"layer {line['layer']} head {line['head']}",
            interval(measured["ablation"][:, line["layer"], line["head"]]),
            f"TVD without it; {line['pattern']}: {READINGS[line['pattern']]}",
        )
        for line in first
    ]
    tables = {"pruning": {name: _pruned(batches, measured[name].mean(0)) for name in MEASURES}}
    settings = {"inputs": len(probed.samples)}
    return ProbeResult("heads", probed.subject.name, settings, lines, shown, SAYS, tables)


def _line(layer: int, head: int, measured: dict[str, Any], means: dict[str, Any]) -> dict[str, Any]:
    own = {name: float(part[layer, head]) for name, part in means.items()}
    values = {name: float(part[:, layer, head].mean()) for name, part in measured.items()}
    return {"layer": layer, "head": head, **values, "pattern": pattern(own), **own}


def looks(batch: Batch, i: int) -> "dict[str, Float[np.ndarray, 'layer head']]":
    length, units = batch.lengths[i], batch.probed.units(batch.samples[i])
    special = torch.tensor(units.special)
    layers = [figures(part[i, :, :length, :length], special, units.names) for part in batch.attention]
    return {name: torch.stack([layer[name] for layer in layers]).double().cpu().numpy() for name in layers[0]}


def _gradient(batch: Batch) -> "Float[np.ndarray, 'input layer head']":
    plan = batch.plan
    tape = batch.probed.recorder.record(plan.batch, plan.value, ("attention_gradient",), leaves=plan.leaves)
    parts = [call.attention * call.attention_gradient for call in tape.calls]  # type: ignore[operator]
    return torch.stack([part.sum((2, 3)).abs() for part in parts], dim=1).double().cpu().numpy()


def _moved(batch: Batch, weights: Replacing, normalised: bool) -> "Float[np.ndarray, 'input layer head']":
    probed = batch.probed
    moved = np.zeros((len(batch.samples), probed.layers, probed.heads))
    for layer in range(probed.layers):
        for head in range(probed.heads):
            with torch.no_grad():
                answer = batch.under(weights, Scope("S3", layer, (head,)), normalised=normalised)
            gap = total_variation(answer, batch.probabilities, probed.subject.multi_label)
            moved[:, layer, head] = gap.double().cpu().numpy()
    return moved


def _pruned(batches: Sequence[Batch], importance: "Float[np.ndarray, 'layer head']") -> list[dict[str, float]]:
    """How many predictions stay when ever more heads are silent, the least important first."""
    order = [divmod(int(place), importance.shape[1]) for place in np.argsort(importance, axis=None, kind="stable")]
    counts = sorted({round(share * len(order)) for share in np.linspace(0, 1, POINTS + 1)})
    curve = []
    for count in counts:
        same = torch.cat([_same(batch, order[:count]) for batch in batches])
        curve.append({"silenced": count, "agreement": float(same.double().mean())})
    return curve


def _same(batch: Batch, gone: Sequence[tuple[int, int]]) -> Tensor:
    by_layer: dict[int, list[int]] = {}
    for layer, head in gone:
        by_layer.setdefault(layer, []).append(head)
    patches = [Patch(silent, [layer], heads, normalised=False) for layer, heads in by_layer.items()]
    with torch.no_grad():
        output, _, _ = patched(batch.probed.recorder, batch.plan.batch, patches)
    return batch.answer(output).argmax(-1) == batch.probabilities.argmax(-1)
