"""Sets of inputs on the command line: folders, files with one input a line, tables, drawn textures, word lists."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from clearhead.cli import output as put
from clearhead.data.sources import (
    TEXT_SUFFIX,
    collect_raw_inputs,
    describe_unreadable_rows,
    open_dataset,
    parse_input_source,
    read_text,
)
from clearhead.errors import InputError

if TYPE_CHECKING:
    from clearhead.concepts.directions import LayerIndex

ItemT = TypeVar("ItemT")


def read_input_set(source: str) -> list[Any]:
    """Read a folder of images or texts, the lines of a .txt file, or the rows of a table."""
    from clearhead.concepts.concept_data import read_concept_folder

    path = Path(source)
    if path.is_dir():
        return read_concept_folder(path)
    if path.suffix == TEXT_SUFFIX:
        return read_text_lines([path])
    if parse_input_source(source).source_type != "data":
        raise InputError(
            f"{source!r} is not a set of inputs: use a folder, a .txt file with one input per line, or a table"
        )
    return collect_raw_inputs(source, open_dataset(source).iter_rows("text"))


def read_text_lines(paths: Sequence[Path]) -> list[str]:
    """Read the non-empty lines of text files, or of all text files in a folder."""
    lines: list[str] = []
    for path in paths:
        files = [path]
        if path.is_dir():
            files = sorted(path.glob(f"*{TEXT_SUFFIX}"))
        for file in files:
            lines += [line.strip() for line in read_text(file).splitlines() if line.strip()]
    if not lines:
        raise InputError(f"there is no text in {', '.join(map(str, paths))}")
    return lines


def read_concept_examples(
    concept_spec: str, random_inputs: Sequence[Any], count: int, seed: int
) -> tuple[str, list[Any]]:
    """Read a concept: NAME is a drawn texture, NAME=PATH an input set, NAME:word,word the random texts with a word."""
    from clearhead.concepts.concept_data import TEXTURE_GENERATORS, draw_textures, select_texts_with_words

    name, equals, path = concept_spec.partition("=")
    if equals:
        if not name or Path(name).name != name:
            raise InputError(
                f"--concept {concept_spec!r}: {name!r} cannot be part of a file name, but files are named after the "
                "concept"
            )
        return name, read_input_set(path)
    name, colon, word_list = concept_spec.partition(":")
    if colon:
        texts = [text for text in random_inputs if isinstance(text, str)]
        words = [word.strip() for word in word_list.split(",") if word.strip()]
        return name, select_texts_with_words(words, texts, count)
    if name not in TEXTURE_GENERATORS:
        raise InputError(
            f"--concept {concept_spec!r}: use a texture ({', '.join(TEXTURE_GENERATORS)}), NAME=FOLDER, NAME=FILE, or "
            "NAME:word,word,… for the texts of --random that contain one of these words"
        )
    return name, list(draw_textures(name, count, seed=seed))


def read_labelled_texts(inputs: str, column: str | None, label_column: str, limit: int) -> tuple[list[Any], list[str]]:
    """Read the texts of a table and their labels; rows without a text or a label are left out with a note."""
    if parse_input_source(inputs).source_type != "data" or Path(inputs).is_dir():
        raise InputError(
            f"--label-column names a column of a table, but {inputs!r} is not a table: use a CSV, TSV or JSONL file"
        )
    rows = list(islice(open_dataset(inputs, column, label_column).iter_rows("text"), limit))
    labelled = [row.raw_input for row in rows if row.error is None]
    problems = describe_unreadable_rows(rows)
    if not labelled:
        raise InputError(f"{inputs!r} has no row with a text and a label ({problems[0]})")
    if problems:
        put.print_note(f"{len(problems)} of {len(rows)} rows of {inputs!r} were skipped ({problems[0]})")
    return [text for text, _ in labelled], [label for _, label in labelled]


def select_evenly(items: Sequence[ItemT], limit: int | None) -> list[ItemT]:
    """Select at most `limit` items at even distances."""
    if limit is None or len(items) <= limit:
        return list(items)
    return [items[i * len(items) // limit] for i in range(limit)]


def parse_name_pair(text: str, option: str) -> tuple[str, str]:
    """Parse two words with a comma between them."""
    words = [word.strip() for word in text.split(",")]
    if len(words) != 2 or not all(words):
        raise InputError(f"{option} {text!r} must be two words separated by a comma, such as he,she")
    return words[0], words[1]


def parse_layer_list(text: str, option: str = "--layers") -> "list[LayerIndex]":
    """Parse layer indices, from 0 and negative from the end, or "embeddings" for the output of the embedding layer.

    >>> parse_layer_list("embeddings, 2, -1")
    ['embeddings', 2, -1]
    """
    from clearhead.concepts.directions import EMBEDDINGS

    layers = [layer.strip() for layer in text.split(",")]
    try:
        return [EMBEDDINGS if layer == EMBEDDINGS else int(layer) for layer in layers]
    except ValueError:
        raise InputError(
            f"{option} {text!r} must be layer indices separated by commas, such as 2,4,-1; {EMBEDDINGS} is the output "
            "of the embedding layer"
        ) from None
