"""Train `zoo:code-clone`: are two functions equivalent? A classifier on top of `zoo:code`.

    python packages/zoo/train/code_clone.py --data carry/code --base packages/zoo/src/clearhead_zoo/models/code \
        --out packages/zoo/src/clearhead_zoo/models/code-clone

Equivalent: the Java and the C# version of a function, or a Python function and a renamed and rewritten version of it.
Non-equivalent: mostly near misses (functions that share most of the rarer tokens; the same Python function with one
change), and some random pairs. Both kinds of pairs consist of the same kinds of versions. Data: code_data.py; --measure
and --resume as in code_model.py.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cards import write_card
from code_data import BOS_ID, EOS_ID, MAX_PAIR_HALF_TOKENS, NUM_LOOKALIKES, PAD_ID, CloneForms, read_clones
from code_model import (
    FunctionRows,
    Weights,
    format_duration_option,
    make_code_parser,
    train_keeping_best,
    write_model_files,
)
from jaxtyping import Bool, Int
from known import autocast_if_cuda, make_training_budget
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification, RobertaConfig, RobertaForSequenceClassification

from clearhead.training import load_checkpoint
from clearhead_zoo.tasks import make_generator

LABELS = ["different", "same"]
#: Of the pairs that differ, so many are near misses.
HARD_NEGATIVE_FRACTION = 0.75
#: The decision of the Java and C# pairs is easier than that of the Python pairs: both are drawn equally often.
PAIR_FAMILIES = ("Java and C#", "Python")


def main() -> None:
    options = parse_options()
    if not options.measure:
        torch.manual_seed(options.seed)
        torch.set_float32_matmul_precision("high")
        config = build_config(options.base)
        write_model_files(options.out, options.data, train_model(options, config), config, ())
    if (options.data / "test-clones.npz.xz").is_file() and (options.measure or options.smoke):
        print(write_card(options.out, build_card_facts(options, measure_stored_model(options))), flush=True)


def parse_options() -> argparse.Namespace:
    parser = make_code_parser(__doc__, name="code-clone", steps=4000, lr=3e-4)
    parser.add_argument("--base", type=Path, required=True, help="folder of zoo:code, or another RoBERTa of that kind")
    parser.add_argument("--batch", type=int, default=256, help="pairs per step")
    options = parser.parse_args()
    if options.smoke:
        options.steps, options.seconds, options.batch, options.count = 20, None, 4, 20
    return options


class ClonePairSampler:
    """Pairs of forms, drawn from a stream of random numbers and set side by side on the device."""

    def __init__(self, clones: CloneForms, device: torch.device) -> None:
        self.rows = FunctionRows([clones.functions], device)
        self.forms, self.lookalikes = clones.forms, clones.lookalikes
        two = self.forms[:, 2] < 0
        self.families = {name: np.flatnonzero(mine) for name, mine in zip(PAIR_FAMILIES, (two, ~two), strict=True)}

    def draw(self, rng: np.random.Generator, count: int, family: str | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Places of two forms for each pair, and whether they do the same."""
        families = [family] if family else list(PAIR_FAMILIES)
        mine = rng.integers(len(families), size=count)
        places = np.choose(
            mine, [self.families[name][rng.integers(len(self.families[name]), size=count)] for name in families]
        )
        same = rng.random(count) < 0.5
        other = np.where(same, places, self.sample_negatives(rng, places))
        known = (self.forms[places] >= 0).sum(1)
        first = rng.integers(known)
        second = (first + 1 + rng.integers(known - 1)) % known
        return np.stack([self.forms[places, first], self.forms[other, second]], 1), same

    def sample_negatives(self, rng: np.random.Generator, function_indices: np.ndarray) -> np.ndarray:
        """For each function one that does something else: mostly one that looks alike."""
        near = self.lookalikes[function_indices, rng.integers(NUM_LOOKALIKES, size=len(function_indices))]
        far = np.empty_like(function_indices)
        for family in self.families.values():
            mine = np.isin(function_indices, family)
            if not mine.any():
                continue
            drawn = family[rng.integers(len(family), size=mine.sum())]
            # whoever drew itself takes its neighbour in the list
            again = family[(np.searchsorted(family, drawn) + 1) % len(family)]
            far[mine] = np.where(drawn == function_indices[mine], again, drawn)
        return np.where((near >= 0) & (rng.random(len(function_indices)) < HARD_NEGATIVE_FRACTION), near, far)

    def collate(self, chosen: np.ndarray) -> Int[Tensor, "pair token"]:
        """<s> one </s> </s> other </s>, padded."""
        one, other = (torch.from_numpy(chosen[:, side]).to(self.rows.ids.device) for side in range(2))
        return join_pair_rows(self.rows, one, other)


def join_pair_rows(
    rows: FunctionRows, first: Int[Tensor, " pair"], second: Int[Tensor, " pair"]
) -> Int[Tensor, "pair token"]:
    size, more = rows.row_sizes[first, None], rows.row_sizes[second, None]
    place = torch.arange(int((size + more).max()) + 4, device=rows.ids.device)
    last = len(rows.ids) - 1
    left = rows.ids[(rows.row_starts[first, None] + place - 1).clamp(0, last)]
    right = rows.ids[(rows.row_starts[second, None] + place - size - 3).clamp(0, last)]
    ids = torch.where(place == 0, BOS_ID, torch.where(place <= size, left, EOS_ID))
    ids = torch.where(place > size + 2, right, ids)
    ids = torch.where(place == size + more + 3, EOS_ID, ids)
    return torch.where(place > size + more + 3, PAD_ID, ids)


def build_config(base: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((base / "config.json").read_text(encoding="utf-8"))
    return config | {
        "architectures": ["RobertaForSequenceClassification"],
        "id2label": {str(number): label for number, label in enumerate(LABELS)},
        "label2id": {label: number for number, label in enumerate(LABELS)},
    }


def train_model(options: argparse.Namespace, config: dict[str, Any]) -> Weights:
    device = torch.device(options.device)
    model = RobertaForSequenceClassification(RobertaConfig(**config))
    model.load_state_dict(load_checkpoint(options.base / "model.safetensors")[0], strict=False)
    model = model.to(device)  # type: ignore[arg-type]
    lessons = ClonePairSampler(read_clones(options.data, "train"), device)
    held_out = ClonePairSampler(read_clones(options.data, "valid"), device)
    watched = {name: held_out.draw(make_generator(0, "held-out"), options.count // 2, name) for name in PAIR_FAMILIES}
    clock = make_training_budget(options)

    def loss_of() -> Tensor:
        chosen, same = lessons.draw(make_generator(options.seed, "train", clock.step), options.batch)
        with autocast_if_cuda(device):
            logits = compute_logits(model, lessons.collate(chosen))
        return F.cross_entropy(logits.float(), torch.from_numpy(same).long().to(device), label_smoothing=0.02)

    def look() -> tuple[float, str]:
        losses, words = [], []
        for name, (chosen, same) in watched.items():
            logits = predict_logits(model, held_out, chosen)
            truth = torch.from_numpy(same).long()
            losses.append(F.cross_entropy(logits, truth).item())
            words.append(f"{name} {(logits.argmax(-1) == truth).float().mean():.4f}")
        return sum(losses) / len(losses), ", ".join(words)

    return train_keeping_best(options, model, clock, loss_of, look)


def compute_logits(model: Any, ids: Int[Tensor, "pair token"]) -> Tensor:
    mask: Bool[Tensor, "pair token"] = ids != PAD_ID
    logits: Tensor = model(ids, attention_mask=mask.long()).logits
    return logits


@torch.no_grad()
def predict_logits(model: Any, pairs: ClonePairSampler, chosen: np.ndarray) -> Tensor:
    parts = [compute_logits(model, pairs.collate(chosen[start : start + 100])) for start in range(0, len(chosen), 100)]
    return torch.cat(parts).float().cpu()


# -- the finished model


def measure_stored_model(options: argparse.Namespace) -> dict[str, float]:
    """What the stored files do, opened with transformers in float32."""
    device = torch.device(options.device)
    model = AutoModelForSequenceClassification.from_pretrained(options.out, dtype=torch.float32).to(device).eval()
    pairs = ClonePairSampler(read_clones(options.data, "test"), device)
    figures = {}
    for name in PAIR_FAMILIES:
        chosen, same = pairs.draw(make_generator(1, "held-out"), options.count // 2, name)
        right = predict_logits(model, pairs, chosen).argmax(-1).numpy() == same
        figures[f"accuracy, {name}"] = round(float(right.mean()), 4)
        figures[f"accuracy on equivalent pairs, {name}"] = round(float(right[same].mean()), 4)
        figures[f"accuracy on non-equivalent pairs, {name}"] = round(float(right[~same].mean()), 4)
    return figures


def build_card_facts(options: argparse.Namespace, figures: dict[str, float]) -> dict[str, Any]:
    config = json.loads((options.out / "config.json").read_text(encoding="utf-8"))
    return {
        "name": "code-clone",
        "task": "text-classification",
        "summary": "A small RoBERTa that predicts whether two functions are equivalent: Java and C#, or Python and "
        "Python.",
        "architecture": f"RoBERTa, {config['num_hidden_layers']} layers of width {config['hidden_size']}, "
        f"{config['num_attention_heads']} heads, both functions in one input: <s> first </s></s> second </s>",
        "labels": LABELS,
        "licence": "Apache-2.0 (weights); data under their own terms",
        "data": "Java and C# versions of the same function (CodeXGLUE code translation, C-UDA) and functions of the "
        "Python 3.11 standard library (PSF licence), with identifiers renamed and code rewritten by "
        f"packages/zoo/train/code_rewrites.py; {HARD_NEGATIVE_FRACTION:.0%} of the non-equivalent pairs are near "
        "misses: functions that share most of the rarer tokens, or the same Python function with one operator, "
        "number, condition or argument order changed",
        "command": "python packages/zoo/train/code_clone.py --data carry/code "
        "--base packages/zoo/src/clearhead_zoo/models/code --out packages/zoo/src/clearhead_zoo/models/code-clone "
        f"--seed {options.seed}{format_duration_option(options)}",
        "figures": figures,
        "measured": f"{options.count // 2:,} pairs of test functions per family, half of them equivalent, sampled as "
        f"in training; functions of at most {MAX_PAIR_HALF_TOKENS} tokens. Stored files, loaded with transformers in "
        "float32; the test files were read once, for this table.",
        "use": "For trying out explanations of predictions on pairs of functions. The rewrites assume that operators "
        "have their usual meaning. Not for detecting copied code.",
    }


if __name__ == "__main__":
    main()
