"""What a person names – words, a picture, a table, a folder – as inputs that can be explained, read row by row."""

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

from clearhead.errors import ClearheadWarning, InputError, unknown

SOUNDS = (".wav",)
PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
TABLES = {".csv": ",", ".tsv": "\t"}
LINES = (".jsonl", ".ndjson")
TEXT = ".txt"
#: Pictures that scikit-image carries with it, by name.
NAMED_PICTURES = ("astronaut", "camera", "cat", "chelsea", "coffee", "coins", "hubble_deep_field", "retina", "rocket")

#: A row by column, or why it is no row of its table.
Cells = tuple[dict[str, Any] | None, str | None]

csv.field_size_limit(2**31 - 1)  # a long text is a long cell


@dataclass(frozen=True)
class Given:
    """One input as it was named: a text (perhaps a picture's name), a file with one, a picture, a sound, or data."""

    kind: Literal["text", "text file", "picture", "named picture", "sound", "data"]
    words: str

    @property
    def stream(self) -> str:
        return {"picture": "image", "named picture": "image", "sound": "audio"}.get(self.kind, "text")

    def text(self) -> str:
        return read_text(Path(self.words)) if self.kind == "text file" else self.words

    def sound(self) -> Any:
        return read_sound(Path(self.words))

    def picture(self) -> Any:
        if self.kind == "picture":
            return Path(self.words)
        if find_spec("skimage") is None:
            raise InputError(f"the picture {self.words!r} comes with scikit-image: pip install 'clearhead[vision]'")
        import skimage.data

        return getattr(skimage.data, self.words)()


def recognise(words: str) -> Given:
    """What an input is. Files that exist and names that end like files are files; everything else is a text.

    >>> recognise("I like the movie").kind, recognise("chelsea").kind
    ('text', 'named picture')
    """
    suffix = Path(words).suffix.lower()
    known = (*PICTURES, *SOUNDS, *TABLES, *LINES, TEXT)
    if os.path.isdir(words):
        return Given("data", words)
    if os.path.isfile(words):
        if suffix in PICTURES:
            return Given("picture", words)
        if suffix in SOUNDS:
            return Given("sound", words)
        if suffix in TABLES or suffix in LINES:
            return Given("data", words)
        if suffix == ".safetensors":
            raise InputError(
                f"{words!r} is a file of tensors: if it is a saved explanation, use clearhead show {words}"
            )
        if suffix == TEXT:
            return Given("text file", words)
        if suffix:
            raise InputError(
                f"{words!r} is a file that explain cannot read: it reads {', '.join(known)} and folders. "
                f"If you mean the words themselves, say --text {words!r}"
            )
        return Given("text", words)
    like_a_path = os.sep in words or len(words.split()) == 1
    if suffix in known and like_a_path:
        raise InputError(f"there is no file {words!r}. If you mean the words themselves, say --text {words!r}")
    return Given("named picture" if words in NAMED_PICTURES else "text", words)


def as_picture(words: str) -> Given:
    """What was said to be a picture: a file, or one by name."""
    if words in NAMED_PICTURES and not os.path.exists(words):
        return Given("named picture", words)
    if not os.path.isfile(words):
        raise InputError(f"there is no picture {words!r}: give a file, or one of {', '.join(NAMED_PICTURES)}")
    return Given("picture", words)


def as_sound(words: str) -> Given:
    if not os.path.isfile(words):
        raise InputError(f"there is no sound {words!r}: give a file that ends in {', '.join(SOUNDS)}")
    return Given("sound", words)


def read_sound(path: Path) -> tuple[Any, int]:
    """The waveform of a sound, its channels mixed into one, and its rate."""
    import numpy as np
    from scipy.io import wavfile

    try:
        rate, wave = wavfile.read(path)
    except (ValueError, EOFError, struct.error) as problem:
        raise InputError(f"{str(path)!r} is not a sound that can be read ({problem}): save it as a WAV file") from None
    if wave.dtype == np.uint8:  # bytes are counted from silence at 128
        wave = (wave.astype(np.float32) - 128) / 128
    elif wave.dtype.kind == "i":
        wave = wave.astype(np.float32) / -float(np.iinfo(wave.dtype).min)
    if wave.ndim == 1 or wave.shape[1] == 1:
        return wave.reshape(-1), int(rate)
    told = f"{str(path)!r} has {wave.shape[1]} channels, and their mean is explained"
    warnings.warn(told, ClearheadWarning, stacklevel=2)
    return wave.mean(axis=1), int(rate)


@dataclass(frozen=True)
class Row:
    """One input of a data set; `problem` says why it cannot be read."""

    id: str
    raw: Any = None
    problem: str | None = None


@dataclass(frozen=True)
class Dataset:
    """A table or a folder. Rows are read when they are needed; `digest` is of all that was there at the beginning."""

    path: Path
    kind: Literal["table", "lines", "texts", "pictures"]
    columns: tuple[str, ...]
    count: int
    digest: str
    #: Whether the last column holds pictures beside the texts.
    with_pictures: bool = False

    @property
    def stream(self) -> str:
        return "image" if self.kind == "pictures" else "text"

    def rows(self, *takes: str) -> Iterator[Row]:
        """All rows in order, for a model that takes these; pictures in a table are paths, seen from its folder."""
        if self.kind in ("texts", "pictures"):
            for file in _files(self.path, (TEXT,) if self.kind == "texts" else PICTURES):
                yield self._row(file.relative_to(self.path).as_posix(), file)
            return
        for row in _cells(self.path):
            yield self._of_cells(row, takes)

    def _row(self, name: str, file: Path) -> Row:
        if self.kind == "pictures":
            return Row(name, file)
        try:
            return _checked(name, (read_text(file),))
        except (InputError, OSError) as problem:
            return Row(name, problem=str(problem))

    def _of_cells(self, row: Row, takes: tuple[str, ...]) -> Row:
        if row.problem is not None:
            return row
        values = [row.raw.get(column) for column in self.columns]
        for column, value in zip(self.columns, values, strict=True):
            if not isinstance(value, str):
                return Row(row.id, problem=f"column {column!r} holds no text but {value!r}")
        if takes == ("image",):
            return Row(row.id, self.path.parent / values[0])
        if not self.with_pictures:
            return _checked(row.id, tuple(values))
        from clearhead.adapters.base import Given as Streams

        text = _checked(row.id, tuple(values[:-1]))
        both = Streams(text=text.raw, image=self.path.parent / values[-1])
        return text if text.problem else Row(row.id, both)


def open_dataset(
    path: str | Path, column: str | None = None, pair_column: str | None = None, image_column: str | None = None
) -> Dataset:
    """Look a table or a folder over once: its columns, how many rows, what exactly it holds."""
    path = Path(path)
    if path.is_dir():
        if column or pair_column or image_column:
            raise InputError(f"{str(path)!r} is a folder, which has no columns: leave out --column")
        return _folder(path)
    with _readable(path):
        count = sum(1 for _ in _cells(path))
        if not count:
            raise InputError(f"{str(path)!r} is empty: give one input a row, in a table below the names of its columns")
    columns = _columns(path, column, pair_column, image_column)
    kind: Literal["table", "lines"] = "table" if path.suffix.lower() in TABLES else "lines"
    return Dataset(path, kind, columns, count, _digest([path], path.parent), image_column is not None)


def whole(path: str | Path, rows: Iterable[Row]) -> list[Any]:
    """What the rows of a data set hold, where each of them counts: those that cannot be read are told, not left out."""
    found = list(rows)
    if bad := unread(found):
        more = f"; and {len(bad) - 3} more" if len(bad) > 3 else ""
        raise InputError(
            f"{len(bad)} of {len(found)} rows of {str(path)!r} cannot be read, so mend them or take them out: "
            f"{'; '.join(bad[:3])}{more}"
        )
    return [row.raw for row in found]


def unread(rows: Iterable[Row]) -> list[str]:
    """Which of the rows cannot be read, and why."""
    return [f"row {row.id}: {row.problem}" for row in rows if row.problem is not None]


def cells_of(path: str | Path, column: str, limit: int | None = None) -> list[Any]:
    """One column of a table as it stands there, such as the labels of its rows."""
    path = Path(path)
    _columns(path, column)
    with _readable(path):
        return whole(path, (_cell(row, column) for row in islice(_cells(path), limit)))


def columns_of(path: Path) -> list[str]:
    """Those that the head of a table names, or the first line of JSON that can be read."""
    with _readable(path):
        if path.suffix.lower() not in TABLES:
            return next((list(row.raw) for row in _cells(path) if row.problem is None), [])
        with path.open(encoding="utf-8-sig", newline="") as file:
            return next((cells for cells in _split(file, path) if cells), [])


def read_text(path: Path) -> str:
    with _readable(path):
        return path.read_text(encoding="utf-8-sig")


def _folder(path: Path) -> Dataset:
    texts, pictures = (_files(path, suffixes) for suffixes in ((TEXT,), PICTURES))
    if bool(texts) == bool(pictures):
        held = f"{len(texts)} texts and {len(pictures)} pictures" if texts else "no texts (.txt) and no pictures"
        raise InputError(
            f"the folder {str(path)!r} holds {held}: give one that holds one kind. "
            f"If you mean the word itself, say --text {str(path)!r}"
        )
    files = texts or pictures
    return Dataset(path, "texts" if texts else "pictures", (), len(files), _digest(files, path))


def _files(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    found = [file for file in folder.rglob("*") if file.suffix.lower() in suffixes and file.is_file()]
    seen = [file for file in found if not any(p.startswith(".") for p in file.relative_to(folder).parts)]
    return sorted(seen, key=lambda file: file.relative_to(folder).as_posix())


def _columns(path: Path, column: str | None, *others: str | None) -> tuple[str, ...]:
    there = columns_of(path)
    own = ("text" if "text" in there or len(there) != 1 else there[0]) if column is None else column
    wanted = (own, *(other for other in others if other is not None))
    for name in wanted:
        if name not in there:
            hint = ". Choose with --column" if column is None and name == own else ""
            raise InputError(f"{path.name}: {unknown('column', name, there)}{hint}")
        if there.count(name) > 1:
            raise InputError(f"{path.name}: {there.count(name)} columns are called {name!r}: give each its own name")
    return wanted


def _cell(row: Row, column: str) -> Row:
    if row.problem is not None:
        return row
    if row.raw.get(column) in (None, ""):
        return Row(row.id, problem=f"it has no {column}: give every row one")
    return Row(row.id, row.raw[column])


def _cells(path: Path) -> Iterator[Row]:
    """Each row as a mapping from column to cell."""
    suffix = path.suffix.lower()
    if suffix not in (*TABLES, *LINES) and path.exists():
        raise InputError(f"{str(path)!r} is no table: give a file that ends in {', '.join((*TABLES, *LINES))}")
    with path.open(encoding="utf-8-sig", newline="") as file:
        read = _table(file, path) if suffix in TABLES else _lines(file)
        for number, (cells, problem) in enumerate(read, 1):
            yield Row(f"{number:06d}", cells, problem)


def _table(file: Iterable[str], path: Path) -> Iterator[Cells]:
    """A row of another length is no row of the table: a comma may stand in a text that no quotes are around."""
    rows = (cells for cells in _split(file, path) if cells)
    names = next(rows, [])
    for cells in rows:
        if len(cells) == len(names):
            yield dict(zip(names, cells, strict=True)), None
        else:
            counted = f"{len(cells)} in place of {len(names)} cells"
            yield None, f"{counted}: put quotes around a text that holds what stands between cells"


def _split(file: Iterable[str], path: Path) -> Iterator[list[str]]:
    reader = csv.reader(file, delimiter=TABLES[path.suffix.lower()], strict=True)
    begins = 1
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as problem:
            raise InputError(
                f"{str(path)!r} is not a table that can be read: the row that begins in line {begins} has no end that "
                f"fits ({problem}). A cell that begins with a quote must end with one"
            ) from None
        if cells is None:
            return
        begins = reader.line_num + 1
        yield cells


def _lines(file: Iterable[str]) -> Iterator[Cells]:
    for line in filter(str.strip, file):
        try:
            cells = json.loads(line)
        except ValueError:
            cells = line.strip()
        is_row = isinstance(cells, dict)
        yield (cells, None) if is_row else (None, f"the line is not a JSON object but {str(cells)[:60]!r}")


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise InputError(f"there is no file {str(path)!r}") from None
    except UnicodeDecodeError as problem:
        raise InputError(f"{str(path)!r} is not UTF-8 text (byte {problem.start}): save it as UTF-8") from None


def _checked(name: str, texts: tuple[str, ...]) -> Row:
    if not all(text.strip() for text in texts):
        return Row(name, problem="the text is empty: there is nothing to explain")
    return Row(name, texts[0] if len(texts) == 1 else texts)


def _digest(files: list[Path], base: Path) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(base).as_posix()}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()
