"""Where measurements lie: Parquet shards, named by what they hold, one a chunk; written whole or not at all.

    RUN/run.json             what was asked for (the last time), and the settings behind each hash
    RUN/shards/KEY-WHAT.parquet   the rows of one chunk; KEY: model, examples, versions; WHAT: protocols and methods
    RUN/explanations/KEY.jsonl.gz   the explanations of one chunk, where they were asked for (`keeping.py`)
    RUN/timings.jsonl        when and how long: beside the results, never in them
    RUN/table.parquet        all rows that the job asks for, in the plan's order

Two runs are merged by copying shards together: equal names hold equal rows.
"""

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead.bench.protocol import Measurement, Protocol
from clearhead.errors import InputError
from clearhead.files import PARTIAL, whole

if TYPE_CHECKING:
    import pyarrow as pa

    from clearhead.bench.keeping import Kept

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


class Store:
    """One folder. Reading and writing need no model and no GPU."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.shards = self.folder / "shards"

    def open(self, about: Mapping[str, Any]) -> None:
        """Make the folder a run's, or make sure that it is one."""
        path = self.folder / "run.json"
        if self.folder.exists() and (not self.folder.is_dir() or (any(self.folder.iterdir()) and not path.exists())):
            raise InputError(
                f"{str(self.folder)!r} is there already and is no benchmark run: give an empty or new --out"
            )
        self.shards.mkdir(parents=True, exist_ok=True)
        for leftover in self.shards.glob(f".*{PARTIAL}"):
            leftover.unlink()
        settings = {**(self.about().get("settings", {}) if path.exists() else {}), **about["settings"]}
        with whole(path) as partial:
            said = json.dumps({**about, "settings": settings}, indent=2, ensure_ascii=False, sort_keys=True)
            partial.write_text(said + "\n", encoding="utf-8")

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
        metadata = _arrow().parquet.read_schema(path).metadata or {}
        about = json.loads(metadata.get(b"clearhead", b"{}"))
        return [(settings, tuple(methods)) for settings, methods in about.get("made_for", [])], about.get("refused", {})

    def of(self, key: str) -> list[Path]:
        """The shards of one chunk."""
        return sorted(self.shards.glob(f"{key}-*.parquet"))

    def has(self, key: str) -> dict[str, set[str]]:
        """By settings hash, the methods that a chunk was already measured with."""
        found: dict[str, set[str]] = {}
        for path in self.of(key):
            for settings, methods in self.made_for(path)[0]:
                found.setdefault(settings, set()).update(methods)
        return found

    def rows(self, key: str) -> list[Row]:
        """The rows of one chunk; what two shards both hold is taken once."""
        found: dict[tuple[str, ...], Row] = {}
        for path in self.of(key):
            for row in _rows(_arrow().parquet.read_table(path)):
                found.setdefault((row.settings, row.part, row.method, row.example), row)
        return [found[where] for where in sorted(found)]

    def write_table(self, keys: Sequence[str], wanted: Mapping[str, set[str]]) -> Path:
        """One table of all chunks, a row group each, so that memory does not grow with their number."""
        pa, path = _arrow(), self.folder / "table.parquet"
        with whole(path) as partial, pa.parquet.ParquetWriter(partial, _schema(), compression="zstd") as writer:
            for key in keys:
                rows = [row for row in self.rows(key) if row.method in wanted.get(row.settings, ())]
                writer.write_table(_table(rows))
        return path

    def table(self) -> Iterator[Row]:
        """The rows of the finished table, a row group at a time."""
        path = self.folder / "table.parquet"
        if not path.exists():
            raise InputError(f"{str(self.folder)!r} has no finished table: run clearhead bench with the same --out")
        file = _arrow().parquet.ParquetFile(path)
        for group in range(file.num_row_groups):
            yield from _rows(file.read_row_group(group))

    def refused(self, keys: Iterable[str]) -> dict[str, str]:
        """By protocol and method, why they were not measured."""
        return {what: why for key in keys for path in self.of(key) for what, why in self.made_for(path)[1].items()}

    def merge(self, other: "Store") -> int:
        """Take over the shards of another run that are not here yet; how many there were."""
        new = [path for path in sorted(other.shards.glob("*.parquet")) if not (self.shards / path.name).exists()]
        for path in new:
            with whole(self.shards / path.name) as partial:
                shutil.copyfile(path, partial)
        return len(new)


def rows_of(
    measurements: Iterable[Measurement], protocol: Protocol, name: str, model: str, data: str, versions: str
) -> list[Row]:
    """Measurements with what they depend on, in an order of their own."""
    made = [
        Row(model, data, m.example, m.method, name, protocol.hash, versions, m.part, m.figures, m.curves)
        for m in measurements
    ]
    return sorted(made, key=lambda row: (row.settings, row.part, row.method, row.example))
