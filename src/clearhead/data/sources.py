"""Input sources: texts, image and audio files, tables and folders, read row by row.

`parse_input_source` recognises what a command-line argument names; `open_dataset` opens tables and folders.
"""

import csv
import hashlib
import json
import os
import struct
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from clearhead.errors import ClearheadWarning, InputError, unknown_value_error

AUDIO_SUFFIXES = (".wav",)
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
TABLE_DELIMITERS = {".csv": ",", ".tsv": "\t"}
JSON_LINES_SUFFIXES = (".jsonl", ".ndjson")
TEXT_SUFFIX = ".txt"
#: Images that come with scikit-image, by name.
SKIMAGE_IMAGE_NAMES = (
    "astronaut",
    "camera",
    "cat",
    "chelsea",
    "coffee",
    "coins",
    "hubble_deep_field",
    "retina",
    "rocket",
)

#: The cells of a row by column, or the error if the row is malformed.
ParsedCells = tuple[dict[str, Any] | None, str | None]

csv.field_size_limit(2**31 - 1)  # a long text is a long cell


@dataclass(frozen=True)
class InputSource:
    """One input as named on the command line: a text, a text file, an image, an audio file or a data set.

    Attributes:
        source_type: The type of input.
        value: The text, or the path or name of the file.
    """

    source_type: Literal["text", "text file", "image", "named image", "audio", "data"]
    value: str

    @property
    def stream(self) -> str:
        """The input stream of a model that takes this source."""
        return {"image": "image", "named image": "image", "audio": "audio"}.get(self.source_type, "text")

    def load_text(self) -> str:
        """Return the text, read from the file if it is one.

        Returns:
            The text; of a file, decoded as `read_text` does.
        """
        if self.source_type == "text file":
            return read_text(Path(self.value))
        return self.value

    def load_audio(self) -> Any:
        """Return the waveform and its sampling rate.

        Returns:
            What `read_wav` returns for the file.
        """
        return read_wav(Path(self.value))

    def load_image(self) -> Any:
        """Return the path of the image file, or the pixels of an image from scikit-image.

        Returns:
            A path, or an array of pixels.

        Raises:
            InputError: If the image comes with scikit-image, and that is not installed.
        """
        if self.source_type == "image":
            return Path(self.value)
        if find_spec("skimage") is None:
            raise InputError(f"the image {self.value!r} needs scikit-image: pip install 'clearhead[vision]'")
        import skimage.data

        return getattr(skimage.data, self.value)()


def parse_input_source(value: str) -> InputSource:
    """Recognise an input. Existing files and names with a file suffix are files; everything else is a text.

    Args:
        value: A text, a path, or the name of an image from scikit-image.

    Returns:
        The source.

    Raises:
        InputError: If a file does not exist or has an unsupported type.

    Example:
        >>> parse_input_source("I like the movie").source_type
        'text'
    """
    suffix = Path(value).suffix.lower()
    readable_suffixes = (*IMAGE_SUFFIXES, *AUDIO_SUFFIXES, *TABLE_DELIMITERS, *JSON_LINES_SUFFIXES, TEXT_SUFFIX)
    if os.path.isdir(value):
        return InputSource("data", value)
    if os.path.isfile(value):
        if suffix in IMAGE_SUFFIXES:
            return InputSource("image", value)
        if suffix in AUDIO_SUFFIXES:
            return InputSource("audio", value)
        if suffix in TABLE_DELIMITERS or suffix in JSON_LINES_SUFFIXES:
            return InputSource("data", value)
        if suffix == ".safetensors":
            raise InputError(
                f"{value!r} is a file of tensors: if it is a saved explanation, use clearhead show {value}"
            )
        if suffix == TEXT_SUFFIX:
            return InputSource("text file", value)
        if suffix:
            raise InputError(
                f"{value!r} is a file that cannot be read as an input: accepted are {', '.join(readable_suffixes)} and "
                f"folders. To explain the string itself, use --text {value!r}"
            )
        return InputSource("text", value)
    looks_like_path = os.sep in value or len(value.split()) == 1
    if suffix in readable_suffixes and looks_like_path:
        raise InputError(f"there is no file {value!r}. To explain the string itself, use --text {value!r}")
    return InputSource("named image" if value in SKIMAGE_IMAGE_NAMES else "text", value)


def parse_image_source(value: str) -> InputSource:
    """Recognise an image: a file, or the name of an image from scikit-image.

    Args:
        value: A path or name.

    Returns:
        The source.

    Raises:
        InputError: If there is no such file or image.
    """
    if value in SKIMAGE_IMAGE_NAMES and not os.path.exists(value):
        return InputSource("named image", value)
    if not os.path.isfile(value):
        raise InputError(f"there is no image {value!r}: use a file, or one of {', '.join(SKIMAGE_IMAGE_NAMES)}")
    return InputSource("image", value)


def parse_audio_source(value: str) -> InputSource:
    """Recognise an audio file.

    Args:
        value: A path.

    Returns:
        The source.

    Raises:
        InputError: If there is no such file.
    """
    if not os.path.isfile(value):
        raise InputError(f"there is no audio file {value!r}: use a file that ends in {', '.join(AUDIO_SUFFIXES)}")
    return InputSource("audio", value)


def read_wav(path: Path) -> tuple[Any, int]:
    """Read a WAV file. Several channels are averaged, with a warning.

    Args:
        path: The file.

    Returns:
        The waveform, with samples in −1 … 1, and its sampling rate.

    Raises:
        InputError: If the file is not a WAV file.
    """
    import numpy as np
    from scipy.io import wavfile

    try:
        rate, wave = wavfile.read(path)
    except (ValueError, EOFError, struct.error) as error:
        raise InputError(f"{str(path)!r} is not a readable audio file ({error}): save it as a WAV file") from None
    if wave.dtype == np.uint8:  # unsigned samples: 128 is silence
        wave = (wave.astype(np.float32) - 128) / 128
    elif wave.dtype.kind == "i":
        wave = wave.astype(np.float32) / -float(np.iinfo(wave.dtype).min)
    if wave.ndim == 1 or wave.shape[1] == 1:
        return wave.reshape(-1), int(rate)
    message = f"{str(path)!r} has {wave.shape[1]} channels; their mean is explained"
    warnings.warn(message, ClearheadWarning, stacklevel=2)
    return wave.mean(axis=1), int(rate)


@dataclass(frozen=True)
class DatasetRow:
    """One row of a data set.

    Attributes:
        id: Number or file name of the row.
        raw_input: The input, as `Explainer.explain` takes it.
        error: Why the row cannot be read, if it cannot.
    """

    id: str
    raw_input: Any = None
    error: str | None = None


@dataclass(frozen=True)
class InputDataset:
    """A table or a folder of inputs. Rows are read lazily.

    Attributes:
        path: The file or folder.
        source_type: The type of data set.
        columns: The selected columns of a table.
        num_rows: Number of rows.
        digest: SHA-256 hash of the content when the data set was opened.
        has_image_column: Whether the last selected column holds image paths.
    """

    path: Path
    source_type: Literal["table", "lines", "texts", "images"]
    columns: tuple[str, ...]
    num_rows: int
    digest: str
    has_image_column: bool = False

    @property
    def stream(self) -> str:
        """The input stream that the rows belong to."""
        return "image" if self.source_type == "images" else "text"

    def iter_rows(self, *input_names: str) -> Iterator[DatasetRow]:
        """Yield all rows in order.

        Args:
            *input_names: The inputs of the model, e.g. "text". Image paths in a table are relative to its folder.

        Yields:
            The rows; a row that cannot be read has an `error`.
        """
        if self.source_type in ("texts", "images"):
            for file in _find_files(self.path, (TEXT_SUFFIX,) if self.source_type == "texts" else IMAGE_SUFFIXES):
                yield self._read_file_row(file.relative_to(self.path).as_posix(), file)
            return
        for row in _iter_table_rows(self.path):
            yield self._row_from_cells(row, input_names)

    def _read_file_row(self, name: str, file: Path) -> DatasetRow:
        """Return the row of one file: the text that it contains, or the path of an image."""
        if self.source_type == "images":
            return DatasetRow(name, file)
        try:
            return _make_text_row(name, (read_text(file),))
        except (InputError, OSError) as error:
            return DatasetRow(name, error=str(error))

    def _row_from_cells(self, row: DatasetRow, input_names: tuple[str, ...]) -> DatasetRow:
        """Convert the cells of a table row to a model input; a cell that is no text is an error."""
        if row.error is not None:
            return row
        values = [row.raw_input.get(column) for column in self.columns]
        for column, value in zip(self.columns, values, strict=True):
            if not isinstance(value, str):
                return DatasetRow(row.id, error=f"column {column!r} contains {value!r} instead of a text")
        if input_names == ("image",):
            return DatasetRow(row.id, self.path.parent / values[0])
        if not self.has_image_column:
            return _make_text_row(row.id, tuple(values))
        from clearhead.adapters.base import NamedInputs

        text_row = _make_text_row(row.id, tuple(values[:-1]))
        if text_row.error:
            return text_row
        return DatasetRow(row.id, NamedInputs(text=text_row.raw_input, image=self.path.parent / values[-1]))


def open_dataset(
    path: str | Path, column: str | None = None, pair_column: str | None = None, image_column: str | None = None
) -> InputDataset:
    """Open a table or a folder of texts or images: select columns, count rows and hash the content.

    Args:
        path: A .csv, .tsv or .jsonl file, or a folder.
        column: The column with the texts (or image paths). Default: "text", or the only column.
        pair_column: The column with the second texts, for models that take pairs.
        image_column: The column with image paths, for models that take text and image.

    Returns:
        The data set.

    Raises:
        InputError: If the file or folder cannot be read or is empty, or a column does not exist.

    Example:
        >>> dataset = open_dataset("reviews.csv", column="review")  # doctest: +SKIP
        >>> clearhead_inputs = [row.raw_input for row in dataset.iter_rows("text")]  # doctest: +SKIP
    """
    path = Path(path)
    if path.is_dir():
        if column or pair_column or image_column:
            raise InputError(f"{str(path)!r} is a folder, which has no columns: leave out --column")
        return _open_folder(path)
    with _translated_read_errors(path):
        count = sum(1 for _ in _iter_table_rows(path))
        if not count:
            raise InputError(
                f"{str(path)!r} is empty: write one input per row; a table also needs a header row with the column "
                "names"
            )
    columns = _select_columns(path, column, pair_column, image_column)
    source_type: Literal["table", "lines"] = "table" if path.suffix.lower() in TABLE_DELIMITERS else "lines"
    digest = _compute_digest([path], path.parent)
    return InputDataset(path, source_type, columns, count, digest, image_column is not None)


def collect_raw_inputs(path: str | Path, rows: Iterable[DatasetRow]) -> list[Any]:
    """Collect the inputs of rows, and refuse the data set if any row cannot be read.

    Args:
        path: The data set, for the message.
        rows: Its rows.

    Returns:
        The inputs.

    Raises:
        InputError: If a row cannot be read; the first three are listed.
    """
    collected = list(rows)
    if unreadable := describe_unreadable_rows(collected):
        listing = "; ".join(unreadable[:3])
        if len(unreadable) > 3:
            listing += f"; and {len(unreadable) - 3} more"
        raise InputError(
            f"{len(unreadable)} of {len(collected)} rows of {str(path)!r} cannot be read; fix or remove them: {listing}"
        )
    return [row.raw_input for row in collected]


def describe_unreadable_rows(rows: Iterable[DatasetRow]) -> list[str]:
    """Describe the rows that cannot be read.

    Args:
        rows: The rows.

    Returns:
        "row ID: reason" for each of them.
    """
    return [f"row {row.id}: {row.error}" for row in rows if row.error is not None]


def read_column(path: str | Path, column: str, limit: int | None = None) -> list[Any]:
    """Read one column of a table, such as the labels.

    Args:
        path: The table.
        column: Name of the column.
        limit: Maximum number of rows.

    Returns:
        The values.

    Raises:
        InputError: If the column does not exist, or a row cannot be read or has no value.
    """
    path = Path(path)
    _select_columns(path, column)
    with _translated_read_errors(path):
        return collect_raw_inputs(path, (_select_cell(row, column) for row in islice(_iter_table_rows(path), limit)))


def read_column_names(path: Path) -> list[str]:
    """Read the column names: the header of a table, or the keys of the first readable JSON line.

    Args:
        path: The table.

    Returns:
        The names.

    Raises:
        InputError: If the file cannot be read.
    """
    with _translated_read_errors(path):
        if path.suffix.lower() not in TABLE_DELIMITERS:
            return next((list(row.raw_input) for row in _iter_table_rows(path) if row.error is None), [])
        with path.open(encoding="utf-8-sig", newline="") as file:
            return next((cells for cells in _iter_csv_cells(file, path) if cells), [])


def read_text(path: Path) -> str:
    """Read a UTF-8 text file.

    Args:
        path: The file.

    Returns:
        The text.

    Raises:
        InputError: If the file does not exist or is not UTF-8.
    """
    with _translated_read_errors(path):
        return path.read_text(encoding="utf-8-sig")


def _open_folder(path: Path) -> InputDataset:
    """Open a folder of either texts or images; a mixture or neither is an error."""
    texts = _find_files(path, (TEXT_SUFFIX,))
    images = _find_files(path, IMAGE_SUFFIXES)
    if bool(texts) == bool(images):
        content = "no texts (.txt) and no images"
        if texts:
            content = f"{len(texts)} texts and {len(images)} images"
        raise InputError(
            f"the folder {str(path)!r} contains {content}: use a folder with either texts or images. To explain its "
            f"name as a text, use --text {str(path)!r}"
        )
    files = texts or images
    return InputDataset(path, "texts" if texts else "images", (), len(files), _compute_digest(files, path))


def _find_files(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Find files by suffix in a folder and its subfolders, sorted by path, without hidden ones."""
    files = [file for file in folder.rglob("*") if file.suffix.lower() in suffixes and file.is_file()]
    visible = [file for file in files if not any(name.startswith(".") for name in file.relative_to(folder).parts)]
    return sorted(visible, key=lambda file: file.relative_to(folder).as_posix())


def _select_columns(path: Path, column: str | None, *extra_columns: str | None) -> tuple[str, ...]:
    """Choose the default for `column` and check that all columns exist once."""
    available = read_column_names(path)
    main_column = column
    if main_column is None:
        main_column = available[0] if len(available) == 1 else "text"
    selected = (main_column, *(name for name in extra_columns if name is not None))
    for name in selected:
        if name not in available:
            hint = ". Choose with --column" if column is None and name == main_column else ""
            raise InputError(f"{path.name}: {unknown_value_error('column', name, available)}{hint}")
        if available.count(name) > 1:
            raise InputError(
                f"{path.name}: {available.count(name)} columns are named {name!r}: give each column a unique name"
            )
    return selected


def _select_cell(row: DatasetRow, column: str) -> DatasetRow:
    """Reduce a row to one column; an empty cell is an error of the row."""
    if row.error is not None:
        return row
    if row.raw_input.get(column) in (None, ""):
        return DatasetRow(row.id, error=f"it has no {column}: give every row a value")
    return DatasetRow(row.id, row.raw_input[column])


def _iter_table_rows(path: Path) -> Iterator[DatasetRow]:
    """Yield the rows, each as a mapping from column to cell."""
    suffix = path.suffix.lower()
    if suffix not in (*TABLE_DELIMITERS, *JSON_LINES_SUFFIXES) and path.exists():
        suffixes = ", ".join((*TABLE_DELIMITERS, *JSON_LINES_SUFFIXES))
        raise InputError(f"{str(path)!r} is not a table: use a file that ends in {suffixes}")
    with path.open(encoding="utf-8-sig", newline="") as file:
        parsed_rows = _parse_delimited_rows(file, path) if suffix in TABLE_DELIMITERS else _parse_json_lines(file)
        for number, (cells, error) in enumerate(parsed_rows, 1):
            yield DatasetRow(f"{number:06d}", cells, error)


def _parse_delimited_rows(file: Iterable[str], path: Path) -> Iterator[ParsedCells]:
    """Yield the cells of each row by column, or (None, message) if their number is not that of the header."""
    rows = (cells for cells in _iter_csv_cells(file, path) if cells)
    names = next(rows, [])
    for cells in rows:
        if len(cells) == len(names):
            yield dict(zip(names, cells, strict=True)), None
        else:
            yield (
                None,
                f"{len(cells)} instead of {len(names)} cells: put quotes around a text that contains the delimiter",
            )


def _iter_csv_cells(file: Iterable[str], path: Path) -> Iterator[list[str]]:
    """Yield the cells of each row; an error names the line in which an unfinished row begins."""
    reader = csv.reader(file, delimiter=TABLE_DELIMITERS[path.suffix.lower()], strict=True)
    first_line = 1
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise InputError(
                f"{str(path)!r} is not a readable table: the row that begins on line {first_line} does not end "
                f"properly ({error}). A cell that begins with a quote must end with one"
            ) from None
        if cells is None:
            return
        first_line = reader.line_num + 1
        yield cells


def _parse_json_lines(file: Iterable[str]) -> Iterator[ParsedCells]:
    """Yield each JSON object as cells, or (None, message) for a line that is none; skip empty lines."""
    for line in filter(str.strip, file):
        try:
            cells = json.loads(line)
        except ValueError:
            cells = line.strip()
        if isinstance(cells, dict):
            yield cells, None
        else:
            yield None, f"the line is not a JSON object but {str(cells)[:60]!r}"


@contextmanager
def _translated_read_errors(path: Path) -> Iterator[None]:
    """Inside the `with`, raise missing files and wrong encodings as `InputError`."""
    try:
        yield
    except FileNotFoundError:
        raise InputError(f"there is no file {str(path)!r}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{str(path)!r} is not UTF-8 text (byte {error.start}): save it as UTF-8") from None


def _make_text_row(name: str, texts: tuple[str, ...]) -> DatasetRow:
    """Make a row of one text, or of a tuple of several; an empty text is an error of the row."""
    if not all(text.strip() for text in texts):
        return DatasetRow(name, error="the text is empty: there is nothing to explain")
    if len(texts) == 1:
        return DatasetRow(name, texts[0])
    return DatasetRow(name, texts)


def _compute_digest(files: list[Path], base: Path) -> str:
    """Compute the SHA-256 hash of the names, sizes and contents of files."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(base).as_posix()}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()
