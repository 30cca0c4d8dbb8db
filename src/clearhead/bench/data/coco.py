"""COCO: pictures with the outlines of their objects (instances_*.json).

Outlines are filled exactly as pycocotools does it, so that masks are the same whether or not that is installed.
"""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from clearhead.bench.data.base import DataSet, Example
from clearhead.bench.data.evidence import Mask
from clearhead.bench.data.image_files import open_rgb
from clearhead.bench.data.registry import Reader, choose, missing, register
from clearhead.errors import InputError, unknown

_GET = "https://cocodataset.org/#download: annotations_trainval2017.zip and val2017.zip, both unpacked into one folder"


@register(
    "coco",
    licence="annotations CC BY 4.0 (Lin et al. 2014); pictures under Flickr's terms",
    get=_GET,
    folders=("coco", "COCO", "mscoco"),
    marks=("annotations/instances_*.json", "instances_*.json"),
)
def coco(reader: Reader, folder: Path, split: str | None, each: str = "kind") -> DataSet:
    """One example for each picture and each kind of object in it; every object of that kind is enough by itself.

    With `each` "picture", one for each picture with all its objects, for masks of all detections.
    """
    if each not in ("kind", "picture"):
        raise unknown("each", each, ("kind", "picture"))
    files = sorted([*folder.glob("annotations/instances_*.json"), *folder.glob("instances_*.json")])
    there = {path.stem.removeprefix("instances_"): path for path in files}
    split = choose(reader.name, split, sorted(there, key=lambda name: (not name.startswith("val"), name)))
    pictures = picture_folder(reader, folder, split)
    categories = _kinds(there[split])
    rows = partial(_rows if each == "kind" else _whole, there[split], tuple(index for index, _ in categories))
    labels = tuple(name for _, name in categories)
    make = partial(_example if each == "kind" else _scene, pictures)
    return DataSet(reader.name, split, reader.licence, labels, rows, make, tuple(there))


def picture_folder(reader: Reader, folder: Path, split: str) -> Path:
    """Where the pictures of a split lie, as COCO and the tools made for it have them."""
    tried = [folder / split, folder / "images" / split, folder / "Images" / "mscoco" / split, folder.parent / split]
    tried += [folder.parent / "coco" / split, folder.parent / "coco" / "images" / split, folder / "images"]
    found = next((place for place in tried if place.is_dir()), None)
    if found is None:
        raise missing(reader, f"folder of pictures {split}", tried)
    return found


@lru_cache(maxsize=1)
def _read(path: Path) -> dict[str, Any]:
    """The whole file: half a gigabyte for COCO's training set, so it is kept no longer than it takes to sort it."""
    try:
        content = json.loads(path.read_text("utf-8"))
        return {name: content[name] for name in ("images", "annotations", "categories")}
    except (ValueError, KeyError, TypeError) as problem:
        raise InputError(f"{str(path)!r} is not COCO's instances ({problem!r})") from None


def _kinds(path: Path) -> list[tuple[int, str]]:
    return sorted((kind["id"], kind["name"]) for kind in _read(path)["categories"])


Row = tuple[dict[str, Any], int, list[dict[str, Any]]]


def _rows(path: Path, categories: Sequence[int]) -> list[Row]:
    content = _read(path)
    _read.cache_clear()
    pictures = {picture["id"]: picture for picture in content["images"]}
    index = {category: label for label, category in enumerate(categories)}

    def of(annotation: Mapping[str, Any]) -> tuple[int, int]:
        return annotation["image_id"], annotation["category_id"]

    rows: list[Row] = []
    for (picture, category), found in groupby(sorted(content["annotations"], key=lambda a: (*of(a), a["id"])), of):
        objects = list(found)
        if not all(one.get("iscrowd") for one in objects):
            rows.append((pictures[picture], index[category], objects))
    return rows


Scene = tuple[dict[str, Any], list[tuple[int, dict[str, Any]]]]


def _whole(path: Path, categories: Sequence[int]) -> list[Scene]:
    """Every picture that shows something, with the kind of each of its objects."""
    content = _read(path)
    _read.cache_clear()
    pictures = {picture["id"]: picture for picture in content["images"]}
    index = {category: label for label, category in enumerate(categories)}
    objects: dict[int, list[tuple[int, dict[str, Any]]]] = {}
    for one in sorted(content["annotations"], key=lambda a: a["id"]):
        objects.setdefault(one["image_id"], []).append((index[one["category_id"]], one))
    return [(pictures[picture], objects[picture]) for picture in sorted(objects)]


def _scene(folder: Path, row: Scene) -> Example:
    about, objects = row
    picture, (high, wide) = _opened(folder, about)
    outlined = [(outline_mask(one["segmentation"], high, wide), label, one) for label, one in objects]
    masks = tuple((Mask(m, label=label, crowd=bool(one.get("iscrowd"))),) for m, label, one in outlined if m.any())
    return Example(str(about["id"]), picture, None, masks or None)


def _opened(folder: Path, about: Mapping[str, Any]) -> tuple[Any, tuple[int, int]]:
    high, wide = about["height"], about["width"]
    picture = open_rgb(folder / about["file_name"])
    if picture.size != (wide, high):
        size = f"{picture.size[0]} × {picture.size[1]}"
        raise InputError(f"{about['file_name']} is {size}, but the annotations say {wide} × {high}: other pictures?")
    return picture, (high, wide)


def _example(folder: Path, row: Row) -> Example:
    about, label, objects = row
    picture, (high, wide) = _opened(folder, about)
    crowds = [outline_mask(one["segmentation"], high, wide) for one in objects if one.get("iscrowd")]
    ignored = np.logical_or.reduce(crowds) if crowds else None
    masks = [outline_mask(one["segmentation"], high, wide) for one in objects if not one.get("iscrowd")]
    sets = tuple((Mask(mask, ignored),) for mask in masks if mask.any())
    return Example(f"{about['id']}-{objects[0]['category_id']}", picture, label, sets or None)


def outline_mask(outline: Any, high: int, wide: int) -> Bool[np.ndarray, "high wide"]:
    """A mask from polygons or from lengths of runs (a list, or COCO's packed string)."""
    if isinstance(outline, Mapping):
        counts = outline["counts"]
        return _runs(_unpacked(counts) if isinstance(counts, str | bytes) else counts, high, wide)
    mask = np.zeros((high, wide), dtype=bool)
    for polygon in outline:
        mask |= _filled(np.asarray(polygon, dtype=float).reshape(-1, 2), high, wide)
    return mask


def _runs(counts: Sequence[int], high: int, wide: int) -> Bool[np.ndarray, "high wide"]:
    """Runs out and in by turns, down the columns."""
    if sum(counts) != high * wide:
        raise InputError(f"a mask's runs cover {sum(counts)} pixels, the picture has {high} × {wide}")
    inside = np.arange(len(counts)) % 2 == 1
    return np.repeat(inside, counts).reshape(wide, high).T


def _unpacked(packed: str | bytes) -> list[int]:
    """Five bits a letter, and from the third on the difference to the run before the last."""
    signs = packed.encode() if isinstance(packed, str) else packed
    counts: list[int] = []
    value = shift = 0
    for sign in signs:
        bits = sign - 48
        value |= (bits & 0x1F) << shift
        shift += 5
        if not bits & 0x20:
            if bits & 0x10:
                value -= 1 << shift
            counts.append(value + (counts[-2] if len(counts) > 2 else 0))
            value = shift = 0
    return counts


def _filled(corners: Int[np.ndarray, "corner 2"], high: int, wide: int) -> Bool[np.ndarray, "high wide"]:
    """pycocotools' way: walk the outline five times finer, and turn over at each crossing of a column's middle."""
    scale = 5
    fine = (scale * corners + 0.5).astype(int)
    paths = [_line(start, stop) for start, stop in pairwise([*fine, fine[0]])]
    across, down = (np.concatenate(parts) for parts in zip(*paths, strict=True))
    before, after = across[:-1], across[1:]
    column = (np.where(after < before, after, after - 1) + 0.5) / scale - 0.5
    row = np.ceil(np.clip((np.minimum(down[:-1], down[1:]) + 0.5) / scale - 0.5, 0, high))
    turns = (after != before) & (column == np.floor(column)) & (column >= 0) & (column <= wide - 1)
    places = column[turns].astype(int) * high + row[turns].astype(int)
    flips = np.bincount(places, minlength=high * wide + 1)[: high * wide]
    return (flips.cumsum() % 2 == 1).reshape(wide, high).T


def _line(
    start: Int[np.ndarray, "2"], stop: Int[np.ndarray, "2"]
) -> tuple[Int[np.ndarray, "step"], Int[np.ndarray, "step"]]:
    """The points of a straight line, one for each step along its longer side, always rounded from the same end."""
    long = int(abs(stop[1] - start[1]) > abs(stop[0] - start[0]))
    backwards = start[long] > stop[long]
    first, last = (stop, start) if backwards else (start, stop)
    length = int(last[long] - first[long])
    steps = np.arange(length + 1)
    slope = (last[1 - long] - first[1 - long]) / max(length, 1)
    sides = [first[long] + steps, (first[1 - long] + slope * steps + 0.5).astype(int)]
    x, y = (side[::-1] if backwards else side for side in (sides if not long else sides[::-1]))
    return x, y
