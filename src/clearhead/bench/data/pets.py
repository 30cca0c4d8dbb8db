"""Oxford-IIIT Pet: 37 breeds of cats and dogs with trimaps, packed in .npz files or in the original's folders."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from clearhead.bench.data.base import DataSet, Example
from clearhead.bench.data.evidence import Mask
from clearhead.bench.data.image_files import Packed, open_levels, open_rgb
from clearhead.bench.data.registry import Reader, choose, files_there, lines, missing, register
from clearhead.errors import InputError, unknown

SPECIES = ("cat", "dog")
ANIMAL, BACKGROUND, BORDER = 1, 2, 3


@register(
    "pets",
    licence="CC BY-SA 4.0 (Oxford-IIIT Pet, Parkhi et al. 2012)",
    get="https://thor.robots.ox.ac.uk/pets/images.tar.gz and annotations.tar.gz, both unpacked into one folder",
    folders=("pets", "oxford-iiit-pet", "oxford-pets"),
    marks=("pets-test.npz", "pets-trainval.npz", "annotations/list.txt", "annotations/test.txt"),
)
def pets(reader: Reader, folder: Path, split: str | None, label: str = "breed") -> DataSet:
    """`label` is the breed or the species. The border of a trimap counts neither as animal nor as background."""
    if label not in ("breed", "species"):
        raise unknown("label of a pet", label, ("breed", "species"))
    packed = files_there(folder, [("test", "pets-test.npz"), ("trainval", "pets-trainval.npz")])
    lists = folder / "annotations"
    there = packed or files_there(lists, [("test", "test.txt"), ("trainval", "trainval.txt")])
    split = choose(reader.name, "trainval" if split == "train" else split, list(there))
    if packed:
        pack = Packed(packed[split])
        named = list(zip(pack["label"].tolist(), pack["name"].tolist(), strict=True))
        rows: Callable[[], Sequence[Any]] = partial(_packed, pack)
        make = partial(_of_pack, pack, label)
    else:
        if not (folder / "images").is_dir() or not (lists / "trimaps").is_dir():
            raise missing(reader, "images and annotations/trimaps", [folder])
        named = [(breed, name) for name, breed, _ in _listed(there[split])]
        rows = partial(_listed, there[split])
        make = partial(_of_files, folder, label)
    breeds = {place: _breed(name) for place, name in named}
    labels = SPECIES if label == "species" else tuple(breeds.get(i, str(i)) for i in range(max(breeds) + 1))
    return DataSet(reader.name, split, reader.licence, labels, rows, make, tuple(there))


def _breed(name: str) -> str:
    """`great_pyrenees_12` → great pyrenees; the original writes cats' breeds with a capital letter."""
    return name.rpartition("_")[0].replace("_", " ")


def _packed(pack: Packed) -> range:
    return range(len(pack["label"]))


def _of_pack(pack: Packed, label: str, place: int) -> Example:
    name = str(pack["name"][place])
    trimap = open_levels(pack.member(place, "mask", "moff"), f"the trimap of {name}")
    index = int(pack["label" if label == "breed" else "species"][place])
    return _example(name, open_rgb(pack.member(place), name), index, trimap)


def _listed(path: Path) -> list[tuple[str, int, int]]:
    """`Abyssinian_100 1 1 1`: name, class, species, number within the species, all counted from 1."""
    cells = [line.split() for line in lines(path) if not line.startswith("#")]
    return [(name, int(breed) - 1, int(species) - 1) for name, breed, species, *_ in cells]


def _of_files(folder: Path, label: str, row: tuple[str, int, int]) -> Example:
    name, breed, species = row
    trimap = open_levels(folder / "annotations" / "trimaps" / f"{name}.png")
    picture = open_rgb(folder / "images" / f"{name}.jpg")
    return _example(name, picture, breed if label == "breed" else species, trimap)


def _example(name: str, picture: Any, label: int, trimap: UInt8[np.ndarray, "height width"]) -> Example:
    wide, high = picture.size
    if trimap.shape != (high, wide):
        raise InputError(f"{name}: the trimap is {trimap.shape[1]} × {trimap.shape[0]}, the picture {wide} × {high}")
    inside = trimap == ANIMAL
    mask = Mask(inside, trimap == BORDER)
    return Example(name, picture, label, ((mask,),) if inside.any() else None)
