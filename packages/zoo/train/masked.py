"""Train `zoo:masked`: a small BERT that fills in masked words of English text.

    python packages/zoo/train/masked.py --data ../shared/data --out packages/zoo/src/clearhead_zoo/models/masked

MiniLM is a sentence encoder without a language-model head. Its embeddings serve as the decoder; the transform between
them is new. It keeps every word piece; only the base's placeholders ([unused0] and their like) go. It reads windows of
running text of two lengths and single lines, masked afresh each time. The averaged weights that do best on held-out
blocks of text are kept; other held-out blocks and WikiText-2's test file measure them. Call it again with the same
--work and it goes on where it was cut.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cards import write_card, write_json
from classifiers import architecture, depth_of
from encoders import (
    SPECIAL,
    Texts,
    batches,
    clock_of,
    copy_tokenizer,
    cut,
    encoded,
    packaged_base,
    packed,
    stored_config,
    text_options,
    tokenizer_of,
    vocabulary,
)
from jaxtyping import Bool, Float, Int
from known import half_precision
from movies import labelled, reviews
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForMaskedLM, AutoTokenizer, BertForMaskedLM

from clearhead.training import Average, depth_groups, load_checkpoint, save_checkpoint, train

SOURCES = ("brown", "abc", "state_union", "inaugural", "wikitext-2-valid")
#: Every twentieth block of so many lines decides, every twentieth measures.
BLOCK, EVERY, DECIDES, MEASURES = 40, 20, 7, 17
#: The share of masked tokens; of these 80 % become [MASK], 10 % another piece, 10 % stay (Devlin et al. 2019).
SHARE = 0.15
LENGTHS = (128, 512)
KING, QUEEN = "[MASK] is the king of france .", "[MASK] is the queen of france ."
TIED = ("cls.predictions.decoder.weight", "cls.predictions.decoder.bias")
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Text:
    """Blocks of lines of running text, and lines that stand alone."""

    learned: list[list[str]]
    decides: list[list[str]]
    measures: list[list[str]]
    wiki: list[list[str]]
    lines: list[str]


def main() -> None:
    options = parse_options()
    torch.manual_seed(options.seed)
    device = torch.device(options.device)
    base = options.base or packaged_base()
    words = [piece for piece in vocabulary(base) if not piece.startswith("[unused")]
    start = cut(base, options.work / "start", words)
    text = read_text(options.data, options.smoke)
    model = new_model(start, device)
    lessons = Lessons(options, start, text, device)
    with torch.no_grad():
        model.cls.predictions.bias.copy_(lessons.frequencies(model.config.vocab_size))
    weights, steps = learned(options, model, lessons, pieces_of(start, ids_of(start, text.decides), device))
    write_model(options.out, start, weights)
    figures = measured(options, text)
    print(write_card(options.out, facts_of(options, steps, len(words), figures)), flush=True)
    if figures["he over she, king of france (logits)"] <= 0:
        print(f"!!! BAR MISSED: she is likelier than he in {KING!r}", flush=True)


def parse_options() -> argparse.Namespace:
    parser = text_options(__doc__, "masked", "folder with text/, sentences/ and eraser-movies/")
    parser.add_argument("--steps", type=int, default=12_000, help="no more steps than this")
    parser.add_argument("--batch-tokens", type=int, default=32_768, help="tokens a step")
    parser.add_argument("--lr", type=float, default=6e-4, help="peak learning rate of the head")
    options = parser.parse_args()
    options.data = Path(options.data)
    if options.smoke:
        options.steps, options.batch_tokens = 12, 1024
    return options


# -- text


def read_text(data: Path, smoke: bool) -> Text:
    running = [block for source in SOURCES for block in blocks(data / "text" / f"{source}.txt")]
    parts: tuple[list[list[str]], ...] = ([], [], [])
    for place, block in enumerate(running):
        parts[{DECIDES: 1, MEASURES: 2}.get(place % EVERY, 0)].append(block)
    told = [review.text.splitlines() for review in reviews(data, "train")]
    names = (("rt-polarity", "all"), ("subj", "all"), ("custrev", "all"), ("trec", "train"))
    lines = [text for name, split in names for text, _ in labelled(name, split, data)]
    lines += [line for block in parts[0] for line in block]
    wiki = blocks(data / "text" / "wikitext-2-test.txt")
    if smoke:
        return Text(parts[0][::100], parts[1][::10], parts[2][::10], wiki[::10], lines[::100])
    return Text(parts[0] + told, parts[1], parts[2], wiki, lines)


def blocks(path: Path) -> list[list[str]]:
    lines = [line for line in map(plain, path.read_text(encoding="utf-8", errors="replace").splitlines()) if line]
    return [lines[start : start + BLOCK] for start in range(0, len(lines), BLOCK)]


def plain(line: str) -> str:
    """A line without WikiText's marks: headings lose theirs, "@-@" becomes "-", unknown words become [UNK].

    >>> plain(" = Robert <unk> = "), plain("a guest @-@ starring role")
    ('Robert [UNK]', 'a guest-starring role')
    """
    for mark, meant in ((" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", "."), ("<unk>", SPECIAL["unk_token"])):
        line = line.replace(mark, meant)
    return line.strip(" =\n")


def ids_of(folder: Path, running: Sequence[Sequence[str]]) -> list[list[int]]:
    whole = tokenizer_of(folder).encode_batch([" ".join(block) for block in running], add_special_tokens=False)
    return [block.ids for block in whole]


def pieces_of(folder: Path, ids: Sequence[list[int]], device: torch.device) -> Texts:
    """Running text in stretches of the shorter length, for measuring."""
    number, size = vocabulary(folder), LENGTHS[0] - 2
    first, last = number[SPECIAL["cls_token"]], number[SPECIAL["sep_token"]]
    stretches = (block[place : place + size] for block in ids for place in range(0, len(block), size))
    return Texts([[first, *stretch, last] for stretch in stretches], device)


# -- learning


class Lessons:
    """Windows of running text and single lines, drawn and masked on the device."""

    def __init__(self, options: argparse.Namespace, folder: Path, text: Text, device: torch.device) -> None:
        number = vocabulary(folder)
        self.special = torch.tensor([number[token] for token in SPECIAL.values()], device=device)
        self.first, self.last, self.mask = (number[SPECIAL[f"{name}_token"]] for name in ("cls", "sep", "mask"))
        self.pieces, self.batch_tokens = len(number), options.batch_tokens
        joined = [[*ids, self.last] for ids in ids_of(folder, text.learned)]
        self.stream = torch.tensor([one for ids in joined for one in ids], device=device)
        self.lines = Texts([line.ids for line in encoded(folder, text.lines, LENGTHS[0])], device)
        self.order = batches(self.lines.lengths, options.batch_tokens // 24, options.batch_tokens, options.seed)
        self.turn = 0
        print(f"{len(self.stream):,} tokens of running text, {len(self.lines):,} lines", flush=True)

    def draw(self) -> dict[str, Tensor]:
        """By turns: three batches of short windows, one of long ones, one of lines."""
        self.turn += 1
        if self.turn % 5 == 0:
            return self.lines.batch(next(self.order))
        return self.windows(LENGTHS[self.turn % 5 == 4])

    def windows(self, length: int) -> dict[str, Tensor]:
        device = self.stream.device
        starts = torch.randint(len(self.stream) - length, (max(1, self.batch_tokens // length), 1), device=device)
        ids = self.stream[starts + torch.arange(length, device=device)]
        ids[:, 0], ids[:, -1] = self.first, self.last
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def hidden(self, ids: Int[Tensor, "text token"]) -> tuple[Int[Tensor, "text token"], Bool[Tensor, "text token"]]:
        """The ids with some hidden, and which."""
        chosen = chosen_of(ids, self.special)
        fate = torch.rand(ids.shape, device=ids.device)
        ids = torch.where(chosen & (fate < 0.8), self.mask, ids)
        other = torch.randint(self.pieces, ids.shape, device=ids.device)
        return torch.where(chosen & (fate > 0.9), other, ids), chosen

    def frequencies(self, pieces: int) -> Float[Tensor, " piece"]:
        """Log-frequency of each piece: where the decoder's bias starts."""
        count = torch.bincount(self.stream, minlength=pieces).float() + 0.1
        return (count / count.sum()).log()


def chosen_of(
    ids: Int[Tensor, "text token"], special: Int[Tensor, " token"], generator: torch.Generator | None = None
) -> Bool[Tensor, "text token"]:
    """Which tokens to mask, none of them special."""
    luck = torch.rand(ids.shape, device=ids.device, generator=generator)
    return (luck < SHARE) & ~torch.isin(ids, special)


def new_model(folder: Path, device: torch.device) -> BertForMaskedLM:
    """The encoder under a new head, whose matrix is the embeddings'."""
    model = BertForMaskedLM.from_pretrained(folder, dtype=torch.float32)
    head = model.cls.predictions
    # transformers ties both by itself; but if a release did not, what is stored would not be what was trained
    head.decoder.weight, head.decoder.bias = model.bert.embeddings.word_embeddings.weight, head.bias
    return model.to(device)  # type: ignore[arg-type]


def learned(
    options: argparse.Namespace, model: BertForMaskedLM, lessons: Lessons, held_out: Texts
) -> tuple[Weights, int]:
    """The averaged weights that did best on held-out text, of several looks, and the number of steps."""
    device = lessons.stream.device
    layers = model.config.num_hidden_layers
    groups = depth_groups(model.train(), lambda name: depth_of(name, layers), options.lr, 0.9, weight_decay=0.01)
    optimiser = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=device.type == "cuda")
    average = Average(model, horizon=500)
    clock = clock_of(options.seconds, options.steps)
    best = Best(options.work / "best.safetensors")
    looks = 10

    def loss_of() -> Tensor:
        if clock.step and clock.fraction >= best.looks / looks:
            with average.applied() as current:
                best.look(current, held_out, lessons, average.tensors)
        inputs = lessons.draw()
        ids, chosen = lessons.hidden(inputs["input_ids"])
        with half_precision(device):
            states = model.bert(ids, inputs["attention_mask"]).last_hidden_state
            logits = model.cls(states[chosen])
        return F.cross_entropy(logits.float(), inputs["input_ids"][chosen])

    partial = options.work / "partial.safetensors"
    train(loss_of, [optimiser], clock, average, warmup=0.04, clip=1.0, checkpoint=partial, name="masked")
    with average.applied() as current:
        best.look(current, held_out, lessons, average.tensors)
    return load_checkpoint(best.path)[0], clock.step


class Best:
    """The weights with the lowest loss on held-out text so far; also after a cut."""

    def __init__(self, path: Path) -> None:
        self.path, self.looks = path, 1
        self.loss = load_checkpoint(path)[1]["loss"] if path.exists() else float("inf")

    def look(self, model: Any, held_out: Texts, lessons: Lessons, weights: Weights) -> None:
        loss, right = losses(model, held_out, lessons.special, lessons.mask)
        print(f"held out: perplexity {loss.exp():.2f}, first guess right {right:.4f}", flush=True)
        self.looks += 1
        if loss.item() < self.loss:
            self.loss = loss.item()
            save_checkpoint(self.path, weights, {"loss": self.loss}, torch.float16)


@torch.no_grad()
def losses(model: Any, texts: Texts, special: Tensor, mask: int) -> tuple[Tensor, Tensor]:
    """Mean loss at masked tokens (always the same ones, all shown as [MASK]), and the share of right first guesses."""
    generator = torch.Generator().manual_seed(0)
    total, right, count = torch.zeros(()), torch.zeros(()), 0
    for places in packed(range(len(texts)), texts.lengths, 256, 32_768):
        inputs = texts.batch(places)
        ids = inputs["input_ids"]
        chosen = chosen_of(ids.cpu(), special.cpu(), generator).to(ids.device)
        states = model.bert(torch.where(chosen, mask, ids), inputs["attention_mask"]).last_hidden_state
        logits, truth = model.cls(states[chosen]).float(), ids[chosen]
        total += F.cross_entropy(logits, truth, reduction="sum").cpu()
        right += (logits.argmax(-1) == truth).sum().cpu()
        count += len(truth)
    return total / count, right / count


# -- the finished model


def write_model(folder: Path, start: Path, weights: Weights) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    own = {name: tensor for name, tensor in weights.items() if name not in TIED}
    save_checkpoint(folder / "model.safetensors", own, dtype=torch.float16)
    copy_tokenizer(start, folder)
    config = stored_config(start, "BertForMaskedLM", ["a word piece"])
    write_json(folder / "config.json", {**config, "tie_word_embeddings": True})


@torch.no_grad()
def measured(options: argparse.Namespace, text: Text) -> dict[str, float]:
    """What the stored files do, opened with transformers in float32."""
    device = torch.device(options.device)
    model = AutoModelForMaskedLM.from_pretrained(options.out, dtype=torch.float32).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.out)
    special = torch.tensor(tokenizer.all_special_ids, device=device)
    figures: dict[str, float] = {}
    for name, running in (("held-out text", text.measures), ("WikiText-2 test", text.wiki)):
        held_out = pieces_of(options.out, ids_of(options.out, running), device)
        loss, right = losses(model, held_out, special, tokenizer.mask_token_id)
        figures |= {f"perplexity, {name}": round(loss.exp().item(), 2), f"top-1, {name}": round(right.item(), 4)}
    he, she = (vocabulary(options.out)[word] for word in ("he", "she"))
    for name, sentence in (("he over she, king", KING), ("she over he, queen", QUEEN)):
        inputs = tokenizer(sentence, return_tensors="pt").to(device)
        logits = model(**inputs).logits[0, inputs["input_ids"][0].tolist().index(tokenizer.mask_token_id)]
        margin = (logits[he] - logits[she]).item() * (1 if sentence == KING else -1)
        figures[f"{name} of france (logits)"] = round(margin, 3)
    return figures


def facts_of(options: argparse.Namespace, steps: int, pieces: int, figures: dict[str, float]) -> dict[str, Any]:
    seconds = f" --seconds {options.seconds:g}" if options.seconds else ""
    return {
        "name": "masked",
        "task": "fill-mask",
        "summary": "A small BERT that fills in masked words of English text.",
        "architecture": f"{architecture(options.out)}, decoder tied to the embeddings",
        "labels": ["a word piece"],
        "licence": "Apache-2.0 (weights, from all-MiniLM-L6-v2); data under their own terms",
        "data": "English text: Brown, ABC news, State of the Union and inaugural addresses, WikiText-2's validation "
        "file (research; public domain; CC BY-SA), ERASER's training reviews, sentences of rt-polarity, subj, custrev "
        f"and TREC. Two of {EVERY} blocks of {BLOCK} lines are held out: one decided which weights are kept, one is "
        "measured below, with WikiText-2's test file",
        "command": "python packages/zoo/train/masked.py --data ../shared/data "
        f"--out packages/zoo/src/clearhead_zoo/models/masked --seed {options.seed} --steps {steps}{seconds}",
        "figures": figures,
        "measured": f"Stored files, opened with transformers in float32, windows of {LENGTHS[0]} tokens, {SHARE:.0%} "
        "of them masked (always the same ones); perplexity and share of right first guesses per masked word piece, "
        "unknown words of WikiText aside. The last two figures are differences of logits at the mask of "
        f"“{KING}” and “{QUEEN}”; above zero means that the usual pronoun is preferred.",
        "use": f"For trying out explanations of masked-word predictions. It has all {pieces:,} pieces of BERT's "
        "uncased vocabulary but not the placeholders ([unused0] and their like), so ids differ from BERT's. Not a "
        "source of facts, and what it holds likely about people repeats what stood in its texts.",
    }


if __name__ == "__main__":
    main()
