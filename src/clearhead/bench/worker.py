"""A worker: keeps a model and its data open, and measures chunks. It knows no store and no engine."""

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import clearhead
from clearhead.bench.chunk_explanations import Explained, applicable, explained, method_of, on_examples
from clearhead.bench.data import DataSet, Example
from clearhead.bench.explanation_store import Kept, kept
from clearhead.bench.job import Job, Task, aligned
from clearhead.bench.output_cache import Looks, Scores
from clearhead.bench.protocols.base import Measurement, Protocol
from clearhead.bench.store import Shard, rows_of
from clearhead.bench.zero_shot import Captions, captions_of
from clearhead.errors import ClearheadError
from clearhead.explanation.multi_stream import AnyExplanation

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

#: The explanations of one method, by the place of their example in the chunk.
Places = Mapping[int, AnyExplanation]


def versions() -> str:
    """What figures may depend on beside settings, in one line."""
    import numpy
    import torch
    import transformers

    parts = {
        "clearhead": clearhead.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return ", ".join(f"{name} {version}" for name, version in parts.items())


class Worker:
    """`ex` is given where the model is an object; otherwise the job names it, and it is opened at its first use."""

    def __init__(self, job: Job, ex: "Explainer | None" = None, data: DataSet | None = None) -> None:
        self.job = job
        self.given, self.data_given = ex, data
        self.bare: Scores = {}
        self.protocols: dict[str, tuple[str, Protocol]] = {
            made.hash: (name, made) for name, made in job.made_protocols().items()
        }

    @cached_property
    def ex(self) -> "Explainer":
        if self.given is not None:
            return self.given
        return clearhead.load(self.job.model, device=self.job.device, dtype=self.job.dtype)

    @cached_property
    def data(self) -> DataSet:
        return self.job.opened() if self.data_given is None else self.data_given

    @cached_property
    def model(self) -> str:
        from clearhead.data.dataset_run import weights_digest

        return weights_digest(self.ex.subject.model)[:16]

    def __call__(self, task: Task) -> Shard:
        """Every protocol on one chunk. Explanations of one target are made once, for all methods that need them."""
        chunk, rows = _Chunk(task, Looks(self.ex, self.bare)), []
        refused: dict[str, str] = {}
        for settings, methods in task.missing:
            name, protocol = self.protocols[settings]
            measured, reasons = self._asked(protocol, methods, chunk)
            refused |= {f"{name}: {method}": "; ".join(own) for method, own in reasons.items() if own}
            rows += rows_of(measured, protocol, name, self.model, self.data.name, versions())
        return Shard(task.key, task.missing, tuple(rows), refused, tuple(chunk.kept))

    def _asked(
        self, protocol: Protocol, methods: Sequence[str], chunk: "_Chunk"
    ) -> tuple[list[Measurement], dict[str, list[str]]]:
        """What one protocol says of a chunk; and by method why it does not speak of all examples."""
        try:
            examples, strange = self.examples(chunk.task, protocol)
            own = self._explained(examples, protocol, chunk)
        except ClearheadError as problem:  # the fault of no single method
            return [], {method: [str(problem)] for method in methods}
        reasons = {method: [own.refused[method]] if method in own.refused else [] for method in methods}
        measured, groups = [], _alike(own, methods, protocol.together)
        for method in methods:
            if own.places(method) and not any(method in part for part in groups):
                reasons[method].append("it is measured together with others, and no example has them all")
        for part in groups:
            found, failed, why = self._tried(protocol, examples, part, chunk.looks)
            measured += found
            for method in part:
                reasons[method] += [*why, *([on_examples(strange | failed)] if strange or failed else [])]
        return _judged(measured, examples, own), reasons

    def _tried(
        self, protocol: Protocol, examples: Sequence[Example], found: Mapping[str, Places], looks: Looks
    ) -> tuple[list[Measurement], dict[str, str], list[str]]:
        """The same as `_measured`, and why there is nothing: of these methods alone, others explain other examples."""
        try:
            return *self._measured(protocol, examples, found, looks), []
        except ClearheadError as problem:
            return [], {}, [str(problem)]

    def _measured(
        self, protocol: Protocol, examples: Sequence[Example], found: Mapping[str, Places], looks: Looks
    ) -> tuple[list[Measurement], dict[str, str]]:
        """What a protocol says of these methods, which all explain the same examples; and on which it fails."""
        places = list(next(iter(found.values())))

        def measure(some: Sequence[int]) -> Sequence[Measurement]:
            mine = {method: [own[place] for place in some] for method, own in found.items()}
            return protocol.measure(self.ex, [examples[place] for place in some], mine, looks)

        try:
            return list(measure(places)), {}
        except ClearheadError:
            made, failed = _one_by_one(measure, places)
            if len(failed) == len(places):
                raise
            return made, {examples[place].id: why for place, why in failed.items()}

    @cached_property
    def captions(self) -> Captions | None:
        return captions_of(self.ex, self.data, self.job.template)

    def examples(self, task: Task, protocol: Protocol) -> tuple[list[Example], dict[str, str]]:
        """A chunk's examples as this model takes them; and of which there is nothing to explain."""
        found: list[Example] = []
        strange: dict[str, str] = {}
        for place in task.places:
            example = self.data[place]
            try:
                posed = self._posed(example, protocol)
                protocol.target(posed)
                found.append(posed)
            except ClearheadError as problem:
                if len(strange) + 1 == len(task.places):
                    raise
                strange[example.id] = str(problem)
        return found, strange

    def _posed(self, example: Example, protocol: Protocol) -> Example:
        """With its label as the model numbers it, or with a caption for it."""
        if self.captions is not None:
            return self.captions.posed(example, protocol)
        return aligned(example, self.data, self.ex)

    def _methods(self, task: Task) -> list[str]:
        """All methods of the chunk, whichever protocol asks: what a chunk gives must not depend on what was there."""
        return list(dict.fromkeys(method for _, methods in task.missing for method in methods))

    def _explained(self, examples: Sequence[Example], protocol: Protocol, chunk: "_Chunk") -> Explained:
        targets = repr([protocol.target(example) for example in examples])
        targets += "" if self.captions is None else repr(protocol.explained)
        if targets not in chunk.explained:
            names = self._methods(chunk.task)
            methods, refused = applicable(self.ex, [method_of(name) for name in names])
            found = explained(self.ex, examples, methods, protocol, self.job.batch_size, self.job.seed)
            found.refused |= refused
            chunk.explained[targets] = found
            if self.job.keep:
                chunk.kept += kept(examples, protocol.explained, {one: found.places(one) for one in names})
        return chunk.explained[targets]


@dataclass
class _Chunk:
    """What the protocols of one chunk share: what the model said, explanations by target, and those to be stored."""

    task: Task
    looks: Looks
    explained: dict[str, Explained] = field(default_factory=dict)
    kept: list[Kept] = field(default_factory=list)


def _one_by_one(
    measure: Callable[[Sequence[int]], Sequence[Measurement]], places: Sequence[int]
) -> tuple[list[Measurement], dict[int, str]]:
    """Each example by itself: what is said of those that can be measured, and why the others cannot, by place."""
    made: list[Measurement] = []
    failed: dict[int, str] = {}
    for place in places:
        try:
            made += measure([place])
        except ClearheadError as problem:
            failed[place] = str(problem)
    return made, failed


def _judged(measured: Sequence[Measurement], examples: Sequence[Example], own: Explained) -> list[Measurement]:
    """The same, each with whether its example is predicted correctly, as far as it does not say so itself."""
    found = {
        examples[place].id: correct(examples[place], one)
        for method in [*own.by_method, *own.some]
        for place, one in own.places(method).items()
    }
    known = {example: {"correct": float(one)} for example, one in found.items() if one is not None}
    return [replace(one, figures={**known.get(one.example, {}), **one.figures}) for one in measured]


def correct(example: Example, explanation: AnyExplanation) -> bool | None:
    """Whether the model's own class is the true one; None where nobody says what is true, or there are no classes."""
    part = next(iter(explanation.parts.values()))
    predicted = part.prediction.get("index")
    if predicted is None or "value" in part.prediction or example.among is not None:
        return None
    if isinstance(example.label, Mapping):
        return example.label.get(part.prediction["label"], 0.0) > 0
    # what an example says is to be explained is its true class
    told = example.target is not None or example.answer is not None
    true = part.target.get("index") if told else example.label
    return bool(predicted == true) if isinstance(true, int) else None


def _alike(own: Explained, methods: Sequence[str], together: bool) -> list[dict[str, Places]]:
    """Methods with what they explain, those of the same examples together; all of them where pairs are measured."""
    found = {method: own.places(method) for method in methods if own.places(method)}
    if together and found:
        shared = set.intersection(*(set(one) for one in found.values()))
        found = {method: {place: one[place] for place in sorted(shared)} for method, one in found.items() if shared}
    groups: dict[tuple[int, ...], dict[str, Places]] = {}
    for method, one in found.items():
        groups.setdefault(tuple(one), {})[method] = one
    return list(groups.values())


_HERE: list[Any] = []


def start_here(job: Job) -> None:
    """One worker for the whole life of a process: the model stays open."""
    _HERE[:] = [Worker(job)]


def work_here(task: Task) -> Shard:
    made: Shard = _HERE[0](task)
    return made
