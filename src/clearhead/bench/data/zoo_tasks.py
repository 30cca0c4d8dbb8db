"""Data sets with known evidence: the zoo's synthetic tasks, where everything that decides a label is marked.

>>> from clearhead.bench.data import load_benchmark_dataset
>>> example = load_benchmark_dataset("known", task="recall", count=1)[0]
>>> value = example.evidence[0][1]
>>> example.input.split()[-1], example.continuation == example.input[value.start : value.stop]
('→', True)
"""

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from clearhead.bench.data.base import BenchmarkDataset, Example
from clearhead.bench.data.evidence import CharSpan, EvidenceItem, EvidenceMask, ImageBox, UnitIndex
from clearhead.bench.data.registry import DatasetSpec, register_dataset
from clearhead.errors import InputError, unknown_value_error
from clearhead.targets import GeneratedToken

#: Names of the tasks that have a zoo model of the same name.
ZOO_TASKS = ("logic", "recall", "spell", "shapes-vqa", "shapes-vilt", "shapes-detr", "pets-hans", "counting", "signs")


@register_dataset(
    "known",
    licence="generated; spell: CMU Pronouncing Dictionary",
    download_hint="pip install clearhead-zoo",
    folder_names=(),
    marker_files=(),
    requires_folder=False,
)
def open_zoo_task(
    spec: DatasetSpec, folder: Path | None, split: str | None, task: str = "logic", count: int = 200, seed: int = 0
) -> BenchmarkDataset:
    """Generate `count` held-out examples of a task; only examples that have evidence in the input."""
    if task not in _TASK_BUILDERS:
        raise unknown_value_error("task", task, tuple(_TASK_BUILDERS))
    if split not in (None, "held-out"):
        raise InputError(
            f"split={split!r} is not available: only the held-out stream of {task} can be used for measurements"
        )
    draw_rows, make_example, list_labels = _TASK_BUILDERS[task]
    return BenchmarkDataset(
        f"known:{task}",
        "held-out",
        spec.licence,
        list_labels(),
        partial(draw_rows, count, seed),
        make_example,
        ("held-out",),
    )


def _import_task(name: str) -> Any:
    """Import a task's module of clearhead-zoo; raise `InputError` with the install command if it is missing."""
    try:
        return import_module(f"clearhead_zoo.tasks.{name}")
    except ImportError:
        raise InputError("the tasks with known evidence are part of the zoo: pip install clearhead-zoo") from None


def _to_char_spans(zoo_example: Any, positions: Sequence[int]) -> tuple[EvidenceItem, ...]:
    """Convert unit positions of a zoo example to spans of characters."""
    return tuple(CharSpan(*zoo_example.spans[position]) for position in positions)


def _list_witnesses(zoo_example: Any) -> tuple[tuple[EvidenceItem, ...], ...]:
    """Return each witness, a minimal set of positions that decides the label, as an evidence set."""
    return tuple(_to_char_spans(zoo_example, witness) for witness in zoo_example.witnesses)


def _draw_logic_rows(count: int, seed: int) -> Sequence[Any]:
    """Generate logic examples whose label has a reason in the text; labels due to an absence are left out."""
    return _import_task("logic").make_examples(count, seed, evident=True)


def _make_logic_example(row: Any) -> Example:
    """Create an example with an evidence set per witness; the question's positions are excluded."""
    label = _import_task("logic").LABELS.index(row.label)
    question = _to_char_spans(row, row.question_positions)
    return Example(row.id, row.text, label, _list_witnesses(row), question, target=row.label)


def _draw_recall_rows(min_pairs: int, max_pairs: int, count: int, seed: int) -> Sequence[Any]:
    """Generate recall examples with between `min_pairs` and `max_pairs` key–value pairs."""
    return _import_task("recall").make_examples(count, seed, pairs=(min_pairs, max_pairs))


def _make_recall_example(row: Any) -> Example:
    """Create an example that explains the first generated token, with the true value as continuation."""
    label = _import_task("recall").list_values().index(row.label)
    question = _to_char_spans(row, row.question_positions)
    evidence = _list_witnesses(row)
    return Example(row.id, row.text, label, evidence, question, target=GeneratedToken(0), continuation=row.label)


def _draw_two_hop_rows(count: int, seed: int) -> Sequence[Any]:
    """Generate two-hop look-ups in lists of pairs."""
    return _import_task("two_hop").make_examples(count, seed)


def _make_two_hop_example(row: Any) -> Example:
    """Create an example that explains the first generated token; its evidence set is the words of both pairs."""
    label = _import_task("two_hop").list_answers().index(row.label)
    question = _to_char_spans(row, row.question_positions)
    evidence = _list_witnesses(row)
    return Example(row.id, row.text, label, evidence, question, target=GeneratedToken(0), continuation=row.label)


def _draw_negation_rows(count: int, seed: int) -> Sequence[Any]:
    """Generate texts that tell whether a thing is open or shut; texts that do not mention the thing are left out."""
    return _import_task("negation").make_examples(count, seed, evident=True)


def _make_negation_example(row: Any) -> Example:
    """Create an example with an evidence set per witness; the question's words are excluded."""
    label = _import_task("negation").LABELS.index(row.label)
    question = _to_char_spans(row, row.question_positions)
    return Example(row.id, row.text, label, _list_witnesses(row), question, target=row.label)


def _draw_spell_rows(count: int, seed: int) -> Sequence[Any]:
    """Draw `count` words, and one phoneme of each."""
    spell = _import_task("spell")
    zoo = import_module("clearhead_zoo")
    words, _ = spell.read_spellings(zoo.path("spell") / "held-out.tsv")
    rng = np.random.default_rng([seed, 1])
    word_indices = rng.permutation(len(words))[:count]
    return [(words[index], int(rng.integers(len(words[index].phonemes)))) for index in word_indices]


def _make_spell_example(row: tuple[Any, int]) -> Example:
    """Create an example of one phoneme of a word: the target is that generated token, the evidence its letters."""
    word, step = row
    zoo_example = word.make_examples()[step]
    return Example(
        zoo_example.id,
        zoo_example.text,
        _import_task("spell").PHONEMES.index(zoo_example.label),
        _list_witnesses(zoo_example),
        streams=("source",),
        target=GeneratedToken(step),
        continuation=" ".join(word.phonemes),
    )


def _draw_shapes_rows(size: int, count: int, seed: int) -> Sequence[Any]:
    """Generate questions about scenes of shapes, in images of size × size pixels."""
    return _import_task("shapes").make_examples(count, seed, size=size)


def _make_shapes_vqa_example(row: Any) -> Example:
    """Create an example of text, image and regions; its one evidence set joins words and regions."""
    inputs = {"text": row.text, "image": row.image, "regions": (row.features, row.region_boxes)}
    regions = tuple(UnitIndex(region, "regions") for region in row.evidence_regions)
    evidence = ((*_to_char_spans(row, row.evidence), *regions),)
    label = _import_task("shapes").ANSWERS.index(row.label)
    return Example(row.id, inputs, label, evidence, streams=("text", "regions"), target=row.label)


def _make_shapes_vilt_example(row: Any) -> Example:
    """Create the same question about pixels; if no object is to be counted or found, only words are evidence."""
    masks = (EvidenceMask(row.evidence_mask),) if row.objects else ()
    evidence = ((*_to_char_spans(row, row.evidence), *masks),)
    label = _import_task("shapes").ANSWERS.index(row.label)
    inputs = {"text": row.text, "image": row.image}
    return Example(row.id, inputs, label, evidence, streams=("text", "image"), target=row.label)


def _make_shapes_detr_example(row: Any) -> Example:
    """Create an example that explains the detection of the scene's first object, whatever the question is about."""
    shape = row.names[0].split()[-1]
    label = _import_task("shapes").SHAPES.index(shape)
    return Example(row.id, row.image, label, ((EvidenceMask(row.masks[0]),),), streams=("image",), target=shape)


def _make_shapes_scene_example(row: Any) -> Example:
    """Create an example with the masks and classes of all objects of a scene."""
    labels = [_import_task("shapes").SHAPES.index(name.split()[-1]) for name in row.names]
    masks = tuple((EvidenceMask(mask, label=label),) for mask, label in zip(row.masks, labels, strict=True))
    return Example(row.id, row.image, None, masks, streams=("image",))


def _draw_hans_rows(count: int, seed: int) -> Sequence[Any]:
    """Generate images with a word pasted on them that alone decides the label (Clever Hans)."""
    return _import_task("hans").make_examples(count, seed)


def _make_hans_example(row: Any) -> Example:
    """Create an example whose evidence is the box of the pasted word."""
    height, width = row.mask.shape
    box = ImageBox.from_pixels(row.box, width, height)
    assert box is not None
    return Example(row.id, row.image, _import_task("hans").LABELS.index(row.label), ((box,),), target=row.label)


def _draw_cell_rows(task: str, count: int, seed: int) -> Sequence[Any]:
    """Generate images of cells (`counting`, `signs`); all of them have evidence."""
    return _import_task(task).make_examples(count, seed)


def _make_cell_example(task: str, row: Any) -> Example:
    """Create an example whose one evidence set is the boxes of the cells that decide the label."""
    width, height = row.image.size
    boxes = tuple(ImageBox.from_pixels(box, width, height) for box in row.boxes)
    evidence = (tuple(box for box in boxes if box is not None),)
    return Example(row.id, row.image, _import_task(task).LABELS.index(row.label), evidence, target=row.label)


def _list_cell_labels(task: str) -> tuple[str, ...]:
    """Return the labels of a task of images of cells."""
    labels: tuple[str, ...] = _import_task(task).LABELS
    return labels


_TASK_BUILDERS: dict[
    str, tuple[Callable[..., Sequence[Any]], Callable[[Any], Example], Callable[[], tuple[str, ...]]]
] = {
    "logic": (_draw_logic_rows, _make_logic_example, lambda: _import_task("logic").LABELS),
    "recall": (
        partial(_draw_recall_rows, 4, 32),
        _make_recall_example,
        lambda: tuple(_import_task("recall").list_values()),
    ),
    "recall-4k": (
        partial(_draw_recall_rows, 256, 2046),
        _make_recall_example,
        lambda: tuple(_import_task("recall").list_values()),
    ),
    "two-hop": (_draw_two_hop_rows, _make_two_hop_example, lambda: tuple(_import_task("two_hop").list_answers())),
    "negation": (_draw_negation_rows, _make_negation_example, lambda: _import_task("negation").LABELS),
    "spell": (_draw_spell_rows, _make_spell_example, lambda: _import_task("spell").PHONEMES),
    "shapes-vqa": (partial(_draw_shapes_rows, 64), _make_shapes_vqa_example, lambda: _import_task("shapes").ANSWERS),
    "shapes-vilt": (partial(_draw_shapes_rows, 64), _make_shapes_vilt_example, lambda: _import_task("shapes").ANSWERS),
    "shapes-detr": (partial(_draw_shapes_rows, 96), _make_shapes_detr_example, lambda: _import_task("shapes").SHAPES),
    "shapes-scenes": (
        partial(_draw_shapes_rows, 96),
        _make_shapes_scene_example,
        lambda: _import_task("shapes").SHAPES,
    ),
    "pets-hans": (_draw_hans_rows, _make_hans_example, lambda: _import_task("hans").LABELS),
    **{
        task: (
            partial(_draw_cell_rows, task),
            partial(_make_cell_example, task),
            partial(_list_cell_labels, task),
        )
        for task in ("counting", "signs")
    },
}
