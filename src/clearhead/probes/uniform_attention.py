"""Uniform attention: the same weight for every visible key (Wiegreffe & Pinter, 2019, here in a trained model).

Layer by layer and in all layers at once: how far the output changes, and how often another class is predicted. A milder
ablation is measured as well: the weights of an input are replaced by the mean weights of the other inputs at the same
positions. This keeps what attention does for every input (the class token, the previous word) and removes what it
selects in this one.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from clearhead.errors import InputError
from clearhead.interventions.attention_patch import AttentionPatch, AttentionWeights, ReplacementFunction, VisibleKeys
from clearhead.probes.base import ProbeBatch, ProbeContext, ProbeScope, Progress
from clearhead.probes.divergences import compute_total_variation
from clearhead.probes.probe_result import ProbeResult, compute_estimates
from clearhead.sample import Sample

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

BATCH_SIZE = 16
CONCLUSION = (
    "The attention weights of a trained model were replaced with uniform weights. Where predictions stay the same, "
    "the model does not need the selectivity of its attention there, at least on these inputs. Where predictions "
    "change, it may need this selectivity, or the change may come from hidden states that never occurred in training; "
    "only a model trained with uniform attention distinguishes the two causes. Replacing the weights with the mean "
    "attention of the other inputs, position by position, removes only what attention selects in this particular "
    "input: where predictions stay the same with the mean attention but change with uniform weights, the model needs "
    "its average attention pattern, not a selection that depends on the input."
)
MEAN_ATTENTION_PREFIX = "mean attention, "


def make_uniform_weights(attention: AttentionWeights, visible: VisibleKeys, layer: int) -> AttentionWeights:
    """Return the weight 1 for every visible key; the patch normalises it to 1 / n."""
    return visible.to(attention.dtype).expand_as(attention)


class MeanAttention:
    """The mean weights of the other inputs at the same query and key; 1 / n in rows that no other input reaches.

    Args:
        context: The model and the inputs of the probe.
        batches: All inputs, with the attention of their unpatched passes.
    """

    def __init__(self, context: ProbeContext, batches: Iterable[ProbeBatch]) -> None:
        self.max_length = max(len(context.get_units(sample)) for sample in context.samples)
        self.has_pooling_query = context.has_pooling_query
        self.attention_sums: list[Float[Tensor, "head query key"]] = []
        self.cell_counts = torch.zeros(())
        for batch in batches:
            self._add_batch(batch)

    def _add_batch(self, batch: ProbeBatch) -> None:
        """Add a batch to the sums of attention, and count the inputs that reach each query and key."""
        valid_cells = _build_valid_cell_mask(batch).to(batch.attention[0])
        batch_sums = [
            self._pad_to_max_length((attention * valid_cells[:, None]).double().sum(0)) for attention in batch.attention
        ]
        if self.attention_sums:
            batch_sums = [total + layer_sum for total, layer_sum in zip(self.attention_sums, batch_sums, strict=True)]
        self.attention_sums = batch_sums
        self.cell_counts = self.cell_counts.to(valid_cells) + self._pad_to_max_length(valid_cells.sum(0))

    def _pad_to_max_length(self, cells: Float[Tensor, "*head query key"]) -> Float[Tensor, "*head query key"]:
        """Pad keys to the length of the longest input; queries too, unless there is a single pooling query."""
        key_padding = self.max_length - cells.shape[-1]
        query_padding = 0 if self.has_pooling_query else key_padding
        return pad(cells, (0, key_padding, 0, query_padding))

    def make_leave_one_out_replacement(self, batch: ProbeBatch) -> ReplacementFunction:
        """Return a function that replaces the weights of each input by the mean over all other inputs."""
        valid_cells = _build_valid_cell_mask(batch).to(batch.attention[0])
        num_queries, num_keys = batch.attention[0].shape[-2:]
        counts = (self.cell_counts[:num_queries, :num_keys] - valid_cells)[:, None]

        def compute_mean(attention: AttentionWeights, visible: VisibleKeys, layer: int) -> AttentionWeights:
            input_weights = (batch.attention[layer] * valid_cells[:, None]).double()
            sums = (self.attention_sums[layer][:, :num_queries, :num_keys] - input_weights).clamp(min=0)
            weights = (sums * (counts > 0) / counts.clamp(min=1)).to(attention) * visible
            return torch.where(
                weights.sum(-1, keepdim=True) > 0, weights, make_uniform_weights(attention, visible, layer)
            )

        return compute_mean


def _build_valid_cell_mask(batch: ProbeBatch) -> Float[Tensor, "batch query key"]:
    """Which queries and keys of each input are not padding."""
    rows = batch.valid_mask[:, :1] if batch.context.has_pooling_query else batch.valid_mask
    return rows[:, :, None] & batch.valid_mask[:, None]


def make_uniform_patch(context: ProbeContext, scope: ProbeScope, samples: Sequence[Sample]) -> AttentionPatch:
    """Return a patch that makes attention uniform in a scope."""
    rows = None
    if scope.is_readout_row_only and not context.has_pooling_query:
        width = max(len(context.get_units(sample)) for sample in samples)
        rows = torch.tensor([context.find_readout_row(sample) for sample in samples])[:, None] == torch.arange(width)
    return AttentionPatch(make_uniform_weights, scope.resolve_layers(context.num_layers), scope.heads, rows)


def run_uniform_probe(
    explainer: "Explainer",
    inputs: Any,
    labels: Sequence[str | int] | None = None,
    *,
    frozen: bool = False,
    target: Any = None,
    candidates: Sequence[str | int] | None = None,
    progress: Progress = False,
) -> ProbeResult:
    """Make attention uniform in the read-out row, layer by layer, and everywhere, and measure the change of the output.

    The effect of training with uniform attention is among the points of `run_frontier_probe`.

    Args:
        explainer: Explainer of the model.
        inputs: One input or a list of inputs.
        labels: One label for each input, to report the accuracy with and without the change.
        frozen: Keep the attention of later layers as in the unpatched pass.
        target: The target, as in `Explainer.explain`; default: the predicted class.
        candidates: Labels or masked words whose probabilities are compared among themselves; default: all.
        progress: True for a progress bar, or a function that wraps a list.

    Returns:
        One record for each input, and means with intervals.

    Raises:
        InputError: Invalid options.
        UnsupportedError: The model cannot be probed.

    Example:
        >>> run_uniform_probe(ex, texts).estimates[0].interval  # doctest: +SKIP
    """
    context = ProbeContext(explainer, inputs, target, candidates)
    label_names: list[str] | None = None
    if labels is not None:
        if len(labels) != len(context.samples):
            raise InputError(f"{len(labels)} labels for {len(context.samples)} inputs: pass one for each")
        label_names = [context.adapter.label_name(context.adapter.label_index(label)) for label in labels]
    scopes = {f"layer {layer}": ProbeScope("S3", layer) for layer in range(context.num_layers)}
    scopes["all layers"] = ProbeScope("S4")
    if all(len(context.find_readout_rows(sample)) == 1 for sample in context.samples):
        scopes = {"read-out row": ProbeScope("S1"), **scopes}
    records: list[dict[str, Any]] = [{}] * len(context.samples)
    mean_attention = MeanAttention(context, (batch for _, batch in context.iter_batches(BATCH_SIZE)))
    for indices, batch in context.iter_batches(BATCH_SIZE, progress):
        batch_labels = label_names and [label_names[i] for i in indices]
        batch_records = _build_records(batch, scopes, mean_attention, frozen, batch_labels)
        for index, record in zip(indices, batch_records, strict=True):
            records[index] = record
    descriptions = _describe_metrics(scopes, has_labels=labels is not None)
    estimates = compute_estimates(records, descriptions)
    return ProbeResult("uniform", context.adapter.name, {"frozen": frozen}, records, estimates, CONCLUSION)


def _describe_metrics(scopes: Mapping[str, ProbeScope], has_labels: bool) -> dict[str, str]:
    """Return a description of each metric, for both replacements in every scope."""
    descriptions = {}
    if has_labels:
        descriptions["accuracy"] = "fraction of correct predictions of the unchanged model"
    replacements = {"": "uniform attention there", MEAN_ATTENTION_PREFIX: "the other inputs' mean attention there"}
    for prefix, replacement in replacements.items():
        for name in scopes:
            descriptions[f"TVD, {prefix}{name}"] = f"total variation distance of the output with {replacement}"
        for name in scopes:
            descriptions[f"flips, {prefix}{name}"] = f"fraction of inputs whose class changes with {replacement}"
        if has_labels:
            for name in scopes:
                descriptions[f"accuracy, {prefix}{name}"] = f"fraction of correct predictions with {replacement}"
    return descriptions


def _build_records(
    batch: ProbeBatch,
    scopes: dict[str, ProbeScope],
    mean_attention: MeanAttention,
    frozen: bool,
    label_names: Sequence[str] | None,
) -> list[dict[str, Any]]:
    """Build the records of a batch: TVD, flips and accuracy with each replacement in each scope."""
    context = batch.context
    predicted = batch.probabilities.argmax(-1)
    records: list[dict[str, Any]] = [
        {"input": batch.format_input_name(i), "prediction": context.get_predicted_label(probabilities)}
        for i, probabilities in enumerate(batch.probabilities)
    ]
    replacements = {
        "": make_uniform_weights,
        MEAN_ATTENTION_PREFIX: mean_attention.make_leave_one_out_replacement(batch),
    }
    for (prefix, weights), (scope_name, scope) in product(replacements.items(), scopes.items()):
        name = prefix + scope_name
        with torch.no_grad():
            patched = batch.compute_patched_probabilities(weights, scope, frozen)
        tvd = compute_total_variation(patched, batch.probabilities, context.multi_label)
        for i, record in enumerate(records):
            record[f"TVD, {name}"] = float(tvd[i])
            record[f"flips, {name}"] = float(patched[i].argmax() != predicted[i])
            if label_names is not None:
                record["accuracy"] = float(record["prediction"] == label_names[i])
                record[f"accuracy, {name}"] = float(context.get_predicted_label(patched[i]) == label_names[i])
    return records
