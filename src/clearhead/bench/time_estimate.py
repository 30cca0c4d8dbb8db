"""How long a run will take, said before it begins: one example is measured and timed, and nothing of it is kept.

Each method explains it alone (RUN/costs.json keeps those seconds for the report), then everything is done to it
together, as a chunk would. Times lie beside the results, never in them.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from clearhead.bench.chunk_explanations import applicable, explained, method_of
from clearhead.bench.job import Task
from clearhead.bench.runner import Run
from clearhead.bench.worker import Worker
from clearhead.data.atomic_file import whole
from clearhead.errors import ClearheadError

#: With fewer examples left, timing one of them would take a good part of the run.
FEW = 20


@dataclass(frozen=True)
class Prediction:
    """Seconds of one explanation by each method alone, of all that is done to one example, and of the whole run."""

    methods: dict[str, float]
    example: float
    run: float

    def __str__(self) -> str:
        return f"about {in_words(self.run)} ({self.example:.2f} s for each example, measured on one)"


def predicted(run: Run, workers: int = 1) -> Prediction | None:
    """Time one example of those that are left; None where there are few, or nothing to do."""
    tasks = run.tasks()
    left = sum(len(task.places) for task in tasks)
    if left < FEW:
        return None
    task = tasks[len(tasks) // 2]  # chunks of a window go from short to long: the middle one stands for all
    one = Task(task.key, task.places[:1], task.missing)
    alone = method_seconds(run.worker, one)
    began = time.perf_counter()
    run.worker(one)
    seconds = time.perf_counter() - began
    return Prediction(alone, seconds, seconds * left / max(1, min(workers, len(tasks))))


def method_seconds(worker: Worker, task: Task) -> dict[str, float]:
    """What one explanation takes, method by method; those that refuse are left out."""
    settings, _ = task.missing[0]
    protocol = worker.protocols[settings][1]
    try:
        examples, _ = worker.examples(task, protocol)
    except ClearheadError:  # the one that was to be timed cannot be explained; the run will say why
        return {}
    names = dict.fromkeys(method for _, methods in task.missing for method in methods)
    methods, _ = applicable(worker.ex, [method_of(name) for name in names])
    found: dict[str, float] = {}
    # the first time, a model is tried out, and that is no method's cost
    for method in [*methods[:1], *methods]:
        began = time.perf_counter()
        made = explained(worker.ex, examples, [method], protocol, worker.job.batch_size, worker.job.seed)
        if made.by_method:  # if not, the run itself will say why
            found[str(method)] = time.perf_counter() - began
    return found


def keep(run: Run, prediction: Prediction) -> None:
    """Write the seconds of each method beside the results."""
    with whole(run.store.folder / "costs.json") as partial:
        said = {"methods": {name: round(seconds, 4) for name, seconds in sorted(prediction.methods.items())}}
        partial.write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")


def in_words(seconds: float) -> str:
    """
    >>> in_words(42), in_words(150), in_words(9000)
    ('42 s', '2.5 min', '2.5 h')
    """
    steps: Sequence[tuple[float, float, str]] = ((90, 1, "s"), (5400, 60, "min"))
    for limit, unit, word in steps:
        if seconds < limit:
            return f"{seconds / unit:.0f} {word}" if unit == 1 else f"{seconds / unit:.1f} {word}"
    return f"{seconds / 3600:.1f} h"
