"""Estimate how long a run takes: time one example of those that are left, before the run begins.

Each method explains the example alone (RUN/costs.json keeps these seconds for the report). Then the example is
processed once with all methods and protocols, as in the run. Its results are not stored, and times are never part of
the results.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from clearhead.bench.chunk_explanations import explain_examples, parse_method, split_applicable
from clearhead.bench.job import ChunkTask
from clearhead.bench.runner import BenchmarkRun
from clearhead.bench.worker import ChunkWorker
from clearhead.data.atomic_file import atomic_write
from clearhead.errors import ClearheadError

#: With fewer examples left, timing one of them would take a good part of the run.
MIN_EXAMPLES_TO_TIME = 20


@dataclass(frozen=True)
class TimeEstimate:
    """Estimated running time of a benchmark run, measured on one example.

    Attributes:
        seconds_by_method: Seconds of one explanation by each method alone.
        seconds_per_example: Seconds of all methods and protocols for one example.
        total_seconds: Seconds of all missing examples, divided among the workers.
    """

    seconds_by_method: dict[str, float]
    seconds_per_example: float
    total_seconds: float

    def __str__(self) -> str:
        """Format the estimate, e.g. "about 12 min (0.82 s for each example, measured on one)"."""
        return (
            f"about {format_duration(self.total_seconds)} ({self.seconds_per_example:.2f} s for each example, "
            "measured on one)"
        )


def estimate_time(run: BenchmarkRun, num_workers: int = 1) -> TimeEstimate | None:
    """Measure the time of one missing example and extrapolate it to all missing examples, divided among the workers.

    Args:
        run: The run; results that it has already are not measured again.
        num_workers: Number of processes that share the chunks.

    Returns:
        The estimate, or None if fewer than `MIN_EXAMPLES_TO_TIME` examples are missing.
    """
    tasks = run.find_missing_tasks()
    left = sum(len(task.example_indices) for task in tasks)
    if left < MIN_EXAMPLES_TO_TIME:
        return None
    task = tasks[len(tasks) // 2]  # chunks of a window go from short to long: the middle one stands for all
    one = ChunkTask(task.chunk_key, task.example_indices[:1], task.missing_methods_by_settings)
    alone = time_methods(run.worker, one)
    began = time.perf_counter()
    run.worker(one)
    seconds = time.perf_counter() - began
    return TimeEstimate(alone, seconds, seconds * left / max(1, min(num_workers, len(tasks))))


def time_methods(worker: ChunkWorker, task: ChunkTask) -> dict[str, float]:
    """What one explanation takes, method by method; those that refuse are left out."""
    settings, _ = task.missing_methods_by_settings[0]
    protocol = worker.protocols_by_settings[settings][1]
    try:
        examples, _ = worker.prepare_examples(task, protocol)
    except ClearheadError:  # the one that was to be timed cannot be explained; the run will say why
        return {}
    names = dict.fromkeys(method for _, methods in task.missing_methods_by_settings for method in methods)
    methods, _ = split_applicable(worker.explainer, [parse_method(name) for name in names])
    found: dict[str, float] = {}
    # the first time, a model is tried out, and that is no method's cost
    for method in [*methods[:1], *methods]:
        began = time.perf_counter()
        made = explain_examples(worker.explainer, examples, [method], protocol, worker.job.batch_size, worker.job.seed)
        if made.by_method:  # if not, the run itself will say why
            found[str(method)] = time.perf_counter() - began
    return found


def save_method_seconds(run: BenchmarkRun, estimate: TimeEstimate) -> None:
    """Write the seconds of each method to costs.json in the folder of the results.

    Args:
        run: The run.
        estimate: Its time estimate.
    """
    with atomic_write(run.store.folder / "costs.json") as partial:
        said = {"methods": {name: round(seconds, 4) for name, seconds in sorted(estimate.seconds_by_method.items())}}
        partial.write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")


def format_duration(seconds: float) -> str:
    """
    >>> format_duration(42), format_duration(150), format_duration(9000)
    ('42 s', '2.5 min', '2.5 h')
    """
    steps: Sequence[tuple[float, float, str]] = ((90, 1, "s"), (5400, 60, "min"))
    for limit, unit, word in steps:
        if seconds < limit:
            return f"{seconds / unit:.0f} {word}" if unit == 1 else f"{seconds / unit:.1f} {word}"
    return f"{seconds / 3600:.1f} h"
