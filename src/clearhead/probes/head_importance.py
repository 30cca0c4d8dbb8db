"""Head importance by three measures, the pattern of each head, and how many heads can be pruned.

gradient   E_x |Σ_qk A_qk ∂y/∂A_qk|        effect of a small change of the head's contribution (Michel et al., 2019)
ablation   E_x TVD(ŷ, ŷ without the head)        all its weights zero
patching   E_x TVD(ŷ, ŷ with the head's attention uniform)        it still passes values on, but selects nothing
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.interventions.attention_patch import (
    AttentionPatch,
    AttentionWeights,
    ReplacementFunction,
    VisibleKeys,
    run_patched_forward,
)
from clearhead.probes.base import ProbeBatch, ProbeContext, ProbeScope, Progress
from clearhead.probes.divergences import compute_total_variation
from clearhead.probes.head_patterns import (
    PATTERN_DESCRIPTIONS,
    classify_head_pattern,
    compute_head_statistics,
    format_head_pattern,
)
from clearhead.probes.probe_result import ProbeEstimate, ProbeResult
from clearhead.probes.uniform_attention import make_uniform_weights
from clearhead.stats import compute_mean_interval

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

BATCH_SIZE = 16
NUM_PRUNING_POINTS = 8
NUM_REPORTED_HEADS = 10
IMPORTANCE_MEASURES = ("gradient", "ablation", "patching")
CONCLUSION = (
    "A head is important for these outputs to the extent that they change without it. Heads with the same function "
    "can mask each other: removing either one changes little, but removing both does, so also check the pruning "
    "curve. The gradient measures only the effect of small changes. The name of a pattern describes which units a "
    "head attends to on average over these inputs, not its function."
)


def make_zero_weights(attention: AttentionWeights, visible: VisibleKeys, layer: int) -> AttentionWeights:
    """Return zero weights, which silence a head."""
    return torch.zeros_like(attention)


def run_heads_probe(
    explainer: "Explainer", inputs: Any, *, target: Any = None, progress: Progress = False
) -> ProbeResult:
    """Measure the importance and the pattern of each head, and prune the least important heads.

    Args:
        explainer: Explainer of the model.
        inputs: One input or a list of inputs.
        target: The target, as in `Explainer.explain`; default: the predicted class.
        progress: True for a progress bar, or a function that wraps a list.

    Returns:
        One record for each layer and head, intervals of the most important heads, and pruning curves.

    Raises:
        UnsupportedError: The model cannot be probed.

    Example:
        >>> records = run_heads_probe(ex, texts).records  # doctest: +SKIP
        >>> max(records, key=lambda record: record["ablation"])  # the most important head  # doctest: +SKIP
    """
    context = ProbeContext(explainer, inputs, target)
    batch_values: dict[str, list[Float[np.ndarray, "input layer head"]]] = {name: [] for name in IMPORTANCE_MEASURES}
    sample_statistics: list[dict[str, Float[np.ndarray, "layer head"]]] = []
    batches = [batch for _, batch in context.iter_batches(BATCH_SIZE, progress)]
    for batch in batches:
        batch_values["gradient"].append(_compute_gradient_importance(batch))
        batch_values["ablation"].append(_compute_prediction_shifts(batch, make_zero_weights, normalised=False))
        batch_values["patching"].append(_compute_prediction_shifts(batch, make_uniform_weights, normalised=True))
        sample_statistics += [compute_sample_head_statistics(batch, i) for i in range(len(batch.samples))]
    importance = {name: np.concatenate(values) for name, values in batch_values.items()}
    mean_statistics = {
        name: np.mean([statistics[name] for statistics in sample_statistics], axis=0) for name in sample_statistics[0]
    }
    records = [
        _build_record(layer, head, importance, mean_statistics)
        for layer in range(context.num_layers)
        for head in range(context.num_heads)
    ]
    top_records = sorted(records, key=lambda record: -record["ablation"])[:NUM_REPORTED_HEADS]
    estimates = [
        ProbeEstimate(
            f"layer {record['layer']} head {record['head']}",
            compute_mean_interval(importance["ablation"][:, record["layer"], record["head"]]),
            f"TVD without it; {format_head_pattern(record['pattern'])}: {PATTERN_DESCRIPTIONS[record['pattern']]}",
        )
        for record in top_records
    ]
    tables = {
        "pruning": {name: _compute_pruning_curve(batches, importance[name].mean(0)) for name in IMPORTANCE_MEASURES}
    }
    settings = {"inputs": len(context.samples)}
    return ProbeResult("heads", context.adapter.name, settings, records, estimates, CONCLUSION, tables)


def _build_record(layer: int, head: int, importance: dict[str, Any], mean_statistics: dict[str, Any]) -> dict[str, Any]:
    """Build the record of a head: importance by each measure, pattern and statistics, mean over inputs."""
    statistics = {name: float(values[layer, head]) for name, values in mean_statistics.items()}
    mean_importance = {name: float(values[:, layer, head].mean()) for name, values in importance.items()}
    return {
        "layer": layer,
        "head": head,
        **mean_importance,
        "pattern": classify_head_pattern(statistics),
        **statistics,
    }


def compute_sample_head_statistics(
    batch: ProbeBatch, sample_index: int
) -> "dict[str, Float[np.ndarray, 'layer head']]":
    """Compute the statistics of every head on one sample of a batch."""
    length = batch.lengths[sample_index]
    units = batch.context.get_units(batch.samples[sample_index])
    special = torch.tensor(units.special)
    layers = [
        compute_head_statistics(attention[sample_index, :, :length, :length], special, units.names)
        for attention in batch.attention
    ]
    return {name: torch.stack([layer[name] for layer in layers]).double().cpu().numpy() for name in layers[0]}


def _compute_gradient_importance(batch: ProbeBatch) -> "Float[np.ndarray, 'input layer head']":
    """Return |Σ_qk A_qk ∂y/∂A_qk| of each head for each input, from one backward pass."""
    target_batch = batch.target_batch
    tape = batch.context.recorder.record(
        target_batch.model_inputs, target_batch.compute_target, ("attention_gradient",), leaves=target_batch.leaves
    )
    products = [call.attention * call.attention_gradient for call in tape.calls]  # type: ignore[operator]
    return torch.stack([product.sum((2, 3)).abs() for product in products], dim=1).double().cpu().numpy()


def _compute_prediction_shifts(
    batch: ProbeBatch, weights: ReplacementFunction, normalised: bool
) -> "Float[np.ndarray, 'input layer head']":
    """The total variation distance of the output when the weights of each head are replaced."""
    context = batch.context
    shifts = np.zeros((len(batch.samples), context.num_layers, context.num_heads))
    for layer in range(context.num_layers):
        for head in range(context.num_heads):
            scope = ProbeScope("S3", layer, (head,))
            with torch.no_grad():
                probabilities = batch.compute_patched_probabilities(weights, scope, normalised=normalised)
            tvd = compute_total_variation(probabilities, batch.probabilities, context.adapter.multi_label)
            shifts[:, layer, head] = tvd.double().cpu().numpy()
    return shifts


def _compute_pruning_curve(
    batches: Sequence[ProbeBatch], importance: "Float[np.ndarray, 'layer head']"
) -> list[dict[str, float]]:
    """The fraction of unchanged predictions as more and more heads are silenced, the least important first."""
    order = [divmod(int(index), importance.shape[1]) for index in np.argsort(importance, axis=None, kind="stable")]
    counts = sorted({round(fraction * len(order)) for fraction in np.linspace(0, 1, NUM_PRUNING_POINTS + 1)})
    curve = []
    for count in counts:
        is_unchanged = torch.cat([_find_kept_predictions(batch, order[:count]) for batch in batches])
        curve.append({"silenced": count, "agreement": float(is_unchanged.double().mean())})
    return curve


def _find_kept_predictions(batch: ProbeBatch, pruned_heads: Sequence[tuple[int, int]]) -> Tensor:
    """Return for each input whether its class stays the same when these heads' weights are zero."""
    heads_by_layer: dict[int, list[int]] = {}
    for layer, head in pruned_heads:
        heads_by_layer.setdefault(layer, []).append(head)
    patches = [
        AttentionPatch(make_zero_weights, [layer], heads, keep_row_sums=False)
        for layer, heads in heads_by_layer.items()
    ]
    with torch.no_grad():
        output, _, _ = run_patched_forward(batch.context.recorder, batch.target_batch.model_inputs, patches)
    return batch.compute_probabilities(output).argmax(-1) == batch.probabilities.argmax(-1)
