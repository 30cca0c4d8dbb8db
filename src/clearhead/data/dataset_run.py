"""Explaining a whole data set into a folder: row by row on disk, so that a run that was stopped goes on where it was.

    DIR/settings.json                       what the run was asked for; a run with other settings is refused
    DIR/index.csv                           one line per result: row, method, file, predicted, probability, target, top
    DIR/errors.csv                          the rows that could not be explained, and why (only if there are any)
    DIR/results/ROW.METHOD.safetensors      the explanations

Rows are always explained in the same batches, also after an interruption: floating-point sums depend in their last
bits on what shares a batch, and a resumed run shall write the same bytes as one that was never stopped.
"""

import csv
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead.data.atomic_file import PARTIAL, whole
from clearhead.data.sources import Dataset, Row
from clearhead.errors import ClearheadError, InputError
from clearhead.explanation.explanation import load as open_explanation
from clearhead.explanation.multi_stream import AnyExplanation
from clearhead.units import LEVELS

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

COLUMNS = ("row", "method", "file", "predicted", "probability", "target", "top")
#: Seconds between two writings of index.csv: the results themselves are the record, the index only lists them.
INDEX_EVERY = 5.0


@dataclass
class Report:
    """What a run did. `written` and `there_before` count rows."""

    out: str
    rows: int
    written: int = 0
    there_before: int = 0
    failed: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {"schema": "clearhead/run", "version": 1, **asdict(self)}


@dataclass
class Run:
    """One data set, one explainer, one folder. `options` are those of `Explainer.explain`."""

    ex: "Explainer"
    data: Dataset
    out: Path
    methods: Sequence[Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    batch_size: int = 8
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.report = Report(str(self.out), self.data.count)
        self.lines: dict[str, list[str]] = {}

    def __call__(self, advance: Callable[[int], None] = lambda rows: None) -> Report:
        """Explain every row that has no result yet; `advance` hears how many rows are through."""
        self._try_out()
        self._claim()
        with self._alone():
            for leftover in self.out.rglob(f".*{PARTIAL}"):
                leftover.unlink()
            self.listed = {line[2]: line for line in _read_csv(self.out / "index.csv", len(COLUMNS))}
            self.errors = dict(_read_csv(self.out / "errors.csv", 2))
            try:
                self._all_rows(advance)
            finally:
                self._write_index()
        return self.report

    def _all_rows(self, advance: Callable[[int], None]) -> None:
        rows = self.data.rows(*self.ex.subject.takes)
        written = time.monotonic()
        while batch := list(islice(rows, self.batch_size)):
            for row in batch:
                self.errors.pop(row.id, None)
                if row.problem is not None:
                    self.errors[row.id] = row.problem
            self._batch([row for row in batch if row.problem is None])
            advance(len(batch))
            if time.monotonic() - written > INDEX_EVERY:
                self._write_index()
                written = time.monotonic()
        self.report.failed = len(self.errors)

    def _batch(self, rows: list[Row]) -> None:
        missing = [row for row in rows if not all((self.out / file).exists() for file in self._files(row))]
        results = self._explained(rows) if missing else {}
        for row in rows:
            if row not in missing:
                self.report.there_before += 1
            elif row.id in results:
                self.report.written += 1
                for file, explanation in zip(self._files(row), results[row.id], strict=True):
                    (self.out / file).parent.mkdir(parents=True, exist_ok=True)
                    explanation.save(self.out / file)
                    self.lines[file] = _line(row.id, file, explanation)
            else:
                continue
            for file in self._files(row):
                if file not in self.lines:
                    listed = self.listed.pop(file, None)
                    self.lines[file] = listed or _line(row.id, file, open_explanation(self.out / file))

    def _explained(self, rows: list[Row]) -> dict[str, list[AnyExplanation]]:
        """All rows of a batch together or, if one of them cannot be explained, each by itself."""
        try:
            return dict(zip([row.id for row in rows], self._explain([row.raw for row in rows]), strict=True))
        except Exception as problem:
            _raise_if_out_of_memory(problem)
        results = {}
        for row in rows:
            try:
                [results[row.id]] = self._explain([row.raw])
            except ClearheadError as problem:
                self.errors[row.id] = str(problem)
            except Exception as problem:
                _raise_if_out_of_memory(problem)
                self.errors[row.id] = f"unexpected {type(problem).__name__}: {problem}"
        return results

    def _explain(self, raws: list[Any]) -> list[list[AnyExplanation]]:
        options = {**self.options, "batch_size": self.batch_size}
        by_method = self.ex.explain(raws, method=list(self.methods), **options)
        if len(by_method) != len(self.methods):
            raise InputError(f"two of the methods are the same: {', '.join(map(str, self.methods))}")
        return [list(of_row) for of_row in zip(*by_method.values(), strict=True)]

    def _files(self, row: Row) -> list[str]:
        names = [re.sub(r"[^\w.=,-]+", "_", str(method)).strip("_") for method in self.methods]
        return [f"results/{row.id}.{name}.safetensors" for name in names]

    def _try_out(self) -> None:
        """Every setting is tried on a small example before anything is written."""
        if self.batch_size < 1:
            raise InputError(f"batch_size={self.batch_size}: it must be at least 1")
        length = ("max_length", "truncation")
        options = {name: value for name, value in self.options.items() if name not in length}
        if getattr(options.get("target"), "mask", None) is not None:  # the example has one masked position
            options["target"] = replace(options["target"], mask=0)
        self.ex.explain(self.ex.subject.example(), method=list(self.methods), **options)

    def _claim(self) -> None:
        """Make the folder this run's, or make sure that it already is."""
        settings = {
            "schema": "clearhead/run-settings",
            "version": 1,
            "settings": {
                **self.about,
                "batch_size": self.batch_size,
                "methods": [str(method) for method in self.methods],
                "columns": list(self.data.columns),
                "data_sha256": self.data.digest,
                "weights_sha256": weights_digest(self.ex.subject.model),
            },
        }
        settings["sha256"] = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
        path = self.out / "settings.json"
        if path.exists():
            _compare(path, settings)
            return
        if self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
            raise InputError(f"{str(self.out)!r} is there already and holds something else: give an empty or new --out")
        self.out.mkdir(parents=True, exist_ok=True)
        with whole(path) as partial:
            partial.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Two runs in one folder would undo each other's index."""
        try:
            import fcntl
        except ImportError:  # Windows
            yield
            return
        with (self.out / "settings.json").open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise InputError(f"another run is writing into {str(self.out)!r}: wait for it or stop it") from None
            yield

    def _write_index(self) -> None:
        rest = {file: line for file, line in self.listed.items() if file not in self.lines}
        _write_csv(self.out / "index.csv", COLUMNS, [*self.lines.values(), *rest.values()])
        if self.errors:
            _write_csv(self.out / "errors.csv", ("row", "message"), sorted(self.errors.items()))
        else:
            (self.out / "errors.csv").unlink(missing_ok=True)


def _raise_if_out_of_memory(problem: Exception) -> None:
    """No fault of the row: the same row may succeed with a smaller batch."""
    if isinstance(problem, MemoryError) or type(problem).__name__ == "OutOfMemoryError":
        raise problem


def weights_digest(model: Any) -> str:
    """One number for all weights: a name stays when a model is trained anew, this does not."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().cpu().contiguous().flatten()
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(flat.view(dtype=_bytes()).numpy().data if flat.numel() else b"")
    return digest.hexdigest()


def _bytes() -> Any:
    import torch

    return torch.uint8


def _compare(path: Path, settings: Mapping[str, Any]) -> None:
    try:
        before = json.loads(path.read_text(encoding="utf-8"))["settings"]
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{str(path)!r} was not written by clearhead: give an empty or new --out") from None
    now = settings["settings"]
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    if changed:
        told = {"data_sha256": "the data have changed", "weights_sha256": "the model's weights have changed"}
        listed = [told.get(key, f"{key} was {before.get(key)!r}, now {now.get(key)!r}") for key in changed]
        raise InputError(
            f"{str(path.parent)!r} holds results of other settings ({'; '.join(listed)}): "
            "give another --out, or the settings of before"
        )


def _line(row: str, file: str, explanation: AnyExplanation) -> list[str]:
    probability = explanation.prediction.get("probability")
    texts = any(part.units.kind in LEVELS for part in explanation.parts.values())
    words = explanation.words() if texts else explanation
    return [
        row,
        explanation.method,
        file,
        str(explanation.prediction.get("label", "")),
        "" if probability is None else f"{probability:.6f}",
        str(explanation.target.get("name", "")),
        " ".join(name for name, _ in words.top(5)),
    ]


def _read_csv(path: Path, width: int) -> list[list[str]]:
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [line for line in list(csv.reader(file))[1:] if len(line) == width]


def _write_csv(path: Path, header: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    with whole(path) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(lines)
