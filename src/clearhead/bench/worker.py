"""A worker: keeps a model and its data open, and measures chunks. It knows no store and no engine."""

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import clearhead
from clearhead.bench.chunk_explanations import (
    ChunkExplanations,
    explain_examples,
    format_failures,
    parse_method,
    split_applicable,
)
from clearhead.bench.data import BenchmarkDataset, Example
from clearhead.bench.explanation_store import StoredExplanation, build_stored_explanations
from clearhead.bench.job import BenchmarkJob, ChunkTask, align_label
from clearhead.bench.output_cache import OutputCache, ScoresByKey
from clearhead.bench.protocols.base import BenchmarkProtocol, Measurement
from clearhead.bench.store import Shard, build_measurement_rows
from clearhead.bench.zero_shot import ZeroShotClasses, make_zero_shot_classes
from clearhead.errors import ClearheadError
from clearhead.explanation.multi_stream import AnyExplanation

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

#: The explanations of one method, by the place of their example in the chunk.
ExplanationsByIndex = Mapping[int, AnyExplanation]


def format_versions() -> str:
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


class ChunkWorker:
    """`ex` is given where the model is an object; otherwise the job names it, and it is opened at its first use."""

    def __init__(
        self, job: BenchmarkJob, explainer: "Explainer | None" = None, dataset: BenchmarkDataset | None = None
    ) -> None:
        self.job = job
        self.preloaded_explainer, self.preloaded_dataset = explainer, dataset
        self.empty_input_scores: ScoresByKey = {}
        self.protocols_by_settings: dict[str, tuple[str, BenchmarkProtocol]] = {
            made.hash: (name, made) for name, made in job.build_protocols().items()
        }

    @cached_property
    def explainer(self) -> "Explainer":
        if self.preloaded_explainer is not None:
            return self.preloaded_explainer
        job = self.job
        return clearhead.load(job.model, device=job.device, dtype=job.dtype, revision=job.revision)

    @cached_property
    def dataset(self) -> BenchmarkDataset:
        return self.job.open_dataset() if self.preloaded_dataset is None else self.preloaded_dataset

    @cached_property
    def model_digest(self) -> str:
        from clearhead.data.dataset_run import compute_weights_digest

        return compute_weights_digest(self.explainer.adapter.model)[:16]

    def __call__(self, task: ChunkTask) -> Shard:
        """Every protocol on one chunk. Explanations of one target are made once, for all methods that need them."""
        chunk, rows = _ChunkState(task, OutputCache(self.explainer, self.empty_input_scores)), []
        refused: dict[str, str] = {}
        for settings, methods in task.missing_methods_by_settings:
            name, protocol = self.protocols_by_settings[settings]
            measured, reasons = self._run_protocol(protocol, methods, chunk)
            refused |= {f"{name}: {method}": "; ".join(own) for method, own in reasons.items() if own}
            rows += build_measurement_rows(
                measured, protocol, name, self.model_digest, self.dataset.name, format_versions()
            )
        return Shard(
            task.chunk_key, task.missing_methods_by_settings, tuple(rows), refused, tuple(chunk.stored_explanations)
        )

    def _run_protocol(
        self, protocol: BenchmarkProtocol, methods: Sequence[str], chunk: "_ChunkState"
    ) -> tuple[list[Measurement], dict[str, list[str]]]:
        """What one protocol says of a chunk; and by method why it does not speak of all examples."""
        try:
            examples, strange = self.prepare_examples(chunk.task, protocol)
            own = self._get_explanations(examples, protocol, chunk)
        except ClearheadError as problem:  # the fault of no single method
            return [], {method: [str(problem)] for method in methods}
        reasons = {method: [own.failure_reasons[method]] if method in own.failure_reasons else [] for method in methods}
        measured, groups = [], _group_by_coverage(own, methods, protocol.depends_on_other_methods)
        for method in methods:
            if own.get_by_index(method) and not any(method in part for part in groups):
                reasons[method].append(
                    "it is measured together with others, and no example has results for all of them"
                )
        for part in groups:
            found, failed, why = self._try_group(protocol, examples, part, chunk.output_cache)
            measured += found
            for method in part:
                reasons[method] += [*why, *([format_failures(strange | failed)] if strange or failed else [])]
        return _add_correctness(measured, examples, own), reasons

    def _try_group(
        self,
        protocol: BenchmarkProtocol,
        examples: Sequence[Example],
        found: Mapping[str, ExplanationsByIndex],
        looks: OutputCache,
    ) -> tuple[list[Measurement], dict[str, str], list[str]]:
        """The same as `_measured`, and why there is nothing: of these methods alone, others explain other examples."""
        try:
            return *self._measure_group(protocol, examples, found, looks), []
        except ClearheadError as problem:
            return [], {}, [str(problem)]

    def _measure_group(
        self,
        protocol: BenchmarkProtocol,
        examples: Sequence[Example],
        found: Mapping[str, ExplanationsByIndex],
        looks: OutputCache,
    ) -> tuple[list[Measurement], dict[str, str]]:
        """What a protocol says of these methods, which all explain the same examples; and on which it fails."""
        places = list(next(iter(found.values())))

        def measure(some: Sequence[int]) -> Sequence[Measurement]:
            mine = {method: [own[place] for place in some] for method, own in found.items()}
            return protocol.measure(self.explainer, [examples[place] for place in some], mine, looks)

        try:
            return list(measure(places)), {}
        except ClearheadError:
            made, failed = _measure_individually(measure, places)
            if len(failed) == len(places):
                raise
            return made, {examples[place].id: why for place, why in failed.items()}

    @cached_property
    def zero_shot_classes(self) -> ZeroShotClasses | None:
        return make_zero_shot_classes(self.explainer, self.dataset, self.job.template)

    def prepare_examples(self, task: ChunkTask, protocol: BenchmarkProtocol) -> tuple[list[Example], dict[str, str]]:
        """A chunk's examples as this model takes them; and of which there is nothing to explain."""
        found: list[Example] = []
        strange: dict[str, str] = {}
        for place in task.example_indices:
            example = self.dataset[place]
            try:
                posed = self._prepare_example(example, protocol)
                protocol.select_target(posed)
                found.append(posed)
            except ClearheadError as problem:
                if len(strange) + 1 == len(task.example_indices):
                    raise
                strange[example.id] = str(problem)
        return found, strange

    def _prepare_example(self, example: Example, protocol: BenchmarkProtocol) -> Example:
        """With its label as the model numbers it, or with a caption for it."""
        if self.zero_shot_classes is not None:
            return self.zero_shot_classes.add_caption(example, protocol)
        return align_label(example, self.dataset, self.explainer)

    def _list_methods(self, task: ChunkTask) -> list[str]:
        """All methods of the chunk, whichever protocol asks: what a chunk gives must not depend on what was there."""
        return list(dict.fromkeys(method for _, methods in task.missing_methods_by_settings for method in methods))

    def _get_explanations(
        self, examples: Sequence[Example], protocol: BenchmarkProtocol, chunk: "_ChunkState"
    ) -> ChunkExplanations:
        targets = repr([protocol.select_target(example) for example in examples])
        targets += "" if self.zero_shot_classes is None else repr(protocol.explained)
        if targets not in chunk.explanations_by_target:
            names = self._list_methods(chunk.task)
            methods, refused = split_applicable(self.explainer, [parse_method(name) for name in names])
            found = explain_examples(self.explainer, examples, methods, protocol, self.job.batch_size, self.job.seed)
            found.failure_reasons |= refused
            chunk.explanations_by_target[targets] = found
            if self.job.keep:
                chunk.stored_explanations += build_stored_explanations(
                    examples, protocol.explained, {one: found.get_by_index(one) for one in names}
                )
        return chunk.explanations_by_target[targets]


@dataclass
class _ChunkState:
    """What the protocols of one chunk share: what the model said, explanations by target, and those to be stored."""

    task: ChunkTask
    output_cache: OutputCache
    explanations_by_target: dict[str, ChunkExplanations] = field(default_factory=dict)
    stored_explanations: list[StoredExplanation] = field(default_factory=list)


def _measure_individually(
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


def _add_correctness(
    measured: Sequence[Measurement], examples: Sequence[Example], own: ChunkExplanations
) -> list[Measurement]:
    """The same, each with whether its example is predicted correctly, as far as it does not say so itself."""
    found = {
        examples[place].id: is_prediction_correct(examples[place], one)
        for method in [*own.by_method, *own.partial_by_method]
        for place, one in own.get_by_index(method).items()
    }
    known = {example: {"correct": float(one)} for example, one in found.items() if one is not None}
    return [replace(one, figures={**known.get(one.example, {}), **one.figures}) for one in measured]


def is_prediction_correct(example: Example, explanation: AnyExplanation) -> bool | None:
    """Whether the model's own class is the true one; None where nobody says what is true, or there are no classes."""
    part = next(iter(explanation.by_stream.values()))
    predicted = part.prediction.get("index")
    if predicted is None or "value" in part.prediction or example.zero_shot_classes is not None:
        return None
    if isinstance(example.label, Mapping):
        return example.label.get(part.prediction["label"], 0.0) > 0
    # what an example says is to be explained is its true class
    told = example.target is not None or example.continuation is not None
    true = part.target.get("index") if told else example.label
    return bool(predicted == true) if isinstance(true, int) else None


def _group_by_coverage(
    own: ChunkExplanations, methods: Sequence[str], together: bool
) -> list[dict[str, ExplanationsByIndex]]:
    """Methods with what they explain, those of the same examples together; all of them where pairs are measured."""
    found = {method: own.get_by_index(method) for method in methods if own.get_by_index(method)}
    if together and found:
        shared = set.intersection(*(set(one) for one in found.values()))
        found = {method: {place: one[place] for place in sorted(shared)} for method, one in found.items() if shared}
    groups: dict[tuple[int, ...], dict[str, ExplanationsByIndex]] = {}
    for method, one in found.items():
        groups.setdefault(tuple(one), {})[method] = one
    return list(groups.values())


_PROCESS_WORKER: list[Any] = []


def init_process_worker(job: BenchmarkJob) -> None:
    """One worker for the whole life of a process: the model stays open."""
    _PROCESS_WORKER[:] = [ChunkWorker(job)]


def run_process_task(task: ChunkTask) -> Shard:
    made: Shard = _PROCESS_WORKER[0](task)
    return made
