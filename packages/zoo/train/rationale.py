"""Train `zoo:rationale`: a small BERT that classifies movie reviews as positive or negative, up to 512 tokens.

    python packages/zoo/train/rationale.py --data ../shared/data --out packages/zoo/src/clearhead_zoo/models/rationale

The reviews are those of ERASER, with human rationales. First MiniLM is trained on the sentiment of phrases (skipped if
--base is already a classifier, such as the averaged teachers that sentiment.py writes to its --work/teachers), then
teachers and students are trained on the reviews (classifiers.py): on windows at the beginning, at the end and at random
positions, and on the marked passages. Reviews longer than 512 tokens are truncated at the end or at the beginning: the
validation reviews decide which, and which student, or the average of the students, is kept.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cards import write_card
from classifiers import (
    DistillationPlan,
    Weights,
    add_distillation_options,
    compute_accuracy,
    describe_architecture,
    encode_word_texts,
    make_evaluator,
    predict_stored_logits,
    report_target,
    train_teacher,
    train_teachers_and_students,
    write_classifier,
)
from encoders import find_packaged_base, make_text_parser, read_vocabulary, write_reduced_model
from movies import LABELS, LabelledText, Review, has_usable_length, read_reviews, read_sentiment, repeat_whole_sentences
from torch.nn import functional as F

TRUNCATED_SIDES = {"right": "the end", "left": "the beginning"}
#: Words that fill 512 tokens, more or less, and a shorter stretch for variety.
LONG_WINDOW_WORDS, SHORT_WINDOW_WORDS = 420, 150
#: Of the seconds given, the share that learning from phrases gets.
WARMUP_TIME_FRACTION = 0.25


def main() -> None:
    options = parse_options()
    training, validation = read_reviews(options.data, "train"), read_reviews(options.data, "validation")
    if options.smoke:
        training, validation = training[::80], validation[::20]
    examples = make_windows(training, options.seed) + [
        (text, review.label) for review in training for text in review.passages if has_usable_length(text)
    ]
    lines = (line.strip() for review in training for line in review.text.splitlines())
    sentences = [line for line in dict.fromkeys(lines) if has_usable_length(line)][:: 50 if options.smoke else 1]
    print(f"{len(training)} reviews make {len(examples)} examples and {len(sentences)} sentences", flush=True)
    decide = {
        "beginning": [(" ".join(review.words[:LONG_WINDOW_WORDS]), review.label) for review in validation],
        "end": [(" ".join(review.words[-LONG_WINDOW_WORDS:]), review.label) for review in validation],
    }
    full, seconds = train_phrase_classifier(options, decide)
    small, students = train_teachers_and_students(
        options, make_plan(options), full, examples, sentences, decide, seconds
    )
    scores = score_candidates(options, small, students, validation)
    best, side = max(reversed(scores), key=lambda candidate: scores[candidate])
    write_classifier(options.out, small, students[best], LABELS, side)
    right, _ = measure_stored_model(options.out, read_reviews(options.data, "test"), options.device)
    figures = {"accuracy": round(right, 4), "accuracy, validation": round(scores[best, side][0], 4)}
    print(write_card(options.out, build_card_facts(options, best, side, figures)), flush=True)
    report_target("accuracy on test.jsonl", right, 0.85)


def parse_options() -> argparse.Namespace:
    parser = make_text_parser(
        __doc__, "rationale", "folder with eraser-movies/, and sst2/ and sentences/ for the phrases"
    )
    add_distillation_options(parser, teachers=2, students=2, vocab_size=8000)
    options = parser.parse_args()
    options.data = Path(options.data)
    return options


def make_plan(options: argparse.Namespace) -> DistillationPlan:
    return DistillationPlan(
        labels=LABELS,
        max_tokens=128 if options.smoke else 512,
        texts_per_step=32 if options.smoke else 384,
        tokens_per_step=4096 if options.smoke else 65_536,
        teacher_epochs=0.5 if options.smoke else 3,
        student_epochs=0.5 if options.smoke else 5,
        teacher_lr=1e-4,
        student_lr=1e-4,
    )


def train_phrase_classifier(
    options: argparse.Namespace, dev_sets: Mapping[str, Sequence[LabelledText]]
) -> tuple[Path, float | None]:
    """A classifier of phrases with the full vocabulary to start from, and the seconds that are left."""
    base = options.base or find_packaged_base()
    full = write_reduced_model(base, options.work / "full", list(read_vocabulary(base)))
    if json.loads((base / "config.json").read_text(encoding="utf-8"))["architectures"] != ["BertModel"]:
        return full, options.seconds
    data, device = read_sentiment(options.data, held_out=0, seed=options.seed), torch.device(options.device)
    phrases = repeat_whole_sentences(data.examples)[:: 400 if options.smoke else 1]
    plan = DistillationPlan(LABELS, 128, 32 if options.smoke else 384, 24_576, 2, 0, 1.5e-4, 0)
    weights = train_teacher(
        options.work / "phrases.safetensors",
        full,
        plan,
        encode_word_texts(full, [text for text, _ in phrases], device, plan.max_tokens),
        torch.tensor([label for _, label in phrases], device=device),
        options.seconds and WARMUP_TIME_FRACTION * options.seconds,
        options.seed,
        make_evaluator(full, make_plan(options), dev_sets, device),
    )
    write_classifier(options.work / "phrases", full, weights, LABELS)
    return options.work / "phrases", options.seconds and (1 - WARMUP_TIME_FRACTION) * options.seconds


def make_windows(training: Sequence[Review], seed: int) -> list[LabelledText]:
    """The beginning and the end of each review, and stretches from anywhere in it."""
    rng = np.random.default_rng(seed)

    def stretch(review: Review, size: int) -> str:
        start = int(rng.integers(max(1, len(review.words) - size + 1)))
        return " ".join(review.words[start : start + size])

    found = []
    for review in training:
        ends = [" ".join(review.words[:LONG_WINDOW_WORDS]), " ".join(review.words[-LONG_WINDOW_WORDS:])]
        found += [(text, review.label) for text in ends]
        found += [
            (stretch(review, size), review.label)
            for size in (
                LONG_WINDOW_WORDS,
                LONG_WINDOW_WORDS,
                LONG_WINDOW_WORDS,
                SHORT_WINDOW_WORDS,
                SHORT_WINDOW_WORDS,
            )
        ]
    return found


def measure_stored_model(folder: Path, held_out: Sequence[Review], device: str) -> tuple[float, float]:
    """Accuracy, and the mean log-likelihood of the labels."""
    logits = predict_stored_logits(folder, [review.text for review in held_out], device)
    truth = [review.label for review in held_out]
    likelihood = -F.cross_entropy(logits, torch.tensor(truth)).item()
    return compute_accuracy(logits.argmax(-1).tolist(), truth), likelihood


def score_candidates(
    options: argparse.Namespace, small: Path, students: dict[str, Weights], validation: Sequence[Review]
) -> dict[tuple[str, str], tuple[float, float]]:
    """What decides: accuracy on the validation reviews and, where it is the same, the likelihood of their labels."""
    scores = {}
    for side, lost in TRUNCATED_SIDES.items():
        for name, weights in students.items():
            folder = options.work / "candidate"
            write_classifier(folder, small, weights, LABELS, side)
            scores[name, side] = measure_stored_model(folder, validation, options.device)
            print(f"{name} without {lost}: {scores[name, side][0]:.4f} {scores[name, side][1]:.4f}", flush=True)
    return scores


def build_card_facts(options: argparse.Namespace, chosen: str, side: str, figures: dict[str, float]) -> dict[str, Any]:
    seconds = f" --seconds {options.seconds:g}" if options.seconds else ""
    return {
        "name": "rationale",
        "task": "text-classification",
        "summary": "A small BERT that classifies movie reviews as positive or negative; the data contain human "
        "rationales.",
        "architecture": describe_architecture(options.out),
        "labels": LABELS,
        "licence": "Apache-2.0 (weights, from all-MiniLM-L6-v2); data under their own terms",
        "data": "ERASER movies (Pang and Lee 2004; rationales by Zaidan et al. 2007): train.jsonl without the 200 "
        "validation reviews that it contains; before that, trained on the data of zoo:sentiment (SST-2, rt-polarity, "
        "custrev)",
        "command": "python packages/zoo/train/rationale.py --data ../shared/data "
        f"--out packages/zoo/src/clearhead_zoo/models/rationale --seed {options.seed} --teachers {options.teachers} "
        f"--students {options.students} --pieces {options.pieces}{seconds}",
        "figures": figures,
        "measured": "On all reviews of test.jsonl (read once); stored files, loaded with transformers in float32. "
        f"Reviews longer than 512 tokens lose {TRUNCATED_SIDES[side]} (truncation_side is {side}), as in normal use. "
        f"Weights of {chosen} out of {options.students} student(s) of {options.teachers} teachers; "
        "these weights and the truncation side were selected on val.jsonl.",
        "use": "For comparing explanations with human rationales (clearhead.bench.data reads them). Not for other "
        "languages or other kinds of text; tokens beyond 512 are cut off.",
    }


if __name__ == "__main__":
    main()
