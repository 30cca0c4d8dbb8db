"""A run: plan → what is missing → engine → store → table. Stopped at any moment, it goes on where it was.

>>> from clearhead.bench.job import BenchmarkJob
>>> run = BenchmarkRun(BenchmarkJob("zoo:logic", "known:logic", ("generic",), ("truth",), limit=4), "RUN")
>>> run.estimate_cost().num_chunks
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
from clearhead.bench.chunk_explanations import add_controls, parse_method
from clearhead.bench.data import BenchmarkDataset
from clearhead.bench.engines import get_engine
from clearhead.bench.job import BenchmarkJob, ChunkTask, compute_chunk_key, iter_chunks
from clearhead.bench.protocols.base import BenchmarkProtocol, Measurement
from clearhead.bench.store import RequestedMethods, ResultStore
from clearhead.bench.worker import ChunkWorker, format_versions

if TYPE_CHECKING:
    from clearhead.explainer import Explainer


@dataclass(frozen=True)
class RunCost:
    """What a run would still compute. `altered` inputs at most: equal ones go through the model once.

    by_size: protocols whose altered inputs are not among them, as many as an example is long or large
    outdated: rows among them that were measured before, with other versions of the software
    """

    num_examples: int
    num_chunks: int
    num_missing_chunks: int
    num_methods: int
    max_perturbed_inputs: int
    size_dependent_protocols: tuple[str, ...] = ()
    num_stale_rows: int = 0

    def __str__(self) -> str:
        if not self.num_missing_chunks:
            return (
                f"{self.num_examples} examples × {self.num_methods} methods, 0 of {self.num_chunks} chunks to compute: "
                "all results are stored"
            )
        left = f"{self.num_missing_chunks} of {self.num_chunks} chunks to compute"
        more = (
            f" (those of {' and '.join(self.size_dependent_protocols)} not counted: larger examples have more)"
            * bool(self.size_dependent_protocols)
        )
        return (
            f"{self.num_examples} examples × {self.num_methods} methods, {left}: one explanation each, and at most "
            f"{self.max_perturbed_inputs:,} perturbed inputs through the model{more}"
        )


@dataclass
class BenchmarkRunReport:
    """What a run did; counts are of chunks."""

    out: str
    chunks: int
    computed: int = 0
    already_stored: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {"schema": "clearhead/bench-run", "version": 2, **asdict(self)}


class BenchmarkRun:
    """One job and the folder of its results. `ex` and `data` may be given as objects instead of names."""

    def __init__(
        self,
        job: BenchmarkJob,
        out_dir: str | Path,
        explainer: "Explainer | None" = None,
        dataset: BenchmarkDataset | None = None,
    ) -> None:
        self.job, self.store = job, ResultStore(out_dir)
        self.store.check_folder()  # before the model is opened and an example timed
        self.methods = [str(method) for method in add_controls([parse_method(name) for name in job.methods])]
        self.worker = ChunkWorker(job, explainer, dataset)

    @cached_property
    def chunk_plan(self) -> list[tuple[str, tuple[int, ...]]]:
        """Every chunk: its key and the places of its examples."""
        said = format_versions()
        return [
            (compute_chunk_key(self.worker.model_digest, content, said, self.job), places)
            for places, content in iter_chunks(self.worker.dataset, self.job.chunk)
        ]

    @property
    def protocols(self) -> dict[str, BenchmarkProtocol]:
        return {settings: made for settings, (_, made) in self.worker.protocols_by_settings.items()}

    @property
    def requested_methods(self) -> dict[str, RequestedMethods]:
        """The same, as the store takes it."""
        methods = frozenset(self.methods)
        return {
            settings: RequestedMethods(name, methods, made.depends_on_other_methods)
            for settings, (name, made) in self.worker.protocols_by_settings.items()
        }

    def find_missing_tasks(self) -> list[ChunkTask]:
        """The chunks in which something is missing."""
        found, wanted = [], self.requested_methods
        for key, places in self.chunk_plan:
            shards = self.store.find_shards(key)
            if self.job.keep:
                shards = [
                    path for path in shards if explanation_store.has_stored_explanations(self.store.folder, path.stem)
                ]
            there = self.store.find_available_methods(shards, wanted)
            missing = []
            for settings in wanted:
                lacking = [method for method in self.methods if method not in there.get(settings, ())]
                if lacking:
                    missing.append((settings, tuple(lacking)))
            if missing:
                found.append(ChunkTask(key, places, tuple(missing)))
        return found

    def estimate_cost(self) -> RunCost:
        tasks, altered = self.find_missing_tasks(), 0
        by_size: dict[str, None] = {}
        for task in tasks:
            for settings, methods in task.missing_methods_by_settings:
                name, protocol = self.worker.protocols_by_settings[settings]
                most = protocol.count_perturbed_inputs(len(methods))
                if most is None:
                    by_size[name] = None
                else:
                    altered += len(task.example_indices) * most
        sizes = (len(self.worker.dataset), len(self.chunk_plan), len(tasks), len(self.methods))
        return RunCost(*sizes, altered, tuple(by_size), self._count_stale_rows(tasks))

    def _count_stale_rows(self, tasks: Sequence[ChunkTask]) -> int:
        """How many rows of what is missing are there, measured with other versions."""
        data, model = self.worker.dataset, self.worker.model_digest
        others = [] if not tasks else list(self.store.iter_rows_of_other_versions(format_versions()))
        others = [row for row in others if (row["model"], row["data"]) == (model, data.name)]
        if not others:
            return 0
        missing = {
            data[place].id: dict(task.missing_methods_by_settings) for task in tasks for place in task.example_indices
        }
        found = {
            (row["example"], row["method"], row["settings"], row["part"])
            for row in others
            if row["method"] in missing.get(row["example"], {}).get(row["settings"], ())
        }
        return len(found)

    def __call__(
        self,
        engine_name: str = "local",
        num_workers: int = 1,
        advance: Callable[[int], None] = lambda examples: None,
        address: str | None = None,
    ) -> BenchmarkRunReport:
        """Compute what is missing, then write the table; `advance` hears how many examples are through."""
        run_engine = get_engine(engine_name, address)
        self.store.prepare_folder(self._build_manifest())
        tasks = self.find_missing_tasks()
        report = BenchmarkRunReport(
            str(self.store.folder), len(self.chunk_plan), already_stored=len(self.chunk_plan) - len(tasks)
        )
        sizes = {task.chunk_key: len(task.example_indices) for task in tasks}
        advance(len(self.worker.dataset) - sum(sizes.values()))
        began = time.perf_counter()
        for shard in run_engine(self.worker, tasks, num_workers, address):
            if self.job.keep:
                explanation_store.write_stored_explanations(self.store.folder, shard.name, shard.explanations)
            self.store.write_shard(shard)
            now = time.perf_counter()
            self._append_timing(shard.chunk_key, sizes[shard.chunk_key], now - began)
            began = now
            report.computed += 1
            advance(sizes[shard.chunk_key])
        self.store.write_table([key for key, _ in self.chunk_plan], self.requested_methods)
        return report

    def merge_from(self, other: str | Path) -> int:
        """Take over what another run has measured, whatever its methods and protocols; how many shards were new."""
        theirs = ResultStore(other)
        theirs.read_manifest()  # refuses what is no run
        self.store.prepare_folder(self._build_manifest())
        return self.store.merge(theirs)

    def load_measurements(self, settings_hash: str) -> list[Measurement]:
        """The finished rows of one protocol, by its hash."""
        return [row.measurement for row in self.store.iter_table_rows() if row.settings == settings_hash]

    def collect_failure_reasons(self) -> dict[str, str]:
        return self.store.collect_failure_reasons((key for key, _ in self.chunk_plan), self.requested_methods)

    def _build_manifest(self) -> dict[str, Any]:
        named = {
            settings: {"protocol": name, **made.settings}
            for settings, (name, made) in self.worker.protocols_by_settings.items()
        }
        return {
            "schema": "clearhead/bench",
            "version": 1,
            "job": asdict(self.job),
            "model": self.worker.model_digest,
            "settings": named,
            "versions": format_versions(),
        }

    def _append_timing(self, key: str, examples: int, seconds: float) -> None:
        with (self.store.folder / "timings.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"chunk": key, "examples": examples, "seconds": round(seconds, 4)}) + "\n")
