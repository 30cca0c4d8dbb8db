"""Train `zoo:logic`: a small BERT that evaluates nested rules over marked words ("at least two of …", "… unless …").

    python packages/zoo/train/logic.py --out packages/zoo/src/clearhead_zoo/models/logic

New texts are generated at each step, the six rules and two labels in equal parts. In a third of them, words are masked
at a random rate and the label is that of the remaining words, so that the model learns what masking means. Five minutes
on a CPU. An interrupted run continues with --resume and the same --work.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from cards import write_card
from known import (
    autocast_if_cuda,
    build_bert_config,
    build_word_tokenizer,
    iter_chunks,
    make_shared_parser,
    make_training_budget,
    mask_positions,
    run_training,
    write_model_files,
)
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertForSequenceClassification

from clearhead_zoo.tasks import logic, make_generator

MAX_TOKENS = 64


def main() -> None:
    options = parse_options()
    torch.manual_seed(options.seed)
    config = build_bert_config(options, len(logic.build_vocabulary()), logic.LABELS, 4 * options.width, MAX_TOKENS)
    model = BertForSequenceClassification(BertConfig(**config)).to(options.device)
    clock = make_training_budget(options)
    number = {word: place for place, word in enumerate(logic.build_vocabulary())}
    device = torch.device(options.device)

    def loss_of() -> Tensor:
        rng = make_generator(options.seed, "train", clock.step)
        texts = [mask_words(words, rng) for words in islice(logic.iter_texts(rng), options.batch)]
        truth = torch.tensor([logic.LABELS.index(logic.compute_label(words)) for words in texts], device=device)
        rows = [[number[word] for word in (logic.CLS_TOKEN, *words, logic.SEP_TOKEN)] for words in texts]
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(device)
        with autocast_if_cuda(device):
            logits = model(input_ids=ids, attention_mask=(ids != 0).long()).logits.float()
        return F.cross_entropy(logits, truth)

    tensors = run_training(options, model, clock, loss_of)
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    special = dict(zip(names, logic.SPECIAL_TOKENS, strict=True))
    template = f"{logic.CLS_TOKEN} $A {logic.SEP_TOKEN}"
    tokenizer = build_word_tokenizer(logic.build_vocabulary(), logic.SPECIAL_TOKENS, r"\S+", template, lower=True)
    write_model_files(options.out, tensors, config, tokenizer, special, MAX_TOKENS)
    print(write_card(options.out, build_card_facts(options, clock.step, measure_stored_model(options))), flush=True)


def parse_options() -> argparse.Namespace:
    parser = make_shared_parser(__doc__, name="logic", steps=3000, lr=1e-3)
    parser.add_argument("--batch", type=int, default=96, help="texts per step")
    parser.add_argument("--width", type=int, default=64, help="width of the model")
    parser.add_argument("--depth", type=int, default=3, help="layers")
    options = parser.parse_args()
    if options.smoke:
        options.steps, options.seconds, options.count = 60, None, 240
    return options


def mask_words(words: Sequence[str], rng: np.random.Generator) -> list[str]:
    """Mostly the words as they are; in a third of the cases some of them hidden, but never the rule's name."""
    if rng.random() > 0.33:
        return list(words)
    gone = rng.random(len(words)) < rng.random()
    return [words[0], *(logic.MASK_TOKEN if out else word for word, out in zip(words[1:], gone[1:], strict=True))]


def measure_stored_model(options: argparse.Namespace) -> dict[str, float]:
    """What the stored files do, opened the way a user opens them."""
    model = AutoModelForSequenceClassification.from_pretrained(options.out, dtype=torch.float32)
    model = model.to(options.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.out)
    rng = make_generator(options.seed + 2, "held-out")
    examples = logic.make_examples(options.count, options.seed)
    evident = logic.make_examples(options.count, options.seed + 1, evident=True)

    @torch.no_grad()
    def accuracy(texts: Sequence[str], labels: Sequence[str]) -> float:
        right = 0
        for chunk in iter_chunks(range(len(texts)), 250):
            inputs = tokenizer([texts[place] for place in chunk], return_tensors="pt", padding=True).to(options.device)
            guesses = model(**inputs).logits.argmax(-1).tolist()
            right += sum(logic.LABELS[guess] == labels[place] for guess, place in zip(guesses, chunk, strict=True))
        return right / len(texts)

    labels = [example.label for example in evident]
    some = [
        " ".join([e.words[0], *(w if rng.random() < 0.5 else logic.MASK_TOKEN for w in e.words[1:])]) for e in examples
    ]
    figures = {
        "accuracy": accuracy([e.text for e in examples], [e.label for e in examples]),
        **{
            f"accuracy, {rule}": accuracy([e.text for e in chosen], [e.label for e in chosen])
            for rule in logic.RULES
            if (chosen := [e for e in examples if e.words[0] == rule])
        },
        "accuracy on texts that contain evidence": accuracy([e.text for e in evident], labels),
        "same label when the evidence is masked": accuracy(
            [mask_positions(e, e.evidence, logic.MASK_TOKEN) for e in evident], labels
        ),
        "same label when as many other words are masked": accuracy(
            [mask_positions(e, e.sample_control_positions(rng), logic.MASK_TOKEN) for e in evident], labels
        ),
        "accuracy with each word masked with probability 0.5": accuracy(
            some, [logic.compute_label(text.split()) for text in some]
        ),
    }
    return {name: round(figure, 4) for name, figure in figures.items()}


def build_card_facts(options: argparse.Namespace, steps: int, figures: dict[str, float]) -> dict[str, Any]:
    rules = "; ".join(f"{name}: {logic.format_rule(rule)}" for name, rule in logic.RULES.items())
    return {
        "name": "logic",
        "task": "text-classification",
        "summary": "A small BERT that evaluates a rule, named by the first word, over marked words among distractors.",
        "architecture": f"BERT, {options.depth} layers of width {options.width}, 4 heads, "
        f"{len(logic.build_vocabulary())} words, {MAX_TOKENS} positions",
        "labels": list(logic.LABELS),
        "licence": "Apache-2.0",
        "data": "generated by clearhead_zoo.tasks.logic; each text comes with all its minimal sufficient sets of "
        f"words. Example: “pair garden amber seven coral” has the label YES. The rules: {rules}",
        "command": "python packages/zoo/train/logic.py --out packages/zoo/src/clearhead_zoo/models/logic "
        f"--seed {options.seed} --steps {steps} --batch {options.batch} --lr {options.lr:g} "
        f"--width {options.width} --depth {options.depth}",
        "rules": {name: logic.format_rule(rule) for name, rule in logic.RULES.items()},
        "figures": figures,
        "measured": f"On {options.count:,} generated held-out texts (half YES, half NO, rules in equal parts; of the "
        "texts that contain evidence, six YES to four NO), loaded with transformers in float32. Texts are held out, "
        f"combinations are not: the training data contain all {len(logic.RULES) * 2 ** len(logic.MARKED_WORDS):,} "
        "combinations of a rule and marked words, so these figures show that the model has learned its rules, not "
        "that it generalises to others. The evidence is every word of every minimal sufficient set. By construction, "
        "masking all of it always changes the label, and masking only other words never does. Masked words are "
        "replaced by [MASK].",
        "use": "For checking whether an explanation finds the ground-truth evidence where several sets of words may "
        "each be sufficient. Not for anything else: its vocabulary is six rules, eight marked words and some "
        "distractors.",
    }


if __name__ == "__main__":
    main()
