"""Tiny-ImageNet-200: 64 × 64 images with one box each, packed in .npz files or in the original's folders."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from clearhead.bench.data.base import BenchmarkDataset, Example
from clearhead.bench.data.evidence import ImageBox
from clearhead.bench.data.image_files import NpzArchive, open_rgb_image
from clearhead.bench.data.registry import DatasetSpec, choose_split, missing_files_error, read_lines, register_dataset
from clearhead.errors import unknown_value_error

IMAGE_SIZE = 64
PixelBox = tuple[int, int, int, int]


@register_dataset(
    "tiny-imagenet",
    licence="ImageNet research terms: non-commercial research and education only",
    download_hint="http://cs231n.stanford.edu/tiny-imagenet-200.zip, unpacked, or "
    "load_benchmark_dataset('hub:zh-plus/tiny-imagenet')",
    folder_names=("tiny-imagenet", "tiny-imagenet-200"),
    marker_files=("tin-val.npz", "tin-train-0.npz", "wnids.txt"),
)
def open_tiny_imagenet(spec: DatasetSpec, folder: Path, split: str | None) -> BenchmarkDataset:
    """Open Tiny-ImageNet (200 classes), unpacked or as .npz files."""
    shard_names = {
        "validation": ["tin-val.npz"],
        "train": [path.name for path in sorted(folder.glob("tin-train-*.npz"))],
    }
    packed_splits = [name for name, files in shard_names.items() if files and (folder / files[0]).is_file()]
    if packed_splits:
        return _open_packed(spec, folder, split, packed_splits, shard_names)
    splits = [name for name, subfolder in (("validation", "val"), ("train", "train")) if (folder / subfolder).is_dir()]
    split = choose_split(spec.name, split, splits)
    names: dict[str, str] = {}
    if (folder / "words.txt").is_file():
        names = dict(line.split("\t", 1) for line in read_lines(folder / "words.txt"))
    wnids = [line.strip() for line in read_lines(folder / "wnids.txt")]
    labels = tuple(names.get(wnid, wnid).strip() for wnid in wnids)
    label_of = {wnid: label for label, wnid in enumerate(wnids)}
    load_rows = partial(_list_training_rows, folder / "train", label_of)
    if split == "validation":
        load_rows = partial(_list_validation_rows, spec, folder / "val", label_of)
    return BenchmarkDataset(spec.name, split, spec.licence, labels, load_rows, _make_file_example, tuple(splits))


def _open_packed(
    spec: DatasetSpec, folder: Path, split: str | None, splits: list[str], shard_names: Mapping[str, list[str]]
) -> BenchmarkDataset:
    """Open a split that is packed in .npz shards; the labels are the second column of classes.tsv."""
    if not (folder / "classes.tsv").is_file():
        raise missing_files_error(spec, "classes.tsv", [folder])
    split = choose_split(spec.name, split, splits)
    labels = tuple(line.split("\t")[1] for line in read_lines(folder / "classes.tsv"))
    shards = [NpzArchive(folder / name) for name in shard_names[split]]
    load_rows = partial(_list_packed_rows, shards, split)
    return BenchmarkDataset(spec.name, split, spec.licence, labels, load_rows, _make_packed_example, tuple(splits))


def _list_packed_rows(shards: list[NpzArchive], split: str) -> list[tuple[str, NpzArchive, int]]:
    """List id, shard and index in the shard of every image; ids count through all shards, from 1."""
    members = [(shard, index) for shard in shards for index in range(len(shard["label"]))]
    return [(f"{split}-{number:06d}", shard, index) for number, (shard, index) in enumerate(members, 1)]


def _make_packed_example(row: tuple[str, NpzArchive, int]) -> Example:
    """Decode an image from its shard, with its label, and its box in pixels as evidence."""
    name, shard, index = row
    x_min, y_min, x_max, y_max = (int(edge) for edge in shard["box"][index])
    image = open_rgb_image(shard.read_member(index), name)
    return Example(name, image, int(shard["label"][index]), _box_to_evidence((x_min, y_min, x_max, y_max)))


def _list_validation_rows(
    spec: DatasetSpec, folder: Path, label_of: Mapping[str, int]
) -> list[tuple[Path, int, PixelBox]]:
    """List path, label and box of each line of val_annotations.txt; an unknown class raises `InputError`."""
    path = folder / "val_annotations.txt"
    if not path.is_file():
        raise missing_files_error(spec, path.name, [folder])
    cells = [line.split("\t") for line in read_lines(path)]
    unknown_wnids = sorted({wnid for _, wnid, *_ in cells} - set(label_of))
    if unknown_wnids:
        raise unknown_value_error("class in val_annotations.txt", unknown_wnids[0], label_of)
    return [(folder / "images" / name, label_of[wnid], _parse_box(box)) for name, wnid, *box in cells]


def _list_training_rows(folder: Path, label_of: Mapping[str, int]) -> list[tuple[Path, int, PixelBox]]:
    """List path, label and box of each line of the classes' files WNID_boxes.txt."""
    rows = []
    for wnid, label in label_of.items():
        for line in read_lines(folder / wnid / f"{wnid}_boxes.txt"):
            name, *box = line.split("\t")
            rows.append((folder / wnid / "images" / name, label, _parse_box(box)))
    return rows


def _parse_box(cells: list[str]) -> PixelBox:
    """Parse the first four cells as edges in pixels: x_min, y_min, x_max, y_max."""
    x_min, y_min, x_max, y_max = (int(cell) for cell in cells[:4])
    return x_min, y_min, x_max, y_max


def _make_file_example(row: tuple[Path, int, PixelBox]) -> Example:
    """Open an image file as RGB, with its box as evidence; the id is the file name without its suffix."""
    path, label, box = row
    return Example(path.stem, open_rgb_image(path), label, _box_to_evidence(box))


def _box_to_evidence(box: PixelBox) -> tuple[tuple[ImageBox, ...], ...] | None:
    """Convert a box whose last column and row (at most 63) belong to it."""
    image_box = ImageBox.from_pixels((box[0], box[1], box[2] + 1, box[3] + 1), IMAGE_SIZE, IMAGE_SIZE)
    if image_box is None:
        return None
    return ((image_box,),)
