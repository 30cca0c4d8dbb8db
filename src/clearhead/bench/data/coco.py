"""COCO: images with the outlines of their objects (instances_*.json).

Outlines are rasterised exactly as pycocotools does it, so that masks do not depend on whether it is installed.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from clearhead.bench.data.base import BenchmarkDataset, Example
from clearhead.bench.data.evidence import EvidenceMask
from clearhead.bench.data.image_files import open_rgb_image
from clearhead.bench.data.registry import DatasetSpec, choose_split, missing_files_error, register_dataset
from clearhead.errors import InputError, unknown_value_error

_DOWNLOAD_HINT = (
    "https://cocodataset.org/#download: annotations_trainval2017.zip and val2017.zip, both unpacked into one folder"
)


@register_dataset(
    "coco",
    licence="annotations CC BY 4.0 (Lin et al. 2014); images under Flickr's terms",
    download_hint=_DOWNLOAD_HINT,
    folder_names=("coco", "COCO", "mscoco"),
    marker_files=("annotations/instances_*.json", "instances_*.json"),
)
def open_coco(spec: DatasetSpec, folder: Path, split: str | None, each: str = "class") -> BenchmarkDataset:
    """Open COCO with one example for each image and each class in it; every object of the class is evidence by itself.

    With `each` "image", one example for each image with all its objects, for masks of all detections.
    """
    if each not in ("class", "image"):
        raise unknown_value_error("value for each=", each, ("class", "image"))
    files = sorted([*folder.glob("annotations/instances_*.json"), *folder.glob("instances_*.json")])
    file_by_split = {path.stem.removeprefix("instances_"): path for path in files}
    split_names = sorted(file_by_split, key=lambda name: (not name.startswith("val"), name))
    split = choose_split(spec.name, split, split_names)
    image_folder = find_image_folder(spec, folder, split)
    categories = _list_categories(file_by_split[split])
    labels = tuple(name for _, name in categories)
    list_rows: Callable[..., Sequence[Any]] = _list_category_rows
    make_example: Callable[..., Example] = _make_category_example
    if each == "image":
        list_rows = _list_image_rows
        make_example = _make_image_example
    return BenchmarkDataset(
        spec.name,
        split,
        spec.licence,
        labels,
        partial(list_rows, file_by_split[split], tuple(category for category, _ in categories)),
        partial(make_example, image_folder),
        tuple(file_by_split),
    )


def find_image_folder(spec: DatasetSpec, folder: Path, split: str) -> Path:
    """Find the folder with the images of a split, in the layouts of COCO and of tools for it."""
    searched = [folder / split, folder / "images" / split, folder / "Images" / "mscoco" / split, folder.parent / split]
    searched += [folder.parent / "coco" / split, folder.parent / "coco" / "images" / split, folder / "images"]
    image_folder = next((candidate for candidate in searched if candidate.is_dir()), None)
    if image_folder is None:
        raise missing_files_error(spec, f"folder of images {split}", searched)
    return image_folder


@lru_cache(maxsize=1)
def _read_annotations(path: Path) -> dict[str, Any]:
    """Read the whole file. COCO's training set takes half a gigabyte, so callers clear this cache after indexing it."""
    try:
        content = json.loads(path.read_text("utf-8"))
        return {name: content[name] for name in ("images", "annotations", "categories")}
    except (ValueError, KeyError, TypeError) as problem:
        raise InputError(f"{str(path)!r} is not a file of COCO instances ({problem!r})") from None


def _list_categories(path: Path) -> list[tuple[int, str]]:
    """List the categories of an annotation file as (id, name), in the order of ids."""
    return sorted((category["id"], category["name"]) for category in _read_annotations(path)["categories"])


#: Image entry, label, and the annotations of all objects of that class.
CategoryRow = tuple[dict[str, Any], int, list[dict[str, Any]]]


def _list_category_rows(path: Path, categories: Sequence[int]) -> list[CategoryRow]:
    """List one row per image and category with its objects; pairs with nothing but crowds are left out."""
    content = _read_annotations(path)
    _read_annotations.cache_clear()
    images = {image["id"]: image for image in content["images"]}
    label_of = {category: label for label, category in enumerate(categories)}

    def group_key(annotation: Mapping[str, Any]) -> tuple[int, int]:
        return annotation["image_id"], annotation["category_id"]

    annotations = sorted(content["annotations"], key=lambda annotation: (*group_key(annotation), annotation["id"]))
    rows: list[CategoryRow] = []
    for (image_id, category), group in groupby(annotations, group_key):
        objects = list(group)
        if not all(annotation.get("iscrowd") for annotation in objects):
            rows.append((images[image_id], label_of[category], objects))
    return rows


#: Image entry, and the label and annotation of each object.
ImageRow = tuple[dict[str, Any], list[tuple[int, dict[str, Any]]]]


def _list_image_rows(path: Path, categories: Sequence[int]) -> list[ImageRow]:
    """List every image with at least one object, with the labels of its objects."""
    content = _read_annotations(path)
    _read_annotations.cache_clear()
    images = {image["id"]: image for image in content["images"]}
    label_of = {category: label for label, category in enumerate(categories)}
    objects: dict[int, list[tuple[int, dict[str, Any]]]] = {}
    for annotation in sorted(content["annotations"], key=lambda annotation: annotation["id"]):
        objects.setdefault(annotation["image_id"], []).append((label_of[annotation["category_id"]], annotation))
    return [(images[image_id], objects[image_id]) for image_id in sorted(objects)]


def _make_image_example(folder: Path, row: ImageRow) -> Example:
    """Create an example of a whole image: no label, and a labelled mask for each object with visible pixels."""
    image_entry, objects = row
    image, (height, width) = _open_image(folder, image_entry)
    evidence = []
    for label, annotation in objects:
        mask = decode_outline(annotation["segmentation"], height, width)
        if mask.any():
            evidence.append((EvidenceMask(mask, label=label, is_crowd=bool(annotation.get("iscrowd"))),))
    return Example(str(image_entry["id"]), image, None, tuple(evidence) or None)


def _open_image(folder: Path, image_entry: Mapping[str, Any]) -> tuple[Any, tuple[int, int]]:
    """Open an image and return it with its height and width, which must be those of the annotations."""
    height = image_entry["height"]
    width = image_entry["width"]
    image = open_rgb_image(folder / image_entry["file_name"])
    if image.size != (width, height):
        raise InputError(
            f"{image_entry['file_name']} is {image.size[0]} × {image.size[1]}, but {width} × {height} in the "
            "annotations: check that the images belong to this data set"
        )
    return image, (height, width)


def _make_category_example(folder: Path, row: CategoryRow) -> Example:
    """Create an example labelled with one category: a mask for each of its objects; crowds are ignored pixels."""
    image_entry, label, objects = row
    image, (height, width) = _open_image(folder, image_entry)
    crowd_masks: list[Bool[np.ndarray, "high wide"]] = []
    object_masks: list[Bool[np.ndarray, "high wide"]] = []
    for annotation in objects:
        masks = crowd_masks if annotation.get("iscrowd") else object_masks
        masks.append(decode_outline(annotation["segmentation"], height, width))
    ignored = np.logical_or.reduce(crowd_masks) if crowd_masks else None
    evidence = tuple((EvidenceMask(mask, ignored),) for mask in object_masks if mask.any())
    return Example(f"{image_entry['id']}-{objects[0]['category_id']}", image, label, evidence or None)


def decode_outline(outline: Any, height: int, width: int) -> Bool[np.ndarray, "high wide"]:
    """Decode a mask from polygons or from run lengths (a list, or COCO's compressed string)."""
    if isinstance(outline, Mapping):
        counts = outline["counts"]
        if isinstance(counts, str | bytes):
            counts = _decode_compressed_runs(counts)
        return _decode_runs(counts, height, width)
    mask = np.zeros((height, width), dtype=bool)
    for polygon in outline:
        mask |= _fill_polygon(np.asarray(polygon, dtype=float).reshape(-1, 2), height, width)
    return mask


def _decode_runs(counts: Sequence[int], height: int, width: int) -> Bool[np.ndarray, "high wide"]:
    """Decode lengths of alternating background and object runs, in column-major order."""
    if sum(counts) != height * width:
        raise InputError(f"the runs of a mask cover {sum(counts)} pixels, but the image has {height} × {width}")
    is_object = np.arange(len(counts)) % 2 == 1
    return np.repeat(is_object, counts).reshape(width, height).T


def _decode_compressed_runs(compressed: str | bytes) -> list[int]:
    """Decode run lengths of five bits a character; from the third on, differences to the run before the last."""
    characters = compressed.encode() if isinstance(compressed, str) else compressed
    counts: list[int] = []
    value = 0
    shift = 0
    for character in characters:
        bits = character - 48
        value |= (bits & 0x1F) << shift
        shift += 5
        if not bits & 0x20:
            if bits & 0x10:
                value -= 1 << shift
            if len(counts) > 2:
                value += counts[-2]
            counts.append(value)
            value = 0
            shift = 0
    return counts


def _fill_polygon(corners: Int[np.ndarray, "corner 2"], height: int, width: int) -> Bool[np.ndarray, "high wide"]:
    """Rasterise like pycocotools: trace the outline at five times the resolution, and toggle at column centres."""
    scale = 5
    fine_corners = (scale * corners + 0.5).astype(int)
    segments = [_trace_line(start, stop) for start, stop in pairwise([*fine_corners, fine_corners[0]])]
    x, y = (np.concatenate(points) for points in zip(*segments, strict=True))
    x_start = x[:-1]
    x_stop = x[1:]
    column = (np.where(x_stop < x_start, x_stop, x_stop - 1) + 0.5) / scale - 0.5
    row = np.ceil(np.clip((np.minimum(y[:-1], y[1:]) + 0.5) / scale - 0.5, 0, height))
    is_crossing = (x_stop != x_start) & (column == np.floor(column)) & (column >= 0) & (column <= width - 1)
    pixel_indices = column[is_crossing].astype(int) * height + row[is_crossing].astype(int)
    num_toggles = np.bincount(pixel_indices, minlength=height * width + 1)[: height * width]
    return (num_toggles.cumsum() % 2 == 1).reshape(width, height).T


def _trace_line(
    start: Int[np.ndarray, "2"], stop: Int[np.ndarray, "2"]
) -> tuple[Int[np.ndarray, "step"], Int[np.ndarray, "step"]]:
    """Return the points of a straight line, one for each step along its longer axis, independent of its direction."""
    long_axis = int(abs(stop[1] - start[1]) > abs(stop[0] - start[0]))
    is_reversed = start[long_axis] > stop[long_axis]
    if is_reversed:
        start, stop = stop, start
    length = int(stop[long_axis] - start[long_axis])
    steps = np.arange(length + 1)
    slope = (stop[1 - long_axis] - start[1 - long_axis]) / max(length, 1)
    long_coordinates = start[long_axis] + steps
    short_coordinates = (start[1 - long_axis] + slope * steps + 0.5).astype(int)
    if is_reversed:
        long_coordinates = long_coordinates[::-1]
        short_coordinates = short_coordinates[::-1]
    if long_axis:
        return short_coordinates, long_coordinates
    return long_coordinates, short_coordinates
