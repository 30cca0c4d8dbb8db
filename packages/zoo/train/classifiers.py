"""How `sentiment`, `topics` and `rationale` learn: teachers with the full vocabulary, then students with a small one.

Teachers are fine-tuned on labels (R-Drop) and differ in their seeds only. A student starts from their averaged weights,
with most word pieces cut away. It imitates the teachers' averaged answers and, word by word, the inner states of the
averaged teacher, on texts that it spells with its own pieces or, for practice in words that have none, with fewer.
What is finished is kept in --work and not done again.
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
    Spelt,
    Texts,
    batches,
    clock_of,
    copy_tokenizer,
    cut,
    encoded,
    epoch_of,
    packed,
    ranked_pieces,
    stored_config,
)
from jaxtyping import Float, Int
from known import half_precision
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertForSequenceClassification

from clearhead.training import Average, Clock, depth_groups, load_checkpoint, save_checkpoint, train

TEMPERATURE = 2.0
#: Of the seconds given, the share that the teachers get.
TEACHING = 0.45
Example = tuple[str, int]
Weights = dict[str, Tensor]
Look = Callable[[Any], str]


@dataclass(frozen=True)
class Plan:
    """Names of the classes, longest text that is learned from, size of a step (tokens: with padding), passes, rates.

    `repeats` is how often a student reads a text with a label while it reads one without once; `weight` is what a text
    without a label counts when the word pieces to keep are chosen.
    """

    labels: Sequence[str]
    tokens: int
    texts_a_step: int
    tokens_a_step: int
    teacher_epochs: float
    student_epochs: float
    teacher_lr: float
    student_lr: float
    repeats: int = 1
    weight: float = 0.3


def add_school_options(
    parser: argparse.ArgumentParser, teachers: int, students: int, pieces: int
) -> argparse.ArgumentParser:
    parser.add_argument("--teachers", type=int, default=teachers, help="how many teachers to average")
    parser.add_argument("--students", type=int, default=students, help="how many students to average")
    parser.add_argument("--pieces", type=int, default=pieces, help="how many word pieces the students keep")
    return parser


def schooled(
    options: argparse.Namespace,
    plan: Plan,
    full: Path,
    examples: Sequence[Example],
    unlabelled: Sequence[str],
    dev: Mapping[str, Sequence[Example]],
    seconds: float | None,
) -> tuple[Path, dict[str, Weights]]:
    """Teachers, then students: the folder that the students started from, and their weights by name."""
    device = torch.device(options.device)
    texts, labels = [text for text, _ in examples], [label for _, label in examples]
    seeds = range(options.seed, options.seed + options.teachers)
    told, truth = texts_of(full, texts, device, plan.tokens), torch.tensor(labels, device=device)
    look = looking(full, plan, dev, device)
    allotted = seconds and TEACHING * seconds / len(seeds)
    teachers = [
        teach(options.work / f"teacher-{seed}.safetensors", full, plan, told, truth, allotted, seed, look)
        for seed in seeds
    ]
    mean = averaged(teachers)
    write_classifier(options.work / "teachers", full, mean, plan.labels)

    everything = [*texts * plan.repeats, *unlabelled]
    kept = ranked_pieces(full, texts, unlabelled, plan.weight)[: options.pieces]
    small = cut(options.work / "teachers", options.work / "small", kept)
    told = texts_of(full, everything, device, plan.tokens)
    truth = torch.tensor([*labels * plan.repeats, *[-1] * len(unlabelled)], device=device)
    wisdom = wisdom_of(opened(full, plan.labels, device), [*teachers, mean], told)
    spellings = [
        texts_of(small, everything, device, plan.tokens, kept[: int(share * len(kept))]) for share in (1.0, 0.8, 0.6)
    ]
    look = looking(small, plan, dev, device)
    allotted = seconds and (1 - TEACHING) * seconds / options.students
    students = {
        f"student {seed}": distil(
            options.work / f"student-{seed}.safetensors", small, plan, spellings, truth, wisdom, allotted, seed, look
        )
        for seed in range(options.seed, options.seed + options.students)
    }
    if len(students) > 1:
        students["average"] = averaged(list(students.values()))
    return small, students


def opened(folder: Path, labels: Sequence[str], device: torch.device) -> BertForSequenceClassification:
    # weights are stored in half precision, and those do not train
    model = AutoModelForSequenceClassification.from_pretrained(
        folder,
        dtype=torch.float32,
        num_labels=len(labels),
        id2label=dict(enumerate(labels)),
        label2id={label: index for index, label in enumerate(labels)},
    )
    return model.to(device)


def texts_of(
    folder: Path, texts: Sequence[str], device: torch.device, tokens: int, pieces: Sequence[str] | None = None
) -> Spelt:
    return Spelt(encoded(folder, texts, tokens, pieces=pieces), device)


def looking(folder: Path, plan: Plan, dev: Mapping[str, Sequence[Example]], device: torch.device) -> Look:
    """A function that says how a model does on each of the sets that decide."""
    sets = {
        name: (texts_of(folder, [text for text, _ in examples], device, plan.tokens), [label for _, label in examples])
        for name, examples in dev.items()
    }

    def look(model: Any) -> str:
        rights = {
            name: share_right(read(model, texts).argmax(-1).tolist(), truth) for name, (texts, truth) in sets.items()
        }
        return ", ".join(f"{name} {right:.4f}" for name, right in rights.items())

    return look


def share_right(guesses: Sequence[int], truth: Sequence[int]) -> float:
    return sum(guess == label for guess, label in zip(guesses, truth, strict=True)) / len(truth)


# -- learning


def steps_of(texts: Texts, epochs: float, plan: Plan) -> int:
    epoch = epoch_of(texts.lengths, plan.texts_a_step, plan.tokens_a_step, torch.Generator())
    return max(1, int(epochs * len(epoch)))


def teach(
    done: Path,
    start: Path,
    plan: Plan,
    texts: Texts,
    labels: Int[Tensor, " text"],
    seconds: float | None,
    seed: int,
    look: Look,
) -> Weights:
    """Fine-tune on labels. Each text is read twice, with different dropout, and should get the same answer."""
    if done.exists():
        return load_checkpoint(done)[0]
    torch.manual_seed(seed)
    device = labels.device
    model = opened(start, plan.labels, device)
    order = batches(texts.lengths, plan.texts_a_step // 2, plan.tokens_a_step // 2, seed)

    def loss_of() -> Tensor:
        chosen = next(order) * 2
        with half_precision(device):
            logits = model(**texts.batch(chosen)).logits.float()
        truth = labels[torch.tensor(chosen, device=device)]
        return F.cross_entropy(logits, truth, label_smoothing=0.05) + disagreement(logits)

    clock = clock_of(seconds, 2 * steps_of(texts, plan.teacher_epochs, plan))
    return learned(done, model, loss_of, clock, plan.teacher_lr, 0.85, look)


def disagreement(logits: Float[Tensor, "twice_batch classes"]) -> Float[Tensor, ""]:
    """R-Drop (Wu et al. 2021): two passes of one example, with different dropout, should say the same."""
    first, second = logits.log_softmax(-1).chunk(2)
    forth = F.kl_div(first, second, log_target=True, reduction="batchmean")
    back = F.kl_div(second, first, log_target=True, reduction="batchmean")
    return (forth + back) / 2


@dataclass(frozen=True)
class Wisdom:
    """What the teachers say to each text, on average, and the averaged teacher, who is asked for its inner states."""

    texts: Spelt
    logits: Float[Tensor, "text classes"]
    teacher: BertForSequenceClassification


def wisdom_of(model: BertForSequenceClassification, teachers: Sequence[Weights], texts: Spelt) -> Wisdom:
    """The averaged teacher is the last of them, and has a voice like any other."""
    voices = []
    for weights in teachers:
        model.load_state_dict(weights)
        voices.append(read(model, texts))
    return Wisdom(texts, torch.stack(voices).mean(0), model.eval().requires_grad_(False))


def distil(
    done: Path,
    start: Path,
    plan: Plan,
    spellings: Sequence[Spelt],
    labels: Int[Tensor, " text"],
    wisdom: Wisdom,
    seconds: float | None,
    seed: int,
    look: Look,
) -> Weights:
    """Imitate the teachers on texts with or without a label (−1); half of the batches are spelt with fewer pieces."""
    if done.exists():
        return load_checkpoint(done)[0]
    torch.manual_seed(seed)
    device = labels.device
    model = opened(start, plan.labels, device)
    own, *coarser = spellings
    order = batches(coarser[-1].lengths, plan.texts_a_step, plan.tokens_a_step, seed)
    luck = random.Random(seed)
    clock = clock_of(seconds, steps_of(coarser[-1], plan.student_epochs, plan))

    def loss_of() -> Tensor:
        chosen = next(order)
        texts = own if luck.random() < 0.5 else luck.choice(coarser)
        rows = torch.tensor(chosen, device=device)
        with half_precision(device):
            logits, states = hear(model, texts.batch(chosen))
            with torch.no_grad():
                _, meant = hear(wisdom.teacher, wisdom.texts.batch(chosen))
        taught = imitation(logits, wisdom.logits[rows]) + 0.3 * error(logits, labels[rows])
        return taught + (1.0 - clock.fraction) * unlike(texts, states, wisdom.texts, meant, chosen)

    return learned(done, model, loss_of, clock, plan.student_lr, 0.95, look)


def unlike(
    texts: Spelt, states: Sequence[Tensor], told: Spelt, meant: Sequence[Tensor], chosen: Sequence[int]
) -> Float[Tensor, ""]:
    """How far the states of words are from the teacher's, in parts of their variance."""
    most = max(told.most[index] for index in chosen)
    parts = []
    for spoken, heard in zip(states, meant, strict=True):
        (mine, here), (yours, there) = texts.by_word(spoken, chosen, most), told.by_word(heard, chosen, most)
        both = (here & there)[..., None]
        centre = (yours * both).sum((0, 1)) / both.sum()
        parts.append(((mine - yours).square() * both).sum() / ((yours - centre).square() * both).sum())
    return torch.stack(parts).mean()


def imitation(logits: Float[Tensor, "batch classes"], answers: Float[Tensor, "batch classes"]) -> Float[Tensor, ""]:
    """Kullback–Leibler divergence from the teachers' softened answers."""
    spoken, heard = (x.div(TEMPERATURE).log_softmax(-1) for x in (logits, answers))
    return F.kl_div(spoken, heard, log_target=True, reduction="batchmean") * TEMPERATURE**2


def error(logits: Float[Tensor, "batch classes"], labels: Int[Tensor, " batch"]) -> Float[Tensor, ""]:
    """Cross-entropy, averaged over the whole batch; texts without a label (−1) count as nothing."""
    return F.cross_entropy(logits, labels, ignore_index=-1, reduction="sum") / len(labels)


def learned(
    done: Path,
    model: BertForSequenceClassification,
    loss_of: Callable[[], Tensor],
    clock: Clock,
    lr: float,
    decay: float,
    look: Look,
) -> Weights:
    """Minimise the loss, look at the averaged weights a few times on the way, store them and give them back."""
    layers = model.config.num_hidden_layers
    groups = depth_groups(model.train(), lambda name: depth_of(name, layers), lr, decay, weight_decay=0.01)
    fused = next(model.parameters()).device.type == "cuda"
    optimiser = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=fused)
    average = Average(model, horizon=300)
    due = [0.25, 0.5, 0.75]

    def observed() -> Tensor:
        if due and clock.fraction >= due[0]:
            with average.applied() as current:
                print(f"{done.stem}: {due.pop(0):.0%} {look(current)}", flush=True)
        return loss_of()

    partial = done.with_suffix(".partial.safetensors")
    train(observed, [optimiser], clock, average, warmup=0.06, clip=1.0, checkpoint=partial, name=done.stem)
    with average.applied() as current:
        print(f"{done.stem}: finished {look(current)}", flush=True)
    save_checkpoint(done, average.tensors, {"steps": clock.step}, torch.float16)
    partial.unlink()
    return load_checkpoint(done)[0]


def depth_of(name: str, layers: int) -> int:
    """How far below the classifier a weight lies; the embeddings are the deepest."""
    found = re.search(r"encoder\.layer\.(\d+)\.", name)
    if found:
        return layers - int(found.group(1))
    return layers + 1 if "embeddings" in name else 0


def averaged(runs: Sequence[Weights]) -> Weights:
    """The mean of weights that were fine-tuned from one start."""
    return {name: torch.stack([run[name] for run in runs]).mean(0) for name in runs[0]}


# -- reading


def hear(model: Any, inputs: Mapping[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Logits, and the states in the middle and at the top."""
    heard = model.bert(**inputs, output_hidden_states=True)
    logits = model.classifier(model.dropout(heard.pooler_output))
    return logits.float(), [heard.hidden_states[model.config.num_hidden_layers // 2], heard.last_hidden_state]


@torch.no_grad()
def read(model: Any, texts: Texts, exact: bool = False) -> Float[Tensor, "text classes"]:
    """Logits of all texts, in half precision unless `exact`."""
    device = texts.ids.device
    model.eval()
    chunks = packed(range(len(texts)), texts.lengths, 1024, 65_536)
    logits = []
    for chosen in chunks:
        with half_precision(torch.device("cpu") if exact else device):
            logits.append(model(**texts.batch(chosen)).logits.float())
    back = torch.tensor([index for chosen in chunks for index in chosen], device=device).argsort()
    return torch.cat(logits)[back]


def answers(folder: Path, texts: Sequence[str], device: str) -> Float[Tensor, "text classes"]:
    """The logits of the stored files, opened with transformers in float32 as a user opens them."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).to(device)
    rows = AutoTokenizer.from_pretrained(folder)(list(texts), truncation=True)["input_ids"]
    return read(model, Texts(rows, torch.device(device)), exact=True).cpu()


def accuracy(folder: Path, examples: Sequence[Example], device: str) -> float:
    logits = answers(folder, [text for text, _ in examples], device)
    return share_right(logits.argmax(-1).tolist(), [label for _, label in examples])


# -- the finished model


def write_classifier(folder: Path, base: Path, weights: Weights, labels: Sequence[str], side: str = "right") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_checkpoint(folder / "model.safetensors", weights, dtype=torch.float16)
    copy_tokenizer(base, folder, side)
    config = stored_config(base, "BertForSequenceClassification", labels)
    write_json(folder / "config.json", {**config, "problem_type": "single_label_classification"})


def architecture(folder: Path) -> str:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return (
        f"BERT, {config['num_hidden_layers']} layers of width {config['hidden_size']}, "
        f"{config['num_attention_heads']} heads, {config['vocab_size']:,} uncased word pieces, "
        f"{config['max_position_embeddings']} positions"
    )


def bar(name: str, figure: float, least: float) -> None:
    """Say loudly if a figure that was asked for is missed; the model is written all the same."""
    print(f"{name}: {figure:.4f}" if figure >= least else f"!!! BAR MISSED: {name} {figure:.4f} < {least}", flush=True)
