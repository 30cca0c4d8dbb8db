"""Attention of models with several streams to look at: maps of each stream, and from one to another, by name."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from clearhead.adapters.base import How, Sample
from clearhead.capture.tape import Call, Tape
from clearhead.engine.target_batch import Plan
from clearhead.errors import InputError, Refusal, unknown
from clearhead.explanation.explanation import plain
from clearhead.explanation.multi_stream import AnyExplanation
from clearhead.links import Links
from clearhead.probes.attention_view import AttentionView, view
from clearhead.probes.head_patterns import figures

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

#: Where units look at those of another stream, no place is beside another.
PLACES = ("previous token", "next token", "itself", "same word")
MEAN = "mean of all rows"
#: What words are linked with, where a model has it.
SEEN = ("regions", "image")


@dataclass
class StreamsView:
    """The attention of one input by streams: "text", "image → text", "prefix → source" …

    links: between words and what lies in a picture, both ways, where they look at one another
    told: an explanation of the input, for its units and its picture alone
    """

    model: str
    prediction: str
    maps: dict[str, AttentionView]
    links: tuple[Links, ...] = ()
    told: AnyExplanation | None = None

    def __getitem__(self, name: str) -> AttentionView:
        if name not in self.maps:
            raise unknown("map", name, self.maps)
        return self.maps[name]

    def to_dict(self) -> dict[str, Any]:
        about = {"schema": "clearhead/attention-by-stream", "version": 1, "model": self.model}
        maps = {name: own.to_dict() for name, own in self.maps.items()}
        joined = [
            {"from": one.from_stream, "to": one.to_stream, "about": one.about, "weights": one.weights}
            for one in self.links
        ]
        return plain({**about, "prediction": self.prediction, "maps": maps, "links": joined})

    def _repr_html_(self) -> str:
        from clearhead.render.html import fragment

        return fragment(self)

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        return Group(*(part for name, own in self.maps.items() for part in (Text(name, style="bold"), own)))


def look(ex: "Explainer", given: Mapping[str, Any], most: int | None = None) -> AttentionView | StreamsView:
    """The attention of one input of any model: with the row that is read where there is one, else by stream.

    given: the input by stream, such as text= and image=; most: units along one side of a map
    """
    plan = ex._planned(None, None, How(), **given)
    longest = max(len(axis) for sample in plan.samples for axis in sample.axes.values())
    if most is not None and longest > most:
        raise InputError(f"the input has {longest:,} units: heads are shown for up to {most:,}")
    if len(given) == 1:
        try:
            return view(ex, next(iter(given.values())))
        except Refusal:  # it has several streams, or no single row is read
            pass
    return _recorded(ex, plan, given)


def by_stream(ex: "Explainer", **given: Any) -> StreamsView:
    """The attention of one input, by the streams that look and are looked at; of an answer, up to its last word.

    >>> import clearhead
    >>> by_stream(clearhead.load("zoo:spell"), text="phone")["prefix → source"].keys
    ('p', 'h', 'o', 'n', 'e', '</s>')
    """
    return _recorded(ex, ex._planned(None, None, How(), **given), given)


def links(ex: "Explainer", **given: Any) -> tuple[Links, ...]:
    """Which words look at which parts of the picture and which parts at which words: mean of heads and layers.

    Nothing where neither looks at the other, as in CLIP. A page draws them: `e.html("why.html", links=links(ex, …))`.

    >>> import clearhead
    >>> from clearhead_zoo.examples import example
    >>> ex, given = clearhead.load("zoo:shapes-vqa"), example("shapes-vqa", 3)
    >>> [(one.from_stream, one.to_stream, one.weights.shape) for one in links(ex, **given)]
    [('text', 'regions', (8, 8)), ('regions', 'text', (8, 8))]
    """
    plan = ex._planned(None, None, How(), **given)
    return _links(_taped(ex, plan), plan.samples[-1])


def _taped(ex: "Explainer", plan: Plan) -> Tape:
    if plan.size != 1:
        raise InputError(f"attention is shown for one input, and there are {plan.size}")
    return ex.recorder.record(plan.batch, plan.value, ("attention",), leaves=plan.leaves)


def _recorded(ex: "Explainer", plan: Plan, given: Mapping[str, Any]) -> StreamsView:
    tape = _taped(ex, plan)
    every = ex.explain(**given, method="random")
    told: AnyExplanation = every[0] if isinstance(every, list) else every
    prediction = _prediction(told)
    model, sample = ex.subject.name, plan.samples[-1]
    maps = {name: _map(calls, sample, model, prediction) for name, calls in _named(tape.calls, sample)}
    return StreamsView(model, prediction, maps, _links(tape, sample), told)


def _links(tape: Tape, sample: Sample) -> tuple[Links, ...]:
    """Both ways; two streams may share one sequence, of which each then has its own places."""
    at = {
        part.stream: (axis, list(places))
        for axis, own in sample.axes.items()
        for part, places in zip(own.parts, own.at, strict=True)
    }
    other = next((stream for stream in SEEN if stream in at), None)
    if "text" not in at or other is None:
        return ()
    return tuple(
        Links(one, two, np.mean(found, axis=0))
        for one, two in (("text", other), (other, "text"))
        if (found := list(_between(tape, *at[one], *at[two])))
    )


def _between(tape: Tape, looks: str, rows: list[int], seen: str, columns: list[int]) -> Iterator[np.ndarray]:
    """The mean of the heads of each call from one to the other."""
    for call in tape.calls:
        if call.attention is not None and (call.query_stream, call.key_stream) == (looks, seen):
            mean = call.attention[-1].mean(0)  # of several targets, the last
            if max(rows) < mean.shape[0] and max(columns) < mean.shape[1]:
                yield mean[rows][:, columns].double().cpu().numpy()


def _prediction(told: AnyExplanation) -> str:
    return str(told.prediction.get("label") or told.target.get("name"))


def _named(calls: Sequence[Call], sample: Sample) -> Iterator[tuple[str, list[Call]]]:
    """Calls that can stand one above the other: of the same streams, and of the same size."""
    groups: dict[tuple[str, str], dict[Any, list[Call]]] = {}
    for call in calls:
        if call.attention is not None:
            sizes = groups.setdefault((call.query_stream, call.key_stream), {})
            sizes.setdefault(call.attention.shape[1:], []).append(call)
    for (looks, seen), sizes in groups.items():
        ends = [_said(sample, stream) for stream in dict.fromkeys((looks, seen))]
        name = " → ".join(ends)
        for (_, queries, keys), own in sizes.items():
            yield (name if len(sizes) == 1 else f"{name}, {queries} × {keys}"), own


def _said(sample: Sample, stream: str) -> str:
    """What a stream is called: one sequence of two is called by both."""
    parts = sample.axes[stream].parts if stream in sample.axes else ()
    return " and ".join(part.stream for part in parts) or stream


def _map(calls: Sequence[Call], sample: Sample, model: str, prediction: str) -> AttentionView:
    weights = [call.attention[-1] for call in calls if call.attention is not None]  # of several targets, the last
    queries, keys = (_units(sample, stream) for stream in (calls[0].query_stream, calls[0].key_stream))
    high, wide = (min(len(units[0]), size) for units, size in zip((queries, keys), weights[0].shape[1:], strict=True))
    whole = [part[:, : high or None, : wide or None].double().cpu() for part in weights]
    attention = torch.stack(whole).numpy()
    rows, columns = _numbered(queries, attention.shape[2]), _numbered(keys, attention.shape[3])
    crosses = calls[0].query_stream != calls[0].key_stream
    found = [figures(part, torch.tensor(columns[1]), columns[0]) for part in whole]
    kept = [name for name in found[0] if not (crosses and name in PLACES)]
    return AttentionView(
        model=model,
        prediction=prediction,
        tokens=rows[0],
        row=None,
        attention=attention,
        by_depth={MEAN: attention.mean((1, 2))},
        looks={name: np.stack([part[name].double().numpy() for part in found]) for name in kept},
        keys=columns[0] if crosses or rows[0] != columns[0] else None,
    )


Named = tuple[tuple[str, ...], tuple[bool, ...]]


def _units(sample: Sample, stream: str) -> Named:
    """Names along one axis in the order of its places, and which are special; none where the axis has no units."""
    if stream not in sample.axes:
        return (), ()
    axis = sample.axes[stream]
    names = {
        at: own
        for part, places in zip(axis.parts, axis.at, strict=True)
        for at, own in zip(places, part.names, strict=True)
    }
    return tuple(names[at] for at in sorted(names)), axis.special


def _numbered(units: Named, count: int) -> Named:
    return units if len(units[0]) == count else (tuple(map(str, range(count))), (False,) * count)
