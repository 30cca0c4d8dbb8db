"""Training of `sentiment`, `topics` and `rationale`: teachers with the full vocabulary, then students with a small one.

Teachers are fine-tuned on labels (R-Drop) and differ only in their seeds. A student starts from the averaged weights of
the teachers with most WordPiece tokens removed. It is trained to reproduce the averaged outputs of the teachers and,
word by word, the hidden states of the averaged teacher, on texts that are tokenised with its own vocabulary or, so that
it learns words that have no token of their own, with a smaller one. Finished steps are stored in --work and skipped.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cards import write_json
from encoders import (
    PaddedTexts,
    PaddedWordTexts,
    copy_tokenizer,
    encode_texts,
    iter_batches,
    make_epoch,
    make_stored_config,
    make_training_budget,
    pack_batches,
    rank_pieces,
    write_reduced_model,
)
from jaxtyping import Float, Int
from known import autocast_if_cuda
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertForSequenceClassification

from clearhead.training import (
    ExponentialMovingAverage,
    TrainingBudget,
    build_layerwise_lr_groups,
    load_checkpoint,
    save_checkpoint,
    train,
)

TEMPERATURE = 2.0
#: Of the seconds given, the share that the teachers get.
DISTILLATION_WEIGHT = 0.45
LabelledText = tuple[str, int]
Weights = dict[str, Tensor]
EvaluateFunction = Callable[[Any], str]


@dataclass(frozen=True)
class DistillationPlan:
    """Names of the classes, longest text that is learned from, size of a step (tokens: with padding), passes, rates.

    `repeats` is how often a student reads a text with a label while it reads one without once; `weight` is what a text
    without a label counts when the WordPiece tokens to keep are chosen.
    """

    labels: Sequence[str]
    max_tokens: int
    texts_per_step: int
    tokens_per_step: int
    teacher_epochs: float
    student_epochs: float
    teacher_lr: float
    student_lr: float
    num_repeats: int = 1
    other_text_weight: float = 0.3


def add_distillation_options(
    parser: argparse.ArgumentParser, teachers: int, students: int, vocab_size: int
) -> argparse.ArgumentParser:
    parser.add_argument("--teachers", type=int, default=teachers, help="how many teachers to average")
    parser.add_argument("--students", type=int, default=students, help="how many students to average")
    parser.add_argument("--pieces", type=int, default=vocab_size, help="how many WordPiece tokens the students keep")
    return parser


def train_teachers_and_students(
    options: argparse.Namespace,
    plan: DistillationPlan,
    full_vocab_dir: Path,
    examples: Sequence[LabelledText],
    unlabelled: Sequence[str],
    dev: Mapping[str, Sequence[LabelledText]],
    seconds: float | None,
) -> tuple[Path, dict[str, Weights]]:
    """Teachers, then students: the folder that the students started from, and their weights by name."""
    device = torch.device(options.device)
    texts, labels = [text for text, _ in examples], [label for _, label in examples]
    seeds = range(options.seed, options.seed + options.teachers)
    told, truth = encode_word_texts(full_vocab_dir, texts, device, plan.max_tokens), torch.tensor(labels, device=device)
    look = make_evaluator(full_vocab_dir, plan, dev, device)
    allotted = seconds and DISTILLATION_WEIGHT * seconds / len(seeds)
    teachers = [
        train_teacher(
            options.work / f"teacher-{seed}.safetensors", full_vocab_dir, plan, told, truth, allotted, seed, look
        )
        for seed in seeds
    ]
    mean = average_weights(teachers)
    write_classifier(options.work / "teachers", full_vocab_dir, mean, plan.labels)

    everything = [*texts * plan.num_repeats, *unlabelled]
    kept = rank_pieces(full_vocab_dir, texts, unlabelled, plan.other_text_weight)[: options.pieces]
    small = write_reduced_model(options.work / "teachers", options.work / "small", kept)
    told = encode_word_texts(full_vocab_dir, everything, device, plan.max_tokens)
    truth = torch.tensor([*labels * plan.num_repeats, *[-1] * len(unlabelled)], device=device)
    wisdom = compute_teacher_targets(open_classifier(full_vocab_dir, plan.labels, device), [*teachers, mean], told)
    spellings = [
        encode_word_texts(small, everything, device, plan.max_tokens, kept[: int(share * len(kept))])
        for share in (1.0, 0.8, 0.6)
    ]
    look = make_evaluator(small, plan, dev, device)
    allotted = seconds and (1 - DISTILLATION_WEIGHT) * seconds / options.students
    students = {
        f"student {seed}": train_student(
            options.work / f"student-{seed}.safetensors", small, plan, spellings, truth, wisdom, allotted, seed, look
        )
        for seed in range(options.seed, options.seed + options.students)
    }
    if len(students) > 1:
        students["average"] = average_weights(list(students.values()))
    return small, students


def open_classifier(folder: Path, labels: Sequence[str], device: torch.device) -> BertForSequenceClassification:
    # weights are stored in half precision, and those do not train
    model = AutoModelForSequenceClassification.from_pretrained(
        folder,
        dtype=torch.float32,
        num_labels=len(labels),
        id2label=dict(enumerate(labels)),
        label2id={label: index for index, label in enumerate(labels)},
    )
    return model.to(device)


def encode_word_texts(
    folder: Path, texts: Sequence[str], device: torch.device, max_tokens: int, pieces: Sequence[str] | None = None
) -> PaddedWordTexts:
    return PaddedWordTexts(encode_texts(folder, texts, max_tokens, pieces=pieces), device)


def make_evaluator(
    folder: Path, plan: DistillationPlan, dev: Mapping[str, Sequence[LabelledText]], device: torch.device
) -> EvaluateFunction:
    """A function that says how a model does on each of the sets that decide."""
    sets = {
        name: (
            encode_word_texts(folder, [text for text, _ in examples], device, plan.max_tokens),
            [label for _, label in examples],
        )
        for name, examples in dev.items()
    }

    def look(model: Any) -> str:
        rights = {
            name: compute_accuracy(predict_logits(model, texts).argmax(-1).tolist(), truth)
            for name, (texts, truth) in sets.items()
        }
        return ", ".join(f"{name} {right:.4f}" for name, right in rights.items())

    return look


def compute_accuracy(guesses: Sequence[int], truth: Sequence[int]) -> float:
    return sum(guess == label for guess, label in zip(guesses, truth, strict=True)) / len(truth)


# -- learning


def count_steps(texts: PaddedTexts, epochs: float, plan: DistillationPlan) -> int:
    epoch = make_epoch(texts.lengths, plan.texts_per_step, plan.tokens_per_step, torch.Generator())
    return max(1, int(epochs * len(epoch)))


def train_teacher(
    checkpoint_path: Path,
    start_dir: Path,
    plan: DistillationPlan,
    texts: PaddedTexts,
    labels: Int[Tensor, " text"],
    seconds: float | None,
    seed: int,
    evaluate: EvaluateFunction,
) -> Weights:
    """Fine-tune on labels. Each text is read twice, with different dropout, and should get the same answer."""
    if checkpoint_path.exists():
        return load_checkpoint(checkpoint_path)[0]
    torch.manual_seed(seed)
    device = labels.device
    model = open_classifier(start_dir, plan.labels, device)
    order = iter_batches(texts.lengths, plan.texts_per_step // 2, plan.tokens_per_step // 2, seed)

    def loss_of() -> Tensor:
        chosen = next(order) * 2
        with autocast_if_cuda(device):
            logits = model(**texts.collate(chosen)).logits.float()
        truth = labels[torch.tensor(chosen, device=device)]
        return F.cross_entropy(logits, truth, label_smoothing=0.05) + compute_rdrop_loss(logits)

    clock = make_training_budget(seconds, 2 * count_steps(texts, plan.teacher_epochs, plan))
    return run_training(checkpoint_path, model, loss_of, clock, plan.teacher_lr, 0.85, evaluate)


def compute_rdrop_loss(logits: Float[Tensor, "twice_batch classes"]) -> Float[Tensor, ""]:
    """R-Drop (Wu et al. 2021): two passes of one example, with different dropout, should say the same."""
    first, second = logits.log_softmax(-1).chunk(2)
    forth = F.kl_div(first, second, log_target=True, reduction="batchmean")
    back = F.kl_div(second, first, log_target=True, reduction="batchmean")
    return (forth + back) / 2


@dataclass(frozen=True)
class TeacherTargets:
    """What the teachers say to each text, on average, and the averaged teacher, who is asked for its inner states."""

    texts: PaddedWordTexts
    logits: Float[Tensor, "text classes"]
    teacher: BertForSequenceClassification


def compute_teacher_targets(
    model: BertForSequenceClassification, teachers: Sequence[Weights], texts: PaddedWordTexts
) -> TeacherTargets:
    """The averaged teacher is the last of them, and has a voice like any other."""
    voices = []
    for weights in teachers:
        model.load_state_dict(weights)
        voices.append(predict_logits(model, texts))
    return TeacherTargets(texts, torch.stack(voices).mean(0), model.eval().requires_grad_(False))


def train_student(
    checkpoint_path: Path,
    start_dir: Path,
    plan: DistillationPlan,
    spellings: Sequence[PaddedWordTexts],
    labels: Int[Tensor, " text"],
    teacher_targets: TeacherTargets,
    seconds: float | None,
    seed: int,
    evaluate: EvaluateFunction,
) -> Weights:
    """Imitate the teachers on texts with or without a label (−1); half of the batches are spelt with fewer pieces."""
    if checkpoint_path.exists():
        return load_checkpoint(checkpoint_path)[0]
    torch.manual_seed(seed)
    device = labels.device
    model = open_classifier(start_dir, plan.labels, device)
    own, *coarser = spellings
    order = iter_batches(coarser[-1].lengths, plan.texts_per_step, plan.tokens_per_step, seed)
    luck = random.Random(seed)
    clock = make_training_budget(seconds, count_steps(coarser[-1], plan.student_epochs, plan))

    def loss_of() -> Tensor:
        chosen = next(order)
        texts = own if luck.random() < 0.5 else luck.choice(coarser)
        rows = torch.tensor(chosen, device=device)
        with autocast_if_cuda(device):
            logits, states = compute_logits_and_states(model, texts.collate(chosen))
            with torch.no_grad():
                _, meant = compute_logits_and_states(teacher_targets.teacher, teacher_targets.texts.collate(chosen))
        taught = compute_distillation_loss(logits, teacher_targets.logits[rows]) + 0.3 * compute_label_loss(
            logits, labels[rows]
        )
        return taught + (1.0 - clock.fraction) * compute_hidden_state_loss(
            texts, states, teacher_targets.texts, meant, chosen
        )

    return run_training(checkpoint_path, model, loss_of, clock, plan.student_lr, 0.95, evaluate)


def compute_hidden_state_loss(
    texts: PaddedWordTexts,
    states: Sequence[Tensor],
    teacher_texts: PaddedWordTexts,
    teacher_states: Sequence[Tensor],
    chosen: Sequence[int],
) -> Float[Tensor, ""]:
    """How far the states of words are from the teacher's, in parts of their variance."""
    most = max(teacher_texts.max_words[index] for index in chosen)
    parts = []
    for spoken, heard in zip(states, teacher_states, strict=True):
        (mine, here), (yours, there) = (
            texts.average_by_word(spoken, chosen, most),
            teacher_texts.average_by_word(heard, chosen, most),
        )
        both = (here & there)[..., None]
        centre = (yours * both).sum((0, 1)) / both.sum()
        parts.append(((mine - yours).square() * both).sum() / ((yours - centre).square() * both).sum())
    return torch.stack(parts).mean()


def compute_distillation_loss(
    logits: Float[Tensor, "batch classes"], answers: Float[Tensor, "batch classes"]
) -> Float[Tensor, ""]:
    """Kullback–Leibler divergence from the teachers' softened answers."""
    spoken, heard = (x.div(TEMPERATURE).log_softmax(-1) for x in (logits, answers))
    return F.kl_div(spoken, heard, log_target=True, reduction="batchmean") * TEMPERATURE**2


def compute_label_loss(logits: Float[Tensor, "batch classes"], labels: Int[Tensor, " batch"]) -> Float[Tensor, ""]:
    """Cross-entropy, averaged over the whole batch; texts without a label (−1) count as nothing."""
    return F.cross_entropy(logits, labels, ignore_index=-1, reduction="sum") / len(labels)


def run_training(
    checkpoint_path: Path,
    model: BertForSequenceClassification,
    loss_of: Callable[[], Tensor],
    budget: TrainingBudget,
    lr: float,
    decay: float,
    evaluate: EvaluateFunction,
) -> Weights:
    """Minimise the loss, evaluate the averaged weights a few times during training, store and return them."""
    layers = model.config.num_hidden_layers
    groups = build_layerwise_lr_groups(
        model.train(), lambda name: get_parameter_depth(name, layers), lr, decay, weight_decay=0.01
    )
    fused = next(model.parameters()).device.type == "cuda"
    optimiser = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=fused)
    average = ExponentialMovingAverage(model, horizon=300)
    due = [0.25, 0.5, 0.75]

    def observed() -> Tensor:
        if due and budget.fraction >= due[0]:
            with average.averaged_weights() as current:
                print(f"{checkpoint_path.stem}: {due.pop(0):.0%} {evaluate(current)}", flush=True)
        return loss_of()

    partial = checkpoint_path.with_suffix(".partial.safetensors")
    train(
        observed,
        [optimiser],
        budget,
        average,
        warmup_fraction=0.06,
        max_grad_norm=1.0,
        checkpoint=partial,
        name=checkpoint_path.stem,
    )
    with average.averaged_weights() as current:
        print(f"{checkpoint_path.stem}: finished {evaluate(current)}", flush=True)
    save_checkpoint(checkpoint_path, average.tensors, {"steps": budget.step}, torch.float16)
    partial.unlink()
    return load_checkpoint(checkpoint_path)[0]


def get_parameter_depth(name: str, layers: int) -> int:
    """How far below the classifier a weight lies; the embeddings are the deepest."""
    found = re.search(r"encoder\.layer\.(\d+)\.", name)
    if found:
        return layers - int(found.group(1))
    return layers + 1 if "embeddings" in name else 0


def average_weights(runs: Sequence[Weights]) -> Weights:
    """The mean of weights that were fine-tuned from one start."""
    return {name: torch.stack([run[name] for run in runs]).mean(0) for name in runs[0]}


# -- reading


def compute_logits_and_states(model: Any, inputs: Mapping[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Logits, and the states in the middle and at the top."""
    heard = model.bert(**inputs, output_hidden_states=True)
    logits = model.classifier(model.dropout(heard.pooler_output))
    return logits.float(), [heard.hidden_states[model.config.num_hidden_layers // 2], heard.last_hidden_state]


@torch.no_grad()
def predict_logits(model: Any, texts: PaddedTexts, exact: bool = False) -> Float[Tensor, "text classes"]:
    """Logits of all texts, in half precision unless `exact`."""
    device = texts.ids.device
    model.eval()
    chunks = pack_batches(range(len(texts)), texts.lengths, 1024, 65_536)
    logits = []
    for chosen in chunks:
        with autocast_if_cuda(torch.device("cpu") if exact else device):
            logits.append(model(**texts.collate(chosen)).logits.float())
    back = torch.tensor([index for chosen in chunks for index in chosen], device=device).argsort()
    return torch.cat(logits)[back]


def predict_stored_logits(folder: Path, texts: Sequence[str], device: str) -> Float[Tensor, "text classes"]:
    """The logits of the stored files, opened with transformers in float32 as a user opens them."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).to(device)
    rows = AutoTokenizer.from_pretrained(folder)(list(texts), truncation=True)["input_ids"]
    return predict_logits(model, PaddedTexts(rows, torch.device(device)), exact=True).cpu()


def measure_accuracy(folder: Path, examples: Sequence[LabelledText], device: str) -> float:
    logits = predict_stored_logits(folder, [text for text, _ in examples], device)
    return compute_accuracy(logits.argmax(-1).tolist(), [label for _, label in examples])


# -- the finished model


def write_classifier(folder: Path, base: Path, weights: Weights, labels: Sequence[str], side: str = "right") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_checkpoint(folder / "model.safetensors", weights, dtype=torch.float16)
    copy_tokenizer(base, folder, side)
    config = make_stored_config(base, "BertForSequenceClassification", labels)
    write_json(folder / "config.json", {**config, "problem_type": "single_label_classification"})


def describe_architecture(folder: Path) -> str:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return (
        f"BERT, {config['num_hidden_layers']} layers of width {config['hidden_size']}, "
        f"{config['num_attention_heads']} heads, {config['vocab_size']:,} uncased WordPiece tokens, "
        f"{config['max_position_embeddings']} positions"
    )


def report_target(name: str, figure: float, minimum: float) -> None:
    """Say loudly if a figure that was asked for is missed; the model is written all the same."""
    print(
        f"{name}: {figure:.4f}" if figure >= minimum else f"!!! TARGET MISSED: {name} {figure:.4f} < {minimum}",
        flush=True,
    )
