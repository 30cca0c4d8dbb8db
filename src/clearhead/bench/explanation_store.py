"""Explanations kept beside a run's figures, on request: RUN/explanations, one file for each shard, named like it.

A line is one explanation in its JSON form with its example and the class that its protocol wanted explained; a picture
stands in a line of its own, once for all methods, and so do the units that people marked in its text. Equal
explanations give equal bytes, as everything in a run.
"""

import base64
import gzip
import io
import json
import shutil
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from clearhead.bench.data.base import Example
from clearhead.bench.data.evidence import find_evidence_units
from clearhead.data.atomic_file import atomic_write
from clearhead.errors import InputError
from clearhead.explanation.explanation import from_dict
from clearhead.explanation.multi_stream import AnyExplanation, MultiStreamExplanation

EXPLANATION_FOLDER = "explanations"


@dataclass(frozen=True)
class StoredExplanation:
    """A line of a shard's file: an explanation, or (without a method) an image or the annotated units of an example.

    Attributes:
        example: Id of the example.
        explained: The class that is explained.
        method: Name of the method; empty for images and annotations.
        form: The JSON form.
    """

    example: str
    explained: str
    method: str
    form: Mapping[str, Any]


def build_stored_explanations(
    examples: Sequence[Example], explained_class: str | int, by_method: Mapping[str, Mapping[int, AnyExplanation]]
) -> Iterator[StoredExplanation]:
    """The explanations of a chunk, as they are written; by method and place."""
    for place, example in enumerate(examples):
        first = next((own[place] for own in by_method.values() if place in own), None)
        if first is None:
            continue
        if first.image is not None:
            yield StoredExplanation(example.id, str(explained_class), "", {"png": _encode_png(first.image)})
        text = next((part for part in first.by_stream.values() if part.units.offsets is not None), None)
        if example.evidence is not None and text is not None:
            marked = np.flatnonzero(find_evidence_units(example, text.units))
            yield StoredExplanation(example.id, str(explained_class), "", {"marked": marked.tolist()})
        for method, own in by_method.items():
            if place not in own:
                continue
            yield StoredExplanation(example.id, str(explained_class), method, own[place].to_dict(short=True))


def write_stored_explanations(folder: Path, shard_name: str, explanations: Iterable[StoredExplanation]) -> None:
    """Those of one shard, whole or not at all."""
    path = folder / EXPLANATION_FOLDER / f"{shard_name}.jsonl.gz"
    path.parent.mkdir(exist_ok=True)
    lines = [json.dumps(vars(one), ensure_ascii=False, allow_nan=False) for one in explanations]
    with atomic_write(path) as partial:
        partial.write_bytes(gzip.compress("\n".join(dict.fromkeys(lines)).encode(), mtime=0))


def has_stored_explanations(folder: Path, shard_name: str) -> bool:
    """Whether a run has kept the explanations of a shard.

    Args:
        folder: Folder of the run.
        shard_name: Name of the shard's file, without its ending.

    Returns:
        Whether the file exists; its content is not read.
    """
    return (folder / EXPLANATION_FOLDER / f"{shard_name}.jsonl.gz").exists()


def merge_stored_explanations(folder: Path, source_folder: Path) -> None:
    """Those of another run that are not here yet."""
    new = [
        path
        for path in sorted((source_folder / EXPLANATION_FOLDER).glob("*.jsonl.gz"))
        if not (folder / EXPLANATION_FOLDER / path.name).exists()
    ]
    for path in new:
        (folder / EXPLANATION_FOLDER).mkdir(exist_ok=True)
        with atomic_write(folder / EXPLANATION_FOLDER / path.name) as partial:
            shutil.copyfile(path, partial)


def load_stored_explanations(folder: Path, keys: set[tuple[str, str]]) -> dict[tuple[str, str], AnyExplanation]:
    """Those of these examples and methods, with their pictures; of several classes that were explained, the first."""
    forms: dict[tuple[str, str], Mapping[str, Any]] = {}
    pictures: dict[str, Any] = {}
    names = {example for example, _ in keys}
    for one in _iter_lines(folder):
        if one["example"] in names and "png" in one["form"]:
            pictures[one["example"]] = _decode_png(one["form"]["png"])
        elif (one["example"], one["method"]) in keys:
            forms.setdefault((one["example"], one["method"]), one["form"])
    return {(example, m): _attach_image(from_dict(form), pictures.get(example)) for (example, m), form in forms.items()}


def load_stored_annotations(folder: Path, examples: Collection[str]) -> dict[str, list[int]]:
    """By example, the places of the units of its text that people marked, where the data said so."""
    found = ((one["example"], one["form"].get("marked")) for one in _iter_lines(folder) if one["example"] in examples)
    return {example: places for example, places in found if places is not None}


def _iter_lines(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted((folder / EXPLANATION_FOLDER).glob("*.jsonl.gz")):
        try:
            with gzip.open(path, "rt", encoding="utf-8") as file:
                yield from map(json.loads, file)
        except (OSError, EOFError, ValueError, zlib.error) as problem:
            raise InputError(
                f"{str(path)!r} cannot be read ({problem}): remove it and run clearhead bench --keep-explanations "
                "again to recompute that chunk"
            ) from None


def _attach_image(explanation: AnyExplanation, picture: Any) -> AnyExplanation:
    if picture is None:
        return explanation
    parts = {
        stream: replace(part, image=picture) if part.units.boxes is not None else part
        for stream, part in explanation.by_stream.items()
    }
    return next(iter(parts.values())) if len(parts) == 1 else MultiStreamExplanation(parts)


def _encode_png(picture: np.ndarray) -> str:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def _decode_png(png: str) -> np.ndarray:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB"))
