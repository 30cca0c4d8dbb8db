"""A worker: keeps a model and its data open, and measures chunks. It knows no store and no engine."""

import platform
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import clearhead
from clearhead.bench.captions import Captions, captions_of
from clearhead.bench.data import DataSet, Example
from clearhead.bench.explaining import Explained, applicable, explained, method_of
from clearhead.bench.keeping import Kept, kept
from clearhead.bench.looking import Looks, Scores
from clearhead.bench.planning import Job, Task, aligned
from clearhead.bench.protocol import Protocol
from clearhead.bench.store import Shard, rows_of
from clearhead.errors import ClearheadError

if TYPE_CHECKING:
    from clearhead.explainer import Explainer


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
            made.hash: (name, made) for name, made in zip(job.protocols, job.made_protocols(), strict=True)
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
        from clearhead.runs import weights_digest

        return weights_digest(self.ex.subject.model)[:16]

    def __call__(self, task: Task) -> Shard:
        """Every protocol on one chunk. Explanations of one target are made once, for all methods that need them."""
        looks, rows = Looks(self.ex, self.bare), []
        keep: list[Kept] = []
        refused: dict[str, str] = {}
        shared: dict[str, Explained] = {}
        for settings, methods in task.missing:
            name, protocol = self.protocols[settings]
            try:
                examples = self.examples(task, protocol)
                known = len(shared)
                own = self._explained(examples, protocol, task, shared)
                if self.job.keep and own.by_method and len(shared) > known:
                    keep += kept(examples, protocol.explained, own.by_method)
                mine = {method: own.by_method[method] for method in methods if method in own.by_method}
                refused |= {f"{name}: {method}": own.refused[method] for method in methods if method in own.refused}
                measured = protocol.measure(self.ex, examples, mine, looks) if mine else []
            except ClearheadError as problem:
                refused |= {f"{name}: {method}": str(problem) for method in methods}
                continue
            rows += rows_of(measured, protocol, name, self.model, self.data.name, versions())
        return Shard(task.key, task.missing, tuple(rows), refused, tuple(keep))

    @cached_property
    def captions(self) -> Captions | None:
        return captions_of(self.ex, self.data, self.job.template)

    def examples(self, task: Task, protocol: Protocol) -> list[Example]:
        """A chunk's examples as this model takes them: its own labels, or captions for labels."""
        if self.captions is not None:
            return [self.captions.posed(self.data[place], protocol) for place in task.places]
        return [aligned(self.data[place], self.data, self.ex) for place in task.places]

    def _explained(
        self, examples: Sequence[Example], protocol: Protocol, task: Task, shared: dict[str, Explained]
    ) -> Explained:
        targets = repr([protocol.target(example) for example in examples])
        targets += "" if self.captions is None else repr(protocol.explained)
        if targets not in shared:
            # all methods of the chunk, whichever protocol asks: what a chunk gives must not depend on what was there
            names = list(dict.fromkeys(method for _, methods in task.missing for method in methods))
            methods, refused = applicable(self.ex, [method_of(name) for name in names])
            found = explained(self.ex, examples, methods, protocol, self.job.batch_size, self.job.seed)
            found.refused |= refused
            shared[targets] = found
        return shared[targets]


_HERE: list[Any] = []


def start_here(job: Job) -> None:
    """One worker for the whole life of a process: the model stays open."""
    _HERE[:] = [Worker(job)]


def work_here(task: Task) -> Shard:
    made: Shard = _HERE[0](task)
    return made
