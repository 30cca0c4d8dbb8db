"""Train `zoo:code-translate`: a small BART that translates Java functions to C#.

    python packages/zoo/train/code_translate.py --data carry/code \
        --out packages/zoo/src/clearhead_zoo/models/code-translate

Ten thousand pairs are a small training set. In half of them, words that the translation copies (`listJobs` →
`ListJobs`) are replaced by others, consistently on both sides; in a sixth, some tokens of the Java side are masked.
Data: code_data.py; --measure and --resume as in code_model.py.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cards import write_card
from code_data import BOS_ID, EOS_ID, MASK_ID, PAD_ID, SPECIAL_TOKENS, VOCAB_SIZE, EncodedFunctions, read_functions
from code_model import (
    MASKED_TOKEN_LABEL,
    FunctionRows,
    Weights,
    add_special_ids,
    format_duration_option,
    make_code_parser,
    train_keeping_best,
    write_model_files,
)
from encoders import iter_batches
from jaxtyping import Int
from known import autocast_if_cuda, iter_chunks, make_training_budget
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, BartConfig, BartForConditionalGeneration

MAX_POSITIONS = 512
#: Longer functions are left out of training.
MAX_SOURCE_TOKENS = 320
TIED_WEIGHTS = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")
SWAP_PROBABILITY, MASKED_FUNCTION_FRACTION = 0.5, 0.17


def main() -> None:
    options = parse_options()
    if not options.measure:
        torch.manual_seed(options.seed)
        torch.set_float32_matmul_precision("high")
        config = build_config(options)
        write_model_files(
            options.out, options.data, train_model(options, config), config, (*TIED_WEIGHTS, "final_logits_bias")
        )
    if (options.data / "test-java.npz.xz").is_file() and (options.measure or options.smoke):
        print(write_card(options.out, build_card_facts(options, measure_stored_model(options))), flush=True)


def parse_options() -> argparse.Namespace:
    parser = make_code_parser(__doc__, name="code-translate", steps=12_000, lr=1e-3)
    parser.add_argument("--batch-tokens", type=int, default=24_576, help="tokens per step, Java and C# together")
    parser.add_argument("--width", type=int, default=192, help="width of the model")
    parser.add_argument("--depth", type=int, default=3, help="layers of the encoder, and of the decoder")
    parser.set_defaults(count=1000)
    options = parser.parse_args()
    if options.smoke:
        options.steps, options.seconds, options.batch_tokens, options.count = 20, None, 1024, 4
    return options


# -- lessons


class TranslationSampler:
    """Pairs of functions, drawn and varied on the device."""

    def __init__(self, options: argparse.Namespace, split: str, device: torch.device) -> None:
        java, cs = (read_functions(options.data, split, language) for language in ("java", "cs"))
        self.java, self.cs = FunctionRows([java], device), FunctionRows([cs], device)
        lengths = [sum(pair) for pair in zip(self.java.lengths, self.cs.lengths, strict=True)]
        fits = [max(pair) <= MAX_SOURCE_TOKENS for pair in zip(self.java.lengths, self.cs.lengths, strict=True)]
        self.pair_indices = np.flatnonzero(fits)
        self.lengths = [lengths[place] for place in self.pair_indices]
        self.copied_words = find_copied_words(options.data / "tokenizer.json", java, cs).to(device)

    def collate_pairs(self, chosen: list[int]) -> tuple[Int[Tensor, "pair token"], Int[Tensor, "pair token"]]:
        places = torch.from_numpy(self.pair_indices[chosen]).to(self.java.ids.device)
        return add_special_ids(self.java.collate(places)), add_special_ids(self.cs.collate(places))

    def swap_copied_words(self, java: Tensor, cs: Tensor) -> tuple[Tensor, Tensor]:
        """Words that are copied become other such words, alike on both sides, in half of the pairs."""
        if not len(self.copied_words):
            return java, cs
        device, pairs, count = java.device, len(java), len(self.copied_words)
        table = torch.arange(VOCAB_SIZE, device=device).repeat(pairs, 1)
        other = torch.randint(count, (pairs, count), device=device)
        moves = torch.rand(pairs, count, device=device) < torch.rand(pairs, 1, device=device)
        moves &= torch.rand(pairs, 1, device=device) < SWAP_PROBABILITY
        stays = torch.arange(count, device=device)
        meant = self.copied_words[torch.where(moves, other, stays)]
        table.scatter_(1, self.copied_words.flatten().repeat(pairs, 1), meant.flatten(1))
        return table.gather(1, java), table.gather(1, cs)

    def mask_tokens(self, java: Tensor) -> Tensor:
        """Some tokens of a sixth of the functions are masked, at a random rate below one half."""
        rate = torch.rand(len(java), 1, device=java.device) / 2
        rate = rate * (torch.rand(len(java), 1, device=java.device) < MASKED_FUNCTION_FRACTION)
        gone = (torch.rand(java.shape, device=java.device) < rate) & (java >= len(SPECIAL_TOKENS))
        return torch.where(gone, MASK_ID, java)


def find_copied_words(tokenizer: Path, java: EncodedFunctions, cs: EncodedFunctions) -> Int[Tensor, "word form"]:
    """Words that are tokens in four forms (`job`, `Job`, each with a space, too) and nearly always in C# if in Java."""
    number: dict[str, int] = json.loads(tokenizer.read_text(encoding="utf-8"))["model"]["vocab"]
    space = "Ġ"  # how byte-level BPE writes a space
    forms = {
        word: [number[form] for form in (word, word.title(), space + word, space + word.title())]
        for word in number
        if word.isascii() and word.islower() and word.isalpha() and len(word) > 2
        if all(form in number for form in (word.title(), space + word, space + word.title()))
    }
    word_of = {one: word for word, ids in forms.items() for one in ids}
    seen: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    for place in range(len(java)):
        left, right = ({word_of[one] for one in side[place].tolist() if one in word_of} for side in (java, cs))
        seen.update(left)
        kept.update(left & right)
    chosen = [ids for word, ids in forms.items() if seen[word] >= 3 and kept[word] >= 0.85 * seen[word]]
    return torch.tensor(chosen, dtype=torch.long).reshape(-1, 4)


def shift_right(target_ids: Int[Tensor, "pair token"]) -> Int[Tensor, "pair token"]:
    """What the decoder has seen before each token; BART starts with the end token."""
    return torch.cat([torch.full_like(target_ids[:, :1], EOS_ID), target_ids[:, :-1]], dim=1)


def build_config(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "architectures": ["BartForConditionalGeneration"],
        "model_type": "bart",
        "dtype": "float16",
        "vocab_size": VOCAB_SIZE,
        "d_model": options.width,
        "encoder_layers": options.depth,
        "decoder_layers": options.depth,
        "encoder_attention_heads": options.width // 32,
        "decoder_attention_heads": options.width // 32,
        "encoder_ffn_dim": 3 * options.width,
        "decoder_ffn_dim": 3 * options.width,
        "max_position_embeddings": MAX_POSITIONS,
        "activation_function": "gelu",
        "dropout": 0.15,
        "attention_dropout": 0.0,
        "activation_dropout": 0.1,
        "init_std": 0.03,
        "scale_embedding": False,
        "tie_word_embeddings": True,
        "is_encoder_decoder": True,
        "bos_token_id": BOS_ID,
        "pad_token_id": PAD_ID,
        "eos_token_id": EOS_ID,
        "decoder_start_token_id": EOS_ID,
        "forced_bos_token_id": BOS_ID,
        "forced_eos_token_id": None,
        "id2label": {"0": MASKED_TOKEN_LABEL},
        "label2id": {MASKED_TOKEN_LABEL: 0},
    }


def train_model(options: argparse.Namespace, config: dict[str, Any]) -> Weights:
    device = torch.device(options.device)
    model = BartForConditionalGeneration(BartConfig(**config)).to(device)  # type: ignore[arg-type]
    lessons, held_out = (TranslationSampler(options, split, device) for split in ("train", "valid"))
    print(f"{len(lessons.pair_indices):,} pairs, {len(lessons.copied_words):,} copied words", flush=True)
    order = iter_batches(lessons.lengths, options.batch_tokens // 32, options.batch_tokens, options.seed)
    clock = make_training_budget(options)

    def answers(java: Tensor, shown: Tensor, cs: Tensor) -> Tensor:
        with autocast_if_cuda(device):
            found = model(
                input_ids=shown,
                attention_mask=(java != PAD_ID).long(),
                decoder_input_ids=shift_right(cs),
                use_cache=False,
            )
        return found.logits.float()

    def loss_of() -> Tensor:
        java, cs = lessons.swap_copied_words(*lessons.collate_pairs(next(order)))
        logits = answers(java, lessons.mask_tokens(java), cs)
        return F.cross_entropy(logits.flatten(0, 1), cs.flatten(), ignore_index=PAD_ID, label_smoothing=0.1)

    def look() -> tuple[float, str]:
        loss, right, whole, tokens = 0.0, 0, 0, 0
        for places in iter_chunks(range(len(held_out.pair_indices)), 50):
            java, cs = held_out.collate_pairs(list(places))
            logits, real = answers(java, java, cs), cs != PAD_ID
            loss += F.cross_entropy(logits[real], cs[real], reduction="sum").item()
            hits = (logits.argmax(-1) == cs) | ~real
            right += int(hits[real].sum())
            whole += int(hits.all(1).sum())
            tokens += int(real.sum())
        share = whole / len(held_out.pair_indices)
        # the share of functions without an error decides: loss rises with certainty long before answers get worse
        return -share, f"token loss {loss / tokens:.4f}, tokens right {right / tokens:.4f}, functions {share:.4f}"

    return train_keeping_best(options, model, clock, loss_of, look)


# -- the finished model


def measure_stored_model(options: argparse.Namespace) -> dict[str, float]:
    """What the stored files do, opened with transformers in float32, writing without help."""
    model = AutoModelForSeq2SeqLM.from_pretrained(options.out, dtype=torch.float32).to(options.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.out)
    java, cs = (read_functions(options.data, "test", language) for language in ("java", "cs"))
    texts, truth = ([tokenizer.decode(side[place].tolist()) for place in range(len(side))] for side in (java, cs))
    texts, truth = texts[: options.count], truth[: options.count]
    order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
    written = [""] * len(texts)
    for places in iter_chunks(order, 50):
        inputs = tokenizer([texts[place] for place in places], return_tensors="pt", padding=True, truncation=True)
        with torch.no_grad():
            said = model.generate(**inputs.to(options.device), max_length=MAX_POSITIONS, num_beams=1, do_sample=False)
        for place, text in zip(places, tokenizer.batch_decode(said, skip_special_tokens=True), strict=True):
            written[place] = text
    whole = [str(one).strip() == str(other).strip() for one, other in zip(written, truth, strict=True)]
    made, right, copied = ([tokenizer(text).input_ids[1:-1] for text in side] for side in (written, truth, texts))
    return {
        "exact match with the C# function": round(float(np.mean(whole)), 4),
        "BLEU-4 over the model's tokens": round(compute_bleu(made, right), 4),
        "BLEU-4 of the untranslated Java text": round(compute_bleu(copied, right), 4),
    }


def compute_bleu(predicted: list[list[int]], references: list[list[int]], max_ngram: int = 4) -> float:
    """Corpus BLEU (Papineni et al. 2002) with one reference each."""
    logs = []
    for size in range(1, max_ngram + 1):
        hits, total = 0, 0
        for one, other in zip(predicted, references, strict=True):
            found, known = (Counter(zip(*(row[k:] for k in range(size)), strict=False)) for row in (one, other))
            hits += sum((found & known).values())
            total += sum(found.values())
        logs.append(np.log(max(hits, 1e-9) / max(total, 1)))
    short = min(0.0, 1 - sum(map(len, references)) / max(1, sum(map(len, predicted))))
    return float(np.exp(np.mean(logs) + short))


def build_card_facts(options: argparse.Namespace, figures: dict[str, float]) -> dict[str, Any]:
    return {
        "name": "code-translate",
        "task": "text2text-generation",
        "summary": "A small encoder–decoder that translates Java functions to C#.",
        "architecture": f"BART, {options.depth} + {options.depth} layers of width {options.width}, "
        f"{options.width // 32} heads, {VOCAB_SIZE:,} byte-level BPE tokens (the vocabulary of zoo:code), "
        f"{MAX_POSITIONS} positions",
        "labels": [MASKED_TOKEN_LABEL],
        "licence": "Apache-2.0 (weights); data under their own terms",
        "data": f"CodeXGLUE code translation (C-UDA): 10,295 training functions (those of at most {MAX_SOURCE_TOKENS} "
        "tokens), 499 validation functions for checkpoint selection, 1,000 test functions for the figures below",
        "command": "python packages/zoo/train/code_translate.py --data carry/code "
        "--out packages/zoo/src/clearhead_zoo/models/code-translate --seed "
        f"{options.seed}{format_duration_option(options)}",
        "figures": figures,
        "measured": "All 1,000 test functions, greedy decoding from the Java function alone; leading and trailing "
        "spaces are ignored. Stored files, loaded with transformers in float32; the test files were read once, for "
        "this table. BLEU is computed over this model's tokens and is not comparable with published figures.",
        "use": "For trying out explanations of an encoder–decoder on code. It reproduces the style of the projects "
        "in its training data. Not for porting programs.",
    }


if __name__ == "__main__":
    main()
