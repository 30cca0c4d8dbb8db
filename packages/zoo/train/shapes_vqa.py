"""Train `zoo:shapes-vqa`: a small LXMERT that answers questions about coloured shapes, given as regions.

    python packages/zoo/train/shapes_vqa.py --out packages/zoo/src/clearhead_zoo/models/shapes-vqa

A region is an object (or a piece of background) as a detector would return it: a noisy vector and a box. Words that do
not carry the question are sometimes masked, so that masked inputs are not out of distribution when an explanation is
tested; neither are removed objects: their region becomes a background region. Scenes never repeat, so the accuracy that
is printed during training is that of new scenes. An interrupted run continues with --resume and the same --work.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from cards import write_card
from known import (
    autocast_if_cuda,
    build_word_tokenizer,
    iter_chunks,
    make_shared_parser,
    make_training_budget,
    run_training,
    write_model_files,
)
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer, LxmertConfig, LxmertForQuestionAnswering

from clearhead.training import TrainingBudget
from clearhead_zoo.tasks import make_generator, shapes

#: Longest question with its special tokens, and some room.
MAX_TOKENS = 16
TARGET_ACCURACY = 0.97
#: Answers of a batch: numbers of questions as tokens, with some of them masked, and its scenes as they are or changed.
PredictFunction = Callable[[shapes.QuestionBatch, NDArray[np.int64], shapes.Scenes], NDArray[np.int64]]


def main() -> None:
    options = parse_options()
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    config = build_config(options)
    model = LxmertForQuestionAnswering(LxmertConfig(**config)).to(options.device)
    clock = make_training_budget(options)
    tensors = run_training(options, model, clock, QuestionStream(options, model, clock).compute_loss)
    write_model_files(options.out, tensors, config, build_tokenizer(), SPECIAL_TOKENS, MAX_TOKENS)
    figures = measure_stored_model(options)
    print(write_card(options.out, build_card_facts(options, clock.step, figures)), flush=True)
    report_target(figures["accuracy"], TARGET_ACCURACY)


def parse_options() -> argparse.Namespace:
    parser = make_shared_parser(__doc__, name="shapes-vqa", steps=8000, lr=1e-3)
    parser.add_argument("--batch", type=int, default=1024, help="questions per step")
    parser.add_argument("--width", type=int, default=128, help="width of the model")
    parser.add_argument(
        "--layers",
        type=int,
        nargs=3,
        default=[3, 2, 3],
        help="layers of the language, region and cross-modal encoders",
    )
    options = parser.parse_args()
    if options.smoke:
        options.steps, options.seconds, options.batch, options.count = 30, None, 64, 60
    return options


SampleType = TypeVar("SampleType")


class BatchPrefetcher(Generic[SampleType]):
    """Draws the next step's data while this step's is being learned from; they depend on the step and lesson alone."""

    def __init__(self, sample: Callable[[int, int], SampleType]) -> None:
        self.sample = sample
        self.pool = ThreadPoolExecutor(1)
        self.pending: dict[tuple[int, int], Future[SampleType]] = {}

    def take(self, step: int, lesson: int = 0) -> SampleType:
        drawn = self.pending.pop((step, lesson), None) or self.pool.submit(self.sample, step, lesson)
        self.pending = {(step + 1, lesson): self.pool.submit(self.sample, step + 1, lesson)}
        return drawn.result()


class FamilyAccuracy:
    """Running accuracy of each family of questions, printed from time to time."""

    def __init__(self, budget: TrainingBudget, seconds: float = 20.0) -> None:
        self.budget, self.seconds, self.last_report_time = budget, seconds, time.monotonic()
        self.family = np.array([shapes.FAMILIES.index(question.family) for question in shapes.list_questions()])
        self.num_correct: Tensor | None = None
        self.num_asked = np.zeros(len(shapes.FAMILIES))

    def add(self, question: NDArray[np.int64], is_correct: Tensor) -> dict[str, float]:
        """Count these; gives the accuracies since the last time when it is time to print them, else nothing.

        What is right stays on the device until then: to ask for it would be to wait for it.
        """
        family = self.family[question]
        if self.num_correct is None:
            self.num_correct = torch.zeros(len(shapes.FAMILIES), device=is_correct.device)
        self.num_correct.index_add_(0, torch.from_numpy(family).to(is_correct.device), is_correct.float())
        self.num_asked += np.bincount(family, minlength=len(shapes.FAMILIES))
        if time.monotonic() - self.last_report_time < self.seconds:
            return {}
        share = self.num_correct.cpu().numpy() / np.maximum(self.num_asked, 1)
        found = {name: float(share[k]) for k, name in enumerate(shapes.FAMILIES) if self.num_asked[k]}
        print(
            f"step {self.budget.step}: " + ", ".join(f"{name} {value:.3f}" for name, value in found.items()), flush=True
        )
        self.num_correct.zero_()
        self.num_asked[:], self.last_report_time = 0, time.monotonic()
        return found


def mask_question_words(rng: np.random.Generator, question: NDArray[np.int64]) -> NDArray[np.int64]:
    """Tokens of the questions; in a third of them words that do not carry the question are masked at a random rate."""
    ids, content = (table[question] for table in shapes.build_token_table())
    rate = np.where(rng.random(len(ids)) < 0.33, rng.random(len(ids)), 0.0)
    out = (rng.random(ids.shape) < rate[:, None]) & ~content & (ids >= len(shapes.SPECIAL_TOKENS))
    return np.where(out, shapes.SPECIAL_TOKENS.index(shapes.MASK_TOKEN), ids)


class QuestionStream:
    """Fresh scenes and questions for every step."""

    def __init__(self, options: argparse.Namespace, model: LxmertForQuestionAnswering, budget: TrainingBudget) -> None:
        self.options, self.model, self.budget = options, model, budget
        self.tally, self.prefetcher = FamilyAccuracy(budget), BatchPrefetcher(self.sample_batch)

    def sample_batch(self, step: int, lesson: int) -> tuple[NDArray[Any], ...]:
        rng = make_generator(self.options.seed, "train", step)
        asked = shapes.sample_question_batch(rng, self.options.batch)
        features, boxes, _ = shapes.make_regions(rng, asked.scenes)
        return asked.question, mask_question_words(rng, asked.question), features, boxes, asked.answer

    def compute_loss(self) -> Tensor:
        device = torch.device(self.options.device)
        question, *drawn = self.prefetcher.take(self.budget.step)
        ids, features, boxes, truth = (torch.from_numpy(array).to(device, non_blocking=True) for array in drawn)
        with autocast_if_cuda(device):
            logits = self.model(
                input_ids=ids, attention_mask=(ids != 0).float(), visual_feats=features, visual_pos=boxes
            ).question_answering_score.float()
        self.tally.add(question, logits.argmax(-1) == truth)
        return F.cross_entropy(logits, truth)


SPECIAL_TOKENS = dict(
    zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), shapes.SPECIAL_TOKENS, strict=True)
)


def build_label_config() -> dict[str, Any]:
    return {
        "id2label": {str(number): answer for number, answer in enumerate(shapes.ANSWERS)},
        "label2id": {answer: number for number, answer in enumerate(shapes.ANSWERS)},
    }


def build_config(options: argparse.Namespace) -> dict[str, Any]:
    language, regions, both = options.layers
    return {
        "architectures": ["LxmertForQuestionAnswering"],
        "model_type": "lxmert",
        "dtype": "float16",
        "vocab_size": len(shapes.build_vocabulary()),
        "hidden_size": options.width,
        "intermediate_size": 2 * options.width,
        "num_attention_heads": 4,
        "l_layers": language,
        "r_layers": regions,
        "x_layers": both,
        "visual_feat_dim": shapes.FEATURE_SIZE,
        "visual_pos_dim": 4,
        "num_qa_labels": len(shapes.ANSWERS),
        "max_position_embeddings": MAX_TOKENS,
        "type_vocab_size": 1,
        # the scenes never repeat: there is nothing to regularise
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        # the usual 0.02 is meant for wider models: this one would spend most of its steps getting off the ground
        "initializer_range": 0.06,
        "pad_token_id": 0,
        **build_label_config(),
    }


def build_tokenizer() -> Tokenizer:
    template = f"{shapes.CLS_TOKEN} $A {shapes.SEP_TOKEN}"
    return build_word_tokenizer(
        shapes.build_vocabulary(), shapes.SPECIAL_TOKENS, shapes.TOKEN_PATTERN, template, lower=True
    )


def measure_stored_model(options: argparse.Namespace) -> dict[str, float]:
    """What the stored files do, opened the way a user opens them."""
    model = LxmertForQuestionAnswering.from_pretrained(options.out, dtype=torch.float32).to(options.device).eval()

    @torch.no_grad()
    def ask(asked: shapes.QuestionBatch, ids: NDArray[np.int64], changed: shapes.Scenes) -> NDArray[np.int64]:
        rng = make_generator(options.seed, "held-out", 1)
        features, boxes, places = shapes.make_regions(rng, replace(changed, present=asked.scenes.present))
        gone = np.zeros(features.shape[:2], dtype=bool)
        np.put_along_axis(gone, places, asked.scenes.present & ~changed.present, axis=1)
        features = np.where(gone[:, :, None], shapes.sample_background_features(rng, *gone.shape), features)
        found = []
        for chunk in iter_chunks(range(len(ids)), 500):
            words, seen, where = (torch.from_numpy(array[list(chunk)]) for array in (ids, features, boxes))
            words = words.to(options.device)
            found.append(
                model(
                    input_ids=words,
                    attention_mask=(words != 0).float(),
                    visual_feats=seen.to(options.device),
                    visual_pos=where.to(options.device),
                ).question_answering_score.argmax(-1)
            )
        return torch.cat(found).cpu().numpy()

    return compute_figures(options, ask)


def compute_figures(options: argparse.Namespace, predict: PredictFunction) -> dict[str, float]:
    """Accuracy by family, and what taking away, masking and recolouring do to the answers."""
    asked = shapes.sample_question_batch(make_generator(options.seed, "held-out"), options.count)
    tokenizer = AutoTokenizer.from_pretrained(options.out)
    texts = [shapes.list_questions()[number].text for number in asked.question]
    ids = tokenizer(texts, padding="max_length", max_length=MAX_TOKENS, return_tensors="np")["input_ids"].astype(
        np.int64
    )
    content = np.pad(shapes.build_token_table()[1], ((0, 0), (0, MAX_TOKENS)))[asked.question, :MAX_TOKENS]
    words = (ids >= len(shapes.SPECIAL_TOKENS)) & ~content
    rng = make_generator(options.seed + 2, "held-out")
    families = np.array([shapes.list_questions()[number].family for number in asked.question])
    evident = np.flatnonzero(asked.evidence.any(1))
    some, some_ids = asked[evident], ids[evident]
    referred = np.flatnonzero((asked.answer < len(shapes.COLOURS)) & (asked.referent >= 0))
    turned = asked.recolour_referents(rng)
    mask = shapes.SPECIAL_TOKENS.index(shapes.MASK_TOKEN)

    right = predict(asked, ids, asked.scenes) == asked.answer
    figures = {
        "accuracy": right.mean(),
        **{f"accuracy, {name}": right[families == name].mean() for name in shapes.FAMILIES},
        "same answer when the evidence is removed": (
            predict(some, some_ids, some.scenes.remove_objects(some.evidence)) == some.answer
        ).mean(),
        "same answer when as many other objects are removed": (
            predict(some, some_ids, some.scenes.remove_objects(some.sample_other_objects(rng))) == some.answer
        ).mean(),
        "predicts the new colour when the queried object is recoloured": (
            predict(turned, ids[referred], turned.scenes) == turned.answer
        ).mean(),
        "same answer when the content words of the question are masked": (
            predict(asked, np.where(content, mask, ids), asked.scenes) == asked.answer
        ).mean(),
        "same answer when all other words are masked": (
            predict(asked, np.where(words, mask, ids), asked.scenes) == asked.answer
        ).mean(),
    }
    return {name: round(float(figure), 4) for name, figure in figures.items()}


def report_target(figure: float, minimum: float) -> None:
    print(
        f"reached {figure:.4f}, target {minimum}" if figure >= minimum else f"TARGET MISSED: {figure:.4f} < {minimum}",
        flush=True,
    )


DATA_NOTE = (
    f"generated by clearhead_zoo.tasks.shapes; 2 to 6 objects of {len(shapes.SHAPES)} shapes, {len(shapes.COLOURS)} "
    f"colours and {len(shapes.SIZES)} sizes on a noisy background, and {len(shapes.list_questions())} questions, such "
    "as “what colour is the circle left of the square?”"
)
MEASURED_NOTE = (
    "generated held-out questions (five families in equal parts: colour, shape, count, exist, relation), loaded with "
    "transformers in float32. Always predicting the most frequent answer of the family has an accuracy of 0.27. The "
    "evidence is the objects that are asked for or counted and, in a relation, the object referred to; questions "
    "without evidence in the image (a count of 0, a “no”) are excluded where it is removed. "
)


def build_card_facts(options: argparse.Namespace, steps: int, figures: dict[str, float]) -> dict[str, Any]:
    language, regions, both = options.layers
    return {
        "name": "shapes-vqa",
        "task": "visual-question-answering",
        "summary": "A small LXMERT that answers questions about coloured shapes, seen as regions with noisy features.",
        "architecture": f"LXMERT, {language} language, {regions} region and {both} cross layers of width "
        f"{options.width}, 4 heads, {shapes.NUM_REGIONS} regions of {shapes.FEATURE_SIZE} features, "
        f"{len(shapes.build_vocabulary())} words",
        "labels": list(shapes.ANSWERS),
        "licence": "Apache-2.0",
        "data": DATA_NOTE,
        "command": "python packages/zoo/train/shapes_vqa.py --out packages/zoo/src/clearhead_zoo/models/shapes-vqa "
        f"--seed {options.seed} --steps {steps} --batch {options.batch} --lr {options.lr:g} --width {options.width}",
        "figures": figures,
        "measured": f"On {options.count:,} {MEASURED_NOTE}An object is removed by giving its region the features of "
        "plain background; masked words are replaced by [MASK].",
        "use": "For checking whether an explanation finds the regions and words that are the ground-truth evidence. "
        "Not for real images: its input is region features as clearhead_zoo.tasks.shapes generates them.",
    }


if __name__ == "__main__":
    main()
