"""The known-answer text models as shipped: right on data that nobody has seen, and for the known reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

clearhead_zoo = pytest.importorskip("clearhead_zoo", reason="clearhead-zoo is not installed")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from clearhead_zoo.tasks import TaskExample, logic, make_generator, recall, replace_spans, spell  # noqa: E402

KINDS = {
    "logic": "AutoModelForSequenceClassification",
    "recall": "AutoModelForCausalLM",
    "recall-4k": "AutoModelForCausalLM",
    "spell": "AutoModelForSeq2SeqLM",
}
#: What each must reach, and how many of its answers must go with the evidence and stay without as much of the rest.
LEAST = {"logic": (0.97, 0.9), "recall": (0.97, 0.9), "recall-4k": (0.97, 0.9), "spell": (0.93, 0.3)}
#: Lists of the test: how many, of how many pairs. The longest cost half a second each.
LISTS = {
    "recall": ((24, 2), (24, 60), (24, 150), (24, recall.compute_max_pairs(512))),
    "recall-4k": ((24, 2), (24, 254), (6, 1000), (6, recall.compute_max_pairs(4096))),
}
SEED = 2024

Known = tuple[Any, Any]


def known(name: str) -> Known:
    if name not in clearhead_zoo.names():
        pytest.skip(f"zoo:{name} is not trained yet")
    folder = clearhead_zoo.path(name)
    model = getattr(transformers, KINDS[name]).from_pretrained(folder, dtype=torch.float32)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(folder)


def hidden(example: TaskExample, positions: Sequence[int], mask: str) -> str:
    return replace_spans(example.text, [example.spans[position] for position in positions], mask)


@pytest.mark.parametrize("name", KINDS)
def test_card_claims_what_the_zoo_asks_for(name: str) -> None:
    if name not in clearhead_zoo.names():
        pytest.skip(f"zoo:{name} is not trained yet")
    figures = clearhead_zoo.card(name)["figures"]
    evidence = ("evidence is masked", "pair is masked", "its letters are masked")
    without = next(value for key, value in figures.items() if any(words in key for words in evidence))
    control = next(value for key, value in figures.items() if "other" in key and "masked" in key)
    accuracy, difference = LEAST[name]
    assert next(iter(figures.values())) >= accuracy
    assert control - without > difference


@pytest.mark.parametrize("name", KINDS)
def test_every_weight_is_used(name: str) -> None:
    if name not in clearhead_zoo.names():
        pytest.skip(f"zoo:{name} is not trained yet")
    kind = getattr(transformers, KINDS[name])
    _, report = kind.from_pretrained(clearhead_zoo.path(name), output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report


@pytest.mark.parametrize("name", ["logic", "recall", "recall-4k"])
def test_tokens_are_the_words(name: str) -> None:
    task = logic if name == "logic" else recall
    _, tokenizer = known(name)
    for example in task.make_examples(5, seed=7):
        offsets = tokenizer(example.text, return_offsets_mapping=True)["offset_mapping"]
        assert [tuple(pair) for pair in offsets if pair[1]] == list(example.spans)


# -- logic


@pytest.mark.slow
@torch.no_grad()
def test_logic_on_texts_that_nobody_has_seen() -> None:
    model, tokenizer = known("logic")
    examples = logic.make_examples(480, seed=SEED, evident=True)
    rng = make_generator(SEED, "held-out")

    def kept(change: Callable[[TaskExample], str]) -> float:
        inputs = tokenizer([change(example) for example in examples], return_tensors="pt", padding=True)
        guesses = [logic.LABELS[guess] for guess in model(**inputs).logits.argmax(-1).tolist()]
        return float(np.mean([guess == example.label for guess, example in zip(guesses, examples, strict=True)]))

    assert kept(lambda example: example.text) >= 0.97
    assert kept(lambda example: hidden(example, example.evidence, logic.MASK_TOKEN)) <= 0.03
    assert kept(lambda example: hidden(example, example.sample_control_positions(rng), logic.MASK_TOKEN)) >= 0.97


# -- recall


@torch.no_grad()
def answers(recaller: Known, texts: Sequence[str]) -> list[str]:
    """The word that follows each text; lists of one length, so that nothing is padded."""
    model, tokenizer = recaller
    inputs = tokenizer(list(texts), return_tensors="pt")
    found: list[str] = []
    for ids in inputs["input_ids"].split(max(1, 8192 // inputs["input_ids"].shape[1])):
        guesses = model(ids, use_cache=False, logits_to_keep=1).logits[:, -1].argmax(-1)
        found += tokenizer.convert_ids_to_tokens(guesses.tolist())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", LISTS)
def test_recall_on_lists_that_nobody_has_seen(name: str) -> None:
    recaller = known(name)
    right: list[bool] = []
    for count, pairs in LISTS[name]:
        examples = recall.make_examples(count, seed=SEED, pairs=pairs)
        found = answers(recaller, [example.text for example in examples])
        right += [guess == example.label for guess, example in zip(found, examples, strict=True)]
    # so few lists cannot tell 0.95 from 0.97
    assert np.mean(right) >= 0.95


@pytest.mark.parametrize("name", LISTS)
def test_recall_reads_the_pair_and_nothing_else(name: str) -> None:
    recaller = known(name)
    rng = make_generator(SEED, "held-out")
    examples = recall.make_examples(32, seed=SEED + 1, pairs=60)
    labels = [example.label for example in examples]

    def kept(change: Callable[[TaskExample], str]) -> float:
        found = answers(recaller, [change(example) for example in examples])
        return float(np.mean([guess == label for guess, label in zip(found, labels, strict=True)]))

    assert kept(lambda example: hidden(example, example.evidence, recall.MASK_TOKEN)) <= 0.2
    assert kept(lambda example: hidden(example, example.sample_control_positions(rng), recall.MASK_TOKEN)) >= 0.9
    # the evidence and the question alone, all other words masked
    alone = {example.id: {*example.evidence, *example.question_positions} for example in examples}
    rest = [[place for place in range(len(e.spans)) if place not in alone[e.id]] for e in examples]
    found = answers(recaller, [hidden(e, places, recall.MASK_TOKEN) for e, places in zip(examples, rest, strict=True)])
    assert np.mean([guess == label for guess, label in zip(found, labels, strict=True)]) >= 0.9
    # another value in its place is what the model says then
    others = [f"v{(int(label[1:]) + 7) % recall.NUM_VALUES}" for label in labels]
    edited = [replace_spans(e.text, [e.evidence_spans[1]], value) for e, value in zip(examples, others, strict=True)]
    assert np.mean([guess == value for guess, value in zip(answers(recaller, edited), others, strict=True)]) >= 0.9


# -- spell


@pytest.mark.slow
@torch.no_grad()
def test_spell_on_held_out_words() -> None:
    model, tokenizer = known("spell")
    spellings, notice = spell.read_spellings(clearhead_zoo.path("spell") / "held-out.tsv")
    assert "Carnegie Mellon University" in notice
    firsts = {spelling.word: spelling for spelling in reversed(spellings)}
    chosen = [firsts[word] for word in sorted(firsts)[::12]]
    assert all(spelling.split == "held-out" for spelling in chosen)
    goal = tokenizer([" ".join(spelling.phonemes) for spelling in chosen], return_tensors="pt", padding=True)
    goal = goal["input_ids"]
    phoneme = goal >= len(spell.SPECIAL_TOKENS)

    def right(texts: Sequence[str]) -> Any:
        inputs = tokenizer(list(texts), return_tensors="pt", padding=True)
        return model(**inputs, labels=goal).logits.argmax(-1) == goal

    plain = right([spelling.word for spelling in chosen])
    assert plain[phoneme].float().mean() >= 0.92  # 500 words: within two standard errors of 0.93
    # one phoneme of each word that is spoken as in the dictionary, without its letters and without as many others
    rng = make_generator(SEED, "held-out")
    steps = [int(rng.integers(len(spelling.phonemes))) for spelling in chosen]
    examples = [spelling.make_examples()[step] for spelling, step in zip(chosen, steps, strict=True)]
    rows, at = torch.arange(len(chosen)), torch.tensor(steps)
    judged = (plain | ~phoneme).all(1)
    without = right([hidden(e, e.evidence, spell.MASK_TOKEN) for e in examples])[rows, at][judged]
    control = right([hidden(e, e.sample_control_positions(rng), spell.MASK_TOKEN) for e in examples])[rows, at][judged]
    assert control.float().mean() - without.float().mean() > 0.3
