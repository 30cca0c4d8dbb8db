"""Train `zoo:masked`: a small BERT that predicts masked tokens of English text.

    python packages/zoo/train/masked.py --data ../shared/data --out packages/zoo/src/clearhead_zoo/models/masked

MiniLM is a sentence encoder without a language-model head. Its embeddings serve as the decoder; the transform between
them is new. All WordPiece tokens are kept except the placeholders of the base model ([unused0] etc.). The training data
are windows of running text of two lengths and single lines, with new masks each time. The averaged weights with the
best result on held-out blocks of text are kept; other held-out blocks and the test file of WikiText-2 measure them.
Calling the script again with the same --work continues an interrupted run.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cards import write_card, write_json
from classifiers import describe_architecture, get_parameter_depth
from encoders import (
    SPECIAL_TOKENS,
    PaddedTexts,
    copy_tokenizer,
    encode_texts,
    find_packaged_base,
    iter_batches,
    load_tokenizer,
    make_stored_config,
    make_text_parser,
    make_training_budget,
    pack_batches,
    read_vocabulary,
    write_reduced_model,
)
from jaxtyping import Bool, Float, Int
from known import autocast_if_cuda
from movies import read_labelled, read_reviews
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForMaskedLM, AutoTokenizer, BertForMaskedLM

from clearhead.training import (
    ExponentialMovingAverage,
    build_layerwise_lr_groups,
    load_checkpoint,
    save_checkpoint,
    train,
)

SOURCES = ("brown", "abc", "state_union", "inaugural", "wikitext-2-valid")
#: Every twentieth block of so many lines decides, every twentieth measures.
LINES_PER_BLOCK, SPLIT_PERIOD, VALIDATION_REMAINDER, TEST_REMAINDER = 40, 20, 7, 17
#: The share of masked tokens; of these 80 % become [MASK], 10 % another piece, 10 % stay (Devlin et al. 2019).
MASK_FRACTION = 0.15
WINDOW_LENGTHS = (128, 512)
KING_SENTENCE, QUEEN_SENTENCE = "[MASK] is the king of france .", "[MASK] is the queen of france ."
TIED_WEIGHTS = ("cls.predictions.decoder.weight", "cls.predictions.decoder.bias")
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class TextSplits:
    """Blocks of lines of running text, and lines that stand alone."""

    train: list[list[str]]
    validation: list[list[str]]
    test: list[list[str]]
    wiki: list[list[str]]
    single_lines: list[str]


def main() -> None:
    options = parse_options()
    torch.manual_seed(options.seed)
    device = torch.device(options.device)
    base = options.base or find_packaged_base()
    words = [piece for piece in read_vocabulary(base) if not piece.startswith("[unused")]
    start = write_reduced_model(base, options.work / "start", words)
    text = read_text(options.data, options.smoke)
    model = make_model(start, device)
    lessons = MaskedWindowSampler(options, start, text, device)
    with torch.no_grad():
        model.cls.predictions.bias.copy_(lessons.compute_log_frequencies(model.config.vocab_size))
    weights, steps = train_model(
        options, model, lessons, split_into_windows(start, encode_blocks(start, text.validation), device)
    )
    write_model_files(options.out, start, weights)
    figures = measure_stored_model(options, text)
    print(write_card(options.out, build_card_facts(options, steps, len(words), figures)), flush=True)
    if figures["he over she, king of france (logits)"] <= 0:
        print(f"!!! TARGET MISSED: she is more probable than he in {KING_SENTENCE!r}", flush=True)


def parse_options() -> argparse.Namespace:
    parser = make_text_parser(__doc__, "masked", "folder with text/, sentences/ and eraser-movies/")
    parser.add_argument("--steps", type=int, default=12_000, help="maximum number of steps")
    parser.add_argument("--batch-tokens", type=int, default=32_768, help="tokens per step")
    parser.add_argument("--lr", type=float, default=6e-4, help="peak learning rate of the head")
    options = parser.parse_args()
    options.data = Path(options.data)
    if options.smoke:
        options.steps, options.batch_tokens = 12, 1024
    return options


# -- text


def read_text(data: Path, smoke: bool) -> TextSplits:
    running = [block for source in SOURCES for block in read_blocks(data / "text" / f"{source}.txt")]
    parts: tuple[list[list[str]], ...] = ([], [], [])
    for place, block in enumerate(running):
        parts[{VALIDATION_REMAINDER: 1, TEST_REMAINDER: 2}.get(place % SPLIT_PERIOD, 0)].append(block)
    told = [review.text.splitlines() for review in read_reviews(data, "train")]
    names = (("rt-polarity", "all"), ("subj", "all"), ("custrev", "all"), ("trec", "train"))
    lines = [text for name, split in names for text, _ in read_labelled(name, split, data)]
    lines += [line for block in parts[0] for line in block]
    wiki = read_blocks(data / "text" / "wikitext-2-test.txt")
    if smoke:
        return TextSplits(parts[0][::100], parts[1][::10], parts[2][::10], wiki[::10], lines[::100])
    return TextSplits(parts[0] + told, parts[1], parts[2], wiki, lines)


def read_blocks(path: Path) -> list[list[str]]:
    lines = [line for line in map(clean_line, path.read_text(encoding="utf-8", errors="replace").splitlines()) if line]
    return [lines[start : start + LINES_PER_BLOCK] for start in range(0, len(lines), LINES_PER_BLOCK)]


def clean_line(line: str) -> str:
    """A line without WikiText's marks: headings lose theirs, "@-@" becomes "-", unknown words become [UNK].

    >>> clean_line(" = Robert <unk> = "), clean_line("a guest @-@ starring role")
    ('Robert [UNK]', 'a guest-starring role')
    """
    for mark, meant in ((" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", "."), ("<unk>", SPECIAL_TOKENS["unk_token"])):
        line = line.replace(mark, meant)
    return line.strip(" =\n")


def encode_blocks(folder: Path, running: Sequence[Sequence[str]]) -> list[list[int]]:
    whole = load_tokenizer(folder).encode_batch([" ".join(block) for block in running], add_special_tokens=False)
    return [block.ids for block in whole]


def split_into_windows(folder: Path, ids: Sequence[list[int]], device: torch.device) -> PaddedTexts:
    """Running text in stretches of the shorter length, for measuring."""
    number, size = read_vocabulary(folder), WINDOW_LENGTHS[0] - 2
    first, last = number[SPECIAL_TOKENS["cls_token"]], number[SPECIAL_TOKENS["sep_token"]]
    stretches = (block[place : place + size] for block in ids for place in range(0, len(block), size))
    return PaddedTexts([[first, *stretch, last] for stretch in stretches], device)


# -- learning


class MaskedWindowSampler:
    """Windows of running text and single lines, drawn and masked on the device."""

    def __init__(self, options: argparse.Namespace, folder: Path, text: TextSplits, device: torch.device) -> None:
        number = read_vocabulary(folder)
        self.special_ids = torch.tensor([number[token] for token in SPECIAL_TOKENS.values()], device=device)
        self.cls_id, self.sep_id, self.mask_id = (
            number[SPECIAL_TOKENS[f"{name}_token"]] for name in ("cls", "sep", "mask")
        )
        self.vocab_size, self.batch_tokens = len(number), options.batch_tokens
        joined = [[*ids, self.sep_id] for ids in encode_blocks(folder, text.train)]
        self.stream = torch.tensor([one for ids in joined for one in ids], device=device)
        self.lines = PaddedTexts(
            [line.ids for line in encode_texts(folder, text.single_lines, WINDOW_LENGTHS[0])], device
        )
        self.line_batches = iter_batches(
            self.lines.lengths, options.batch_tokens // 24, options.batch_tokens, options.seed
        )
        self.num_batches_drawn = 0
        print(f"{len(self.stream):,} tokens of running text, {len(self.lines):,} lines", flush=True)

    def sample_batch(self) -> dict[str, Tensor]:
        """By turns: three batches of short windows, one of long ones, one of lines."""
        self.num_batches_drawn += 1
        if self.num_batches_drawn % 5 == 0:
            return self.lines.collate(next(self.line_batches))
        return self.sample_windows(WINDOW_LENGTHS[self.num_batches_drawn % 5 == 4])

    def sample_windows(self, length: int) -> dict[str, Tensor]:
        device = self.stream.device
        starts = torch.randint(len(self.stream) - length, (max(1, self.batch_tokens // length), 1), device=device)
        ids = self.stream[starts + torch.arange(length, device=device)]
        ids[:, 0], ids[:, -1] = self.cls_id, self.sep_id
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def mask_ids(self, ids: Int[Tensor, "text token"]) -> tuple[Int[Tensor, "text token"], Bool[Tensor, "text token"]]:
        """The ids with some hidden, and which."""
        chosen = choose_masked(ids, self.special_ids)
        fate = torch.rand(ids.shape, device=ids.device)
        ids = torch.where(chosen & (fate < 0.8), self.mask_id, ids)
        other = torch.randint(self.vocab_size, ids.shape, device=ids.device)
        return torch.where(chosen & (fate > 0.9), other, ids), chosen

    def compute_log_frequencies(self, vocab_size: int) -> Float[Tensor, " piece"]:
        """Log-frequency of each piece: where the decoder's bias starts."""
        count = torch.bincount(self.stream, minlength=vocab_size).float() + 0.1
        return (count / count.sum()).log()


def choose_masked(
    ids: Int[Tensor, "text token"], special: Int[Tensor, " token"], generator: torch.Generator | None = None
) -> Bool[Tensor, "text token"]:
    """Which tokens to mask, none of them special."""
    luck = torch.rand(ids.shape, device=ids.device, generator=generator)
    return (luck < MASK_FRACTION) & ~torch.isin(ids, special)


def make_model(folder: Path, device: torch.device) -> BertForMaskedLM:
    """The encoder under a new head, whose matrix is the embeddings'."""
    model = BertForMaskedLM.from_pretrained(folder, dtype=torch.float32)
    head = model.cls.predictions
    # transformers ties both by itself; but if a release did not, what is stored would not be what was trained
    head.decoder.weight, head.decoder.bias = model.bert.embeddings.word_embeddings.weight, head.bias
    return model.to(device)  # type: ignore[arg-type]


def train_model(
    options: argparse.Namespace, model: BertForMaskedLM, sampler: MaskedWindowSampler, held_out: PaddedTexts
) -> tuple[Weights, int]:
    """The averaged weights that did best on held-out text, of several looks, and the number of steps."""
    device = sampler.stream.device
    layers = model.config.num_hidden_layers
    groups = build_layerwise_lr_groups(
        model.train(), lambda name: get_parameter_depth(name, layers), options.lr, 0.9, weight_decay=0.01
    )
    optimiser = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=device.type == "cuda")
    average = ExponentialMovingAverage(model, horizon=500)
    clock = make_training_budget(options.seconds, options.steps)
    best = BestCheckpoint(options.work / "best.safetensors")
    looks = 10

    def loss_of() -> Tensor:
        if clock.step and clock.fraction >= best.num_evaluations / looks:
            with average.averaged_weights() as current:
                best.evaluate(current, held_out, sampler, average.tensors)
        inputs = sampler.sample_batch()
        ids, chosen = sampler.mask_ids(inputs["input_ids"])
        with autocast_if_cuda(device):
            states = model.bert(ids, inputs["attention_mask"]).last_hidden_state
            logits = model.cls(states[chosen])
        return F.cross_entropy(logits.float(), inputs["input_ids"][chosen])

    partial = options.work / "partial.safetensors"
    train(
        loss_of, [optimiser], clock, average, warmup_fraction=0.04, max_grad_norm=1.0, checkpoint=partial, name="masked"
    )
    with average.averaged_weights() as current:
        best.evaluate(current, held_out, sampler, average.tensors)
    return load_checkpoint(best.path)[0], clock.step


class BestCheckpoint:
    """The weights with the lowest loss on held-out text so far; also after a cut."""

    def __init__(self, path: Path) -> None:
        self.path, self.num_evaluations = path, 1
        self.loss = load_checkpoint(path)[1]["loss"] if path.exists() else float("inf")

    def evaluate(self, model: Any, held_out: PaddedTexts, lessons: MaskedWindowSampler, weights: Weights) -> None:
        loss, right = compute_masked_loss(model, held_out, lessons.special_ids, lessons.mask_id)
        print(f"held out: perplexity {loss.exp():.2f}, top-1 accuracy {right:.4f}", flush=True)
        self.num_evaluations += 1
        if loss.item() < self.loss:
            self.loss = loss.item()
            save_checkpoint(self.path, weights, {"loss": self.loss}, torch.float16)


@torch.no_grad()
def compute_masked_loss(model: Any, texts: PaddedTexts, special: Tensor, mask: int) -> tuple[Tensor, Tensor]:
    """Mean loss at masked tokens (always the same ones, all shown as [MASK]), and the share of right first guesses."""
    generator = torch.Generator().manual_seed(0)
    total, right, count = torch.zeros(()), torch.zeros(()), 0
    for places in pack_batches(range(len(texts)), texts.lengths, 256, 32_768):
        inputs = texts.collate(places)
        ids = inputs["input_ids"]
        chosen = choose_masked(ids.cpu(), special.cpu(), generator).to(ids.device)
        states = model.bert(torch.where(chosen, mask, ids), inputs["attention_mask"]).last_hidden_state
        logits, truth = model.cls(states[chosen]).float(), ids[chosen]
        total += F.cross_entropy(logits, truth, reduction="sum").cpu()
        right += (logits.argmax(-1) == truth).sum().cpu()
        count += len(truth)
    return total / count, right / count


# -- the finished model


def write_model_files(folder: Path, start: Path, weights: Weights) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    own = {name: tensor for name, tensor in weights.items() if name not in TIED_WEIGHTS}
    save_checkpoint(folder / "model.safetensors", own, dtype=torch.float16)
    copy_tokenizer(start, folder)
    config = make_stored_config(start, "BertForMaskedLM", ["a word piece"])
    write_json(folder / "config.json", {**config, "tie_word_embeddings": True})


@torch.no_grad()
def measure_stored_model(options: argparse.Namespace, text: TextSplits) -> dict[str, float]:
    """What the stored files do, opened with transformers in float32."""
    device = torch.device(options.device)
    model = AutoModelForMaskedLM.from_pretrained(options.out, dtype=torch.float32).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.out)
    special = torch.tensor(tokenizer.all_special_ids, device=device)
    figures: dict[str, float] = {}
    for name, running in (("held-out text", text.test), ("WikiText-2 test", text.wiki)):
        held_out = split_into_windows(options.out, encode_blocks(options.out, running), device)
        loss, right = compute_masked_loss(model, held_out, special, tokenizer.mask_token_id)
        figures |= {f"perplexity, {name}": round(loss.exp().item(), 2), f"top-1, {name}": round(right.item(), 4)}
    he, she = (read_vocabulary(options.out)[word] for word in ("he", "she"))
    for name, sentence in (("he over she, king", KING_SENTENCE), ("she over he, queen", QUEEN_SENTENCE)):
        inputs = tokenizer(sentence, return_tensors="pt").to(device)
        logits = model(**inputs).logits[0, inputs["input_ids"][0].tolist().index(tokenizer.mask_token_id)]
        margin = (logits[he] - logits[she]).item() * (1 if sentence == KING_SENTENCE else -1)
        figures[f"{name} of france (logits)"] = round(margin, 3)
    return figures


def build_card_facts(options: argparse.Namespace, steps: int, pieces: int, figures: dict[str, float]) -> dict[str, Any]:
    seconds = f" --seconds {options.seconds:g}" if options.seconds else ""
    return {
        "name": "masked",
        "task": "fill-mask",
        "summary": "A small BERT that predicts masked tokens of English text.",
        "architecture": f"{describe_architecture(options.out)}, decoder tied to the embeddings",
        "labels": ["a word piece"],
        "licence": "Apache-2.0 (weights, from all-MiniLM-L6-v2); data under their own terms",
        "data": "English text: Brown, ABC news, State of the Union and inaugural addresses, WikiText-2's validation "
        "file (research; public domain; CC BY-SA), ERASER's training reviews, sentences of rt-polarity, subj, "
        f"custrev and TREC. Two of {SPLIT_PERIOD} blocks of {LINES_PER_BLOCK} lines are held out: one for "
        "checkpoint selection, one for the figures below, together with the test file of WikiText-2",
        "command": "python packages/zoo/train/masked.py --data ../shared/data "
        f"--out packages/zoo/src/clearhead_zoo/models/masked --seed {options.seed} --steps {steps}{seconds}",
        "figures": figures,
        "measured": f"Stored files, loaded with transformers in float32, windows of {WINDOW_LENGTHS[0]} tokens, "
        f"{MASK_FRACTION:.0%} of them masked (the same ones in each run); perplexity and top-1 accuracy per masked "
        "token, without the unknown words of WikiText. The last two figures are logit differences at the mask of "
        f"“{KING_SENTENCE}” and “{QUEEN_SENTENCE}”; a positive value means that the usual pronoun is preferred.",
        "use": f"For trying out explanations of masked-token predictions. It has all {pieces:,} tokens of BERT's "
        "uncased vocabulary without the placeholders ([unused0] etc.), so token ids differ from BERT's. Not a source "
        "of facts: its predictions about people reproduce its training texts.",
    }


if __name__ == "__main__":
    main()
