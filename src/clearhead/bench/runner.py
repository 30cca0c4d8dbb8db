"""A run: plan → what is missing → engine → store → table. Stopped at any moment, it goes on where it was.

>>> from clearhead.bench.job import Job
>>> run = Run(Job("zoo:logic", "known:logic", ("generic",), ("truth",), limit=4), "RUN")
>>> run.cost().chunks
1
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead.bench import explanation_store
from clearhead.bench.chunk_explanations import method_of, with_controls
from clearhead.bench.data import DataSet
from clearhead.bench.engines import engine
from clearhead.bench.job import Job, Task, base_key, chunks
from clearhead.bench.protocols.base import Measurement, Protocol
from clearhead.bench.store import Store, Wanted
from clearhead.bench.worker import Worker, versions

if TYPE_CHECKING:
    from clearhead.explainer import Explainer


@dataclass(frozen=True)
class Cost:
    """What a run would still compute. `altered` inputs at most: equal ones go through the model once.

    by_size: protocols whose altered inputs are not among them, as many as an example is long or large
    outdated: rows among them that were measured before, with other versions of the software
    """

    examples: int
    chunks: int
    chunks_left: int
    methods: int
    altered: int
    by_size: tuple[str, ...] = ()
    outdated: int = 0

    def __str__(self) -> str:
        if not self.chunks_left:
            return f"{self.examples} examples × {self.methods} methods, 0 of {self.chunks} chunks to do: all is there"
        left = f"{self.chunks_left} of {self.chunks} chunks to do"
        more = f" (those of {' and '.join(self.by_size)} not counted: larger examples have more)" * bool(self.by_size)
        return (
            f"{self.examples} examples × {self.methods} methods, {left}: one explanation of each, and at most "
            f"{self.altered:,} altered inputs through the model{more}"
        )


@dataclass
class Report:
    """What a run did; counts are of chunks."""

    out: str
    chunks: int
    computed: int = 0
    there_before: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {"schema": "clearhead/bench-run", "version": 1, **asdict(self)}


class Run:
    """One job and the folder of its results. `ex` and `data` may be given as objects instead of names."""

    def __init__(self, job: Job, out: str | Path, ex: "Explainer | None" = None, data: DataSet | None = None) -> None:
        self.job, self.store = job, Store(out)
        self.store.check()  # before the model is opened and an example timed
        self.methods = [str(method) for method in with_controls([method_of(name) for name in job.methods])]
        self.worker = Worker(job, ex, data)

    @cached_property
    def plan(self) -> list[tuple[str, tuple[int, ...]]]:
        """Every chunk: its key and the places of its examples."""
        said = versions()
        return [
            (base_key(self.worker.model, content, said, self.job), places)
            for places, content in chunks(self.worker.data, self.job.chunk)
        ]

    @property
    def wanted(self) -> dict[str, Protocol]:
        return {settings: made for settings, (_, made) in self.worker.protocols.items()}

    @property
    def asked(self) -> dict[str, Wanted]:
        """The same, as the store takes it."""
        methods = frozenset(self.methods)
        return {
            settings: Wanted(name, methods, made.together) for settings, (name, made) in self.worker.protocols.items()
        }

    def tasks(self) -> list[Task]:
        """The chunks in which something is missing."""
        found, wanted = [], self.asked
        for key, places in self.plan:
            shards = self.store.of(key)
            if self.job.keep:
                shards = [path for path in shards if explanation_store.keeps(self.store.folder, path.stem)]
            there = self.store.has(shards, wanted)
            missing = []
            for settings in wanted:
                lacking = [method for method in self.methods if method not in there.get(settings, ())]
                if lacking:
                    missing.append((settings, tuple(lacking)))
            if missing:
                found.append(Task(key, places, tuple(missing)))
        return found

    def cost(self) -> Cost:
        tasks, altered = self.tasks(), 0
        by_size: dict[str, None] = {}
        for task in tasks:
            for settings, methods in task.missing:
                name, protocol = self.worker.protocols[settings]
                most = protocol.altered(len(methods))
                if most is None:
                    by_size[name] = None
                else:
                    altered += len(task.places) * most
        sizes = (len(self.worker.data), len(self.plan), len(tasks), len(self.methods))
        return Cost(*sizes, altered, tuple(by_size), self._outdated(tasks))

    def _outdated(self, tasks: Sequence[Task]) -> int:
        """How many rows of what is missing are there, measured with other versions."""
        data, model = self.worker.data, self.worker.model
        others = [] if not tasks else list(self.store.measured_by_others(versions()))
        others = [row for row in others if (row["model"], row["data"]) == (model, data.name)]
        if not others:
            return 0
        missing = {data[place].id: dict(task.missing) for task in tasks for place in task.places}
        found = {
            (row["example"], row["method"], row["settings"], row["part"])
            for row in others
            if row["method"] in missing.get(row["example"], {}).get(row["settings"], ())
        }
        return len(found)

    def __call__(
        self,
        engine_name: str = "local",
        workers: int = 1,
        advance: Callable[[int], None] = lambda examples: None,
        address: str | None = None,
    ) -> Report:
        """Compute what is missing, then write the table; `advance` hears how many examples are through."""
        run_engine = engine(engine_name, address)
        self.store.open(self._about())
        tasks = self.tasks()
        report = Report(str(self.store.folder), len(self.plan), there_before=len(self.plan) - len(tasks))
        sizes = {task.key: len(task.places) for task in tasks}
        advance(len(self.worker.data) - sum(sizes.values()))
        began = time.perf_counter()
        for shard in run_engine(self.worker, tasks, workers, address):
            if self.job.keep:
                explanation_store.write(self.store.folder, shard.name, shard.kept)
            self.store.write(shard)
            now = time.perf_counter()
            self._note(shard.key, sizes[shard.key], now - began)
            began = now
            report.computed += 1
            advance(sizes[shard.key])
        self.store.write_table([key for key, _ in self.plan], self.asked)
        return report

    def take(self, other: str | Path) -> int:
        """Take over what another run has measured, whatever its methods and protocols; how many shards were new."""
        theirs = Store(other)
        theirs.about()  # refuses what is no run
        self.store.open(self._about())
        return self.store.merge(theirs)

    def measurements(self, settings: str) -> list[Measurement]:
        """The finished rows of one protocol, by its hash."""
        return [row.measurement for row in self.store.table() if row.settings == settings]

    def refused(self) -> dict[str, str]:
        return self.store.refused((key for key, _ in self.plan), self.asked)

    def _about(self) -> dict[str, Any]:
        named = {
            settings: {"protocol": name, **made.settings} for settings, (name, made) in self.worker.protocols.items()
        }
        return {
            "schema": "clearhead/bench",
            "version": 1,
            "job": asdict(self.job),
            "model": self.worker.model,
            "settings": named,
            "versions": versions(),
        }

    def _note(self, key: str, examples: int, seconds: float) -> None:
        with (self.store.folder / "timings.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"chunk": key, "examples": examples, "seconds": round(seconds, 4)}) + "\n")
