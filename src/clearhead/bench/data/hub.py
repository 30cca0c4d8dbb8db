"""Data sets of the Hugging Face hub, loaded with the package `datasets`, and tables of your own."""

from collections.abc import Sequence
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

from clearhead.adapters.readers.image import convert_to_rgb
from clearhead.bench.data.base import BenchmarkDataset, Example
from clearhead.bench.data.registry import DatasetSpec, choose_split, missing_package_error, register_dataset
from clearhead.data.sources import DatasetRow, open_dataset
from clearhead.errors import InputError, unknown_value_error

#: Usual names of input columns, in the order in which they are tried.
INPUT_COLUMNS: tuple[tuple[str, ...], ...] = (
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
_PREFERRED_SPLITS = ("validation", "test", "train")
LABEL_COLUMNS = ("label", "labels", "coarse_label", "fine_label")


@register_dataset(
    "hub",
    licence="see the data set's card",
    download_hint="on a machine with a network, datasets.load_dataset(NAME) stores it in ~/.cache/huggingface; "
    "copy that folder",
    folder_names=(),
    marker_files=(),
    requires_folder=False,
)
def open_hub_dataset(
    spec: DatasetSpec,
    folder: Path | None,
    split: str | None,
    dataset: str,
    config: str | None = None,
    revision: str | None = None,
    columns: Sequence[str] | None = None,
    label_column: str | None = None,
) -> BenchmarkDataset:
    """Open a hub data set; `columns` name the input (two for a pair) and `label_column` the class, if unusual."""
    splits = _load_hub_splits(spec, dataset, config, revision)
    split_names = [name for name in _PREFERRED_SPLITS if name in splits]
    split_names += [name for name in splits if name not in _PREFERRED_SPLITS]
    split = choose_split(dataset, split, split_names)
    table = splits[split]
    column_names = list(table.column_names)
    for name in [*(columns or ()), *([label_column] if label_column else ())]:
        if name not in column_names:
            raise unknown_value_error(f"column of {dataset}", name, column_names)
    input_columns = tuple(columns or next((names for names in INPUT_COLUMNS if set(names) <= set(column_names)), ()))
    if not input_columns:
        raise InputError(
            f"{dataset} has the columns {', '.join(column_names)}: choose those to explain with columns=[…]"
        )
    label_column = label_column or next((name for name in LABEL_COLUMNS if name in column_names), None)
    labels: tuple[str, ...] = ()
    if label_column:
        labels = tuple(getattr(table.features[label_column], "names", None) or ())
    has_text_labels = bool(label_column and not labels and len(table) and isinstance(table[0][label_column], str))
    if has_text_labels:  # collected from all splits, so that a label has the same index in each
        labels = tuple(sorted({label for other_table in splits.values() for label in other_table[label_column]}))
    licence = str(getattr(table.info, "license", "") or f"see https://huggingface.co/datasets/{dataset}")
    source = (spec, dataset, config, revision, split)
    return BenchmarkDataset(
        f"hub:{dataset}",
        split,
        licence,
        labels,
        partial(_list_indices, *source),
        partial(_make_example, source, input_columns, label_column, labels),
        tuple(split_names),
        label_ids_are_arbitrary=has_text_labels,
    )


@lru_cache(maxsize=4)
def _load_hub_splits(spec: DatasetSpec, dataset: str, config: str | None, revision: str | None) -> Any:
    """Load and cache all splits of a hub data set; one without splits becomes the split "all"."""
    try:
        datasets = import_module("datasets")  # not a dependency
    except ImportError:
        raise missing_package_error("datasets", f"hub:{dataset}") from None
    try:
        loaded = datasets.load_dataset(dataset, config, revision=revision)
    except Exception as problem:  # the hub, the cache and the files raise different exception types
        reason = str(problem).strip().partition("\n")[0]
        raise InputError(f"hub:{dataset} cannot be loaded ({reason}). How to get it: {spec.download_hint}") from None
    return loaded if isinstance(loaded, dict) else {"all": loaded}


def _list_indices(spec: DatasetSpec, dataset: str, config: str | None, revision: str | None, split: str) -> range:
    """Return the row indices of a split; `_make_example` reads the rows themselves."""
    return range(len(_load_hub_splits(spec, dataset, config, revision)[split]))


def _make_example(
    source: tuple[DatasetSpec, str, str | None, str | None, str],
    input_columns: tuple[str, ...],
    label_column: str | None,
    labels: tuple[str, ...],
    index: int,
) -> Example:
    """Create an example from row `index`; several input columns make a tuple, a negative label means none."""
    *source_without_split, split = source
    row = _load_hub_splits(*source_without_split)[split][index]
    label = row[label_column] if label_column else None
    if isinstance(label, str):
        label = labels.index(label)
    if isinstance(label, int) and label < 0:  # −1 marks the hidden labels of a test set
        label = None
    raw_input: Any = row[input_columns[0]]
    if len(input_columns) > 1:
        raw_input = tuple(row[name] for name in input_columns)
    if hasattr(raw_input, "convert"):
        raw_input = convert_to_rgb(raw_input)
    return Example(f"{split}-{index:06d}", raw_input, label)


@register_dataset(
    "table",
    licence="your own data: as you know it",
    download_hint="pass the path of a .csv, .tsv or .jsonl file",
    folder_names=(),
    marker_files=("*.csv", "*.tsv", "*.jsonl", "*.ndjson"),
)
def open_table_dataset(
    spec: DatasetSpec, path: Path, split: str | None, column: str | None = None, label_column: str | None = None
) -> BenchmarkDataset:
    """Open a table file; without `label_column`, the labels are unknown."""
    if path.is_dir():
        raise InputError(f"{str(path)!r} is a folder: pass the path of one table in it")
    source = open_dataset(path, column, label_column)
    split = choose_split(spec.name, split, ["all"])
    rows = list(source.iter_rows("text"))
    label_values = {row.raw_input[1] for row in rows if label_column and row.error is None}
    has_numeric_labels = all(str(value).lstrip("-").isdigit() for value in label_values)
    labels = tuple(sorted(label_values, key=int) if has_numeric_labels else sorted(label_values))
    return BenchmarkDataset(
        path.name,
        split,
        spec.licence,
        labels,
        partial(list, rows),
        partial(_make_row_example, labels),
        ("all",),
        label_ids_are_arbitrary=not has_numeric_labels,
    )


def _make_row_example(labels: tuple[str, ...], row: DatasetRow) -> Example:
    """Create an example from a row of a local table; a row that could not be read raises `InputError`."""
    if row.error is not None:
        raise InputError(f"row {row.id}: {row.error}")
    if not labels:
        return Example(row.id, row.raw_input)
    text, label = row.raw_input
    return Example(row.id, text, labels.index(label))
