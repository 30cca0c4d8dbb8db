"""Data sets of the Hugging Face hub by name, through the package `datasets`; and tables of your own."""

from collections.abc import Sequence
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

from clearhead.adapters.readers.image import in_colour
from clearhead.bench.data.base import DataSet, Example
from clearhead.bench.data.registry import Reader, choose, needs, register
from clearhead.data.sources import Row, open_dataset
from clearhead.errors import InputError, unknown

#: Columns that hold the input, in the order in which they are looked for.
INPUTS: tuple[tuple[str, ...], ...] = (
    ("premise", "hypothesis"),
    ("question", "sentence"),
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("text",),
    ("sentence",),
    ("content",),
    ("review",),
    ("image",),
    ("img",),
)
_USUAL = ("validation", "test", "train")
LABELS = ("label", "labels", "coarse_label", "fine_label")


@register(
    "hub",
    licence="see the data set's card",
    get="on a machine with a network, datasets.load_dataset(NAME) keeps it in ~/.cache/huggingface; copy that folder",
    folders=(),
    marks=(),
    must_exist=False,
)
def hub(
    reader: Reader,
    folder: Path | None,
    split: str | None,
    dataset: str,
    config: str | None = None,
    revision: str | None = None,
    columns: Sequence[str] | None = None,
    label_column: str | None = None,
) -> DataSet:
    """`columns` name the input (one, or two for a pair) and `label_column` the class, where the usual names do not."""
    whole = _loaded(reader, dataset, config, revision)
    ranked = sorted(whole, key=lambda name: _USUAL.index(name) if name in _USUAL else len(_USUAL))
    split = choose(dataset, split, ranked)
    part = whole[split]
    there = list(part.column_names)
    for name in [*(columns or ()), *([label_column] if label_column else ())]:
        if name not in there:
            raise unknown(f"column of {dataset}", name, there)
    inputs = tuple(columns or next((names for names in INPUTS if set(names) <= set(there)), ()))
    if not inputs:
        raise InputError(f"{dataset} has the columns {', '.join(there)}: say which to explain, columns=[…]")
    label = label_column or next((name for name in LABELS if name in there), None)
    labels = tuple(getattr(part.features[label], "names", None) or ()) if label else ()
    found = bool(label and not labels and len(part) and isinstance(part[0][label], str))
    if found:
        labels = tuple(sorted({word for one in whole.values() for word in one[label]}))  # one index in all splits
    licence = str(getattr(part.info, "license", "") or f"see https://huggingface.co/datasets/{dataset}")
    rows = partial(_numbers, reader, dataset, config, revision, split)
    make = partial(_example, (reader, dataset, config, revision, split), inputs, label, labels)
    return DataSet(f"hub:{dataset}", split, licence, labels, rows, make, tuple(ranked), by_alphabet=found)


@lru_cache(maxsize=4)
def _loaded(reader: Reader, dataset: str, config: str | None, revision: str | None) -> Any:
    try:
        datasets = import_module("datasets")  # not a dependency
    except ImportError:
        raise needs("datasets", f"hub:{dataset}") from None
    try:
        whole = datasets.load_dataset(dataset, config, revision=revision)
    except Exception as problem:  # the hub, the cache and the files each fail in their own way
        said = str(problem).strip().partition("\n")[0]
        raise InputError(f"hub:{dataset} cannot be loaded ({said}). How to get it: {reader.get}") from None
    return whole if isinstance(whole, dict) else {"all": whole}


def _numbers(reader: Reader, dataset: str, config: str | None, revision: str | None, split: str) -> range:
    return range(len(_loaded(reader, dataset, config, revision)[split]))


def _example(
    where: tuple[Reader, str, str | None, str | None, str],
    inputs: tuple[str, ...],
    label: str | None,
    labels: tuple[str, ...],
    place: int,
) -> Example:
    *loaded, split = where
    row = _loaded(*loaded)[split][place]
    found = tuple(row[name] for name in inputs)
    given = row[label] if label else None
    if isinstance(given, str):
        given = labels.index(given)
    if isinstance(given, int) and given < 0:  # the hub's way to hide a test set's labels
        given = None
    raw = found if len(found) > 1 else found[0]
    return Example(f"{split}-{place:06d}", in_colour(raw) if hasattr(raw, "convert") else raw, given)


@register(
    "table",
    licence="your own data: as you know it",
    get="give the path of a .csv, .tsv or .jsonl file",
    folders=(),
    marks=("*.csv", "*.tsv", "*.jsonl", "*.ndjson"),
)
def table(
    reader: Reader, path: Path, split: str | None, column: str | None = None, label_column: str | None = None
) -> DataSet:
    """The rows that the command line reads, with a column of labels; without one, labels are unknown."""
    if path.is_dir():
        raise InputError(f"{str(path)!r} is a folder: give the path of one table in it")
    opened = open_dataset(path, column, label_column)
    split = choose(reader.name, split, ["all"])
    rows = list(opened.rows("text"))
    given = {row.raw[1] for row in rows if label_column and row.problem is None}
    numbers = all(str(word).lstrip("-").isdigit() for word in given)
    labels = tuple(sorted(given, key=int) if numbers else sorted(given))
    make = partial(_of_row, labels)
    by = not numbers
    return DataSet(path.name, split, reader.licence, labels, partial(list, rows), make, ("all",), by_alphabet=by)


def _of_row(labels: tuple[str, ...], row: Row) -> Example:
    if row.problem is not None:
        raise InputError(f"row {row.id}: {row.problem}")
    if not labels:
        return Example(row.id, row.raw)
    text, label = row.raw
    return Example(row.id, text, labels.index(label))
