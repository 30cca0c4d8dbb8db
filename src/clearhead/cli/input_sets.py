"""Sets of inputs as they are named on the command line: folders, files of lines, tables, drawn textures, word lists."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from clearhead.cli import output as put
from clearhead.data.sources import TEXT, open_dataset, read_text, recognise, unread, whole
from clearhead.errors import InputError

T = TypeVar("T")


def read_set(words: str) -> list[Any]:
    """A folder of pictures or of texts, the lines of a .txt file, the rows of a table."""
    from clearhead.concepts.concept_data import from_folder

    path = Path(words)
    if path.is_dir():
        return from_folder(path)
    if path.suffix == TEXT:
        return read_texts([path])
    if recognise(words).kind != "data":
        raise InputError(f"{words!r} is no set of inputs: give a folder, a .txt file with one a line, or a table")
    return whole(words, open_dataset(words).rows("text"))


def read_texts(paths: Sequence[Path]) -> list[str]:
    """The lines of text files that are not empty."""
    found: list[str] = []
    for path in paths:
        files = sorted(path.glob(f"*{TEXT}")) if path.is_dir() else [path]
        for file in files:
            found += [line.strip() for line in read_text(file).splitlines() if line.strip()]
    if not found:
        raise InputError(f"there is no text in {', '.join(map(str, paths))}")
    return found


def read_concept(words: str, others: Sequence[Any], count: int, seed: int) -> tuple[str, list[Any]]:
    """NAME: a drawn texture; NAME=PATH: a set of inputs; NAME:word,word: those of the other texts that hold one."""
    from clearhead.concepts.concept_data import TEXTURES, textures, with_words

    name, equals, path = words.partition("=")
    if equals:
        if not name or Path(name).name != name:
            raise InputError(f"--concept {words!r}: {name!r} is no name; files are named after it")
        return name, read_set(path)
    name, colon, listed = words.partition(":")
    if colon:
        texts = [one for one in others if isinstance(one, str)]
        return name, with_words([word.strip() for word in listed.split(",") if word.strip()], texts, count)
    if name not in TEXTURES:
        raise InputError(
            f"--concept {words!r}: give a texture ({', '.join(TEXTURES)}), NAME=FOLDER, NAME=FILE, or NAME:word,word,… "
            "for the texts of --random that hold one of these words"
        )
    return name, list(textures(name, count, seed=seed))


def read_labelled(inputs: str, column: str | None, label: str, limit: int) -> tuple[list[Any], list[str]]:
    """The texts of a table and their labels, of the rows that have both."""
    if recognise(inputs).kind != "data" or Path(inputs).is_dir():
        raise InputError(f"--label is a column of a table, and {inputs!r} is none: give a CSV, TSV or JSONL file")
    rows = list(islice(open_dataset(inputs, column, label).rows("text"), limit))
    both, left_out = [row.raw for row in rows if row.problem is None], unread(rows)
    if not both:
        raise InputError(f"{inputs!r} has no row with a text and a label ({left_out[0]})")
    if left_out:
        put.note(f"{len(left_out)} of {len(rows)} rows of {inputs!r} are left out ({left_out[0]})")
    return [text for text, _ in both], [own for _, own in both]


def first_of_each(some: Sequence[T], limit: int | None) -> list[T]:
    """So many of them, evenly from first to last."""
    if limit is None or len(some) <= limit:
        return list(some)
    return [some[i * len(some) // limit] for i in range(limit)]


def two_names(words: str, option: str) -> tuple[str, str]:
    parts = [part.strip() for part in words.split(",")]
    if len(parts) != 2 or not all(parts):
        raise InputError(f"{option} {words!r} must be two words with a comma between them, such as he,she")
    return parts[0], parts[1]


def layer_numbers(words: str, option: str = "--layers") -> list[int]:
    try:
        return [int(word) for word in words.split(",")]
    except ValueError:
        raise InputError(f"{option} {words!r} must be numbers with commas between them, such as 2,4,-1") from None
