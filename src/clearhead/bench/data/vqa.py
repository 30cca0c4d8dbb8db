"""VQA v2: questions about COCO images, each with the answers of ten annotators."""

import json
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from clearhead.bench.data.base import BenchmarkDataset, Example
from clearhead.bench.data.coco import find_image_folder
from clearhead.bench.data.image_files import open_rgb_image
from clearhead.bench.data.registry import DatasetSpec, choose_split, register_dataset
from clearhead.errors import InputError, unknown_value_error

SOFT_SCORE_RULES = ("thirds", "official")


@register_dataset(
    "vqa",
    licence="CC BY 4.0 (VQA v2, Goyal et al. 2017); images are COCO's, under Flickr's terms",
    download_hint="https://visualqa.org/download.html: questions, annotations and COCO's val2014.zip, "
    "unpacked into one folder",
    folder_names=("vqa", "VQA", "vqa-v2", "vqav2"),
    marker_files=("*OpenEnded_mscoco_*_questions.json", "*/*OpenEnded_mscoco_*_questions.json"),
)
def open_vqa(spec: DatasetSpec, folder: Path, split: str | None, rule: str = "thirds") -> BenchmarkDataset:
    """Open VQA; labels map answers to soft scores (`compute_soft_scores`), the test splits have none."""
    if rule not in SOFT_SCORE_RULES:
        raise unknown_value_error("rule for answers", rule, SOFT_SCORE_RULES)
    pattern = "*OpenEnded_mscoco_*_questions.json"
    paths = sorted([*folder.glob(pattern), *folder.glob(f"*/{pattern}")])
    files = {path.stem.split("mscoco_")[1].removesuffix("_questions"): path for path in paths}
    split = choose_split(spec.name, split, sorted(files, key=lambda name: (not name.startswith("val"), name)))
    image_split = split.replace("-dev", "")  # test-dev uses the images of test
    load_rows = partial(_list_rows, files[split], rule)
    make_example = partial(_make_example, find_image_folder(spec, folder, image_split), image_split)
    return BenchmarkDataset(spec.name, split, spec.licence, (), load_rows, make_example, tuple(files))


def _list_rows(path: Path, rule: str) -> list[tuple[dict[str, Any], dict[str, float] | None]]:
    """List the questions with the soft scores of their answers; None for a test split, whose answers are hidden."""
    questions = _read_list(path, "questions")
    prefix, split = path.stem.split("OpenEnded_mscoco_")
    name = f"{prefix}mscoco_{split.removesuffix('_questions')}_annotations.json"
    candidates = (path.parent / name, *path.parent.parent.glob(f"*/{name}"))
    annotation_path = next((candidate for candidate in candidates if candidate.is_file()), None)
    if annotation_path is None:
        if split.startswith("test"):
            return [(question, None) for question in questions]
        raise InputError(
            f"vqa: found no {name} next to {str(path)!r}. How to get it: https://visualqa.org/download.html"
        )
    scores_by_question = {
        annotation["question_id"]: compute_soft_scores((answer["answer"] for answer in annotation["answers"]), rule)
        for annotation in _read_list(annotation_path, "annotations")
    }
    return [(question, scores_by_question.get(question["question_id"])) for question in questions]


def _read_list(path: Path, name: str) -> list[dict[str, Any]]:
    """Read the list under the key `name` of a VQA file, sorted by question id."""
    try:
        entries: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))[name]
    except (ValueError, KeyError, TypeError) as problem:
        raise InputError(f"{str(path)!r} is not a file of VQA {name} ({problem!r})") from None
    return sorted(entries, key=lambda entry: entry["question_id"])


def _make_example(image_folder: Path, image_split: str, row: tuple[dict[str, Any], dict[str, float] | None]) -> Example:
    """Create an example of a question and its COCO image; the label is a score for each answer, or None."""
    question, scores = row
    image = open_rgb_image(image_folder / f"COCO_{image_split}_{question['image_id']:012d}.jpg")
    return Example(str(question["question_id"]), {"text": question["question"], "image": image}, scores)


def compute_soft_scores(answers: Iterable[str], rule: str = "thirds") -> dict[str, float]:
    """Compute the soft score of each answer: min(annotators who gave it / 3, 1).

    Args:
        answers: The annotators' answers.
        rule: "thirds", or "official": the mean over all subsets of all but one annotator, like VQA's own scorer, which
            gives .3, .6, .9, 1 for one, two, three, four of ten.

    Returns:
        Answer → score, the most frequent answer first.

    Example:
        >>> compute_soft_scores(["red"] * 2 + ["blue"] * 8)
        {'blue': 1.0, 'red': 0.6666666666666666}
        >>> compute_soft_scores(["red"] * 2 + ["blue"] * 8, "official")
        {'blue': 1.0, 'red': 0.6}
    """
    counts = Counter(answers)
    num_annotators = counts.total()

    def score(count: int) -> float:
        if rule == "thirds":
            return min(count / 3, 1.0)
        num_others = num_annotators - count
        return (count * min((count - 1) / 3, 1.0) + num_others * min(count / 3, 1.0)) / num_annotators

    return {answer: score(counts[answer]) for answer in sorted(counts, key=lambda answer: (-counts[answer], answer))}
