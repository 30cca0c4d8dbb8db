"""Train `zoo:code`: a small RoBERTa that predicts masked tokens of Python, Java and C#.

    python packages/zoo/train/code_data.py --data ../shared/data --out carry/code
    python packages/zoo/train/code_model.py --data carry/code --out packages/zoo/src/clearhead_zoo/models/code
    python packages/zoo/train/code_model.py --data carry/code --out packages/zoo/src/clearhead_zoo/models/code --measure

Batches alternate between single functions and longer windows of several functions. The averaged weights with the best
result on held-out functions are kept. Only --measure reads the test files; it also writes the card. An interrupted run
continues with --resume and the same --work. (Not named code.py: Python's debugger imports a module of that name.)
"""

from __future__ import annotations

import argparse
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cards import write_card, write_json
from code_data import (
    BOS_ID,
    EOS_ID,
    LANGUAGES,
    MASK_ID,
    PAD_ID,
    SPECIAL_TOKENS,
    VOCAB_SIZE,
    WINDOW_TOKENS,
    EncodedFunctions,
    read_functions,
)
from encoders import iter_batches, pack_batches
from jaxtyping import Bool, Int
from known import autocast_if_cuda, make_shared_parser, make_training_budget, run_training
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForMaskedLM, RobertaConfig, RobertaForMaskedLM

from clearhead.training import load_checkpoint, save_checkpoint

LANGUAGE_NAMES = {"python": "Python", "java": "Java", "cs": "C#"}
LONG_WINDOW_TOKENS = 510
MASK_FRACTION = 0.15
MASKED_TOKEN_LABEL = "a token"
TIED_WEIGHTS = ("lm_head.decoder.weight", "lm_head.decoder.bias")
Weights = dict[str, Tensor]


def main() -> None:
    options = parse_options()
    if not options.measure:
        torch.manual_seed(options.seed)
        torch.set_float32_matmul_precision("high")
        config = build_config(options)
        weights = train_model(options, config)
        write_model_files(options.out, options.data, weights, config, TIED_WEIGHTS)
    if (options.data / "test-python.npz.xz").is_file() and (options.measure or options.smoke):
        print(write_card(options.out, build_card_facts(options, measure_stored_model(options))), flush=True)


def parse_options() -> argparse.Namespace:
    parser = make_code_parser(__doc__, name="code", steps=10_000, lr=1e-3)
    parser.add_argument("--batch-tokens", type=int, default=65_536, help="tokens per step")
    parser.add_argument("--width", type=int, default=192, help="width of the model")
    parser.add_argument("--depth", type=int, default=6, help="layers")
    options = parser.parse_args()
    if options.smoke:
        options.steps, options.seconds, options.batch_tokens = 20, None, 1024
    return options


def make_code_parser(doc: str | None, name: str, steps: int, lr: float) -> argparse.ArgumentParser:
    parser = make_shared_parser(doc, name, steps, lr)
    parser.add_argument("--data", type=Path, required=True, help="output folder of code_data.py")
    parser.add_argument("--measure", action="store_true", help="do not train: measure --out on the test files")
    return parser


# -- batches


class FunctionRows:
    """Functions of token ids, kept end to end on the device: a batch is one indexing."""

    def __init__(
        self, functions: Sequence[EncodedFunctions], device: torch.device | str, max_tokens: int | None = None
    ) -> None:
        """With `most`, longer functions are cut into stretches of so many tokens."""
        ids = np.concatenate([part.ids for part in functions]).astype(np.int64)
        lengths = [int(one) for part in functions for one in np.diff(part.ends, prepend=0)]
        if max_tokens is not None:
            lengths = [min(max_tokens, one - start) for one in lengths for start in range(0, one, max_tokens)]
        self.lengths = lengths
        self.ids: Int[Tensor, " token"] = torch.from_numpy(ids).to(device)
        self.row_sizes = torch.tensor(lengths, device=device)
        self.row_starts = self.row_sizes.cumsum(0) - self.row_sizes

    def __len__(self) -> int:
        return len(self.lengths)

    def collate(self, chosen: Int[Tensor, " row"], width: int | None = None) -> Int[Tensor, "row token"]:
        """These functions without special tokens, padded."""
        size = self.row_sizes[chosen]
        place = torch.arange(width or int(size.max()), device=self.ids.device)
        ids = self.ids[(self.row_starts[chosen, None] + place).clamp(max=len(self.ids) - 1)]
        return torch.where(place < size[:, None], ids, PAD_ID)


def add_special_ids(ids: Int[Tensor, "row token"]) -> Int[Tensor, "row framed"]:
    """<s> … </s> around each row."""
    whole = F.pad(F.pad(ids, (1, 0), value=BOS_ID), (0, 1), value=PAD_ID)
    return whole.scatter(1, (whole != PAD_ID).sum(1, keepdim=True), EOS_ID)


def mask_ids(
    ids: Int[Tensor, "row token"], generator: torch.Generator | None = None
) -> tuple[Int[Tensor, "row token"], Bool[Tensor, "row token"]]:
    """The ids with some hidden, and which: 80 % become <mask>, 10 % another token, 10 % stay (Devlin et al. 2019)."""
    device = ids.device if generator is None else "cpu"
    luck, fate = (torch.rand(ids.shape, device=device, generator=generator).to(ids.device) for _ in range(2))
    chosen = (luck < MASK_FRACTION) & (ids >= len(SPECIAL_TOKENS))
    if generator is not None:
        return torch.where(chosen, MASK_ID, ids), chosen
    ids = torch.where(chosen & (fate < 0.8), MASK_ID, ids)
    other = torch.randint(len(SPECIAL_TOKENS), VOCAB_SIZE, ids.shape, device=ids.device)
    return torch.where(chosen & (fate > 0.9), other, ids), chosen


# -- learning


def build_config(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "architectures": ["RobertaForMaskedLM"],
        "model_type": "roberta",
        "dtype": "float16",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": options.width,
        "num_hidden_layers": options.depth,
        "num_attention_heads": options.width // 32,
        "intermediate_size": 4 * options.width,
        "max_position_embeddings": LONG_WINDOW_TOKENS + 4,
        "type_vocab_size": 1,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.0,
        "layer_norm_eps": 1e-5,
        "initializer_range": 0.02,
        "bos_token_id": BOS_ID,
        "pad_token_id": PAD_ID,
        "eos_token_id": EOS_ID,
        "tie_word_embeddings": True,
        "id2label": {"0": MASKED_TOKEN_LABEL},
        "label2id": {MASKED_TOKEN_LABEL: 0},
    }


def train_model(options: argparse.Namespace, config: dict[str, Any]) -> Weights:
    device = torch.device(options.device)
    model = RobertaForMaskedLM(RobertaConfig(**config)).to(device)  # type: ignore[arg-type]
    parts = [read_functions(options.data, "train", language) for language in LANGUAGES]
    rows = FunctionRows(parts, device, WINDOW_TOKENS)
    stream = concat_functions(parts, device)
    held_out = {
        name: FunctionRows([read_functions(options.data, "valid", name)], device, WINDOW_TOKENS) for name in LANGUAGES
    }
    print(f"{len(rows):,} segments of functions, {len(stream):,} tokens", flush=True)
    order = iter_batches(rows.lengths, options.batch_tokens // 16, options.batch_tokens, options.seed)
    clock = make_training_budget(options)
    turn = 0

    def draw() -> Tensor:
        nonlocal turn
        turn += 1
        if turn % 4:
            return add_special_ids(rows.collate(torch.tensor(next(order), device=device)))
        starts = torch.randint(
            len(stream) - LONG_WINDOW_TOKENS, (max(1, options.batch_tokens // LONG_WINDOW_TOKENS), 1), device=device
        )
        return add_special_ids(stream[starts + torch.arange(LONG_WINDOW_TOKENS, device=device)])

    def loss_of() -> Tensor:
        ids = draw()
        shown, chosen = mask_ids(ids)
        with autocast_if_cuda(device):
            states = model.roberta(shown, attention_mask=(ids != PAD_ID).long()).last_hidden_state
            logits = model.lm_head(states[chosen])
        return F.cross_entropy(logits.float(), ids[chosen])

    def look() -> tuple[float, str]:
        found = {name: compute_masked_loss(model, part) for name, part in held_out.items()}
        loss = sum(one for one, _ in found.values()) / len(found)
        return loss, ", ".join(f"{LANGUAGE_NAMES[name]} top-1 {right:.4f}" for name, (_, right) in found.items())

    return train_keeping_best(options, model, clock, loss_of, look)


def concat_functions(parts: Sequence[EncodedFunctions], device: torch.device) -> Int[Tensor, " token"]:
    """All functions end to end, two </s> between them, as between the two texts of a pair."""
    pieces = [piece for part in parts for place in range(len(part)) for piece in (part[place], [EOS_ID, EOS_ID])]
    return torch.from_numpy(np.concatenate(pieces).astype(np.int64)).to(device)


def train_keeping_best(
    options: argparse.Namespace,
    model: torch.nn.Module,
    budget: Any,
    compute_loss: Callable[[], Tensor],
    evaluate: Callable[[], tuple[float, str]],
    horizon: int = 200,
) -> Weights:
    """Train; return the averaged weights with the lowest loss of eight held-out evaluations and the end."""
    path = options.work / "best.safetensors"
    if not options.resume:
        path.unlink(missing_ok=True)
    lowest = load_checkpoint(path)[1]["loss"] if path.exists() else math.inf

    def check() -> str:
        nonlocal lowest
        loss, words = evaluate()
        if loss < lowest:
            lowest = loss
            save_checkpoint(path, model.state_dict(), {"loss": loss, "step": budget.step}, torch.float16)
        return f"loss {loss:.4f}, {words}"

    tensors = run_training(
        options, model, budget, compute_loss, horizon, uses_muon=lambda name: ".layer" in name, check=check
    )
    model.load_state_dict(tensors, strict=False)
    model.eval()
    with torch.no_grad():
        print(f"at the end: {check()}", flush=True)
    return load_checkpoint(path)[0]


@torch.no_grad()
def compute_masked_loss(model: Any, rows: FunctionRows) -> tuple[float, float]:
    """Mean loss at masked tokens (always the same ones, all shown as <mask>), and the share of right first guesses."""
    generator = torch.Generator().manual_seed(0)
    total, right, count = 0.0, 0, 0
    for places in pack_batches(range(len(rows)), rows.lengths, 256, 32_768):
        ids = add_special_ids(rows.collate(torch.tensor(places, device=rows.ids.device)))
        shown, chosen = mask_ids(ids, generator)
        states = model.roberta(shown, attention_mask=(ids != PAD_ID).long()).last_hidden_state
        logits, truth = model.lm_head(states[chosen]).float(), ids[chosen]
        total += F.cross_entropy(logits, truth, reduction="sum").item()
        right += int((logits.argmax(-1) == truth).sum())
        count += len(truth)
    return total / max(count, 1), right / max(count, 1)


# -- the finished model


def write_model_files(folder: Path, data: Path, weights: Weights, config: dict[str, Any], tied: Sequence[str]) -> None:
    own = {name: tensor for name, tensor in weights.items() if name not in tied and not name.endswith("_ids")}
    save_checkpoint(folder / "model.safetensors", own, dtype=torch.float16)
    write_json(folder / "config.json", config)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(data / name, folder / name)


def measure_stored_model(options: argparse.Namespace) -> dict[str, float]:
    """What the stored files do, opened with transformers in float32."""
    model = AutoModelForMaskedLM.from_pretrained(options.out, dtype=torch.float32).to(options.device).eval()
    figures: dict[str, float] = {}
    for language, name in LANGUAGE_NAMES.items():
        whole = read_functions(options.data, "test", language)
        places = range(0, len(whole), -(-len(whole) // options.count))
        rows = FunctionRows(
            [EncodedFunctions.from_rows([whole[place].tolist() for place in places])], options.device, WINDOW_TOKENS
        )
        loss, right = compute_masked_loss(model, rows)
        figures |= {f"perplexity, {name}": round(math.exp(loss), 2), f"top-1, {name}": round(right, 4)}
    return figures


def format_duration_option(options: argparse.Namespace) -> str:
    return f" --seconds {options.seconds:g}" if options.seconds else f" --steps {options.steps}"


def build_card_facts(options: argparse.Namespace, figures: dict[str, float]) -> dict[str, Any]:
    return {
        "name": "code",
        "task": "fill-mask",
        "summary": "A small RoBERTa that predicts masked tokens of Python, Java and C#.",
        "architecture": f"RoBERTa, {options.depth} layers of width {options.width}, {options.width // 32} heads, "
        f"{VOCAB_SIZE:,} byte-level BPE tokens, {LONG_WINDOW_TOKENS + 2} positions, decoder tied to the embeddings",
        "labels": [MASKED_TOKEN_LABEL],
        "licence": "Apache-2.0 (weights); data under their own terms",
        "data": "Functions of the Python 3.11 standard library (PSF licence), split by file, and Java and C# "
        "functions of CodeXGLUE code translation (C-UDA) with its original split. The checkpoint was selected on "
        "validation functions",
        "command": "python packages/zoo/train/code_model.py --data carry/code "
        f"--out packages/zoo/src/clearhead_zoo/models/code --seed {options.seed}{format_duration_option(options)}",
        "figures": figures,
        "measured": f"Up to {options.count:,} test functions per language in segments of {WINDOW_TOKENS} tokens, "
        f"{MASK_FRACTION:.0%} of the tokens masked (the same ones in each run); perplexity and top-1 accuracy per "
        "masked token. Stored files, loaded with transformers in float32. The test files were read once, for this "
        "table. Java and C# come from few projects with much repetition: their figures are not comparable with those "
        "of Python.",
        "use": "For trying out explanations of code models: attention and attribution by syntax class. Words are "
        "split at capital letters, so a token is seldom a whole identifier. Not for code generation.",
    }


if __name__ == "__main__":
    main()
