"""Tiny-ImageNet-200: 64 × 64 pictures with one box each, packed in .npz files or in the original's folders."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from clearhead.bench.data.base import DataSet, Example
from clearhead.bench.data.evidence import Region
from clearhead.bench.data.image_files import Packed, open_rgb
from clearhead.bench.data.registry import Reader, choose, lines, missing, register
from clearhead.errors import unknown

SIZE = 64
Box = tuple[int, int, int, int]


@register(
    "tiny-imagenet",
    licence="ImageNet research terms: non-commercial research and education only",
    get="http://cs231n.stanford.edu/tiny-imagenet-200.zip, unpacked, or read('hub:zh-plus/tiny-imagenet')",
    folders=("tiny-imagenet", "tiny-imagenet-200"),
    marks=("tin-val.npz", "tin-train-0.npz", "wnids.txt"),
)
def tiny_imagenet(reader: Reader, folder: Path, split: str | None) -> DataSet:
    packed = {"validation": ["tin-val.npz"], "train": [path.name for path in sorted(folder.glob("tin-train-*.npz"))]}
    there = [name for name, files in packed.items() if files and (folder / files[0]).is_file()]
    if there:
        if not (folder / "classes.tsv").is_file():
            raise missing(reader, "classes.tsv", [folder])
        split = choose(reader.name, split, there)
        labels = tuple(line.split("\t")[1] for line in lines(folder / "classes.tsv"))
        shards = [Packed(folder / name) for name in packed[split]]
        rows = partial(_packed, shards, split)
        return DataSet(reader.name, split, reader.licence, labels, rows, _of_pack, tuple(there))
    there = [name for name, part in (("validation", "val"), ("train", "train")) if (folder / part).is_dir()]
    split = choose(reader.name, split, there)
    words = (
        dict(line.split("\t", 1) for line in lines(folder / "words.txt")) if (folder / "words.txt").is_file() else {}
    )
    wnids = [line.strip() for line in lines(folder / "wnids.txt")]
    labels = tuple(words.get(wnid, wnid).strip() for wnid in wnids)
    index = {wnid: place for place, wnid in enumerate(wnids)}
    rows_of = partial(_validation, reader, folder / "val", index) if split == "validation" else None
    rows_of = rows_of or partial(_training, folder / "train", index)
    return DataSet(reader.name, split, reader.licence, labels, rows_of, _of_file, tuple(there))


def _packed(shards: list[Packed], split: str) -> list[tuple[str, Packed, int]]:
    found = [(shard, place) for shard in shards for place in range(len(shard["label"]))]
    return [(f"{split}-{number:06d}", shard, place) for number, (shard, place) in enumerate(found, 1)]


def _of_pack(row: tuple[str, Packed, int]) -> Example:
    name, shard, place = row
    left, top, right, bottom = (int(edge) for edge in shard["box"][place])
    picture = open_rgb(shard.member(place), name)
    return Example(name, picture, int(shard["label"][place]), _evidence((left, top, right, bottom)))


def _validation(reader: Reader, folder: Path, index: Mapping[str, int]) -> list[tuple[Path, int, Box]]:
    path = folder / "val_annotations.txt"
    if not path.is_file():
        raise missing(reader, path.name, [folder])
    cells = [line.split("\t") for line in lines(path)]
    strange = sorted({wnid for _, wnid, *_ in cells} - set(index))
    if strange:
        raise unknown("class in val_annotations.txt", strange[0], index)
    return [(folder / "images" / name, index[wnid], _box(box)) for name, wnid, *box in cells]


def _training(folder: Path, index: Mapping[str, int]) -> list[tuple[Path, int, Box]]:
    rows = []
    for wnid, label in index.items():
        for line in lines(folder / wnid / f"{wnid}_boxes.txt"):
            name, *box = line.split("\t")
            rows.append((folder / wnid / "images" / name, label, _box(box)))
    return rows


def _box(cells: list[str]) -> Box:
    left, top, right, bottom = (int(cell) for cell in cells[:4])
    return left, top, right, bottom


def _of_file(row: tuple[Path, int, Box]) -> Example:
    path, label, box = row
    return Example(path.stem, open_rgb(path), label, _evidence(box))


def _evidence(box: Box) -> tuple[tuple[Region, ...], ...] | None:
    """The last column and row (at most 63) belong to the box."""
    region = Region.of_pixels((box[0], box[1], box[2] + 1, box[3] + 1), SIZE, SIZE)
    return ((region,),) if region else None
