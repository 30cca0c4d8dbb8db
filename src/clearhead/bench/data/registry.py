"""Finding data sets by name: the folder that holds one, the files of a split, and what to say if they are not there."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

from clearhead.bench.data.base import DataSet
from clearhead.errors import InputError, unknown

#: Where data lie if `root=` does not say.
ROOT = "CLEARHEAD_DATA"
_SAME = ({"validation", "val", "valid", "dev"}, {"train", "training"}, {"test", "testing"})


@dataclass(frozen=True)
class Reader:
    """How one data set is read. It lies in the first of `folders` that holds one of `marks`; `get` says where from."""

    name: str
    licence: str
    get: str
    folders: tuple[str, ...]
    marks: tuple[str, ...]
    open: Callable[..., DataSet]
    must_exist: bool = True


READERS: dict[str, Reader] = {}


def register(
    name: str, licence: str, get: str, folders: Sequence[str], marks: Sequence[str], must_exist: bool = True
) -> Callable[[Callable[..., DataSet]], Callable[..., DataSet]]:
    """Add a data set, from inside or outside the package: a function of (reader, folder, split, options)."""

    def add(function: Callable[..., DataSet]) -> Callable[..., DataSet]:
        READERS[name] = Reader(name, licence, get, tuple(folders), tuple(marks), function, must_exist)
        return function

    return add


def read(name: str, split: str | None = None, root: str | Path | None = None, **options: Any) -> DataSet:
    """A data set by name, or your own table or folder of pictures by its path.

    `root` is the folder that holds data sets (or this one); without it the environment variable CLEARHEAD_DATA says.
    Hub data sets are named `hub:OWNER/NAME`.
    """
    kind, _, dataset = name.partition(":")
    if kind == "hub":
        options = {"dataset": dataset, **options}
    elif name in READERS or not os.path.exists(name):
        kind = name
    else:
        kind, root = ("folder" if os.path.isdir(name) else "table"), name
    if kind not in READERS and (os.sep in name or Path(name).suffix):
        raise InputError(f"there is no file or folder {name!r}")
    if kind not in READERS or (kind == "hub" and not dataset):
        raise unknown("data set", name, [*sorted(set(READERS) - {"hub"}), "hub:OWNER/NAME", "a path"])
    reader = READERS[kind]
    accepted = list(signature(reader.open).parameters)[3:]
    for option in options:
        if option not in accepted:
            raise unknown(f"option of {kind}", option, accepted)
    data = reader.open(reader, _folder(reader, root), split, **options)
    return replace(data, reopen=partial(_again, name, root, options))


def _again(name: str, root: str | Path | None, options: Mapping[str, Any], split: str) -> DataSet:
    return read(name, split, root, **{key: value for key, value in options.items() if key != "dataset"})


def _folder(reader: Reader, root: str | Path | None) -> Path | None:
    given = root if root is not None else os.environ.get(ROOT) or None
    if given is None:
        if not reader.must_exist:
            return None
        raise InputError(
            f"where is {reader.name}? Say which folder holds it: root=, or the environment variable {ROOT}. "
            f"How to get it: {reader.get}"
        )
    base = Path(given)
    tried = [base / folder for folder in reader.folders] + [base]
    for folder in tried:
        if folder.is_dir() and any(next(folder.glob(mark), None) for mark in reader.marks):
            return folder
    if base.is_file() and any(base.match(mark) for mark in reader.marks):
        return base
    if not reader.must_exist:
        return None
    raise missing(reader, " or ".join(reader.marks), tried)


def missing(reader: Reader, what: str, where: Sequence[Path]) -> InputError:
    """What was looked for, where, and how to get it."""
    listed = ", ".join(repr(str(place)) for place in where)
    return InputError(f"{reader.name}: found no {what} in {listed}. How to get it: {reader.get}")


def choose(name: str, wanted: str | None, there: Sequence[str]) -> str:
    """The split that was asked for (`val`, `dev` and `validation` mean the same), or the first.

    >>> choose("coco", "validation", ["train2017", "val2017"])
    'val2017'
    """
    if wanted is None and there:
        return there[0]
    names = next((same for same in _SAME if wanted in same), {str(wanted)})
    for candidate in (wanted, *sorted(names)):
        if candidate in there:
            return str(candidate)
    for split in there:
        if split.rstrip("0123456789") in names:
            return split
    problem = unknown("split", wanted, there)
    raise InputError(f"{name}: {problem}")


def files_there(folder: Path, names: Sequence[tuple[str, str]]) -> dict[str, Path]:
    """Which splits are there, given (split, file name) in order of preference."""
    found: dict[str, Path] = {}
    for split, name in names:
        if split not in found and (folder / name).is_file():
            found[split] = folder / name
    return found


def lines(path: Path) -> list[str]:
    """The lines of a text file. Older data sets are not UTF-8; their 0x85 is an ellipsis and ends no line."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"there is no file {str(path)!r}: is the data set unpacked completely?") from None
    for encoding in ("utf-8-sig", "cp1252", "latin-1"):
        try:
            text = content.decode(encoding)
            break
        except UnicodeDecodeError:
            continue
    return [line for line in text.replace("\r\n", "\n").split("\n") if line.strip()]


def needs(package: str, what: str) -> InputError:
    return InputError(f"{what} is read with the package {package}, which is not installed: pip install {package}")
