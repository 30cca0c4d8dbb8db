"""`DatasetRun`: explains a data set into a folder, row by row, and resumes an interrupted run.

    DIR/settings.json                       settings of the run; a run with other settings is refused
    DIR/index.csv                           one line per result: row, method, file, predicted, probability, target, top
    DIR/errors.csv                          rows that could not be explained, with the reason (only if there are any)
    DIR/results/ROW.METHOD.safetensors      the explanations

A resumed run explains rows in the same batches as an uninterrupted one and writes the same bytes: the last bits of
floating-point sums depend on the other samples of a batch.
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

from clearhead.data.atomic_file import PARTIAL_SUFFIX, atomic_write
from clearhead.data.sources import DatasetRow, InputDataset
from clearhead.errors import ClearheadError, InputError
from clearhead.explanation.explanation import EXPLANATION_VERSION, load_explanation
from clearhead.explanation.multi_stream import AnyExplanation
from clearhead.units import TEXT_LEVELS

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

INDEX_COLUMNS = ("row", "method", "file", "predicted", "probability", "target", "top")
#: Seconds between updates of index.csv. The result files are the record of the run; the index only lists them.
INDEX_INTERVAL_SECONDS = 5.0


@dataclass
class DatasetRunReport:
    """Counts of a run.

    Attributes:
        out: The folder.
        rows: Number of rows of the data set.
        written: Number of rows explained by this run.
        already_stored: Number of rows that already had results.
        failed: Number of rows with errors.
    """

    out: str
    rows: int
    written: int = 0
    already_stored: int = 0
    failed: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"schema": "clearhead/run", "version": 2, **asdict(self)}


@dataclass
class DatasetRun:
    """Explains every row of a data set into a folder. Call the object to start or resume the run.

    Attributes:
        explainer: The explainer.
        dataset: The data set.
        out_dir: The folder for results; empty, new, or of an earlier run with the same settings.
        methods: The methods.
        options: Options of `Explainer.explain`.
        batch_size: Number of rows per batch.
        extra_settings: Further settings to record, and to compare when the run is resumed.
    """

    explainer: "Explainer"
    dataset: InputDataset
    out_dir: Path
    methods: Sequence[Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    batch_size: int = 8
    extra_settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.report = DatasetRunReport(str(self.out_dir), self.dataset.num_rows)
        self.index_lines: dict[str, list[str]] = {}

    def __call__(self, advance: Callable[[int], None] = lambda rows: None) -> DatasetRunReport:
        """Explain every row without results.

        Args:
            advance: Called with the number of processed rows after every batch, for progress bars.

        Returns:
            The counts of the run.

        Raises:
            InputError: If a setting is invalid, the folder holds something else, or another run is using it.
        """
        self._check_settings()
        self._claim_folder()
        with self._exclusive_folder_lock():
            for leftover in self.out_dir.rglob(f".*{PARTIAL_SUFFIX}"):
                leftover.unlink()
            self.previous_index_lines = {
                line[2]: line for line in _read_csv(self.out_dir / "index.csv", len(INDEX_COLUMNS))
            }
            self.errors = dict(_read_csv(self.out_dir / "errors.csv", 2))
            try:
                self._explain_all_rows(advance)
            finally:
                self._write_index()
        return self.report

    def _explain_all_rows(self, advance: Callable[[int], None]) -> None:
        """Process the rows batch by batch, record unreadable ones, and save the index at intervals."""
        rows = self.dataset.iter_rows(*self.explainer.adapter.input_names)
        written = time.monotonic()
        while batch := list(islice(rows, self.batch_size)):
            for row in batch:
                self.errors.pop(row.id, None)
                if row.error is not None:
                    self.errors[row.id] = row.error
            self._process_batch([row for row in batch if row.error is None])
            advance(len(batch))
            if time.monotonic() - written > INDEX_INTERVAL_SECONDS:
                self._write_index()
                written = time.monotonic()
        self.report.failed = len(self.errors)

    def _process_batch(self, rows: list[DatasetRow]) -> None:
        """Explain the rows of a batch without results, save the results and add all rows to the index."""
        missing = [
            row for row in rows if not all((self.out_dir / file).exists() for file in self._list_result_files(row))
        ]
        results = self._explain_rows(rows) if missing else {}
        for row in rows:
            files = self._list_result_files(row)
            if row not in missing:
                self.report.already_stored += 1
            elif row.id in results:
                self.report.written += 1
                for file, explanation in zip(files, results[row.id], strict=True):
                    (self.out_dir / file).parent.mkdir(parents=True, exist_ok=True)
                    explanation.save(self.out_dir / file)
                    self.index_lines[file] = _format_index_line(row.id, file, explanation)
            else:
                continue
            for file in files:
                if file not in self.index_lines:
                    previous_line = self.previous_index_lines.pop(file, None)
                    self.index_lines[file] = previous_line or _format_index_line(
                        row.id, file, load_explanation(self.out_dir / file)
                    )

    def _explain_rows(self, rows: list[DatasetRow]) -> dict[str, list[AnyExplanation]]:
        """Explain the rows of a batch together, or one by one if that fails, so that each row gets its own error."""
        try:
            results = self._explain_raw_inputs([row.raw_input for row in rows])
            return dict(zip([row.id for row in rows], results, strict=True))
        except Exception as error:
            _raise_if_out_of_memory(error)
        results_by_row = {}
        for row in rows:
            try:
                [results_by_row[row.id]] = self._explain_raw_inputs([row.raw_input])
            except ClearheadError as error:
                self.errors[row.id] = str(error)
            except Exception as error:
                _raise_if_out_of_memory(error)
                self.errors[row.id] = f"unexpected {type(error).__name__}: {error}"
        return results_by_row

    def _explain_raw_inputs(self, raw_inputs: list[Any]) -> list[list[AnyExplanation]]:
        """Return the explanations of all methods for each input."""
        options = {**self.options, "batch_size": self.batch_size}
        by_method = self.explainer.explain(raw_inputs, method=list(self.methods), **options)
        if len(by_method) != len(self.methods):
            raise InputError(f"the same method was given twice: {', '.join(map(str, self.methods))}")
        return [list(row_explanations) for row_explanations in zip(*by_method.values(), strict=True)]

    def _list_result_files(self, row: DatasetRow) -> list[str]:
        """Return the result file of each method, relative to the folder of the run."""
        names = [re.sub(r"[^\w.=,-]+", "_", str(method)).strip("_") for method in self.methods]
        return [f"results/{row.id}.{name}.safetensors" for name in names]

    def _check_settings(self) -> None:
        """Explain a small example with all settings, to raise errors before anything is written."""
        if self.batch_size < 1:
            raise InputError(f"batch_size={self.batch_size} is not valid: it must be at least 1")
        options = {name: value for name, value in self.options.items() if name not in ("max_length", "truncation")}
        if getattr(options.get("target"), "mask_index", None) is not None:  # the example has one masked position
            options["target"] = replace(options["target"], mask_index=0)
        self.explainer.explain(self.explainer.adapter.make_example_input(), method=list(self.methods), **options)

    def _claim_folder(self) -> None:
        """Write the settings into the folder, or compare them with those of an earlier run."""
        settings = {
            "schema": "clearhead/run-settings",
            "version": EXPLANATION_VERSION,
            "settings": {
                **self.extra_settings,
                "batch_size": self.batch_size,
                "methods": [str(method) for method in self.methods],
                "columns": list(self.dataset.columns),
                "data_sha256": self.dataset.digest,
                "weights_sha256": compute_weights_digest(self.explainer.adapter.model),
            },
        }
        settings["sha256"] = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
        path = self.out_dir / "settings.json"
        if path.exists():
            _check_same_settings(path, settings)
            return
        if self.out_dir.exists() and (not self.out_dir.is_dir() or any(self.out_dir.iterdir())):
            raise InputError(
                f"{str(self.out_dir)!r} already exists and contains other files: set --out to an empty or new folder"
            )
        self.out_dir.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as partial:
            partial.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    @contextmanager
    def _exclusive_folder_lock(self) -> Iterator[None]:
        """Lock the folder, because two runs would overwrite each other's index."""
        try:
            import fcntl
        except ImportError:  # Windows
            yield
            return
        with (self.out_dir / "settings.json").open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise InputError(f"another run is writing to {str(self.out_dir)!r}: wait for it or stop it") from None
            yield

    def _write_index(self) -> None:
        """Write index.csv, with the lines of earlier runs, and errors.csv if there are errors."""
        previous = [line for file, line in self.previous_index_lines.items() if file not in self.index_lines]
        _write_csv(self.out_dir / "index.csv", INDEX_COLUMNS, [*self.index_lines.values(), *previous])
        if self.errors:
            _write_csv(self.out_dir / "errors.csv", ("row", "message"), sorted(self.errors.items()))
        else:
            (self.out_dir / "errors.csv").unlink(missing_ok=True)


def _raise_if_out_of_memory(error: Exception) -> None:
    """Re-raise out-of-memory errors: they are not errors of a row, which may succeed in a smaller batch."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        raise error


def compute_weights_digest(model: Any) -> str:
    """Compute a hash of all weights, to detect a model that was retrained under the same name.

    Args:
        model: The model.

    Returns:
        The SHA-256 hash as a hexadecimal string.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().cpu().contiguous().flatten()
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        if flat.numel():
            digest.update(flat.view(dtype=_get_uint8_dtype()).numpy().data)
    return digest.hexdigest()


def _get_uint8_dtype() -> Any:
    """Return torch.uint8, importing torch only when it is needed."""
    import torch

    return torch.uint8


def _check_same_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Check that the settings of an earlier run are equal; an error names those that differ."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        previous = document["settings"]
        version = document["version"]
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{str(path)!r} was not written by clearhead: set --out to an empty or new folder") from None
    if version != settings["version"]:
        raise InputError(
            f"{str(path.parent)!r} contains results in file format {version}; this version of clearhead writes format "
            f"{settings['version']}: set --out to an empty or new folder"
        )
    current = settings["settings"]
    changed = [key for key in {**previous, **current} if previous.get(key) != current.get(key)]
    if changed:
        descriptions = {"data_sha256": "the data have changed", "weights_sha256": "the model's weights have changed"}
        listed = [
            descriptions.get(key, f"{key} was {previous.get(key)!r}, now {current.get(key)!r}") for key in changed
        ]
        raise InputError(
            f"{str(path.parent)!r} contains results of a run with different settings ({'; '.join(listed)}): choose "
            "another --out, or use the previous settings"
        )


def _format_index_line(row: str, file: str, explanation: AnyExplanation) -> list[str]:
    """Return the columns of index.csv for one result, with the five highest-scoring units (words in texts)."""
    probability = explanation.prediction.get("probability")
    if any(stream.units.kind in TEXT_LEVELS for stream in explanation.by_stream.values()):
        explanation = explanation.words()
    return [
        row,
        explanation.method,
        file,
        str(explanation.prediction.get("label", "")),
        "" if probability is None else f"{probability:.6f}",
        str(explanation.target.get("name", "")),
        " ".join(name for name, _ in explanation.top(5)),
    ]


def _read_csv(path: Path, width: int) -> list[list[str]]:
    """Read the rows below the header, without those of another width; no file means no rows."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [line for line in list(csv.reader(file))[1:] if len(line) == width]


def _write_csv(path: Path, header: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Write header and rows atomically."""
    with atomic_write(path) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(lines)
