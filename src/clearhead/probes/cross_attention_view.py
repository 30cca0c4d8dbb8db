"""Attention of models with several streams, for display: maps within a stream and between streams, by name."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from clearhead.adapters.base import InputOptions
from clearhead.capture.tape import AttentionCall, Tape
from clearhead.engine.target_batch import TargetBatch
from clearhead.errors import InputError, UnsupportedError, unknown_value_error
from clearhead.explanation.explanation import to_json_value
from clearhead.explanation.multi_stream import AnyExplanation
from clearhead.links import AttentionLinks
from clearhead.probes.attention_view import AttentionView, compute_attention_view
from clearhead.probes.head_patterns import compute_head_statistics
from clearhead.sample import Sample

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

#: Patterns that are undefined between two streams, whose positions do not correspond.
POSITIONAL_PATTERNS = ("previous_token", "next_token", "self", "same_word")
MEAN_ROW_NAME = "mean of all rows"
#: The streams that text is linked with; the first that a model has is used.
IMAGE_STREAMS = ("regions", "image")


@dataclass
class MultiStreamAttentionView:
    """The attention of one input by pairs of streams: "text", "image → text", "prefix → source" …

    Attributes:
        model: Name of the model.
        prediction: Label of the prediction.
        views: The attention by the name of the streams.
        links: Attention between words and image regions, in both directions; empty where a direction has none.
        explanation: An explanation of the input, which supplies its units and its image; the scores are not used.
    """

    model: str
    prediction: str
    views: dict[str, AttentionView]
    links: tuple[AttentionLinks, ...] = ()
    explanation: AnyExplanation | None = None

    def __getitem__(self, name: str) -> AttentionView:
        """Return the attention view of one pair of streams, by its key in `views`; `InputError` if there is none."""
        if name not in self.views:
            raise unknown_value_error("attention map", name, self.views)
        return self.views[name]

    def to_dict(self) -> dict[str, Any]:
        """Return the views and links as a dictionary for JSON.

        Returns:
            Plain JSON values, schema "clearhead/attention-by-stream".
        """
        links = [
            {"from": link.from_stream, "to": link.to_stream, "description": link.description, "weights": link.weights}
            for link in self.links
        ]
        return to_json_value(
            {
                "schema": "clearhead/attention-by-stream",
                "version": 2,
                "model": self.model,
                "prediction": self.prediction,
                "maps": {name: view.to_dict() for name, view in self.views.items()},
                "links": links,
            }
        )

    def _repr_html_(self) -> str:
        from clearhead.render.html import render_notebook_html

        return render_notebook_html(self)

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        return Group(*(item for name, view in self.views.items() for item in (Text(name, style="bold"), view)))


def view_attention(
    explainer: "Explainer", inputs: Mapping[str, Any], max_units: int | None = None
) -> AttentionView | MultiStreamAttentionView:
    """Compute the attention view of one input of any model.

    Args:
        explainer: Explainer of the model.
        inputs: The input by stream, such as {"text": …, "image": …}.
        max_units: Maximum number of units along one side of a map; None for no limit.

    Returns:
        A view with the read-out row where the model has a single one, otherwise a view by streams.

    Raises:
        InputError: The input has more units than `max_units`.

    Example:
        >>> view_attention(ex, {"text": "two cats", "image": "cats.jpg"}).views.keys()  # doctest: +SKIP
    """
    batch = explainer._build_target_batch(None, None, InputOptions(), **inputs)
    longest = max(len(axis) for sample in batch.truncated_samples for axis in sample.axes.values())
    if max_units is not None and longest > max_units:
        raise InputError(f"the input has {longest:,} units: heads are shown for up to {max_units:,}")
    if len(inputs) == 1:
        try:
            return compute_attention_view(explainer, next(iter(inputs.values())))
        except UnsupportedError:  # several streams, or no single read-out row
            pass
    return _build_multi_stream_view(explainer, batch, inputs)


def compute_multi_stream_view(explainer: "Explainer", **inputs: Any) -> MultiStreamAttentionView:
    """Compute the attention of one input by pairs of query and key stream; of generated output, up to its last token.

    Args:
        explainer: Explainer of the model.
        **inputs: The input by stream, such as text= and image=.

    Returns:
        The attention by streams.

    Raises:
        InputError: More than one input.

    Example:
        >>> import clearhead
        >>> compute_multi_stream_view(clearhead.load("zoo:spell"), text="phone")["prefix → source"].key_names
        ('p', 'h', 'o', 'n', 'e', '</s>')
    """
    batch = explainer._build_target_batch(None, None, InputOptions(), **inputs)
    return _build_multi_stream_view(explainer, batch, inputs)


def compute_attention_links(explainer: "Explainer", **inputs: Any) -> tuple[AttentionLinks, ...]:
    """Compute the attention between words and image regions, in both directions: the mean over heads and layers.

    To draw the links on a page: `explanation.html("page.html", links=compute_attention_links(explainer, …))`.

    Args:
        explainer: Explainer of a model that reads text and an image.
        **inputs: The input by stream, such as text= and image=.

    Returns:
        The links of each direction; empty where neither stream attends to the other, as in CLIP.

    Raises:
        InputError: More than one input.

    Example:
        >>> import clearhead
        >>> from clearhead_zoo.examples import make_example_input
        >>> explainer = clearhead.load("zoo:shapes-vqa")
        >>> links = compute_attention_links(explainer, **make_example_input("shapes-vqa", 3))
        >>> [(link.from_stream, link.to_stream, link.weights.shape) for link in links]
        [('text', 'regions', (8, 8)), ('regions', 'text', (8, 8))]
    """
    batch = explainer._build_target_batch(None, None, InputOptions(), **inputs)
    return _build_links(_record_attention(explainer, batch), batch.truncated_samples[-1])


def _record_attention(explainer: "Explainer", batch: TargetBatch) -> Tape:
    """Record the attention of a pass over one input; several inputs raise `InputError`."""
    if batch.num_samples != 1:
        raise InputError(f"attention is shown for one input, but there are {batch.num_samples}")
    return explainer.recorder.record(batch.model_inputs, batch.compute_target, ("attention",), leaves=batch.leaves)


def _build_multi_stream_view(
    explainer: "Explainer", batch: TargetBatch, inputs: Mapping[str, Any]
) -> MultiStreamAttentionView:
    """Build a view per pair of streams; the method `random` is run for the prediction and the units."""
    tape = _record_attention(explainer, batch)
    explanations = explainer.explain(**inputs, method="random")
    explanation: AnyExplanation = explanations[0] if isinstance(explanations, list) else explanations
    prediction = _format_prediction(explanation)
    model = explainer.adapter.name
    sample = batch.truncated_samples[-1]
    views = {
        name: _build_attention_view(calls, sample, model, prediction)
        for name, calls in _iter_named_calls(tape.calls, sample)
    }
    return MultiStreamAttentionView(model, prediction, views, _build_links(tape, sample), explanation)


def _build_links(tape: Tape, sample: Sample) -> tuple[AttentionLinks, ...]:
    """Links in both directions; two streams that share one sequence have their own positions in it."""
    positions = {
        units.stream: (axis_name, list(indices))
        for axis_name, axis in sample.axes.items()
        for units, indices in zip(axis.unit_groups, axis.indices, strict=True)
    }
    image_stream = next((stream for stream in IMAGE_STREAMS if stream in positions), None)
    if "text" not in positions or image_stream is None:
        return ()
    links = []
    for from_stream, to_stream in (("text", image_stream), (image_stream, "text")):
        maps = list(_iter_mean_attention(tape, *positions[from_stream], *positions[to_stream]))
        if maps:
            links.append(AttentionLinks(from_stream, to_stream, np.mean(maps, axis=0)))
    return tuple(links)


def _iter_mean_attention(
    tape: Tape, query_stream: str, rows: list[int], key_stream: str, columns: list[int]
) -> Iterator[np.ndarray]:
    """The mean over heads of each call from one stream to the other."""
    for call in tape.calls:
        if call.attention is not None and (call.query_stream, call.key_stream) == (query_stream, key_stream):
            mean = call.attention[-1].mean(0)  # of several targets, the last
            if max(rows) < mean.shape[0] and max(columns) < mean.shape[1]:
                yield mean[rows][:, columns].double().cpu().numpy()


def _format_prediction(explanation: AnyExplanation) -> str:
    """Return the predicted label, or the name of the target if there is none."""
    return str(explanation.prediction.get("label") or explanation.target.get("name"))


def _iter_named_calls(calls: Sequence[AttentionCall], sample: Sample) -> Iterator[tuple[str, list[AttentionCall]]]:
    """Calls that can be stacked: those of the same streams and of the same size, with a name for each group."""
    groups: dict[tuple[str, str], dict[Any, list[AttentionCall]]] = {}
    for call in calls:
        if call.attention is not None:
            calls_by_shape = groups.setdefault((call.query_stream, call.key_stream), {})
            calls_by_shape.setdefault(call.attention.shape[1:], []).append(call)
    for (query_stream, key_stream), calls_by_shape in groups.items():
        stream_names = [_format_stream_name(sample, stream) for stream in dict.fromkeys((query_stream, key_stream))]
        name = " → ".join(stream_names)
        for (_, num_queries, num_keys), group in calls_by_shape.items():
            yield (name if len(calls_by_shape) == 1 else f"{name}, {num_queries} × {num_keys}"), group


def _format_stream_name(sample: Sample, stream: str) -> str:
    """The name of a stream; a sequence that two streams share is named after both."""
    unit_groups = sample.axes[stream].unit_groups if stream in sample.axes else ()
    return " and ".join(units.stream for units in unit_groups) or stream


def _build_attention_view(calls: Sequence[AttentionCall], sample: Sample, model: str, prediction: str) -> AttentionView:
    """Stack the maps of calls between the same two streams, without padding, with statistics of each head."""
    weights = [call.attention[-1] for call in calls if call.attention is not None]  # of several targets, the last
    query_units = _get_unit_names(sample, calls[0].query_stream)
    key_units = _get_unit_names(sample, calls[0].key_stream)
    # padding is cut off; an axis without units keeps its full size
    num_queries = min(len(query_units[0]), weights[0].shape[1]) or None
    num_keys = min(len(key_units[0]), weights[0].shape[2]) or None
    maps = [layer_weights[:, :num_queries, :num_keys].double().cpu() for layer_weights in weights]
    attention = torch.stack(maps).numpy()
    query_names, _ = _with_default_names(query_units, attention.shape[2])
    key_names, is_special = _with_default_names(key_units, attention.shape[3])
    is_cross_attention = calls[0].query_stream != calls[0].key_stream
    statistics = [compute_head_statistics(layer_map, torch.tensor(is_special), key_names) for layer_map in maps]
    statistic_names = [name for name in statistics[0] if not (is_cross_attention and name in POSITIONAL_PATTERNS)]
    return AttentionView(
        model=model,
        prediction=prediction,
        tokens=query_names,
        readout_row=None,
        attention=attention,
        scores_by_depth={MEAN_ROW_NAME: attention.mean((1, 2))},
        head_statistics={
            name: np.stack([layer_statistics[name].double().numpy() for layer_statistics in statistics])
            for name in statistic_names
        },
        key_names=key_names if is_cross_attention or query_names != key_names else None,
    )


#: Names of the units along an axis, and which of them are special.
UnitNames = tuple[tuple[str, ...], tuple[bool, ...]]


def _get_unit_names(sample: Sample, stream: str) -> UnitNames:
    """Names along one axis by position, and which are special; empty where the axis has no units."""
    if stream not in sample.axes:
        return (), ()
    axis = sample.axes[stream]
    names = {
        position: name
        for units, positions in zip(axis.unit_groups, axis.indices, strict=True)
        for position, name in zip(positions, units.names, strict=True)
    }
    return tuple(names[position] for position in sorted(names)), axis.special


def _with_default_names(units: UnitNames, count: int) -> UnitNames:
    """The names, or numbers where they do not fit the count."""
    if len(units[0]) == count:
        return units
    return tuple(map(str, range(count))), (False,) * count
