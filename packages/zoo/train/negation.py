"""Train `zoo:negation`: a small BERT that reads how a thing is from sentences with negators of limited scope.

    python packages/zoo/train/negation.py --out packages/zoo/src/clearhead_zoo/models/negation

New sentences are generated at each step, and each text is queried for several things. In most copies of a text, words
are masked: at random, all but the evidence, only words that make up the syntax (negators, ends of scopes), or only one
word of the evidence. The label is what the rule reads off the remaining words, so that the model learns what masking
means.

A state word and a negator say nothing about the label by themselves, only together, so that the model would not find
either for long. An extra loss, which fades out over the first half of the run, rewards a layer before the last that
tells of every thing of the text which state is named, and, separately, whether it is reversed and whether the thing is
the one that is asked about, and a last layer that tells the same of that thing. Position embeddings start as sines, by
which attention can find the next state or the last negator. An interrupted run continues with --resume and the same
--work.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from cards import write_card
from jaxtyping import Float, Int
from known import (
    autocast_if_cuda,
    build_bert_config,
    build_word_tokenizer,
    iter_chunks,
    make_shared_parser,
    make_training_budget,
    mask_positions,
    report_target,
    run_training,
    write_model_files,
)
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertForSequenceClassification

from clearhead.training import TrainingBudget
from clearhead_zoo.tasks import TaskExample, make_generator, negation

MAX_TOKENS = 80
#: Rows of a batch with the same sentences, but with different questions and masks.
ROWS_PER_TEXT = 2
UNMENTIONED_PROBABILITY = 0.05
SYNTAX_WORDS = {*negation.NEGATORS, *negation.SCOPE_ENDS, *negation.STATE_ENDS}
#: Of the initial embeddings: positions and words start about as large, since words are also compared with each other.
SINE_AMPLITUDE, WORD_STD = 0.2, 0.16
#: Classes of the extra loss: which state is named, whether it is reversed, and whether the thing is asked about.
SCAFFOLD_SIZES = (3, 2, 2)
NOT_NAMED, IGNORED = 2, -100
MIN_ACCURACY = 0.99


def main() -> None:
    options = parse_options()
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    config = build_bert_config(
        options, len(negation.build_vocabulary()), negation.LABELS, 2 * options.width, MAX_TOKENS
    )
    model = ScaffoldedModel(config).to(options.device)
    budget = make_training_budget(options)
    number = {word: place for place, word in enumerate(negation.build_vocabulary())}
    tensors = run_training(
        options,
        model,
        budget,
        lambda: compute_loss(options, model, budget, number),
        uses_muon=lambda name: ".layer." in name,
        check=lambda: evaluate(options, model, number),
    )
    tensors = {name.removeprefix("model."): x for name, x in tensors.items() if name.startswith("model.")}
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    special = dict(zip(names, negation.SPECIAL_TOKENS, strict=True))
    template = f"{negation.CLS_TOKEN} $A {negation.SEP_TOKEN}"
    tokenizer = build_word_tokenizer(negation.build_vocabulary(), negation.SPECIAL_TOKENS, r"\S+", template)
    write_model_files(options.out, tensors, config, tokenizer, special, MAX_TOKENS)
    figures = measure_stored_model(options)
    print(write_card(options.out, build_card_facts(options, budget.step, figures)), flush=True)
    report_target(figures, MIN_ACCURACY)


def parse_options() -> argparse.Namespace:
    parser = make_shared_parser(__doc__, name="negation", steps=6000, lr=2e-3)
    parser.add_argument("--batch", type=int, default=256, help="texts per step")
    parser.add_argument("--width", type=int, default=64, help="width of the model")
    parser.add_argument("--depth", type=int, default=4, help="layers")
    options = parser.parse_args()
    if options.smoke:
        options.steps, options.seconds, options.batch, options.count = 40, None, 32, 120
    return options


class ScaffoldedModel(nn.Module):
    """The model, and a classifier for the extra loss, which is not stored."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.model = BertForSequenceClassification(BertConfig(**config))
        self.scaffold = nn.Linear(config["hidden_size"], sum(SCAFFOLD_SIZES))
        width = config["hidden_size"]
        angles = torch.arange(MAX_TOKENS)[:, None] / 100 ** (torch.arange(width // 2) / (width // 2))
        with torch.no_grad():
            waves = torch.cat([angles.sin(), angles.cos()], dim=1)
            self.model.bert.embeddings.position_embeddings.weight.copy_(SINE_AMPLITUDE * waves)
            self.model.bert.embeddings.word_embeddings.weight.mul_(WORD_STD / config["initializer_range"])

    def forward(
        self, input_ids: Int[Tensor, "row token"]
    ) -> tuple[Float[Tensor, "row label"], Float[Tensor, "row token hint"]]:
        """Logits of the labels, and of the scaffold's classes for [CLS] in the last layer and others in that before."""
        attention_mask = (input_ids != 0).long()
        output = self.model(input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=True)
        states = torch.cat([output.hidden_states[-1][:, :1], output.hidden_states[-2][:, 1:]], dim=1)
        return output.logits.float(), self.scaffold(states).float()


def sample_batch(rng: np.random.Generator, num_rows: int) -> list[list[str]]:
    """Masked texts, several of the same sentences; half of the sentences are made as those to be measured on."""
    texts: list[list[str]] = []
    while len(texts) < num_rows:
        if rng.random() < 0.5:
            num_reversals = negation.REVERSAL_COUNTS[int(rng.integers(len(negation.REVERSAL_COUNTS)))]
            asked, _, *words = negation.sample_words(rng, negation.LABELS[int(rng.integers(2))], num_reversals)
            unmentioned = [thing for thing in negation.THINGS if thing not in words]
        else:
            words, unmentioned = negation.sample_sentences(rng, int(rng.integers(1, negation.MAX_SENTENCES + 1)))
            asked = unmentioned[0]
        for row in range(ROWS_PER_TEXT):
            mentioned = [word for word in words if word in negation.THINGS]
            if row > 0 or asked not in mentioned:
                things = unmentioned if rng.random() < UNMENTIONED_PROBABILITY else mentioned
                asked = things[int(rng.integers(len(things)))]
            texts.append(mask_words([asked, negation.QUESTION_MARK, *words], rng))
    return texts[:num_rows]


def mask_words(words: list[str], rng: np.random.Generator) -> list[str]:
    """The words as they are or with some masked, but never the question."""
    way = rng.random()
    if way < 0.35:
        return words
    masked = rng.random(len(words)) < rng.random()
    if way < 0.5:  # all but one witness and, sometimes, some other words
        witnesses = negation.find_witnesses(words)
        masked[list(witnesses[int(rng.integers(len(witnesses)))])] = False
    elif way < 0.65:
        masked &= [word in SYNTAX_WORDS for word in words]
    elif way < 0.85:
        masked[:] = False
        masked[sample_needed_words(words, rng)] = True
    masked[: negation.QUESTION_LENGTH] = False
    return [negation.MASK_TOKEN if is_masked else word for word, is_masked in zip(words, masked, strict=True)]


def sample_needed_words(words: list[str], rng: np.random.Generator) -> list[int]:
    """One word of the evidence, or all words that end the last scope before the thing, to be masked alone."""
    statement = negation.find_statement(words)
    if statement is None:
        return []
    needed = [statement.thing, statement.state, *statement.negators]
    choices = [[position] for position in needed]
    ends = {position for witness in negation.find_witnesses(words) for position in witness}.difference(needed)
    if ends:
        # the only words whose effect is seen in no other way
        choices += [sorted(ends)] * len(choices)
    return choices[int(rng.integers(len(choices)))]


def compute_loss(
    options: argparse.Namespace, model: ScaffoldedModel, budget: TrainingBudget, number: dict[str, int]
) -> Tensor:
    texts = sample_batch(make_generator(options.seed, "train", budget.step), options.batch)
    logits, scaffold_logits = run_model(options, model, number, texts)
    loss = F.cross_entropy(logits, encode_labels(texts).to(logits.device))
    support = max(0.0, 1.0 - 2.0 * budget.fraction)
    return loss + support * compute_scaffold_loss(scaffold_logits, texts) if support else loss


def compute_scaffold_loss(
    scaffold_logits: Float[Tensor, "row token hint"], texts: Sequence[Sequence[str]]
) -> Float[Tensor, ""]:
    """Each thing should tell which state is named (or none), if it is reversed, and if the thing is asked about.

    [CLS] should tell the same of the thing that is asked about.
    """
    rows, columns, truth = [], [], []
    for row, words in enumerate(texts):
        # columns count from [CLS], which stands for the asked thing
        things = [(0, words[0])] + [
            (position + 1, word)
            for position, word in enumerate(words)
            if position >= negation.QUESTION_LENGTH and word in negation.THINGS
        ]
        for column, thing in things:
            statement = negation.find_statement([thing, *words[1:]])
            rows.append(row)
            columns.append(column)
            truth.append(
                (
                    NOT_NAMED
                    if statement is None
                    else negation.LABELS.index(negation.STATE_OF_WORD[words[statement.state]]),
                    IGNORED if statement is None else int(statement.is_reversed),
                    int(thing == words[0]),
                )
            )
    hints = scaffold_logits[rows, columns].split(SCAFFOLD_SIZES, dim=-1)
    classes = torch.tensor(truth, device=scaffold_logits.device).T
    # as much weight for the asked things as for all others together
    is_asked = torch.tensor(columns, device=scaffold_logits.device) == 0
    loss = torch.zeros((), device=scaffold_logits.device)
    for chosen in (is_asked, ~is_asked):
        for logits, target in zip(hints, classes, strict=True):
            loss = loss + F.cross_entropy(logits[chosen], target[chosen], ignore_index=IGNORED)
    return loss


def encode_labels(texts: Sequence[Sequence[str]]) -> Tensor:
    return torch.tensor([negation.LABELS.index(negation.compute_label(words)) for words in texts])


def run_model(
    options: argparse.Namespace, model: ScaffoldedModel, number: dict[str, int], texts: Sequence[Sequence[str]]
) -> tuple[Float[Tensor, "row label"], Float[Tensor, "row token hint"]]:
    rows = [[number[word] for word in (negation.CLS_TOKEN, *words, negation.SEP_TOKEN)] for words in texts]
    length = max(map(len, rows))
    ids = torch.tensor([row + [0] * (length - len(row)) for row in rows]).to(options.device, non_blocking=True)
    with autocast_if_cuda(torch.device(options.device)):
        logits, scaffold_logits = model(ids)
    return logits, scaffold_logits


def evaluate(options: argparse.Namespace, model: ScaffoldedModel, number: dict[str, int]) -> str:
    """Accuracy on new texts of the training stream, unmasked and as in training."""
    rng = make_generator(options.seed + 1, "train")
    unmasked = [negation.sample_words(rng, label, count) for count in (0, 1, 2) for label in negation.LABELS[:2] * 40]
    figures = []
    for name, texts in (("unmasked", unmasked), ("masked as in training", sample_batch(rng, 256))):
        logits, _ = run_model(options, model, number, texts)
        is_correct = logits.argmax(-1).cpu() == encode_labels(texts)
        figures.append(f"{is_correct.float().mean().item():.4f} {name}")
    return ", ".join(figures)


def measure_stored_model(options: argparse.Namespace) -> dict[str, float]:
    """What the stored files do, opened the way a user opens them."""
    torch.set_float32_matmul_precision("highest")
    model = AutoModelForSequenceClassification.from_pretrained(options.out, dtype=torch.float32)
    model = model.to(options.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.out)
    rng = make_generator(options.seed + 2, "held-out")
    examples = negation.make_examples(options.count, options.seed)
    evident = negation.make_examples(options.count, options.seed + 1, evident=True)

    @torch.no_grad()
    def predict(texts: Sequence[str]) -> list[str]:
        labels: list[str] = []
        for chunk in iter_chunks(range(len(texts)), 250):
            inputs = tokenizer([texts[place] for place in chunk], return_tensors="pt", padding=True).to(options.device)
            labels += [negation.LABELS[guess] for guess in model(**inputs).logits.argmax(-1).tolist()]
        return labels

    def rate_same_label(chosen: Sequence[TaskExample], positions: Sequence[Sequence[int]]) -> float:
        """How often the label is that of the unmasked text."""
        masked = [mask_positions(e, p, negation.MASK_TOKEN) for e, p in zip(chosen, positions, strict=True)]
        return float(np.mean([guess == e.label for guess, e in zip(predict(masked), chosen, strict=True)]))

    def accuracy(texts: Sequence[str]) -> float:
        truth = [negation.compute_label(text.split()) for text in texts]
        return float(np.mean([guess == label for guess, label in zip(predict(texts), truth, strict=True)]))

    with_negator = [e for e in evident if list_reversing(e)]
    with_end = [e for e in evident if list_scope_ends(e)]
    at_random = [mask_positions(e, sample_half(e, rng), negation.MASK_TOKEN) for e in examples]
    figures = {
        "accuracy": accuracy([e.text for e in examples]),
        **{
            f"accuracy, {count} negators in scope": accuracy([e.text for e in chosen])
            for count in sorted(set(negation.REVERSAL_COUNTS))
            if (chosen := [e for e in evident if len(list_reversing(e)) == count])
        },
        "same label when the evidence is masked": rate_same_label(evident, [e.evidence for e in evident]),
        "same label when one negator in scope is masked": rate_same_label(
            with_negator, [[list_reversing(e)[0]] for e in with_negator]
        ),
        "same label when the ends of the last scope before the thing are masked": rate_same_label(
            with_end, [list_scope_ends(e) for e in with_end]
        ),
        "same label when as many other words are masked": rate_same_label(
            evident, [e.sample_control_positions(rng) for e in evident]
        ),
        "same label when all negators out of scope are masked": rate_same_label(
            evident, [list_distracting_negators(e) for e in evident]
        ),
        "same label when all but one witness and the question is masked": rate_same_label(
            evident, [list_other_positions(e, rng) for e in evident]
        ),
        "accuracy with each word masked with probability 0.5": accuracy(at_random),
    }
    return {name: round(figure, 4) for name, figure in figures.items()}


def list_reversing(example: TaskExample) -> list[int]:
    """Positions of the negators in whose scope the statement is."""
    return [position for position in example.evidence if example.words[position] in negation.NEGATORS]


def list_scope_ends(example: TaskExample) -> list[int]:
    """Positions of all words of the evidence that end the scope of earlier negators."""
    return [position for position in example.evidence if example.words[position] in negation.SCOPE_ENDS]


def list_distracting_negators(example: TaskExample) -> list[int]:
    needed = set(example.evidence)
    return [p for p, word in enumerate(example.words) if word in negation.NEGATORS and p not in needed]


def list_other_positions(example: TaskExample, rng: np.random.Generator) -> list[int]:
    """Positions outside the question and one witness, drawn at random."""
    needed = {*example.witnesses[rng.integers(len(example.witnesses))], *example.question_positions}
    return [position for position in range(len(example.spans)) if position not in needed]


def sample_half(example: TaskExample, rng: np.random.Generator) -> list[int]:
    return [p for p in range(negation.QUESTION_LENGTH, len(example.spans)) if rng.random() < 0.5]


def build_card_facts(options: argparse.Namespace, steps: int, figures: dict[str, float]) -> dict[str, Any]:
    return {
        "name": "negation",
        "task": "text-classification",
        "summary": "A small BERT that reads from sentences whether a thing, named by the first word, is open or shut. "
        "Negators reverse what is said in their scope, which ends at the next “but” or full stop.",
        "architecture": f"BERT, {options.depth} layers of width {options.width}, 4 heads, "
        f"{len(negation.build_vocabulary())} words, {MAX_TOKENS} positions",
        "labels": list(negation.LABELS),
        "licence": "Apache-2.0",
        "data": "generated by clearhead_zoo.tasks.negation; each text comes with all its minimal sufficient sets of "
        "words. Example: “gate ? not the hatch but the gate is open .” is OPEN because of “but”, “gate” and “open”: "
        "without “but”, “not” would reverse it. Every text has negators out of scope; no, one and two negators are in "
        "scope in a quarter, a half and a quarter of the texts",
        "command": "python packages/zoo/train/negation.py --out packages/zoo/src/clearhead_zoo/models/negation "
        f"--seed {options.seed} --steps {steps} --batch {options.batch} --lr {options.lr:g} "
        f"--width {options.width} --depth {options.depth}",
        "figures": figures,
        "measured": f"On {options.count:,} generated held-out texts (labels in equal parts), and, where labels are "
        "compared, on as many that are SHUT or OPEN, half each; loaded with transformers in float32. The evidence is "
        "every word of every minimal sufficient set. By construction, masking all of it makes the label UNKNOWN, "
        "masking one negator in scope reverses it, so does masking all words that end the last scope before the thing, "
        "and masking other words changes nothing. Masked words are replaced by [MASK].",
        "use": "For checking whether an explanation distinguishes negators by their scope, and finds what limits it. "
        "Not for anything else: its vocabulary is some things, six states and the words of five kinds of sentences.",
    }


if __name__ == "__main__":
    main()
