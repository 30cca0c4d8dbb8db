"""VQA v2: questions about COCO pictures, each with ten people's answers."""

import json
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from clearhead.bench.data.base import DataSet, Example
from clearhead.bench.data.coco import picture_folder
from clearhead.bench.data.image_files import open_rgb
from clearhead.bench.data.registry import Reader, choose, register
from clearhead.errors import InputError, unknown

RULES = ("thirds", "official")


@register(
    "vqa",
    licence="CC BY 4.0 (VQA v2, Goyal et al. 2017); pictures are COCO's, under Flickr's terms",
    get="https://visualqa.org/download.html: questions, annotations and COCO's val2014.zip, unpacked into one folder",
    folders=("vqa", "VQA", "vqa-v2", "vqav2"),
    marks=("*OpenEnded_mscoco_*_questions.json", "*/*OpenEnded_mscoco_*_questions.json"),
)
def vqa(reader: Reader, folder: Path, split: str | None, rule: str = "thirds") -> DataSet:
    """The label of an example is a table from answer to score (`soft_answers`); the test splits have none."""
    if rule not in RULES:
        raise unknown("rule for answers", rule, RULES)
    pattern = "*OpenEnded_mscoco_*_questions.json"
    files = sorted([*folder.glob(pattern), *folder.glob(f"*/{pattern}")])
    there = {path.stem.split("mscoco_")[1].removesuffix("_questions"): path for path in files}
    split = choose(reader.name, split, sorted(there, key=lambda name: (not name.startswith("val"), name)))
    kind = split.replace("-dev", "")  # test-dev's pictures are test's
    rows = partial(_rows, there[split], rule)
    make = partial(_example, picture_folder(reader, folder, kind), kind)
    return DataSet(reader.name, split, reader.licence, (), rows, make, tuple(there))


def _rows(path: Path, rule: str) -> list[tuple[dict[str, Any], dict[str, float] | None]]:
    questions = _list(path, "questions")
    prefix, split = path.stem.split("OpenEnded_mscoco_")
    name = f"{prefix}mscoco_{split.removesuffix('_questions')}_annotations.json"
    found = next((p for p in (path.parent / name, *path.parent.parent.glob(f"*/{name}")) if p.is_file()), None)
    if found is None:
        if split.startswith("test"):
            return [(question, None) for question in questions]
        raise InputError(
            f"vqa: found no {name} beside {str(path)!r}. How to get it: https://visualqa.org/download.html"
        )
    answers = {
        one["question_id"]: soft_answers((given["answer"] for given in one["answers"]), rule)
        for one in _list(found, "annotations")
    }
    return [(question, answers.get(question["question_id"])) for question in questions]


def _list(path: Path, name: str) -> list[dict[str, Any]]:
    try:
        found: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))[name]
    except (ValueError, KeyError, TypeError) as problem:
        raise InputError(f"{str(path)!r} is not a file of VQA's {name} ({problem!r})") from None
    return sorted(found, key=lambda one: one["question_id"])


def _example(pictures: Path, kind: str, row: tuple[dict[str, Any], dict[str, float] | None]) -> Example:
    question, answers = row
    picture = open_rgb(pictures / f"COCO_{kind}_{question['image_id']:012d}.jpg")
    return Example(str(question["question_id"]), {"text": question["question"], "image": picture}, answers)


def soft_answers(answers: Iterable[str], rule: str = "thirds") -> dict[str, float]:
    """How right each answer is: min(people who gave it / 3, 1).

    `official` is the mean of that over all people but one, as VQA's own scorer has it: .3, .6, .9, 1 of ten.

    >>> soft_answers(["red"] * 2 + ["blue"] * 8)
    {'blue': 1.0, 'red': 0.6666666666666666}
    >>> soft_answers(["red"] * 2 + ["blue"] * 8, "official")
    {'blue': 1.0, 'red': 0.6}
    """
    counts = Counter(answers)
    people = counts.total()

    def score(count: int) -> float:
        if rule == "thirds":
            return min(count / 3, 1.0)
        return (count * min((count - 1) / 3, 1.0) + (people - count) * min(count / 3, 1.0)) / people

    return {answer: score(counts[answer]) for answer in sorted(counts, key=lambda one: (-counts[one], one))}
