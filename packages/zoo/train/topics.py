"""Train `zoo:topics`: a small BERT that classifies what a question asks for (TREC's six types).

    python packages/zoo/train/topics.py --data ../shared/data --out packages/zoo/src/clearhead_zoo/models/topics
    python packages/zoo/train/topics.py --data 20newsgroups --out work/newsgroups

With `--data 20newsgroups` the classes are the twenty newsgroups instead, with up to 512 tokens a post; the posts are
read from the folder in the environment variable CLEARHEAD_DATA, otherwise scikit-learn downloads them. Teachers and
students as in classifiers.py; held-out training questions decide which student, or the average of the students, is
kept. If the folder also contains text/ (running English text), its lines are unlabelled data for learning the reduced
vocabulary.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from cards import write_card
from classifiers import (
    DistillationPlan,
    add_distillation_options,
    describe_architecture,
    measure_accuracy,
    report_target,
    train_teachers_and_students,
    write_classifier,
)
from encoders import find_packaged_base, make_text_parser, read_vocabulary, write_reduced_model

from clearhead.bench.data import BenchmarkDataset
from clearhead.bench.data import load_benchmark_dataset as read_data

NEWSGROUPS = "20newsgroups"
#: In the order of the reader's labels: DESC, ENTY, ABBR, HUM, LOC, NUM.
QUESTION_TYPES = ["description", "entity", "abbreviation", "human", "location", "number"]
LabelledText = tuple[str, int]


def main() -> None:
    options = parse_options()
    posts = options.data == NEWSGROUPS
    training, test = read_splits(options.data)
    labels = list(training.labels) if posts else QUESTION_TYPES
    learning, dev = split_examples(
        list_labelled_texts(training), 64 if options.smoke else len(training) // 11, options.seed
    )
    plan = make_plan(options, labels)
    if options.smoke:
        learning = learning[:256]
    practice = (
        [] if posts else sample_lines(Path(options.data) / "text", 256 if options.smoke else 40_000, options.seed)
    )
    print(
        f"{len(learning)} training examples, {len(dev)} for model selection, {len(practice)} unlabelled lines",
        flush=True,
    )
    base = options.base or find_packaged_base()
    full = write_reduced_model(base, options.work / "full", list(read_vocabulary(base)), plan.max_tokens)
    small, students = train_teachers_and_students(
        options, plan, full, learning, practice, {"dev": dev}, options.seconds
    )
    scores = {}
    for name, weights in students.items():
        write_classifier(options.work / "candidate", small, weights, labels)
        scores[name] = measure_accuracy(options.work / "candidate", dev, options.device)
        print(f"dev, {name}: {scores[name]:.4f}", flush=True)
    best = max(reversed(scores), key=lambda name: scores[name])
    write_classifier(options.out, small, students[best], labels)
    right = measure_accuracy(options.out, list_labelled_texts(test), options.device)
    figures = {"accuracy": round(right, 4), "accuracy, questions for model selection": round(scores[best], 4)}
    if posts:
        figures = {"accuracy": round(right, 4), "accuracy, posts for model selection": round(scores[best], 4)}
    print(write_card(options.out, build_card_facts(options, labels, test, best, figures)), flush=True)
    report_target("accuracy on the test set", right, 0.0 if posts else 0.95)


def parse_options() -> argparse.Namespace:
    data = f"folder with sentences/TREC.train.all and TREC.test.all, or {NEWSGROUPS}"
    parser = add_distillation_options(
        make_text_parser(__doc__, "topics", data), teachers=3, students=2, vocab_size=4000
    )
    options = parser.parse_args()
    if options.smoke:
        options.teachers, options.students = 2, 2
    return options


def make_plan(options: argparse.Namespace, labels: list[str]) -> DistillationPlan:
    posts = options.data == NEWSGROUPS
    return DistillationPlan(
        labels=labels,
        max_tokens=512 if posts else 128,
        texts_per_step=128 if posts or options.smoke else 256,
        tokens_per_step=32_768,
        teacher_epochs=1 if options.smoke else 8,
        student_epochs=1 if options.smoke else 12,
        teacher_lr=2e-4,
        student_lr=2e-4,
        num_repeats=1 if posts or options.smoke else 6,
        # the most words of held-out questions stay whole with about this
        other_text_weight=0.02,
    )


def read_splits(data: str) -> tuple[BenchmarkDataset, BenchmarkDataset]:
    if data == NEWSGROUPS:
        return read_data(data, "train"), read_data(data, "test")
    return read_data("trec", "train", data), read_data("trec", "test", data)


def list_labelled_texts(data: BenchmarkDataset) -> list[LabelledText]:
    return [(example.input, example.label) for example in data if isinstance(example.label, int)]


def split_examples(
    examples: list[LabelledText], num_held_out: int, seed: int
) -> tuple[list[LabelledText], list[LabelledText]]:
    """The examples without `few` of them, and these; a question that is there twice stays on one side."""
    order = np.random.default_rng(seed).permutation(len(examples))
    dev = [examples[place] for place in order[:num_held_out]]
    asked = {text.lower() for text, _ in dev}
    return [examples[place] for place in order[num_held_out:] if examples[place][0].lower() not in asked], dev


def sample_lines(folder: Path, count: int, seed: int) -> list[str]:
    """Lines of three to forty words from all over the folder's files: all that hold a question mark, then any."""
    found = (line for file in sorted(folder.glob("*.txt")) for line in file.read_text(errors="replace").splitlines())
    lines = [line.strip() for line in dict.fromkeys(found) if 3 <= len(line.split()) <= 40]
    np.random.default_rng(seed).shuffle(lines)
    return sorted(lines, key=lambda line: "?" not in line)[:count]


def build_card_facts(
    options: argparse.Namespace, labels: list[str], test: BenchmarkDataset, chosen: str, figures: dict[str, float]
) -> dict[str, Any]:
    posts = options.data == NEWSGROUPS
    folder = Path("work", "newsgroups") if posts else Path("packages/zoo/src/clearhead_zoo/models/topics")
    seconds = f" --seconds {options.seconds:g}" if options.seconds else ""
    return {
        "name": "newsgroups" if posts else "topics",
        "task": "text-classification",
        "summary": "A small BERT that classifies which of twenty newsgroups a post is from."
        if posts
        else "A small BERT that classifies what a question asks for: a number, a place, a person …",
        "architecture": describe_architecture(options.out),
        "labels": labels,
        "licence": "Apache-2.0 (weights, from all-MiniLM-L6-v2); data under their own terms",
        "data": f"{test.licence}; {'the posts by date' if posts else 'its 5,452 training questions'}, one in eleven "
        "(at random) held out for model selection; lines of running English text as unlabelled data for learning the "
        "reduced vocabulary",
        "command": f"python packages/zoo/train/topics.py --data {NEWSGROUPS if posts else '../shared/data'} "
        f"--out {folder} --seed {options.seed} --teachers {options.teachers} --students {options.students} "
        f"--pieces {options.pieces}{seconds}",
        "figures": figures,
        "measured": f"On all {len(test):,} examples of the test set (read once); stored files, loaded with "
        f"transformers in float32. Weights of {chosen} out of {options.students} student(s) of {options.teachers} "
        "teachers, selected on training examples that none of them was trained on.",
        "use": "For trying out explanations where there are more than two classes. Not for other languages or "
        f"{'texts' if posts else 'sentences that are no questions'}: it always predicts one of its {len(labels)} "
        "classes.",
    }


if __name__ == "__main__":
    main()
