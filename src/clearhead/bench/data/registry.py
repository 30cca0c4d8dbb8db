"""Registry of benchmark data sets: find a data set by name, its folder, and the files of a split."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

from clearhead.bench.data.base import BenchmarkDataset
from clearhead.errors import InputError, unknown_value_error

#: Environment variable with the folder of data sets, used if `root=` is not given.
DATA_ROOT_VARIABLE = "CLEARHEAD_DATA"
_SPLIT_ALIASES = ({"validation", "val", "valid", "dev"}, {"train", "training"}, {"test", "testing"})


@dataclass(frozen=True)
class DatasetSpec:
    """How one data set is found and opened.

    Attributes:
        name: Name of the data set.
        licence: Licence of the data, in words.
        download_hint: Where to get the data; part of error messages.
        folder_names: Folders below the data root that are searched, in this order.
        marker_files: Glob patterns; a folder that matches one of them holds the data set.
        open_dataset: Function of (spec, folder, split, **options).
        requires_folder: False if the data set can be opened without a local folder.
    """

    name: str
    licence: str
    download_hint: str
    folder_names: tuple[str, ...]
    marker_files: tuple[str, ...]
    open_dataset: Callable[..., BenchmarkDataset]
    requires_folder: bool = True


DATASET_REGISTRY: dict[str, DatasetSpec] = {}


def register_dataset(
    name: str,
    licence: str,
    download_hint: str,
    folder_names: Sequence[str],
    marker_files: Sequence[str],
    requires_folder: bool = True,
) -> Callable[[Callable[..., BenchmarkDataset]], Callable[..., BenchmarkDataset]]:
    """Decorator that adds a data set to `DATASET_REGISTRY`, from inside or outside the package.

    The decorated function takes (spec, folder, split, **options); its parameters after the third are the options of
    `load_benchmark_dataset`.

    Args:
        name: Name of the data set.
        licence: Licence of the data, in words.
        download_hint: Where to get the data; part of error messages.
        folder_names: Folders below the data root that are searched, in this order.
        marker_files: Glob patterns; a folder that matches one of them holds the data set.
        requires_folder: False if the data set can be opened without a local folder.

    Returns:
        The decorator.
    """

    def add(function: Callable[..., BenchmarkDataset]) -> Callable[..., BenchmarkDataset]:
        DATASET_REGISTRY[name] = DatasetSpec(
            name, licence, download_hint, tuple(folder_names), tuple(marker_files), function, requires_folder
        )
        return function

    return add


#: Data sets whose name can be followed by a colon and the value of this option.
_SUFFIX_OPTIONS = {"hub": "dataset", "known": "task", "coco": "each"}


def load_benchmark_dataset(
    name: str, split: str | None = None, root: str | Path | None = None, **options: Any
) -> BenchmarkDataset:
    """Load a benchmark data set by name, or your own table or folder of images by its path.

    Args:
        name: Name of a registered data set, `hub:OWNER/NAME` for the Hugging Face hub, `known:TASK` for a zoo task
            with ground-truth evidence, `coco:image` for COCO with one example per image, or a path.
        split: Name of the split; by default the first available one.
        root: Folder that contains data sets (or this one); by default the environment variable CLEARHEAD_DATA.
        **options: Options of the data set, such as `label=` of "pets".

    Returns:
        The data set.

    Raises:
        InputError: If the data set, the split or an option is unknown, or files are missing; the message says which
            files were expected where, and how to get them.

    Example:
        >>> data = load_benchmark_dataset("known:logic")  # doctest: +SKIP
        >>> data[0].input, data[0].label  # doctest: +SKIP
    """
    given_options = options
    spec_name, _, suffix = name.partition(":")
    if spec_name in _SUFFIX_OPTIONS and suffix:
        options = {_SUFFIX_OPTIONS[spec_name]: suffix, **options}
    elif name in DATASET_REGISTRY or not os.path.exists(name):
        spec_name = name
    else:
        spec_name = "folder" if os.path.isdir(name) else "table"
        root = name
    if spec_name not in DATASET_REGISTRY and (os.sep in name or Path(name).suffix):
        raise InputError(f"there is no file or folder {name!r}")
    if spec_name not in DATASET_REGISTRY or (spec_name == "hub" and not suffix):
        raise unknown_value_error(
            "data set", name, [*sorted(set(DATASET_REGISTRY) - {"hub"}), "hub:OWNER/NAME", "a path"]
        )
    spec = DATASET_REGISTRY[spec_name]
    accepted = list(signature(spec.open_dataset).parameters)[3:]
    for option in options:
        if option not in accepted:
            raise unknown_value_error(f"option of {spec_name}", option, accepted)
    dataset = spec.open_dataset(spec, _find_folder(spec, root), split, **options)
    return replace(dataset, open_other_split=partial(_reopen, name, root, given_options))


def _reopen(name: str, root: str | Path | None, options: Mapping[str, Any], split: str) -> BenchmarkDataset:
    """Load another split of a data set with the name, folder and options of the first call."""
    return load_benchmark_dataset(name, split, root, **options)


def _find_folder(spec: DatasetSpec, root: str | Path | None) -> Path | None:
    """Return the folder (or the single file) that holds the data set; None if it needs none."""
    if root is None:
        root = os.environ.get(DATA_ROOT_VARIABLE) or None
    if root is None:
        if not spec.requires_folder:
            return None
        raise InputError(
            f"the folder of {spec.name} is not known: set it with root= or the environment variable "
            f"{DATA_ROOT_VARIABLE}. How to get it: {spec.download_hint}"
        )
    base = Path(root)
    searched = [base / folder for folder in spec.folder_names] + [base]
    for folder in searched:
        if folder.is_dir() and any(next(folder.glob(marker), None) for marker in spec.marker_files):
            return folder
    if base.is_file() and any(base.match(marker) for marker in spec.marker_files):
        return base
    if not spec.requires_folder:
        return None
    raise missing_files_error(spec, " or ".join(spec.marker_files), searched)


def missing_files_error(spec: DatasetSpec, missing_names: str, searched_folders: Sequence[Path]) -> InputError:
    """Build the error for missing files: what was searched, where, and how to get it."""
    listed = ", ".join(repr(str(folder)) for folder in searched_folders)
    return InputError(f"{spec.name}: found no {missing_names} in {listed}. How to get it: {spec.download_hint}")


def choose_split(name: str, requested: str | None, available: Sequence[str]) -> str:
    """Return the requested split (`val`, `dev` and `validation` are synonyms), or the first available one.

    >>> choose_split("coco", "validation", ["train2017", "val2017"])
    'val2017'
    """
    if requested is None and available:
        return available[0]
    synonyms = next((aliases for aliases in _SPLIT_ALIASES if requested in aliases), {str(requested)})
    for candidate in (requested, *sorted(synonyms)):
        if candidate in available:
            return str(candidate)
    for split in available:
        if split.rstrip("0123456789") in synonyms:
            return split
    problem = unknown_value_error("split", requested, available)
    raise InputError(f"{name}: {problem}")


def find_split_files(folder: Path, candidates: Sequence[tuple[str, str]]) -> dict[str, Path]:
    """Return the existing file of each split, from (split, file name) in order of preference."""
    files: dict[str, Path] = {}
    for split, name in candidates:
        if split not in files and (folder / name).is_file():
            files[split] = folder / name
    return files


def read_lines(path: Path) -> list[str]:
    """Read the non-empty lines of a text file.

    Older data sets are not UTF-8; their byte 0x85 is an ellipsis and not a line end.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise InputError(
            f"there is no file {str(path)!r}: check that the data set has been unpacked completely"
        ) from None
    for encoding in ("utf-8-sig", "cp1252", "latin-1"):
        try:
            text = content.decode(encoding)
            break
        except UnicodeDecodeError:
            continue
    return [line for line in text.replace("\r\n", "\n").split("\n") if line.strip()]


def missing_package_error(package: str, dataset_name: str) -> InputError:
    """Build the error for an optional package that is not installed."""
    return InputError(f"{dataset_name} needs the package {package}, which is not installed: pip install {package}")
