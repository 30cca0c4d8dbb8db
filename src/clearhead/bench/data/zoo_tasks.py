"""The zoo's tasks with known answers as data sets: every example with all that decides its label.

>>> from clearhead.bench.data import read
>>> one = read("known", task="recall", count=1)[0]
>>> one.input.split()[-1], one.answer == one.input[one.evidence[0][1].start : one.evidence[0][1].stop]
('→', True)
"""

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from clearhead.bench.data.base import DataSet, Example
from clearhead.bench.data.evidence import Characters, Mask, Piece, Place, Region
from clearhead.bench.data.registry import Reader, register
from clearhead.errors import InputError, unknown
from clearhead.targets import Generated

#: The models that the tasks were made for, by name; each has a task of its name.
TASKS = ("logic", "recall", "spell", "shapes-vqa", "shapes-vilt", "shapes-detr", "pets-hans")


@register(
    "known",
    licence="generated; spell: CMU Pronouncing Dictionary",
    get="pip install clearhead-zoo",
    folders=(),
    marks=(),
    must_exist=False,
)
def known(
    reader: Reader, folder: Path | None, split: str | None, task: str = "logic", count: int = 200, seed: int = 0
) -> DataSet:
    """`count` examples of the held-out stream of a task. Only examples that have evidence in the input."""
    if task not in _MAKERS:
        raise unknown("task", task, tuple(_MAKERS))
    if split not in (None, "held-out"):
        raise InputError(f"split={split!r}: only the held-out stream of {task} is for measuring")
    rows, example, labels = _MAKERS[task]
    return DataSet(
        f"known:{task}", "held-out", reader.licence, labels(), partial(rows, count, seed), example, ("held-out",)
    )


def _task(name: str) -> Any:
    try:
        return import_module(f"clearhead_zoo.tasks.{name}")
    except ImportError:
        raise InputError("the tasks with known answers are in the zoo: pip install clearhead-zoo") from None


def _characters(one: Any, positions: Sequence[int]) -> tuple[Piece, ...]:
    return tuple(Characters(*one.spans[position]) for position in positions)


def _logic_rows(count: int, seed: int) -> Sequence[Any]:
    return _task("logic").examples(count, seed, evident=True)


def _logic(one: Any) -> Example:
    sets = tuple(_characters(one, witness) for witness in one.witnesses)
    label = _task("logic").LABELS.index(one.label)
    return Example(one.id, one.text, label, sets, _characters(one, one.question), target=one.label)


def _recall_rows(least: int, most: int, count: int, seed: int) -> Sequence[Any]:
    return _task("recall").examples(count, seed, pairs=(least, most))


def _recall(one: Any) -> Example:
    sets = tuple(_characters(one, witness) for witness in one.witnesses)
    label = _task("recall").values().index(one.label)
    asked = _characters(one, one.question)
    return Example(one.id, one.text, label, sets, asked, target=Generated(0), answer=one.label)


def _spell_rows(count: int, seed: int) -> Sequence[Any]:
    """One phoneme of each of so many words, drawn at random."""
    spell, zoo = _task("spell"), import_module("clearhead_zoo")
    words, _ = spell.read(zoo.path("spell") / "held-out.tsv")
    rng = np.random.default_rng([seed, 1])
    chosen = rng.permutation(len(words))[:count]
    return [(words[place], int(rng.integers(len(words[place].phonemes)))) for place in chosen]


def _spell(row: tuple[Any, int]) -> Example:
    word, step = row
    one = word.examples()[step]
    sets = tuple(_characters(one, witness) for witness in one.witnesses)
    label = _task("spell").PHONEMES.index(one.label)
    said = " ".join(word.phonemes)
    return Example(one.id, one.text, label, sets, streams=("source",), target=Generated(step), answer=said)


def _shapes_rows(size: int, count: int, seed: int) -> Sequence[Any]:
    return _task("shapes").examples(count, seed, size=size)


def _shapes_vqa(one: Any) -> Example:
    given = {"text": one.text, "image": one.image, "regions": (one.features, one.region_boxes)}
    places = tuple(Place(region, "regions") for region in one.evidence_regions)
    evidence = ((*_characters(one, one.evidence), *places),)
    label = _task("shapes").ANSWERS.index(one.label)
    return Example(one.id, given, label, evidence, streams=("text", "regions"), target=one.label)


def _shapes_vilt(one: Any) -> Example:
    """The same questions about pixels; where nothing is there to be counted or found, the words alone are evidence."""
    shown = (Mask(one.evidence_mask),) if one.objects else ()
    evidence = ((*_characters(one, one.evidence), *shown),)
    label = _task("shapes").ANSWERS.index(one.label)
    given = {"text": one.text, "image": one.image}
    return Example(one.id, given, label, evidence, streams=("text", "image"), target=one.label)


def _shapes_detr(one: Any) -> Example:
    """The first object of the scene, whatever the question is about: the detection of it is explained."""
    shape = one.names[0].split()[-1]
    label = _task("shapes").SHAPES.index(shape)
    return Example(one.id, one.image, label, ((Mask(one.masks[0]),),), streams=("image",), target=shape)


def _shapes_scenes(one: Any) -> Example:
    """Every object of a scene, each with its shape, for masks of all detections."""
    shapes = [_task("shapes").SHAPES.index(name.split()[-1]) for name in one.names]
    masks = tuple((Mask(mask, label=shape),) for mask, shape in zip(one.masks, shapes, strict=True))
    return Example(one.id, one.image, None, masks, streams=("image",))


def _hans_rows(count: int, seed: int) -> Sequence[Any]:
    return _task("hans").examples(count, seed)


def _hans(one: Any) -> Example:
    high, wide = one.mask.shape
    where = Region.of_pixels(one.box, wide, high)
    assert where is not None
    return Example(one.id, one.picture, _task("hans").LABELS.index(one.label), ((where,),), target=one.label)


_MAKERS: dict[str, tuple[Callable[..., Sequence[Any]], Callable[[Any], Example], Callable[[], tuple[str, ...]]]] = {
    "logic": (_logic_rows, _logic, lambda: _task("logic").LABELS),
    "recall": (partial(_recall_rows, 4, 32), _recall, lambda: tuple(_task("recall").values())),
    "recall-4k": (partial(_recall_rows, 256, 2046), _recall, lambda: tuple(_task("recall").values())),
    "spell": (_spell_rows, _spell, lambda: _task("spell").PHONEMES),
    "shapes-vqa": (partial(_shapes_rows, 64), _shapes_vqa, lambda: _task("shapes").ANSWERS),
    "shapes-vilt": (partial(_shapes_rows, 64), _shapes_vilt, lambda: _task("shapes").ANSWERS),
    "shapes-detr": (partial(_shapes_rows, 96), _shapes_detr, lambda: _task("shapes").SHAPES),
    "shapes-scenes": (partial(_shapes_rows, 96), _shapes_scenes, lambda: _task("shapes").SHAPES),
    "pets-hans": (_hans_rows, _hans, lambda: _task("hans").LABELS),
}
