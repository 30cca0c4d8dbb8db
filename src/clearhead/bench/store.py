"""Storage of measurements in a run folder: one Parquet shard per chunk, named by its content and written atomically.

    RUN/run.json             what was asked for (the last time), and the settings behind each hash
    RUN/shards/KEY-WHAT.parquet   the rows of one chunk; KEY: model, examples, versions; WHAT: protocols and methods
    RUN/explanations/KEY-WHAT.jsonl.gz   the explanations of a shard, where they were asked for (`explanation_store.py`)
    RUN/timings.jsonl        when and how long: beside the results, never in them
    RUN/table.parquet        all rows that the job asks for, in the plan's order; and why some are not there

Two runs are merged by copying shards together: equal names hold equal rows.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead.bench import explanation_store
from clearhead.bench.protocols.base import BenchmarkProtocol, Measurement
from clearhead.data.atomic_file import PARTIAL_SUFFIX, atomic_write
from clearhead.errors import InputError

if TYPE_CHECKING:
    import pyarrow as pa

    from clearhead.bench.explanation_store import StoredExplanation

ROW_COLUMNS = ("model", "data", "example", "method", "protocol", "settings", "versions", "part", "figures", "curves")


@dataclass(frozen=True)
class MeasurementRow:
    """One measurement with everything that it depends on."""

    model: str
    data: str
    example: str
    method: str
    protocol: str
    settings: str
    versions: str
    part: str
    figures: Mapping[str, float]
    curves: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def measurement(self) -> Measurement:
        curves = {name: tuple(values) for name, values in self.curves.items()}
        return Measurement(self.example, self.method, self.part, dict(self.figures), curves)


@dataclass(frozen=True)
class Shard:
    """The rows of one chunk, for which protocols (by hash) and methods they are, and what could not be measured."""

    chunk_key: str
    methods_by_settings: tuple[tuple[str, tuple[str, ...]], ...]
    rows: tuple[MeasurementRow, ...]
    failure_reasons: Mapping[str, str] = field(default_factory=dict)
    explanations: "tuple[StoredExplanation, ...]" = ()

    @property
    def name(self) -> str:
        said = json.dumps(sorted((settings, sorted(methods)) for settings, methods in self.methods_by_settings))
        return f"{self.chunk_key}-{hashlib.sha256(said.encode()).hexdigest()[:12]}"


@dataclass(frozen=True)
class RequestedMethods:
    """What a job asks of one protocol: under which name, and for which methods."""

    protocol_name: str
    methods: frozenset[str]
    depends_on_other_methods: bool = False

    def is_satisfied_by(self, methods: Iterable[str]) -> bool:
        """Whether a shard made for these methods counts: where pairs are measured, one of other methods lacks some."""
        return not self.depends_on_other_methods or self.methods == set(methods)


def _import_pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InputError("the benchmark's store needs pyarrow: pip install 'clearhead[bench]'") from None
    return pyarrow


def _build_schema() -> "pa.Schema":
    pa = _import_pyarrow()
    words = [(name, pa.string()) for name in ROW_COLUMNS[:-2]]
    figures, curves = pa.map_(pa.string(), pa.float64()), pa.map_(pa.string(), pa.list_(pa.float64()))
    return pa.schema([*words, ("figures", figures), ("curves", curves)])


def _rows_to_table(rows: Iterable[MeasurementRow]) -> "pa.Table":
    plain = [
        {**asdict(row), "figures": sorted(row.figures.items()), "curves": sorted(row.curves.items())} for row in rows
    ]
    return _import_pyarrow().Table.from_pylist(plain, schema=_build_schema())


def _table_to_rows(table: "pa.Table") -> list[MeasurementRow]:
    return [
        MeasurementRow(**{**one, "figures": dict(one["figures"]), "curves": dict(one["curves"])})
        for one in table.to_pylist()
    ]


def _read_file(path: Path, reader: Callable[[Path], Any], remedy: str) -> Any:
    try:
        return reader(path)
    except (OSError, _import_pyarrow().ArrowInvalid) as problem:
        raise InputError(f"{str(path)!r} cannot be read ({problem}): {remedy}") from None


#: What to do about a shard that is damaged. It is not removed unasked: it may be the disk that is at fault.
DAMAGED_SHARD_REMEDY = "remove it and run the same command again to recompute that chunk"


class ResultStore:
    """One folder. Reading and writing need no model and no GPU."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.shard_folder = self.folder / "shards"

    def check_folder(self) -> None:
        """Refuse a folder that holds something else."""
        path = self.folder / "run.json"
        if self.folder.exists() and (not self.folder.is_dir() or (self._has_foreign_files() and not path.exists())):
            raise InputError(
                f"{str(self.folder)!r} already exists and is not a benchmark run: set --out to an empty or new folder"
            )

    def prepare_folder(self, manifest: Mapping[str, Any]) -> None:
        """Refuse a folder of something else; else remove unfinished files and write run.json, settings merged."""
        self.check_folder()
        path = self.folder / "run.json"
        self.folder.mkdir(parents=True, exist_ok=True)
        for folder in (self.folder, self.shard_folder, self.folder / explanation_store.EXPLANATION_FOLDER):
            for leftover in folder.glob(f".*{PARTIAL_SUFFIX}"):
                leftover.unlink()
        settings = {**(self.read_manifest().get("settings", {}) if path.exists() else {}), **manifest["settings"]}
        with atomic_write(path) as partial:
            said = json.dumps({**manifest, "settings": settings}, indent=2, ensure_ascii=False, sort_keys=True)
            partial.write_text(said + "\n", encoding="utf-8")
        self.shard_folder.mkdir(exist_ok=True)

    def _has_foreign_files(self) -> bool:
        """Whether something is here that no run left behind that was killed at its very beginning."""
        return any(not path.name.endswith(PARTIAL_SUFFIX) for path in self.folder.iterdir())

    def read_manifest(self) -> dict[str, Any]:
        path = self.folder / "run.json"
        try:
            made: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise InputError(f"{str(self.folder)!r} contains no benchmark run") from None
        return made

    def write_shard(self, shard: Shard) -> Path:
        pa = _import_pyarrow()
        about = {"made_for": shard.methods_by_settings, "refused": dict(sorted(shard.failure_reasons.items()))}
        table = _rows_to_table(shard.rows).replace_schema_metadata({"clearhead": json.dumps(about, ensure_ascii=False)})
        path = self.shard_folder / f"{shard.name}.parquet"
        with atomic_write(path) as partial:
            pa.parquet.write_table(table, partial, compression="zstd")
        return path

    def read_shard_metadata(self, path: Path) -> tuple[list[tuple[str, tuple[str, ...]]], dict[str, str]]:
        """What a shard was made for, and what was refused in it."""
        metadata = _read_file(path, _import_pyarrow().parquet.read_schema, DAMAGED_SHARD_REMEDY).metadata or {}
        about = json.loads(metadata.get(b"clearhead", b"{}"))
        return [(settings, tuple(methods)) for settings, methods in about.get("made_for", [])], about.get("refused", {})

    def find_shards(self, chunk_key: str) -> list[Path]:
        """The shards of one chunk."""
        return sorted(self.shard_folder.glob(f"{chunk_key}-*.parquet"))

    def find_available_methods(
        self, shards: Iterable[Path], requested: Mapping[str, RequestedMethods]
    ) -> dict[str, set[str]]:
        """By settings hash, the methods that some of a chunk's shards already hold."""
        found: dict[str, set[str]] = {}
        for path in shards:
            for settings, methods in self.read_shard_metadata(path)[0]:
                if settings in requested and requested[settings].is_satisfied_by(methods):
                    found.setdefault(settings, set()).update(methods)
        return found

    def read_chunk_rows(self, chunk_key: str, requested: Mapping[str, RequestedMethods]) -> list[MeasurementRow]:
        """The rows of one chunk; what two shards both hold is taken once."""
        found: dict[tuple[str, ...], MeasurementRow] = {}
        for path in self.find_shards(chunk_key):
            serving = self.find_available_methods([path], requested)
            for row in _table_to_rows(_read_file(path, _import_pyarrow().parquet.read_table, DAMAGED_SHARD_REMEDY)):
                if row.settings in serving and row.method in requested[row.settings].methods:
                    found.setdefault((row.settings, row.part, row.method, row.example), row)
        return [found[where] for where in sorted(found)]

    def iter_rows_of_other_versions(self, versions: str) -> Iterator[dict[str, str]]:
        """What rows measured with other versions are about: the words of `COLUMNS`, without their figures."""

        def words(path: Path) -> Any:
            return _import_pyarrow().parquet.read_table(path, columns=list(ROW_COLUMNS[:-2]))

        for path in sorted(self.shard_folder.glob("*.parquet")):
            try:
                rows = _read_file(path, words, DAMAGED_SHARD_REMEDY).to_pylist()
            except InputError:  # it may be of another job: whoever needs it will tell
                continue
            yield from (row for row in rows if row["versions"] != versions)

    def write_table(self, chunk_keys: Sequence[str], requested: Mapping[str, RequestedMethods]) -> Path:
        """One table of all chunks, a row group each, so that memory does not grow with their number."""
        pa, path = _import_pyarrow(), self.folder / "table.parquet"
        run = self.read_manifest()
        named = {
            "job": {name: run.get("job", {}).get(name) for name in ("model", "data")},
            "versions": run.get("versions"),
        }
        about = {
            "refused": dict(sorted(self.collect_failure_reasons(chunk_keys, requested).items())),
            **named,
            "model": run.get("model"),
        }
        schema = _build_schema().with_metadata({"clearhead": json.dumps(about, ensure_ascii=False)})
        with atomic_write(path) as partial, pa.parquet.ParquetWriter(partial, schema, compression="zstd") as writer:
            for key in chunk_keys:
                writer.write_table(_rows_to_table(self.read_chunk_rows(key, requested)))
        return path

    def _open_table(self) -> "pa.parquet.ParquetFile":
        path = self.folder / "table.parquet"
        if not path.exists():
            raise InputError(f"{str(self.folder)!r} has no finished table: run clearhead bench with the same --out")
        return _read_file(
            path, _import_pyarrow().parquet.ParquetFile, "run the same clearhead bench command again to rewrite it"
        )

    def iter_table_rows(self) -> Iterator[MeasurementRow]:
        """The rows of the finished table, a row group at a time."""
        file = self._open_table()
        for group in range(file.num_row_groups):
            yield from _table_to_rows(file.read_row_group(group))

    def read_table_metadata(self) -> dict[str, Any]:
        """Of which model, data and versions the finished table is, and why some rows that were asked for are not in it.

        What `about` says may be of a later job, that was stopped before its table was written.
        """
        metadata = self._open_table().schema_arrow.metadata or {}
        about: dict[str, Any] = json.loads(metadata.get(b"clearhead", b"{}"))
        return about

    def collect_failure_reasons(
        self, chunk_keys: Iterable[str], requested: Mapping[str, RequestedMethods]
    ) -> dict[str, str]:
        """By protocol and method, why what is wanted was not measured."""
        found: dict[str, dict[str, None]] = {}
        for path in (path for key in chunk_keys for path in self.find_shards(key)):
            made_for, why = self.read_shard_metadata(path)
            for settings, methods in made_for:
                if settings in requested and requested[settings].is_satisfied_by(methods):
                    asked = {f"{requested[settings].protocol_name}: {method}" for method in requested[settings].methods}
                    for what in sorted(asked & why.keys()):
                        found.setdefault(what, {})[why[what]] = None
        return {what: _join_reasons(list(reasons)) for what, reasons in found.items()}

    def merge(self, other: "ResultStore") -> int:
        """Take over the shards of another run that are not here yet, and what it kept; how many shards there were."""
        explanation_store.merge_stored_explanations(self.folder, other.folder)
        new = [
            path
            for path in sorted(other.shard_folder.glob("*.parquet"))
            if not (self.shard_folder / path.name).exists()
        ]
        for path in new:
            other.read_shard_metadata(path)  # a damaged one is told now, and not taken
            with atomic_write(self.shard_folder / path.name) as partial:
                shutil.copyfile(path, partial)
        return len(new)


def _join_reasons(reasons: list[str], most: int = 3) -> str:
    """
    >>> _join_reasons(["a", "b"]), _join_reasons(list("abcde"))
    ('a; b', 'a; b; c; and 2 more reasons')
    """
    left = len(reasons) - most
    return "; ".join(reasons[:most]) + (f"; and {left} more reason{'s' * (left > 1)}" if left > 0 else "")


def build_measurement_rows(
    measurements: Iterable[Measurement],
    protocol: BenchmarkProtocol,
    protocol_name: str,
    model_digest: str,
    dataset_name: str,
    versions: str,
) -> list[MeasurementRow]:
    """Measurements with what they depend on, in an order of their own."""
    made = [
        MeasurementRow(
            model_digest,
            dataset_name,
            m.example,
            m.method,
            protocol_name,
            protocol.hash,
            versions,
            m.part,
            m.figures,
            m.curves,
        )
        for m in measurements
    ]
    return sorted(made, key=lambda row: (row.settings, row.part, row.method, row.example))
