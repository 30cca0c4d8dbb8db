"""Tasks for language models: the prompts are those of the grammars, and the figures follow from scores and removals."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import clearhead
from tests.adapters import test_decoder

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import language_tasks

    yield language_tasks
    sys.modules.pop("language_tasks", None)


@pytest.fixture
def grammars(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import language_task_prompts

    yield language_task_prompts
    sys.modules.pop("language_task_prompts", None)


def test_files_are_those_of_the_grammars(tasks: ModuleType, grammars: ModuleType) -> None:
    assert tasks.read_prompts("subject-verb") == grammars.generate_subject_verb_prompts()
    assert tasks.read_prompts("needle") == grammars.generate_needle_prompts()


def test_pairs_differ_in_the_head_noun_and_the_attractor_agrees_with_one_of_them(
    tasks: ModuleType, grammars: ModuleType
) -> None:
    prompts = tasks.read_prompts("subject-verb")
    nouns = [*grammars.PERSONS, *(noun for _, _, attractors in grammars.PHRASES for noun in attractors)]
    assert len(prompts) >= 200 and len({prompt["text"] for prompt in prompts}) == len(prompts)
    for first, second in zip(prompts[::2], prompts[1::2], strict=True):
        assert first["text"].replace(first["marked"], second["marked"]) == second["text"]
        assert (first["answer"], first["against"]) == (second["against"], second["answer"])
        for prompt in (first, second):
            others = set(prompt["text"].split()) - {prompt["marked"]}
            (number,) = {number for noun in nouns for number in (0, 1) if noun[number] in others}
            is_head_plural = prompt["answer"] in (" are", " were", " have")
            assert prompt["attractor"] == ("same number" if number == is_head_plural else "other number")


def test_needle_and_marked_word_lie_in_the_passage_and_nowhere_else(tasks: ModuleType) -> None:
    prompts = tasks.read_prompts("needle")
    assert len(prompts) >= 100
    for prompt in prompts:
        passage, question = prompt["text"][: prompt["passage_length"]], prompt["text"][prompt["passage_length"] :]
        sentences = [passage[start:end] for start, end in tasks.find_sentence_spans(passage)]
        assert sentences.count(prompt["needle"]) == 1 and " ".join(sentences) == passage
        assert prompt["marked"] in prompt["needle"] and prompt["marked"] not in question
        start, end = tasks.find_marked_span(prompt)
        assert prompt["text"][start:end] == prompt["marked"] == prompt["answer"].strip()


def test_equal_scores_rank_above_the_marked_word(tasks: ModuleType) -> None:
    assert tasks.rank_unit([0.0, 0.0, 0.0], 0) == 3
    assert tasks.rank_unit([0.5, 0.9, 0.1], 0) == 2


def test_only_the_span_and_one_space_are_removed(tasks: ModuleType) -> None:
    text = "The keys to the door"
    assert [tasks.remove_span(text, span) for span in tasks.find_word_spans(text)] == [
        "keys to the door", "The to the door", "The keys the door", "The keys to door", "The keys to the"
    ]  # fmt: skip


#: A pair of sentences, and two passages with a question.
PROMPTS: dict[str, list[dict[str, Any]]] = {
    "subject-verb": [
        {"text": "I like the movie", "answer": " and", "against": " is", "marked": "movie", "pair": 0},
        {"text": "I like the book", "answer": " is", "against": " and", "marked": "book", "pair": 0},
    ],
    "needle": [
        {
            "text": f"{passage}\n\nHe?",
            "answer": " far",
            "marked": "far",
            "passage_length": len(passage),
            "needle": needle,
        }
        for passage, needle in [
            ("It is far. He said it. So it is. I wait.", "It is far."),
            ("She said it. He is far. I wait. So it is.", "He is far."),
        ]
    ],
}
METHODS = ["saliency", "random"]


def test_continued_run_equals_a_run_at_once(tasks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "read_prompts", PROMPTS.__getitem__)
    ex, stores = test_decoder.explainer("llama"), [tmp_path / "once.jsonl", tmp_path / "continued.jsonl"]
    for task in PROMPTS:
        tasks.run_task(ex, task, METHODS, None, stores[0])
        tasks.run_task(ex, task, METHODS[:1], 1, stores[1])
        tasks.run_task(ex, task, METHODS, None, stores[1])
        tasks.run_task(ex, task, METHODS, None, stores[1])
    once, continued = (
        {(row["task"], row["prompt"], row["method"]): row for row in tasks.read_store(store)} for store in stores
    )
    assert once == continued and len(once) == 2 * 2 * 3
    assert len(tasks.read_store(stores[1])) == len(once), "a result is stored once"


def test_figures_are_those_of_the_scores_and_of_the_model(
    tasks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The explained log-odds, the rank of the marked word and the drop, computed from the model's logits."""
    monkeypatch.setattr(tasks, "read_prompts", PROMPTS.__getitem__)
    ex, store = test_decoder.explainer("llama"), tmp_path / "store.jsonl"
    tasks.run_task(ex, "subject-verb", ["saliency"], None, store)
    rows = {(row["prompt"], row["method"]): row for row in tasks.read_store(store)}
    tokenizer = ex.adapter.processor
    for index, prompt in enumerate(PROMPTS["subject-verb"]):
        first_ids = [tokenizer(prompt[key], add_special_tokens=False)["input_ids"][0] for key in ("answer", "against")]

        def compute_log_odds(text: str, ids: list[int] = first_ids) -> float:
            with torch.no_grad():
                logits = ex.adapter.model(input_ids=torch.tensor([tokenizer(text)["input_ids"][:-1]])).logits[0, -1]
            return float(logits[ids[0]] - logits[ids[1]])

        controls, row = rows[index, "controls"], rows[index, "saliency"]
        value = compute_log_odds(prompt["text"])
        assert controls["value"] == pytest.approx(value, abs=1e-5)
        without_marked = compute_log_odds(prompt["text"].rsplit(" ", 1)[0])
        assert controls["marked_word_drop"] == pytest.approx(value - without_marked, abs=1e-5)
        target = clearhead.GeneratedToken(0, against=first_ids[1])
        e = ex.explain(prompt["text"], "saliency", answer=prompt["answer"], target=target)
        assert e.target["value"] == pytest.approx(value, abs=1e-5)
        scores = {word: score for word, score in zip(e.words().tokens, e.words().scores, strict=True) if score}
        ranked = sorted(scores, key=lambda word: -scores[word])
        assert row["average_precision"] == 1 / (1 + ranked.index(prompt["marked"]))
        assert row["top_word"] == ranked[0]


def test_pair_is_solved_only_if_both_sentences_are_right(tasks: ModuleType) -> None:
    rows = [
        {"task": "subject-verb", "prompt": index, "method": method, **values}
        for index, is_right in enumerate([True, True, True, False])
        for method, values in {
            "controls": {"value": 1.0, "is_preferred": is_right, "marked_word_drop": 1.0, "random_word_drop": 0.0},
            "a": {"average_precision": 1.0 if index < 2 else 0.5, "is_among_top_two": True, "top_word_drop": 1.0},
        }.items()
    ]
    summary = tasks.summarise_task("subject-verb", rows)
    assert summary["all"]["controls"]["is_solved"]["mean"] == 0.5
    assert summary["all"]["methods"]["a"]["average_precision"]["mean"] == 0.75
    solved = summary["solved"]["methods"]["a"]["average_precision"]
    assert (solved["mean"], solved["n"]) == (1.0, 2)
