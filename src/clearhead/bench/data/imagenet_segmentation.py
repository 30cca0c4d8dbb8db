"""ImageNet-Segmentation: 4,276 images with the mask of their object (Guillaumin et al. 2014), in one HDF5 file."""

import os
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from clearhead.bench.data.base import BenchmarkDataset, Example
from clearhead.bench.data.evidence import EvidenceMask
from clearhead.bench.data.imagenet import read_wnid_names
from clearhead.bench.data.registry import DatasetSpec, choose_split, missing_package_error, register_dataset
from clearhead.errors import InputError

SEGMENTATION_FILE = "gtsegs_ijcv.mat"


@register_dataset(
    "imagenet-segmentation",
    licence="ImageNet research terms: non-commercial research and education only (masks: Guillaumin et al. 2014)",
    download_hint=f"http://calvin-vision.net/bigstuff/proj-imagenet/data/{SEGMENTATION_FILE}, "
    "and pip install h5py to read it",
    folder_names=("imagenet-segmentation", "imagenet_segmentation"),
    marker_files=(SEGMENTATION_FILE,),
)
def open_imagenet_segmentation(spec: DatasetSpec, folder: Path, split: str | None) -> BenchmarkDataset:
    """Open ImageNet-Segmentation; its only split is "test"."""
    path = folder if folder.is_file() else folder / SEGMENTATION_FILE
    split = choose_split(spec.name, split, ["test"])
    wnids = tuple(sorted(set(_read_wnids(path))))
    names = read_wnid_names([path.parent])
    labels = tuple(names.get(wnid, wnid) for wnid in wnids)
    load_rows = partial(_list_rows, path, wnids)
    return BenchmarkDataset(spec.name, split, spec.licence, labels, load_rows, partial(_make_example, path), ("test",))


@lru_cache(maxsize=2)
def _open_hdf5(path: Path, process: int) -> Any:
    """Open the file. `process` is part of the cache key, because a forked process must not share the handle."""
    try:
        h5py = import_module("h5py")  # not a dependency
    except ImportError:
        raise missing_package_error("h5py", SEGMENTATION_FILE) from None
    try:
        file = h5py.File(path, "r")
        file["value/img"], file["value/gt"]
    except (OSError, KeyError) as problem:
        raise InputError(f"{str(path)!r} is not {SEGMENTATION_FILE} in its published form ({problem})") from None
    return file


def _decode_matlab_text(file: Any, name: str, index: int) -> str:
    """Decode MATLAB text, which is stored as character codes."""
    return "".join(chr(int(code)) for code in np.asarray(file[file[f"value/{name}"][index, 0]]).flatten())


def _read_wnids(path: Path) -> list[str]:
    """Read the WordNet id of the object in each image, in file order."""
    file = _open_hdf5(path, os.getpid())
    return [_decode_matlab_text(file, "target", index) for index in range(len(file["value/img"]))]


def _list_rows(path: Path, wnids: tuple[str, ...]) -> list[tuple[int, int]]:
    """Pair the index of each image with its label, the position of its WordNet id in `wnids`."""
    return [(index, wnids.index(wnid)) for index, wnid in enumerate(_read_wnids(path))]


def _make_example(path: Path, row: tuple[int, int]) -> Example:
    """Create an example. MATLAB is column-major, so axes are reversed; masks lie one reference deeper than images."""
    from PIL import Image

    index, label = row
    file = _open_hdf5(path, os.getpid())
    pixels = np.asarray(file[file["value/img"][index, 0]])
    pixels = pixels.transpose(2, 1, 0) if pixels.ndim == 3 else pixels.T
    image = Image.fromarray(np.ascontiguousarray(pixels.astype(np.uint8))).convert("RGB")
    mask = np.asarray(file[file[file["value/gt"][index, 0]][0, 0]]).T > 0
    if mask.shape != pixels.shape[:2]:
        raise InputError(
            f"{SEGMENTATION_FILE}, image {index}: the mask has the shape {mask.shape}, but the image has the shape "
            f"{pixels.shape[:2]}"
        )
    evidence = ((EvidenceMask(mask),),) if mask.any() else None
    return Example(_decode_matlab_text(file, "id", index), image, label, evidence)
