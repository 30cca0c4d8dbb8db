"""Where measurements lie: Parquet shards, named by what they hold, one a chunk; written whole or not at all.

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
from clearhead.bench.protocols.base import Measurement, Protocol
from clearhead.data.atomic_file import PARTIAL, whole
from clearhead.errors import InputError

if TYPE_CHECKING:
    import pyarrow as pa

    from clearhead.bench.explanation_store import Kept

COLUMNS = ("model", "data", "example", "method", "protocol", "settings", "versions", "part", "figures", "curves")


@dataclass(frozen=True)
class Row:
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

    key: str
    made_for: tuple[tuple[str, tuple[str, ...]], ...]
    rows: tuple[Row, ...]
    refused: Mapping[str, str] = field(default_factory=dict)
    kept: "tuple[Kept, ...]" = ()

    @property
    def name(self) -> str:
        said = json.dumps(sorted((settings, sorted(methods)) for settings, methods in self.made_for))
        return f"{self.key}-{hashlib.sha256(said.encode()).hexdigest()[:12]}"


@dataclass(frozen=True)
class Wanted:
    """What a job asks of one protocol: under which name, and for which methods."""

    name: str
    methods: frozenset[str]
    together: bool = False

    def served_by(self, methods: Iterable[str]) -> bool:
        """Whether a shard made for these methods counts: where pairs are measured, one of other methods lacks some."""
        return not self.together or self.methods == set(methods)


def _arrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InputError("the benchmark's store needs pyarrow: pip install 'clearhead[bench]'") from None
    return pyarrow


def _schema() -> "pa.Schema":
    pa = _arrow()
    words = [(name, pa.string()) for name in COLUMNS[:-2]]
    figures, curves = pa.map_(pa.string(), pa.float64()), pa.map_(pa.string(), pa.list_(pa.float64()))
    return pa.schema([*words, ("figures", figures), ("curves", curves)])


def _table(rows: Iterable[Row]) -> "pa.Table":
    plain = [
        {**asdict(row), "figures": sorted(row.figures.items()), "curves": sorted(row.curves.items())} for row in rows
    ]
    return _arrow().Table.from_pylist(plain, schema=_schema())


def _rows(table: "pa.Table") -> list[Row]:
    return [Row(**{**one, "figures": dict(one["figures"]), "curves": dict(one["curves"])}) for one in table.to_pylist()]


def _read(path: Path, reader: Callable[[Path], Any], remedy: str) -> Any:
    try:
        return reader(path)
    except (OSError, _arrow().ArrowInvalid) as problem:
        raise InputError(f"{str(path)!r} cannot be read ({problem}): {remedy}") from None


#: What to do about a shard that is damaged. It is not removed unasked: it may be the disk that is at fault.
REMOVE = "remove it, and the same command computes that chunk again"


class Store:
    """One folder. Reading and writing need no model and no GPU."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.shards = self.folder / "shards"

    def check(self) -> None:
        """Refuse a folder that holds something else."""
        path = self.folder / "run.json"
        if self.folder.exists() and (not self.folder.is_dir() or (self._strangers() and not path.exists())):
            raise InputError(
                f"{str(self.folder)!r} is there already and is no benchmark run: give an empty or new --out"
            )

    def open(self, about: Mapping[str, Any]) -> None:
        """Make the folder a run's, or make sure that it is one."""
        self.check()
        path = self.folder / "run.json"
        self.folder.mkdir(parents=True, exist_ok=True)
        for folder in (self.folder, self.shards, self.folder / explanation_store.FOLDER):
            for leftover in folder.glob(f".*{PARTIAL}"):
                leftover.unlink()
        settings = {**(self.about().get("settings", {}) if path.exists() else {}), **about["settings"]}
        with whole(path) as partial:
            said = json.dumps({**about, "settings": settings}, indent=2, ensure_ascii=False, sort_keys=True)
            partial.write_text(said + "\n", encoding="utf-8")
        self.shards.mkdir(exist_ok=True)

    def _strangers(self) -> bool:
        """Whether something is here that no run left behind that was killed at its very beginning."""
        return any(not path.name.endswith(PARTIAL) for path in self.folder.iterdir())

    def about(self) -> dict[str, Any]:
        path = self.folder / "run.json"
        try:
            made: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise InputError(f"{str(self.folder)!r} holds no benchmark run") from None
        return made

    def write(self, shard: Shard) -> Path:
        pa = _arrow()
        about = {"made_for": shard.made_for, "refused": dict(sorted(shard.refused.items()))}
        table = _table(shard.rows).replace_schema_metadata({"clearhead": json.dumps(about, ensure_ascii=False)})
        path = self.shards / f"{shard.name}.parquet"
        with whole(path) as partial:
            pa.parquet.write_table(table, partial, compression="zstd")
        return path

    def made_for(self, path: Path) -> tuple[list[tuple[str, tuple[str, ...]]], dict[str, str]]:
        """What a shard was made for, and what was refused in it."""
        metadata = _read(path, _arrow().parquet.read_schema, REMOVE).metadata or {}
        about = json.loads(metadata.get(b"clearhead", b"{}"))
        return [(settings, tuple(methods)) for settings, methods in about.get("made_for", [])], about.get("refused", {})

    def of(self, key: str) -> list[Path]:
        """The shards of one chunk."""
        return sorted(self.shards.glob(f"{key}-*.parquet"))

    def has(self, shards: Iterable[Path], wanted: Mapping[str, Wanted]) -> dict[str, set[str]]:
        """By settings hash, the methods that some of a chunk's shards already hold."""
        found: dict[str, set[str]] = {}
        for path in shards:
            for settings, methods in self.made_for(path)[0]:
                if settings in wanted and wanted[settings].served_by(methods):
                    found.setdefault(settings, set()).update(methods)
        return found

    def rows(self, key: str, wanted: Mapping[str, Wanted]) -> list[Row]:
        """The rows of one chunk; what two shards both hold is taken once."""
        found: dict[tuple[str, ...], Row] = {}
        for path in self.of(key):
            serving = self.has([path], wanted)
            for row in _rows(_read(path, _arrow().parquet.read_table, REMOVE)):
                if row.settings in serving and row.method in wanted[row.settings].methods:
                    found.setdefault((row.settings, row.part, row.method, row.example), row)
        return [found[where] for where in sorted(found)]

    def measured_by_others(self, versions: str) -> Iterator[dict[str, str]]:
        """What rows measured with other versions are about: the words of `COLUMNS`, without their figures."""

        def words(path: Path) -> Any:
            return _arrow().parquet.read_table(path, columns=list(COLUMNS[:-2]))

        for path in sorted(self.shards.glob("*.parquet")):
            try:
                rows = _read(path, words, REMOVE).to_pylist()
            except InputError:  # it may be of another job: whoever needs it will tell
                continue
            yield from (row for row in rows if row["versions"] != versions)

    def write_table(self, keys: Sequence[str], wanted: Mapping[str, Wanted]) -> Path:
        """One table of all chunks, a row group each, so that memory does not grow with their number."""
        pa, path = _arrow(), self.folder / "table.parquet"
        run = self.about()
        named = {
            "job": {name: run.get("job", {}).get(name) for name in ("model", "data")},
            "versions": run.get("versions"),
        }
        about = {"refused": dict(sorted(self.refused(keys, wanted).items())), **named, "model": run.get("model")}
        schema = _schema().with_metadata({"clearhead": json.dumps(about, ensure_ascii=False)})
        with whole(path) as partial, pa.parquet.ParquetWriter(partial, schema, compression="zstd") as writer:
            for key in keys:
                writer.write_table(_table(self.rows(key, wanted)))
        return path

    def _finished(self) -> "pa.parquet.ParquetFile":
        path = self.folder / "table.parquet"
        if not path.exists():
            raise InputError(f"{str(self.folder)!r} has no finished table: run clearhead bench with the same --out")
        return _read(path, _arrow().parquet.ParquetFile, "the same clearhead bench command writes it anew")

    def table(self) -> Iterator[Row]:
        """The rows of the finished table, a row group at a time."""
        file = self._finished()
        for group in range(file.num_row_groups):
            yield from _rows(file.read_row_group(group))

    def about_table(self) -> dict[str, Any]:
        """Of which model, data and versions the finished table is, and why some rows that were asked for are not in it.

        What `about` says may be of a later job, that was stopped before its table was written.
        """
        metadata = self._finished().schema_arrow.metadata or {}
        about: dict[str, Any] = json.loads(metadata.get(b"clearhead", b"{}"))
        return about

    def refused(self, keys: Iterable[str], wanted: Mapping[str, Wanted]) -> dict[str, str]:
        """By protocol and method, why what is wanted was not measured."""
        found: dict[str, dict[str, None]] = {}
        for path in (path for key in keys for path in self.of(key)):
            made_for, why = self.made_for(path)
            for settings, methods in made_for:
                if settings in wanted and wanted[settings].served_by(methods):
                    asked = {f"{wanted[settings].name}: {method}" for method in wanted[settings].methods}
                    for what in sorted(asked & why.keys()):
                        found.setdefault(what, {})[why[what]] = None
        return {what: _in_short(list(reasons)) for what, reasons in found.items()}

    def merge(self, other: "Store") -> int:
        """Take over the shards of another run that are not here yet, and what it kept; how many shards there were."""
        explanation_store.take(self.folder, other.folder)
        new = [path for path in sorted(other.shards.glob("*.parquet")) if not (self.shards / path.name).exists()]
        for path in new:
            other.made_for(path)  # a damaged one is told now, and not taken
            with whole(self.shards / path.name) as partial:
                shutil.copyfile(path, partial)
        return len(new)


def _in_short(reasons: list[str], most: int = 3) -> str:
    """
    >>> _in_short(["a", "b"]), _in_short(list("abcde"))
    ('a; b', 'a; b; c; and 2 more reasons')
    """
    left = len(reasons) - most
    return "; ".join(reasons[:most]) + (f"; and {left} more reason{'s' * (left > 1)}" if left > 0 else "")


def rows_of(
    measurements: Iterable[Measurement], protocol: Protocol, name: str, model: str, data: str, versions: str
) -> list[Row]:
    """Measurements with what they depend on, in an order of their own."""
    made = [
        Row(model, data, m.example, m.method, name, protocol.hash, versions, m.part, m.figures, m.curves)
        for m in measurements
    ]
    return sorted(made, key=lambda row: (row.settings, row.part, row.method, row.example))
