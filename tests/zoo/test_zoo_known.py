"""Known-answer text models as shipped: correct on held-out data, and because of the known evidence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

clearhead_zoo = pytest.importorskip("clearhead_zoo", reason="clearhead-zoo is not installed")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from clearhead_zoo.tasks import (  # noqa: E402
    TaskExample,
    logic,
    make_generator,
    negation,
    recall,
    replace_spans,
    spell,
    two_hop,
)

AUTO_CLASSES = {
    "logic": "AutoModelForSequenceClassification",
    "recall": "AutoModelForCausalLM",
    "recall-4k": "AutoModelForCausalLM",
    "spell": "AutoModelForSeq2SeqLM",
    "two-hop": "AutoModelForCausalLM",
    "negation": "AutoModelForSequenceClassification",
}
TASKS = {"logic": logic, "recall": recall, "recall-4k": recall, "two-hop": two_hop, "negation": negation}
#: Per model: minimal accuracy, and minimal gap between accuracy with masked control words and with masked evidence.
MIN_ACCURACY_AND_GAP = {
    "logic": (0.97, 0.9),
    "recall": (0.97, 0.9),
    "recall-4k": (0.97, 0.9),
    "spell": (0.93, 0.3),
    "two-hop": (0.99, 0.98),
    "negation": (0.99, 0.98),
}
#: Test lists as (count, pairs). The longest cost half a second each.
LISTS = {
    "recall": ((24, 2), (24, 60), (24, 150), (24, recall.compute_max_pairs(512))),
    "recall-4k": ((24, 2), (24, 254), (6, 1000), (6, recall.compute_max_pairs(4096))),
}
SEED = 2024

ModelAndTokenizer = tuple[Any, Any]


def load_model(name: str) -> ModelAndTokenizer:
    if name not in clearhead_zoo.names():
        pytest.skip(f"zoo:{name} is not trained yet")
    folder = clearhead_zoo.path(name)
    model = getattr(transformers, AUTO_CLASSES[name]).from_pretrained(folder, dtype=torch.float32)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(folder)


def mask_positions(example: TaskExample, positions: Sequence[int], mask: str) -> str:
    return replace_spans(example.text, [example.spans[position] for position in positions], mask)


@pytest.mark.parametrize("name", AUTO_CLASSES)
def test_card_figures_meet_the_requirements(name: str) -> None:
    if name not in clearhead_zoo.names():
        pytest.skip(f"zoo:{name} is not trained yet")
    figures = clearhead_zoo.card(name)["figures"]
    evidence = ("evidence is masked", "pair is masked", "its letters are masked")
    without = next(value for key, value in figures.items() if any(phrase in key for phrase in evidence))
    control = next(value for key, value in figures.items() if "other" in key and "masked" in key)
    accuracy, difference = MIN_ACCURACY_AND_GAP[name]
    assert next(iter(figures.values())) >= accuracy
    assert control - without > difference


@pytest.mark.parametrize("name", AUTO_CLASSES)
def test_checkpoint_has_no_missing_or_unused_weights(name: str) -> None:
    if name not in clearhead_zoo.names():
        pytest.skip(f"zoo:{name} is not trained yet")
    model_class = getattr(transformers, AUTO_CLASSES[name])
    _, report = model_class.from_pretrained(clearhead_zoo.path(name), output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report


@pytest.mark.parametrize("name", TASKS)
def test_tokenizer_offsets_equal_word_spans(name: str) -> None:
    _, tokenizer = load_model(name)
    for example in TASKS[name].make_examples(5, seed=7):
        offsets = tokenizer(example.text, return_offsets_mapping=True)["offset_mapping"]
        assert [tuple(pair) for pair in offsets if pair[1]] == list(example.spans)


# -- logic


@pytest.mark.slow
@torch.no_grad()
def test_logic_accuracy_on_held_out_texts() -> None:
    model, tokenizer = load_model("logic")
    examples = logic.make_examples(480, seed=SEED, evident=True)
    rng = make_generator(SEED, "held-out")

    def compute_accuracy(edit: Callable[[TaskExample], str]) -> float:
        inputs = tokenizer([edit(example) for example in examples], return_tensors="pt", padding=True)
        guesses = [logic.LABELS[guess] for guess in model(**inputs).logits.argmax(-1).tolist()]
        return float(np.mean([guess == example.label for guess, example in zip(guesses, examples, strict=True)]))

    assert compute_accuracy(lambda example: example.text) >= 0.97
    assert compute_accuracy(lambda example: mask_positions(example, example.evidence, logic.MASK_TOKEN)) <= 0.03
    assert (
        compute_accuracy(
            lambda example: mask_positions(example, example.sample_control_positions(rng), logic.MASK_TOKEN)
        )
        >= 0.97
    )


# -- recall


@torch.no_grad()
def predict_next_tokens(model_and_tokenizer: ModelAndTokenizer, texts: Sequence[str]) -> list[str]:
    """Return the most likely next token of each text; texts have equal length, so nothing is padded."""
    model, tokenizer = model_and_tokenizer
    inputs = tokenizer(list(texts), return_tensors="pt")
    tokens: list[str] = []
    for ids in inputs["input_ids"].split(max(1, 8192 // inputs["input_ids"].shape[1])):
        guesses = model(ids, use_cache=False, logits_to_keep=1).logits[:, -1].argmax(-1)
        tokens += tokenizer.convert_ids_to_tokens(guesses.tolist())
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", LISTS)
def test_recall_accuracy_on_held_out_lists(name: str) -> None:
    model_and_tokenizer = load_model(name)
    is_correct: list[bool] = []
    for count, pairs in LISTS[name]:
        examples = recall.make_examples(count, seed=SEED, pairs=pairs)
        predicted = predict_next_tokens(model_and_tokenizer, [example.text for example in examples])
        is_correct += [guess == example.label for guess, example in zip(predicted, examples, strict=True)]
    # so few lists cannot distinguish 0.95 from 0.97
    assert np.mean(is_correct) >= 0.95


@pytest.mark.parametrize("name", LISTS)
def test_recall_depends_only_on_the_queried_pair(name: str) -> None:
    model_and_tokenizer = load_model(name)
    rng = make_generator(SEED, "held-out")
    examples = recall.make_examples(32, seed=SEED + 1, pairs=60)
    labels = [example.label for example in examples]

    def compute_accuracy(edit: Callable[[TaskExample], str]) -> float:
        predicted = predict_next_tokens(model_and_tokenizer, [edit(example) for example in examples])
        return float(np.mean([guess == label for guess, label in zip(predicted, labels, strict=True)]))

    assert compute_accuracy(lambda example: mask_positions(example, example.evidence, recall.MASK_TOKEN)) <= 0.2
    assert (
        compute_accuracy(
            lambda example: mask_positions(example, example.sample_control_positions(rng), recall.MASK_TOKEN)
        )
        >= 0.9
    )
    # the evidence and the question alone, all other words masked
    kept_positions = {example.id: {*example.evidence, *example.question_positions} for example in examples}
    rest = [[position for position in range(len(e.spans)) if position not in kept_positions[e.id]] for e in examples]
    predicted = predict_next_tokens(
        model_and_tokenizer,
        [mask_positions(e, positions, recall.MASK_TOKEN) for e, positions in zip(examples, rest, strict=True)],
    )
    assert np.mean([guess == label for guess, label in zip(predicted, labels, strict=True)]) >= 0.9
    # with another value in the pair, the model predicts that value
    others = [f"v{(int(label[1:]) + 7) % recall.NUM_VALUES}" for label in labels]
    edited = [replace_spans(e.text, [e.evidence_spans[1]], value) for e, value in zip(examples, others, strict=True)]
    assert (
        np.mean(
            [
                guess == value
                for guess, value in zip(predict_next_tokens(model_and_tokenizer, edited), others, strict=True)
            ]
        )
        >= 0.9
    )


# -- two-hop


def test_two_hop_needs_each_word_of_both_pairs_and_no_other() -> None:
    model_and_tokenizer = load_model("two-hop")
    rng = make_generator(SEED, "held-out")
    examples = two_hop.make_examples(64, seed=SEED, pairs=12)

    def predict(positions: list[list[int]]) -> list[str]:
        texts = [mask_positions(e, p, two_hop.MASK_TOKEN) for e, p in zip(examples, positions, strict=True)]
        return predict_next_tokens(model_and_tokenizer, texts)

    def compute_accuracy(positions: list[list[int]]) -> float:
        return float(np.mean([g == e.label for g, e in zip(predict(positions), examples, strict=True)]))

    others = [[p for p in range(len(e.spans)) if p not in {*e.evidence, *e.question_positions}] for e in examples]
    assert compute_accuracy([[] for _ in examples]) >= 0.95
    assert compute_accuracy(others) >= 0.95
    assert compute_accuracy([[p for p in rest if rng.random() < 0.5] for rest in others]) >= 0.95
    for number in range(4):
        guesses = predict([[example.evidence[number]] for example in examples])
        assert np.mean([guess == two_hop.UNKNOWN_ANSWER for guess in guesses]) >= 0.95


# -- negation


@torch.no_grad()
def test_negation_model_reads_scopes_as_the_rule_does() -> None:
    model, tokenizer = load_model("negation")
    examples = negation.make_examples(96, seed=SEED, evident=True)

    def predict(positions: list[list[int]]) -> list[str]:
        texts = [mask_positions(e, p, negation.MASK_TOKEN) for e, p in zip(examples, positions, strict=True)]
        inputs = tokenizer(texts, return_tensors="pt", padding=True)
        return [negation.LABELS[guess] for guess in model(**inputs).logits.argmax(-1).tolist()]

    def list_evidence(words: Sequence[str]) -> list[list[int]]:
        return [[p for p in example.evidence if example.words[p] in words] for example in examples]

    plain = predict([[] for _ in examples])
    assert np.mean([guess == e.label for guess, e in zip(plain, examples, strict=True)]) >= 0.95
    distracting = [
        [p for p, word in enumerate(e.words) if word in negation.NEGATORS and p not in e.evidence] for e in examples
    ]
    assert np.mean([g == e.label for g, e in zip(predict(distracting), examples, strict=True)]) >= 0.95
    # one negator in scope, or all ends of the last scope before the thing: the label is reversed
    negators = [positions[:1] for positions in list_evidence(negation.NEGATORS)]
    for masked in (negators, list_evidence(negation.SCOPE_ENDS)):
        is_reversed = [
            {guess, example.label} == {"SHUT", "OPEN"}
            for guess, example, positions in zip(predict(masked), examples, masked, strict=True)
            if positions
        ]
        assert len(is_reversed) > 20 and np.mean(is_reversed) >= 0.95
    assert np.mean([g == negation.UNKNOWN_LABEL for g in predict([[*e.evidence] for e in examples])]) >= 0.95


# -- spell


@pytest.mark.slow
@torch.no_grad()
def test_spell_accuracy_on_held_out_words() -> None:
    model, tokenizer = load_model("spell")
    spellings, notice = spell.read_spellings(clearhead_zoo.path("spell") / "held-out.tsv")
    assert "Carnegie Mellon University" in notice
    firsts = {spelling.word: spelling for spelling in reversed(spellings)}
    chosen = [firsts[word] for word in sorted(firsts)[::12]]
    assert all(spelling.split == "held-out" for spelling in chosen)
    target_ids = tokenizer([" ".join(spelling.phonemes) for spelling in chosen], return_tensors="pt", padding=True)
    target_ids = target_ids["input_ids"]
    is_phoneme = target_ids >= len(spell.SPECIAL_TOKENS)

    def compute_correct(texts: Sequence[str]) -> Any:
        inputs = tokenizer(list(texts), return_tensors="pt", padding=True)
        return model(**inputs, labels=target_ids).logits.argmax(-1) == target_ids

    plain = compute_correct([spelling.word for spelling in chosen])
    assert plain[is_phoneme].float().mean() >= 0.92  # 500 words: within two standard errors of 0.93
    # one phoneme of each correctly spelled word, with its letters masked and with as many others masked
    rng = make_generator(SEED, "held-out")
    steps = [int(rng.integers(len(spelling.phonemes))) for spelling in chosen]
    examples = [spelling.make_examples()[step] for spelling, step in zip(chosen, steps, strict=True)]
    rows, step_index = torch.arange(len(chosen)), torch.tensor(steps)
    is_fully_correct = (plain | ~is_phoneme).all(1)
    without = compute_correct([mask_positions(e, e.evidence, spell.MASK_TOKEN) for e in examples])[rows, step_index][
        is_fully_correct
    ]
    control = compute_correct([mask_positions(e, e.sample_control_positions(rng), spell.MASK_TOKEN) for e in examples])[
        rows, step_index
    ][is_fully_correct]
    assert control.float().mean() - without.float().mean() > 0.3
