"""Train `zoo:code`: a small RoBERTa that fills in masked tokens of Python, Java and C#.

    python packages/zoo/train/code_data.py --data ../shared/data --out carry/code
    python packages/zoo/train/code_model.py --data carry/code --out packages/zoo/src/clearhead_zoo/models/code
    python packages/zoo/train/code_model.py --data carry/code --out packages/zoo/src/clearhead_zoo/models/code --measure

It reads single functions and, by turns, longer windows of several. The averaged weights that do best on held-out
functions are kept. The test files are read by --measure alone, which also writes the card. A cut run goes on with
--resume and the same --work. (Not named code.py: Python's debugger imports a module of that name.)
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
from code_data import END, LANGUAGES, MASK, PAD, SPECIAL, START, VOCABULARY, WINDOW, Functions, read_functions
from encoders import batches, packed
from jaxtyping import Bool, Int
from known import clock_of, half_precision, learn, shared_options
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForMaskedLM, RobertaConfig, RobertaForMaskedLM

from clearhead.training import load_checkpoint, save_checkpoint

NAMES = {"python": "Python", "java": "Java", "cs": "C#"}
LONG = 510
SHARE = 0.15
LABEL = "a token"
TIED = ("lm_head.decoder.weight", "lm_head.decoder.bias")
Weights = dict[str, Tensor]


def main() -> None:
    options = parse_options()
    if not options.measure:
        torch.manual_seed(options.seed)
        torch.set_float32_matmul_precision("high")
        config = config_of(options)
        weights = learned(options, config)
        write_files(options.out, options.data, weights, config, TIED)
    if (options.data / "test-python.npz.xz").is_file() and (options.measure or options.smoke):
        print(write_card(options.out, facts_of(options, measured(options))), flush=True)


def parse_options() -> argparse.Namespace:
    parser = code_options(__doc__, name="code", steps=10_000, lr=1e-3)
    parser.add_argument("--batch-tokens", type=int, default=65_536, help="tokens a step")
    parser.add_argument("--width", type=int, default=192, help="width of the model")
    parser.add_argument("--depth", type=int, default=6, help="layers")
    options = parser.parse_args()
    if options.smoke:
        options.steps, options.seconds, options.batch_tokens = 20, None, 1024
    return options


def code_options(doc: str | None, name: str, steps: int, lr: float) -> argparse.ArgumentParser:
    parser = shared_options(doc, name, steps, lr)
    parser.add_argument("--data", type=Path, required=True, help="folder that code_data.py wrote")
    parser.add_argument("--measure", action="store_true", help="do not train: measure --out on the test files")
    return parser


# -- batches


class Rows:
    """Functions of token ids, kept end to end on the device: a batch is one indexing."""

    def __init__(self, functions: Sequence[Functions], device: torch.device | str, most: int | None = None) -> None:
        """With `most`, longer functions are cut into stretches of so many tokens."""
        ids = np.concatenate([part.ids for part in functions]).astype(np.int64)
        lengths = [int(one) for part in functions for one in np.diff(part.ends, prepend=0)]
        if most is not None:
            lengths = [min(most, one - start) for one in lengths for start in range(0, one, most)]
        self.lengths = lengths
        self.ids: Int[Tensor, " token"] = torch.from_numpy(ids).to(device)
        self.size = torch.tensor(lengths, device=device)
        self.start = self.size.cumsum(0) - self.size

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, chosen: Int[Tensor, " row"], width: int | None = None) -> Int[Tensor, "row token"]:
        """These functions without special tokens, padded."""
        size = self.size[chosen]
        place = torch.arange(width or int(size.max()), device=self.ids.device)
        ids = self.ids[(self.start[chosen, None] + place).clamp(max=len(self.ids) - 1)]
        return torch.where(place < size[:, None], ids, PAD)


def framed(ids: Int[Tensor, "row token"]) -> Int[Tensor, "row framed"]:
    """<s> … </s> around each row."""
    whole = F.pad(F.pad(ids, (1, 0), value=START), (0, 1), value=PAD)
    return whole.scatter(1, (whole != PAD).sum(1, keepdim=True), END)


def masked(
    ids: Int[Tensor, "row token"], generator: torch.Generator | None = None
) -> tuple[Int[Tensor, "row token"], Bool[Tensor, "row token"]]:
    """The ids with some hidden, and which: 80 % become <mask>, 10 % another token, 10 % stay (Devlin et al. 2019)."""
    device = ids.device if generator is None else "cpu"
    luck, fate = (torch.rand(ids.shape, device=device, generator=generator).to(ids.device) for _ in range(2))
    chosen = (luck < SHARE) & (ids >= len(SPECIAL))
    if generator is not None:
        return torch.where(chosen, MASK, ids), chosen
    ids = torch.where(chosen & (fate < 0.8), MASK, ids)
    other = torch.randint(len(SPECIAL), VOCABULARY, ids.shape, device=ids.device)
    return torch.where(chosen & (fate > 0.9), other, ids), chosen


# -- learning


def config_of(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "architectures": ["RobertaForMaskedLM"],
        "model_type": "roberta",
        "dtype": "float16",
        "vocab_size": VOCABULARY,
        "hidden_size": options.width,
        "num_hidden_layers": options.depth,
        "num_attention_heads": options.width // 32,
        "intermediate_size": 4 * options.width,
        "max_position_embeddings": LONG + 4,
        "type_vocab_size": 1,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.0,
        "layer_norm_eps": 1e-5,
        "initializer_range": 0.02,
        "bos_token_id": START,
        "pad_token_id": PAD,
        "eos_token_id": END,
        "tie_word_embeddings": True,
        "id2label": {"0": LABEL},
        "label2id": {LABEL: 0},
    }


def learned(options: argparse.Namespace, config: dict[str, Any]) -> Weights:
    device = torch.device(options.device)
    model = RobertaForMaskedLM(RobertaConfig(**config)).to(device)  # type: ignore[arg-type]
    parts = [read_functions(options.data, "train", language) for language in LANGUAGES]
    rows = Rows(parts, device, WINDOW)
    stream = stream_of(parts, device)
    held_out = {name: Rows([read_functions(options.data, "valid", name)], device, WINDOW) for name in LANGUAGES}
    print(f"{len(rows):,} stretches of functions, {len(stream):,} tokens", flush=True)
    order = batches(rows.lengths, options.batch_tokens // 16, options.batch_tokens, options.seed)
    clock = clock_of(options)
    turn = 0

    def draw() -> Tensor:
        nonlocal turn
        turn += 1
        if turn % 4:
            return framed(rows.batch(torch.tensor(next(order), device=device)))
        starts = torch.randint(len(stream) - LONG, (max(1, options.batch_tokens // LONG), 1), device=device)
        return framed(stream[starts + torch.arange(LONG, device=device)])

    def loss_of() -> Tensor:
        ids = draw()
        shown, chosen = masked(ids)
        with half_precision(device):
            states = model.roberta(shown, attention_mask=(ids != PAD).long()).last_hidden_state
            logits = model.lm_head(states[chosen])
        return F.cross_entropy(logits.float(), ids[chosen])

    def look() -> tuple[float, str]:
        found = {name: losses(model, part) for name, part in held_out.items()}
        loss = sum(one for one, _ in found.values()) / len(found)
        return loss, ", ".join(f"{NAMES[name]} top-1 {right:.4f}" for name, (_, right) in found.items())

    return best_of(options, model, clock, loss_of, look)


def stream_of(parts: Sequence[Functions], device: torch.device) -> Int[Tensor, " token"]:
    """All functions end to end, two </s> between them, as between the two texts of a pair."""
    pieces = [piece for part in parts for place in range(len(part)) for piece in (part[place], [END, END])]
    return torch.from_numpy(np.concatenate(pieces).astype(np.int64)).to(device)


def best_of(
    options: argparse.Namespace,
    model: torch.nn.Module,
    clock: Any,
    loss_of: Callable[[], Tensor],
    look: Callable[[], tuple[float, str]],
    horizon: int = 200,
) -> Weights:
    """Train; of eight looks at held-out functions and the end, the averaged weights with the lowest loss there."""
    path = options.work / "best.safetensors"
    if not options.resume:
        path.unlink(missing_ok=True)
    lowest = load_checkpoint(path)[1]["loss"] if path.exists() else math.inf

    def check() -> str:
        nonlocal lowest
        loss, words = look()
        if loss < lowest:
            lowest = loss
            save_checkpoint(path, model.state_dict(), {"loss": loss, "step": clock.step}, torch.float16)
        return f"loss {loss:.4f}, {words}"

    tensors = learn(options, model, clock, loss_of, horizon, muon=lambda name: ".layer" in name, check=check)
    model.load_state_dict(tensors, strict=False)
    model.eval()
    with torch.no_grad():
        print(f"at the end: {check()}", flush=True)
    return load_checkpoint(path)[0]


@torch.no_grad()
def losses(model: Any, rows: Rows) -> tuple[float, float]:
    """Mean loss at masked tokens (always the same ones, all shown as <mask>), and the share of right first guesses."""
    generator = torch.Generator().manual_seed(0)
    total, right, count = 0.0, 0, 0
    for places in packed(range(len(rows)), rows.lengths, 256, 32_768):
        ids = framed(rows.batch(torch.tensor(places, device=rows.ids.device)))
        shown, chosen = masked(ids, generator)
        states = model.roberta(shown, attention_mask=(ids != PAD).long()).last_hidden_state
        logits, truth = model.lm_head(states[chosen]).float(), ids[chosen]
        total += F.cross_entropy(logits, truth, reduction="sum").item()
        right += int((logits.argmax(-1) == truth).sum())
        count += len(truth)
    return total / max(count, 1), right / max(count, 1)


# -- the finished model


def write_files(folder: Path, data: Path, weights: Weights, config: dict[str, Any], tied: Sequence[str]) -> None:
    own = {name: tensor for name, tensor in weights.items() if name not in tied and not name.endswith("_ids")}
    save_checkpoint(folder / "model.safetensors", own, dtype=torch.float16)
    write_json(folder / "config.json", config)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(data / name, folder / name)


def measured(options: argparse.Namespace) -> dict[str, float]:
    """What the stored files do, opened with transformers in float32."""
    model = AutoModelForMaskedLM.from_pretrained(options.out, dtype=torch.float32).to(options.device).eval()
    figures: dict[str, float] = {}
    for language, name in NAMES.items():
        whole = read_functions(options.data, "test", language)
        places = range(0, len(whole), -(-len(whole) // options.count))
        rows = Rows([Functions.of([whole[place].tolist() for place in places])], options.device, WINDOW)
        loss, right = losses(model, rows)
        figures |= {f"perplexity, {name}": round(math.exp(loss), 2), f"top-1, {name}": round(right, 4)}
    return figures


def seconds_of(options: argparse.Namespace) -> str:
    return f" --seconds {options.seconds:g}" if options.seconds else f" --steps {options.steps}"


def facts_of(options: argparse.Namespace, figures: dict[str, float]) -> dict[str, Any]:
    return {
        "name": "code",
        "task": "fill-mask",
        "summary": "A small RoBERTa that fills in masked tokens of Python, Java and C#.",
        "architecture": f"RoBERTa, {options.depth} layers of width {options.width}, {options.width // 32} heads, "
        f"{VOCABULARY:,} byte-level BPE tokens, {LONG + 2} positions, decoder tied to the embeddings",
        "labels": [LABEL],
        "licence": "Apache-2.0 (weights); data under their own terms",
        "data": "Functions of Python 3.11's standard library (PSF licence), split by files, and Java and C# functions "
        "of CodeXGLUE's code translation (C-UDA), split as there. Validation functions decided which weights are kept",
        "command": "python packages/zoo/train/code_model.py --data carry/code "
        f"--out packages/zoo/src/clearhead_zoo/models/code --seed {options.seed}{seconds_of(options)}",
        "figures": figures,
        "measured": f"Up to {options.count:,} test functions of each language in stretches of {WINDOW} tokens, "
        f"{SHARE:.0%} of the tokens masked (always the same ones); perplexity and share of right first guesses per "
        "masked token. Stored files, opened with transformers in float32. The test files were read once, for this "
        "table. Java and C# come from few projects, and much in them repeats: their figures are not comparable with "
        "Python's.",
        "use": "For trying out explanations of code models: attention and attribution by syntax class. Words are cut "
        "at capitals, so a token is seldom a whole identifier. Not for writing programs.",
    }


if __name__ == "__main__":
    main()
