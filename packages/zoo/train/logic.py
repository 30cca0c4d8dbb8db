"""Train `zoo:logic`: a small BERT that evaluates nested rules over marked words ("at least two of …", "… unless …").

    python packages/zoo/train/logic.py --out packages/zoo/src/clearhead_zoo/models/logic

Texts are generated afresh at each step, the six rules and two labels in equal parts. In a third of them words are
masked at a random rate and the label is that of the words that are left, so that the model has learned what masking
means. Five minutes on a CPU. A cut run goes on with --resume and the same --work.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from cards import write_card
from known import chunks, clock_of, half_precision, hidden, learn, shared_options, word_tokenizer, write_model
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertForSequenceClassification

from clearhead_zoo.tasks import generator, logic

TOKENS = 64


def main() -> None:
    options = parse_options()
    torch.manual_seed(options.seed)
    config = config_of(options)
    model = BertForSequenceClassification(BertConfig(**config)).to(options.device)
    clock = clock_of(options)
    number = {word: place for place, word in enumerate(logic.vocabulary())}
    device = torch.device(options.device)

    def loss_of() -> Tensor:
        rng = generator(options.seed, "train", clock.step)
        texts = [masked(words, rng) for words in islice(logic.texts(rng), options.batch)]
        truth = torch.tensor([logic.LABELS.index(logic.label_of(words)) for words in texts], device=device)
        rows = [[number[word] for word in (logic.FIRST, *words, logic.LAST)] for words in texts]
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(device)
        with half_precision(device):
            logits = model(input_ids=ids, attention_mask=(ids != 0).long()).logits.float()
        return F.cross_entropy(logits, truth)

    tensors = learn(options, model, clock, loss_of)
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    special = dict(zip(names, logic.SPECIAL, strict=True))
    template = f"{logic.FIRST} $A {logic.LAST}"
    tokenizer = word_tokenizer(logic.vocabulary(), logic.SPECIAL, r"\S+", template, lower=True)
    write_model(options.out, tensors, config, tokenizer, special, TOKENS)
    print(write_card(options.out, facts_of(options, clock.step, measure(options))), flush=True)


def parse_options() -> argparse.Namespace:
    parser = shared_options(__doc__, name="logic", steps=3000, lr=1e-3)
    parser.add_argument("--batch", type=int, default=96, help="texts a step")
    parser.add_argument("--width", type=int, default=64, help="width of the model")
    parser.add_argument("--depth", type=int, default=3, help="layers")
    options = parser.parse_args()
    if options.smoke:
        options.steps, options.seconds, options.count = 60, None, 240
    return options


def masked(words: Sequence[str], rng: np.random.Generator) -> list[str]:
    """Mostly the words as they are; in a third of the cases some of them hidden, but never the rule's name."""
    if rng.random() > 0.33:
        return list(words)
    gone = rng.random(len(words)) < rng.random()
    return [words[0], *(logic.MASK if out else word for word, out in zip(words[1:], gone[1:], strict=True))]


def config_of(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "architectures": ["BertForSequenceClassification"],
        "model_type": "bert",
        "dtype": "float16",
        "vocab_size": len(logic.vocabulary()),
        "hidden_size": options.width,
        "intermediate_size": 4 * options.width,
        "num_hidden_layers": options.depth,
        "num_attention_heads": 4,
        "max_position_embeddings": TOKENS,
        "type_vocab_size": 1,
        "hidden_act": "gelu",
        # the texts never repeat: there is nothing to regularise
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "layer_norm_eps": 1e-6,
        # the usual 0.02 is meant for wider models: this one would spend most of its steps getting off the ground
        "initializer_range": 0.08,
        "pad_token_id": 0,
        "id2label": {str(number): label for number, label in enumerate(logic.LABELS)},
        "label2id": {label: number for number, label in enumerate(logic.LABELS)},
        "problem_type": "single_label_classification",
    }


def measure(options: argparse.Namespace) -> dict[str, float]:
    """What the stored files do, opened the way a user opens them."""
    model = AutoModelForSequenceClassification.from_pretrained(options.out, dtype=torch.float32)
    model = model.to(options.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.out)
    rng = generator(options.seed + 2, "held-out")
    examples = logic.examples(options.count, options.seed)
    evident = logic.examples(options.count, options.seed + 1, evident=True)

    @torch.no_grad()
    def accuracy(texts: Sequence[str], labels: Sequence[str]) -> float:
        right = 0
        for chunk in chunks(range(len(texts)), 250):
            inputs = tokenizer([texts[place] for place in chunk], return_tensors="pt", padding=True).to(options.device)
            guesses = model(**inputs).logits.argmax(-1).tolist()
            right += sum(logic.LABELS[guess] == labels[place] for guess, place in zip(guesses, chunk, strict=True))
        return right / len(texts)

    labels = [example.label for example in evident]
    some = [" ".join([e.words[0], *(w if rng.random() < 0.5 else logic.MASK for w in e.words[1:])]) for e in examples]
    figures = {
        "accuracy": accuracy([e.text for e in examples], [e.label for e in examples]),
        **{
            f"accuracy, {rule}": accuracy([e.text for e in chosen], [e.label for e in chosen])
            for rule in logic.RULES
            if (chosen := [e for e in examples if e.words[0] == rule])
        },
        "accuracy where the text holds evidence": accuracy([e.text for e in evident], labels),
        "keeps the label when the evidence is masked": accuracy(
            [hidden(e, e.evidence, logic.MASK) for e in evident], labels
        ),
        "keeps the label when as many other words are masked": accuracy(
            [hidden(e, e.control(rng), logic.MASK) for e in evident], labels
        ),
        "accuracy with every second word masked": accuracy(some, [logic.label_of(text.split()) for text in some]),
    }
    return {name: round(figure, 4) for name, figure in figures.items()}


def facts_of(options: argparse.Namespace, steps: int, figures: dict[str, float]) -> dict[str, Any]:
    rules = "; ".join(f"{name}: {logic.said(rule)}" for name, rule in logic.RULES.items())
    return {
        "name": "logic",
        "task": "text-classification",
        "summary": "A small BERT that evaluates a rule, named by the first word, over marked words among distractors.",
        "architecture": f"BERT, {options.depth} layers of width {options.width}, 4 heads, "
        f"{len(logic.vocabulary())} words, {TOKENS} positions",
        "labels": list(logic.LABELS),
        "licence": "Apache-2.0",
        "data": "generated: clearhead_zoo.tasks.logic; every text with all its minimal sufficient sets of words, "
        f"such as “pair garden amber seven coral”, which is YES. The rules: {rules}",
        "command": "python packages/zoo/train/logic.py --out packages/zoo/src/clearhead_zoo/models/logic "
        f"--seed {options.seed} --steps {steps} --batch {options.batch} --lr {options.lr:g} "
        f"--width {options.width} --depth {options.depth}",
        "rules": {name: logic.said(rule) for name, rule in logic.RULES.items()},
        "figures": figures,
        "measured": f"On {options.count:,} generated texts of the held-out stream (half YES, half NO, rules in equal "
        "parts; where the text holds evidence: six YES to four NO), opened with transformers in float32. Held out are "
        f"texts, not cases: training has seen all {len(logic.RULES) * 2 ** len(logic.MARKED):,} combinations of a rule "
        "and marked words, so these figures say that the model knows its rules, not that it would find others. "
        "Evidence is every word of every witness; by the rules the label always turns when all of it is masked, and "
        "never when only other words are. Masked words become [MASK].",
        "use": "For checking whether an explanation finds what is known to be the reason, where several reasons may "
        "each be enough. Not for anything else: it knows six rules, eight marked words and some distractors.",
    }


if __name__ == "__main__":
    main()
