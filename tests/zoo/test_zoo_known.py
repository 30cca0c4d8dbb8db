"""Known-answer text models as shipped: correct on held-out data, and because of the known evidence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

clearhead_zoo = pytest.importorskip("clearhead_zoo", reason="clearhead-zoo is not installed")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from clearhead_zoo.tasks import TaskExample, logic, make_generator, recall, replace_spans, spell  # noqa: E402

AUTO_CLASSES = {
    "logic": "AutoModelForSequenceClassification",
    "recall": "AutoModelForCausalLM",
    "recall-4k": "AutoModelForCausalLM",
    "spell": "AutoModelForSeq2SeqLM",
}
#: Per model: minimal accuracy, and minimal gap between accuracy with masked control words and with masked evidence.
MIN_ACCURACY_AND_GAP = {"logic": (0.97, 0.9), "recall": (0.97, 0.9), "recall-4k": (0.97, 0.9), "spell": (0.93, 0.3)}
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


@pytest.mark.parametrize("name", ["logic", "recall", "recall-4k"])
def test_tokenizer_offsets_equal_word_spans(name: str) -> None:
    task = logic if name == "logic" else recall
    _, tokenizer = load_model(name)
    for example in task.make_examples(5, seed=7):
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
