"""Images in one folder per class, as in ImageNet, with boxes from XML files if present; and folders of your own."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from clearhead.bench.data.base import BenchmarkDataset, Example
from clearhead.bench.data.evidence import ImageBox
from clearhead.bench.data.image_files import open_rgb_image
from clearhead.bench.data.registry import DatasetSpec, choose_split, missing_files_error, read_lines, register_dataset
from clearhead.data.sources import IMAGE_SUFFIXES

_SPLIT_FOLDERS = (("validation", "val"), ("validation", "validation"), ("test", "test"), ("train", "train"))


@register_dataset(
    "imagenet",
    licence="ImageNet research terms: non-commercial research and education only",
    download_hint="https://image-net.org/download (an account is needed); images go into val/<wnid>/*.JPEG and "
    "train/<wnid>/*.JPEG, as torchvision has them (the published val/ is flat and must be sorted)",
    folder_names=("imagenet", "ILSVRC", "ILSVRC2012", "imagenet-1k"),
    marker_files=("val/*/", "train/*/", "Data/CLS-LOC/val", "Data/CLS-LOC/train"),
)
def open_imagenet(spec: DatasetSpec, folder: Path, split: str | None) -> BenchmarkDataset:
    """Open ImageNet as folders of classes, in torchvision's or the published layout, with boxes if there are any."""
    return _open_class_folders(spec, folder, split)


@register_dataset(
    "folder",
    licence="your own data: as you know it",
    download_hint="pass the path of a folder with one folder of images per class, or with train/ and val/ of that kind",
    folder_names=(),
    marker_files=("*",),
)
def open_image_folder(spec: DatasetSpec, folder: Path, split: str | None) -> BenchmarkDataset:
    """Open a folder of your own with one folder of images per class."""
    return replace(_open_class_folders(spec, folder, split), name=folder.resolve().name)


def _open_class_folders(spec: DatasetSpec, folder: Path, split: str | None) -> BenchmarkDataset:
    """Open one folder per class; the sorted folder names of all splits are the labels, by readable name if known."""
    base = folder / "Data" / "CLS-LOC" if (folder / "Data" / "CLS-LOC").is_dir() else folder
    split_folders: dict[str, Path] = {}
    for name, subfolder in _SPLIT_FOLDERS:
        if name not in split_folders and (base / subfolder).is_dir():
            split_folders[name] = base / subfolder
    split_folders = split_folders or {"all": base}
    split = choose_split(spec.name, split, list(split_folders))
    class_folders = [path for parent in split_folders.values() for path in parent.iterdir() if path.is_dir()]
    wnids = sorted({path.name for path in class_folders if path.name[0] != "."})  # the same labels in all splits
    if not wnids:
        raise missing_files_error(spec, "folders of classes", [split_folders[split]])
    names = read_wnid_names([folder, base])
    box_folder = folder / "Annotations" / "CLS-LOC" / split_folders[split].name
    return BenchmarkDataset(
        spec.name,
        split,
        spec.licence,
        tuple(names.get(wnid, wnid) for wnid in wnids),
        partial(_list_image_files, spec, split_folders[split], wnids),
        partial(_make_example, split_folders[split], box_folder if box_folder.is_dir() else None),
        tuple(split_folders),
        # ImageNet's ids are numbered in alphabetical order everywhere; for other folders no model knows that order
        label_ids_are_arbitrary=not all(re.fullmatch(r"n\d{8}", wnid) for wnid in wnids),
    )


def read_wnid_names(folders: Sequence[Path]) -> dict[str, str]:
    """Read the class names of WordNet ids from the first list that one of the folders contains."""
    for folder in folders:
        if (folder / "LOC_synset_mapping.txt").is_file():  # n01440764 tench, Tinca tinca
            return {
                line.split(" ", 1)[0]: line.split(" ", 1)[1] for line in read_lines(folder / "LOC_synset_mapping.txt")
            }
        if (folder / "imagenet_class_index.json").is_file():
            table = json.loads((folder / "imagenet_class_index.json").read_text("utf-8"))
            return {wnid: name.replace("_", " ") for wnid, name in table.values()}
        for name in ("classes.tsv", "words.txt"):
            if (folder / name).is_file():
                return {line.split("\t")[0]: line.split("\t")[1] for line in read_lines(folder / name) if "\t" in line}
    return {}


def _list_image_files(spec: DatasetSpec, folder: Path, wnids: Sequence[str]) -> list[tuple[Path, int]]:
    """List image files by class and name, including subfolders (Tiny-ImageNet's images/)."""
    rows = []
    for label, wnid in enumerate(wnids):
        files = (file for file in (folder / wnid).rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES)
        rows += [(file, label) for file in sorted(files)]
    if not rows:
        raise missing_files_error(spec, f"images ({', '.join(IMAGE_SUFFIXES)}) in folders of classes", [folder])
    return rows


def _make_example(folder: Path, box_folder: Path | None, row: tuple[Path, int]) -> Example:
    """Open an image as RGB, with its boxes if there is a folder of boxes; the id is its path without suffix."""
    path, label = row
    name = path.relative_to(folder).with_suffix("").as_posix()
    return Example(name, open_rgb_image(path), label, _read_boxes(box_folder, path) if box_folder else None)


def _read_boxes(box_folder: Path, image_path: Path) -> tuple[tuple[ImageBox, ...], ...] | None:
    """Read the boxes of an image; each contains one object of the class and is sufficient evidence by itself."""
    from xml.etree import ElementTree

    name = f"{image_path.stem}.xml"
    candidates = (box_folder / name, box_folder / image_path.parent.name / name)
    path = next((candidate for candidate in candidates if candidate.is_file()), None)
    if path is None:
        return None
    tree = ElementTree.parse(path)
    width, height = (float(tree.findtext(f"size/{side}", "0")) for side in ("width", "height"))
    boxes = []
    for element in tree.iter("bndbox"):
        edges = [float(element.findtext(edge, "0")) for edge in ("xmin", "ymin", "xmax", "ymax")]
        boxes.append(ImageBox.from_pixels(edges, width, height))
    return tuple((box,) for box in boxes if box) or None
