"""Oxford-IIIT Pet: 37 breeds of cats and dogs with trimaps, packed in .npz files or in the original's folders."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from clearhead.bench.data.base import BenchmarkDataset, Example
from clearhead.bench.data.evidence import EvidenceMask
from clearhead.bench.data.image_files import NpzArchive, open_label_map, open_rgb_image
from clearhead.bench.data.registry import (
    DatasetSpec,
    choose_split,
    find_split_files,
    missing_files_error,
    read_lines,
    register_dataset,
)
from clearhead.errors import InputError, unknown_value_error

SPECIES = ("cat", "dog")
TRIMAP_ANIMAL, TRIMAP_BACKGROUND, TRIMAP_BORDER = 1, 2, 3


@register_dataset(
    "pets",
    licence="CC BY-SA 4.0 (Oxford-IIIT Pet, Parkhi et al. 2012)",
    download_hint="https://thor.robots.ox.ac.uk/pets/images.tar.gz and annotations.tar.gz, "
    "both unpacked into one folder",
    folder_names=("pets", "oxford-iiit-pet", "oxford-pets"),
    marker_files=("pets-test.npz", "pets-trainval.npz", "annotations/list.txt", "annotations/test.txt"),
)
def open_pets(spec: DatasetSpec, folder: Path, split: str | None, label: str = "breed") -> BenchmarkDataset:
    """Open the pets; `label` is "breed" or "species". Border pixels of the trimap are ignored."""
    if label not in ("breed", "species"):
        raise unknown_value_error("label of a pet", label, ("breed", "species"))
    if split == "train":
        split = "trainval"
    packed_files = find_split_files(folder, [("test", "pets-test.npz"), ("trainval", "pets-trainval.npz")])
    annotations = folder / "annotations"
    files = packed_files or find_split_files(annotations, [("test", "test.txt"), ("trainval", "trainval.txt")])
    split = choose_split(spec.name, split, list(files))
    load_rows: Callable[[], Sequence[Any]]
    make_example: Callable[..., Example]
    if packed_files:
        archive = NpzArchive(packed_files[split])
        breed_and_name = list(zip(archive["label"].tolist(), archive["name"].tolist(), strict=True))
        load_rows = partial(_list_packed_rows, archive)
        make_example = partial(_make_packed_example, archive, label)
    else:
        if not (folder / "images").is_dir() or not (annotations / "trimaps").is_dir():
            raise missing_files_error(spec, "images and annotations/trimaps", [folder])
        breed_and_name = [(breed, name) for name, breed, _ in _read_list(files[split])]
        load_rows = partial(_read_list, files[split])
        make_example = partial(_make_file_example, folder, label)
    labels: tuple[str, ...] = SPECIES
    if label == "breed":
        breed_names = {breed: _parse_breed(name) for breed, name in breed_and_name}
        labels = tuple(breed_names.get(breed, str(breed)) for breed in range(max(breed_names) + 1))
    return BenchmarkDataset(spec.name, split, spec.licence, labels, load_rows, make_example, tuple(files))


def _parse_breed(name: str) -> str:
    """Parse the breed: `great_pyrenees_12` → great pyrenees; the original capitalises the breeds of cats."""
    return name.rpartition("_")[0].replace("_", " ")


def _list_packed_rows(archive: NpzArchive) -> range:
    """Return the row indices of a packed archive, one for each label in it."""
    return range(len(archive["label"]))


def _make_packed_example(archive: NpzArchive, label: str, index: int) -> Example:
    """Decode image and trimap of one packed row; `label` selects breed or species."""
    name = str(archive["name"][index])
    trimap = open_label_map(archive.read_member(index, "mask", "moff"), f"the trimap of {name}")
    label_index = int(archive["label" if label == "breed" else "species"][index])
    return _make_example(name, open_rgb_image(archive.read_member(index), name), label_index, trimap)


def _read_list(path: Path) -> list[tuple[str, int, int]]:
    """Read lines such as `Abyssinian_100 1 1 1`: name, class, species, number within the species, counted from 1."""
    cells = [line.split() for line in read_lines(path) if not line.startswith("#")]
    return [(name, int(breed) - 1, int(species) - 1) for name, breed, species, *_ in cells]


def _make_file_example(folder: Path, label: str, row: tuple[str, int, int]) -> Example:
    """Open image and trimap of one row of the original folders; `label` selects breed or species."""
    name, breed, species = row
    trimap = open_label_map(folder / "annotations" / "trimaps" / f"{name}.png")
    image = open_rgb_image(folder / "images" / f"{name}.jpg")
    return _make_example(name, image, breed if label == "breed" else species, trimap)


def _make_example(name: str, image: Any, label: int, trimap: UInt8[np.ndarray, "height width"]) -> Example:
    """Create an example whose evidence is the animal's pixels; pixels on the trimap's border are ignored."""
    width, height = image.size
    if trimap.shape != (height, width):
        raise InputError(
            f"{name}: the trimap is {trimap.shape[1]} × {trimap.shape[0]}, but the image is {width} × {height}"
        )
    is_animal = trimap == TRIMAP_ANIMAL
    mask = EvidenceMask(is_animal, trimap == TRIMAP_BORDER)
    return Example(name, image, label, ((mask,),) if is_animal.any() else None)
