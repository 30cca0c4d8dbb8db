"""ImageNet-Segmentation: 4,276 pictures with the pixels of their object (Guillaumin et al. 2014), one HDF5 file."""

import os
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from clearhead.bench.data.base import DataSet, Example
from clearhead.bench.data.evidence import Mask
from clearhead.bench.data.imagenet import names_of_ids
from clearhead.bench.data.registry import Reader, choose, needs, register
from clearhead.errors import InputError

FILE = "gtsegs_ijcv.mat"


@register(
    "imagenet-segmentation",
    licence="ImageNet research terms: non-commercial research and education only (masks: Guillaumin et al. 2014)",
    get=f"http://calvin-vision.net/bigstuff/proj-imagenet/data/{FILE}, and pip install h5py to read it",
    folders=("imagenet-segmentation", "imagenet_segmentation"),
    marks=(FILE,),
)
def imagenet_segmentation(reader: Reader, folder: Path, split: str | None) -> DataSet:
    path = folder if folder.is_file() else folder / FILE
    split = choose(reader.name, split, ["test"])
    wnids = _wnids(path)
    labels = tuple(sorted(set(wnids)))
    names = names_of_ids([path.parent])
    rows = partial(_rows, path, labels)
    shown = tuple(names.get(wnid, wnid) for wnid in labels)
    return DataSet(reader.name, split, reader.licence, shown, rows, partial(_example, path), ("test",))


@lru_cache(maxsize=2)
def _file(path: Path, process: int) -> Any:
    """The open file; forked processes open it anew."""
    try:
        h5py = import_module("h5py")  # not a dependency
    except ImportError:
        raise needs("h5py", FILE) from None
    try:
        file = h5py.File(path, "r")
        file["value/img"], file["value/gt"]
    except (OSError, KeyError) as problem:
        raise InputError(f"{str(path)!r} is not {FILE} as it was published ({problem})") from None
    return file


def _text(file: Any, name: str, place: int) -> str:
    """MATLAB writes a word as numbers of its letters."""
    return "".join(chr(int(sign)) for sign in np.asarray(file[file[f"value/{name}"][place, 0]]).flatten())


def _wnids(path: Path) -> list[str]:
    file = _file(path, os.getpid())
    return [_text(file, "target", place) for place in range(len(file["value/img"]))]


def _rows(path: Path, labels: tuple[str, ...]) -> list[tuple[int, int]]:
    return [(place, labels.index(wnid)) for place, wnid in enumerate(_wnids(path))]


def _example(path: Path, row: tuple[int, int]) -> Example:
    """MATLAB counts columns first, so that axes come in the opposite order; masks lie one reference deeper."""
    from PIL import Image

    place, label = row
    file = _file(path, os.getpid())
    pixels = np.asarray(file[file["value/img"][place, 0]])
    pixels = pixels.transpose(2, 1, 0) if pixels.ndim == 3 else pixels.T
    picture = Image.fromarray(np.ascontiguousarray(pixels.astype(np.uint8))).convert("RGB")
    inside = np.asarray(file[file[file["value/gt"][place, 0]][0, 0]]).T > 0
    if inside.shape != pixels.shape[:2]:
        raise InputError(f"{FILE}, picture {place}: the mask is {inside.shape}, the picture {pixels.shape[:2]}")
    return Example(_text(file, "id", place), picture, label, ((Mask(inside),),) if inside.any() else None)
