"""Attention of one input for display: every map, statistics of each head, and rollout and flow by depth."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from clearhead.errors import InputError
from clearhead.explanation.explanation import to_json_value
from clearhead.explanation.json_keys import to_snake_case_keys
from clearhead.probes.base import ProbeBatch, ProbeContext
from clearhead.probes.head_importance import compute_sample_head_statistics
from clearhead.probes.head_patterns import PATTERN_DESCRIPTIONS, classify_head_pattern, format_head_pattern

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

#: With more units than this, no flow is computed.
MAX_FLOW_LENGTH = 40
CONCLUSION = (
    "An attention map shows which units a head takes values from. It shows neither these values nor how later layers "
    "use them, and the names of patterns are only approximate. To measure whether the output depends on a head, run "
    "clearhead probe heads."
)


@dataclass
class AttentionView:
    """The attention of one input, with statistics of each head.

    Attributes:
        model: Name of the model.
        tokens: Names of the queries.
        readout_row: The read-out row; None where there is no single one.
        prediction: Label of the prediction.
        attention: Attention weights of every layer and head.
        scores_by_depth: Raw attention, rollout and flow of the read-out row (or the mean of all rows), layer × unit.
        head_statistics: Statistics of each head on this input.
        mean_head_statistics: The same as means over comparison inputs; None without them.
        candidate_probabilities: Probabilities of the requested labels or masked words.
        key_names: Names of the keys; None where they are those of the queries.
    """

    model: str
    tokens: tuple[str, ...]
    readout_row: int | None
    prediction: str
    attention: Float[np.ndarray, "layer head query key"]
    scores_by_depth: "dict[str, Float[np.ndarray, 'layer unit']]"
    head_statistics: "dict[str, Float[np.ndarray, 'layer head']]"
    mean_head_statistics: "dict[str, Float[np.ndarray, 'layer head']] | None" = None
    candidate_probabilities: dict[str, float] = field(default_factory=dict)
    key_names: tuple[str, ...] | None = None

    def get_head_pattern(self, layer: int, head: int, on_average: bool = False) -> str:
        """Return the name of a head's pattern, on this input or on average over the comparison inputs.

        Args:
            layer: Index of the layer.
            head: Index of the head.
            on_average: Use the mean over the comparison inputs, if there are any.

        Returns:
            Name of the pattern, such as "previous_token".
        """
        statistics = self.head_statistics
        if on_average and self.mean_head_statistics is not None:
            statistics = self.mean_head_statistics
        return classify_head_pattern({name: float(values[layer, head]) for name, values in statistics.items()})

    def format_head_pattern(self, layer: int, head: int, on_average: bool = False) -> str:
        """Return the name of a head's pattern for display: "previous token" for previous_token.

        Args:
            layer: Index of the layer.
            head: Index of the head.
            on_average: Use the mean over the comparison inputs, if there are any.

        Returns:
            The name for display.
        """
        return format_head_pattern(self.get_head_pattern(layer, head, on_average))

    def get_map(self, layer: int, head: int) -> Float[np.ndarray, "query key"]:
        """Return the attention map of one head; negative indices count from the end.

        Args:
            layer: Index of the layer, from 0.
            head: Index of the head, from 0.

        Returns:
            The weights of each query over the keys; a view of `attention`.

        Raises:
            InputError: The layer or head does not exist.

        Example:
            >>> compute_attention_view(ex, "A wonderful film").get_map(-1, 0).shape  # doctest: +SKIP
            (5, 5)
        """
        layers, heads = self.attention.shape[:2]
        if not (-layers <= layer < layers and -heads <= head < heads):
            raise InputError(
                f"there is no head {head} in layer {layer}: the model has {layers} layers of {heads} heads, counted "
                "from 0"
            )
        return self.attention[layer, head]

    def to_dict(self) -> dict[str, Any]:
        """Return the view as a dictionary for JSON.

        Returns:
            Plain JSON values, schema "clearhead/attention"; non-finite numbers become null.
        """
        layers, heads = self.attention.shape[:2]
        document: dict[str, Any] = {
            "schema": "clearhead/attention",
            "version": 2,
            "model": self.model,
            "tokens": self.tokens,
            "readout_row": self.readout_row,
            "prediction": self.prediction,
            "heads": [self._build_head_record(layer, head) for layer in range(layers) for head in range(heads)],
            "by_depth": to_snake_case_keys(self.scores_by_depth),
        }
        if self.key_names is not None:
            document["keys"] = self.key_names
        document["candidates"] = self.candidate_probabilities
        document["attention"] = self.attention
        document["conclusion"] = CONCLUSION
        return to_json_value(document)

    def _build_head_record(self, layer: int, head: int) -> dict[str, Any]:
        """Build the record of a head: its pattern, also on average over inputs if known, and its statistics."""
        record: dict[str, Any] = {"layer": layer, "head": head, "pattern": self.get_head_pattern(layer, head)}
        if self.mean_head_statistics is not None:
            record["mean_pattern"] = self.get_head_pattern(layer, head, True)
        record |= {name: float(values[layer, head]) for name, values in self.head_statistics.items()}
        return record

    def _repr_html_(self) -> str:
        from clearhead.render.html import render_notebook_html

        return render_notebook_html(self)

    def __rich__(self) -> Any:
        from rich import box
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in ("layer", "patterns of its heads", "entropy", "distance", "sink", "most attended"):
            table.add_column(name)
        layers, heads = self.attention.shape[:2]
        key_names = self.key_names or self.tokens
        raw_scores = next(iter(self.scores_by_depth.values()))
        for layer in range(layers):
            patterns = [self.get_head_pattern(layer, head) for head in range(heads)]
            pattern_counts = ", ".join(
                f"{patterns.count(name)} {format_head_pattern(name)}"
                for name in PATTERN_DESCRIPTIONS
                if name in patterns
            )
            means = [self.head_statistics[name][layer].mean() for name in ("entropy", "distance", "sink")]
            cells = ["–" if np.isnan(mean) else f"{mean:.2f}" for mean in means]
            scores = raw_scores[layer]
            top_keys = ", ".join(f"{key_names[i]} {scores[i]:.2f}" for i in np.argsort(-scores, kind="stable")[:3])
            table.add_row(str(layer), Text(pattern_counts), *cells, Text(top_keys))
        rows_shown = "mean of all rows"
        if self.readout_row is not None:
            rows_shown = f"read-out row {self.readout_row} ({self.tokens[self.readout_row]})"
        title = f"attention · {self.model} → {self.prediction} · {layers} layers of {heads} heads · {rows_shown}"
        lines = [Text(title)]
        if self.candidate_probabilities:
            probabilities = ", ".join(f"{name} {value:.4f}" for name, value in self.candidate_probabilities.items())
            lines.append(Text(f"probabilities: {probabilities}"))
        return Group(*lines, table, Text(CONCLUSION))


def compute_attention_view(
    explainer: "Explainer",
    raw_input: Any,
    comparison_inputs: list[Any] | None = None,
    target: Any = None,
    candidates: Sequence[str | int] = (),
    batch_size: int = 16,
) -> AttentionView:
    """Compute the attention view of one input of a model with a single stream.

    Args:
        explainer: Explainer of the model.
        raw_input: The input, as `Explainer.explain` takes it.
        comparison_inputs: Inputs over which the head statistics are averaged for comparison.
        target: The target, as in `Explainer.explain`; default: the predicted class.
        candidates: Labels or masked words whose probabilities are reported, such as "his" and "her".
        batch_size: Maximum number of comparison inputs per pass.

    Returns:
        The attention of the input.

    Raises:
        InputError: `raw_input` is more than one input.
        UnsupportedError: The model cannot be probed.

    Example:
        >>> view = compute_attention_view(ex, "A wonderful film")  # doctest: +SKIP
        >>> view.tokens, view.get_head_pattern(0, 3)  # doctest: +SKIP
    """
    context = ProbeContext(explainer, [raw_input], target)
    if len(context.samples) != 1:
        raise InputError(f"attention is shown for one input, but there are {len(context.samples)}")
    sample = context.samples[0]
    batch = ProbeBatch(context, context.samples)
    mean_head_statistics = None
    if comparison_inputs:
        comparison_context = ProbeContext(explainer, comparison_inputs, target)
        sample_statistics = [
            compute_sample_head_statistics(comparison_batch, i)
            for _, comparison_batch in comparison_context.iter_batches(batch_size)
            for i in range(len(comparison_batch.samples))
        ]
        mean_head_statistics = {
            name: np.mean([statistics[name] for statistics in sample_statistics], axis=0)
            for name in sample_statistics[0]
        }
    methods = ["rollout"]
    if find_spec("igraph") and batch.lengths[0] <= MAX_FLOW_LENGTH:
        methods.append("flow")
    explanations = explainer.explain(raw_input, method=methods, target=target)
    raw_scores = np.stack(
        [batch.select_readout_attention(layer)[0].mean(0).double().cpu().numpy() for layer in range(context.num_layers)]
    )
    return AttentionView(
        model=context.adapter.name,
        tokens=context.get_units(sample).names,
        readout_row=context.find_readout_row(sample),
        prediction=context.get_predicted_label(batch.probabilities[0]),
        attention=np.stack([attention[0].double().cpu().numpy() for attention in batch.attention]),
        scores_by_depth={"raw": raw_scores, **{name: e.per_layer for name, e in explanations.items()}},
        head_statistics=compute_sample_head_statistics(batch, 0),
        mean_head_statistics=mean_head_statistics,
        candidate_probabilities={
            str(label): float(batch.probabilities[0, context.adapter.label_index(label)]) for label in candidates
        },
    )
