"""Pictures in a folder a class, as ImageNet's are, with boxes where XML files lie beside; and folders of your own."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from clearhead.bench.data.base import DataSet, Example
from clearhead.bench.data.evidence import Region
from clearhead.bench.data.image_files import open_rgb
from clearhead.bench.data.registry import Reader, choose, lines, missing, register
from clearhead.data.sources import PICTURES

_SPLITS = (("validation", "val"), ("validation", "validation"), ("test", "test"), ("train", "train"))


@register(
    "imagenet",
    licence="ImageNet research terms: non-commercial research and education only",
    get="https://image-net.org/download (an account is needed); pictures go into val/<wnid>/*.JPEG and "
    "train/<wnid>/*.JPEG, as torchvision has them (the published val/ is flat and must be sorted)",
    folders=("imagenet", "ILSVRC", "ILSVRC2012", "imagenet-1k"),
    marks=("val/*/", "train/*/", "Data/CLS-LOC/val", "Data/CLS-LOC/train"),
)
def imagenet(reader: Reader, folder: Path, split: str | None) -> DataSet:
    return _classes(reader, folder, split)


@register(
    "folder",
    licence="your own data: as you know it",
    get="give the path of a folder with a folder of pictures a class, or with train/ and val/ of that kind",
    folders=(),
    marks=("*",),
)
def own_folder(reader: Reader, folder: Path, split: str | None) -> DataSet:
    return replace(_classes(reader, folder, split), name=folder.resolve().name)


def _classes(reader: Reader, folder: Path, split: str | None) -> DataSet:
    base = folder / "Data" / "CLS-LOC" if (folder / "Data" / "CLS-LOC").is_dir() else folder
    there: dict[str, Path] = {}
    for name, part in _SPLITS:
        if name not in there and (base / part).is_dir():
            there[name] = base / part
    there = there or {"all": base}
    split = choose(reader.name, split, list(there))
    folders = [place for part in there.values() for place in part.iterdir() if place.is_dir()]
    wnids = sorted({place.name for place in folders if place.name[0] != "."})  # one index in all splits
    if not wnids:
        raise missing(reader, "folders of classes", [there[split]])
    names = names_of_ids([folder, base])
    labels = tuple(names.get(wnid, wnid) for wnid in wnids)
    boxes = folder / "Annotations" / "CLS-LOC" / there[split].name
    rows = partial(_files, reader, there[split], wnids)
    make = partial(_example, there[split], boxes if boxes.is_dir() else None)
    # ImageNet's own ids are numbered in their order everywhere; other folders by the alphabet, which no model knows
    others = not all(re.fullmatch(r"n\d{8}", wnid) for wnid in wnids)
    return DataSet(reader.name, split, reader.licence, labels, rows, make, tuple(there), by_alphabet=others)


def names_of_ids(folders: Sequence[Path]) -> dict[str, str]:
    """What the ids mean, from whichever list lies beside."""
    for folder in folders:
        if (folder / "LOC_synset_mapping.txt").is_file():  # n01440764 tench, Tinca tinca
            return {line.split(" ", 1)[0]: line.split(" ", 1)[1] for line in lines(folder / "LOC_synset_mapping.txt")}
        if (folder / "imagenet_class_index.json").is_file():
            table = json.loads((folder / "imagenet_class_index.json").read_text("utf-8"))
            return {wnid: name.replace("_", " ") for wnid, name in table.values()}
        for name in ("classes.tsv", "words.txt"):
            if (folder / name).is_file():
                return {line.split("\t")[0]: line.split("\t")[1] for line in lines(folder / name) if "\t" in line}
    return {}


def _files(reader: Reader, folder: Path, wnids: Sequence[str]) -> list[tuple[Path, int]]:
    """A folder's files in the order of their names; deeper folders (Tiny-ImageNet's images/) belong to their class."""
    rows = []
    for label, wnid in enumerate(wnids):
        found = (file for file in (folder / wnid).rglob("*") if file.suffix.lower() in PICTURES)
        rows += [(file, label) for file in sorted(found)]
    if not rows:
        raise missing(reader, f"pictures ({', '.join(PICTURES)}) in folders of classes", [folder])
    return rows


def _example(folder: Path, boxes: Path | None, row: tuple[Path, int]) -> Example:
    path, label = row
    name = path.relative_to(folder).with_suffix("").as_posix()
    return Example(name, open_rgb(path), label, _evidence(boxes, path) if boxes else None)


def _evidence(boxes: Path, picture: Path) -> tuple[tuple[Region, ...], ...] | None:
    """Each box marks one object of the class, which is enough by itself."""
    from xml.etree import ElementTree

    name = f"{picture.stem}.xml"
    path = next((p for p in (boxes / name, boxes / picture.parent.name / name) if p.is_file()), None)
    if path is None:
        return None
    tree = ElementTree.parse(path)
    wide, high = (float(tree.findtext(f"size/{side}", "0")) for side in ("width", "height"))
    found = [
        Region.of_pixels([float(box.findtext(edge, "0")) for edge in ("xmin", "ymin", "xmax", "ymax")], wide, high)
        for box in tree.iter("bndbox")
    ]
    return tuple((region,) for region in found if region) or None
