"""The `truth` protocol: metrics equal their definitions, for every kind of evidence and target."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import clearhead
from clearhead.bench import make_protocol
from clearhead.bench.chunk_explanations import add_controls, explain_examples, split_applicable
from clearhead.bench.data import CharSpan, Example, ImageBox, UnitIndex, load_benchmark_dataset
from clearhead.bench.data.zoo_tasks import ZOO_TASKS
from clearhead.bench.protocols.base import argsort_descending
from clearhead.bench.protocols.known_evidence import KnownEvidence, compute_ranking_metrics
from clearhead.errors import InputError
from clearhead.explanation.explanation import Explanation
from clearhead.explanation.multi_stream import MultiStreamExplanation
from clearhead.methods.base import Method
from clearhead.units import Units, build_patch_units
from tests.bench.replicas import truth as replica

WORDS = ("[CLS]", "ask", "a", "b", "c", "d", "e", "[SEP]")


def units() -> Units:
    offsets, start = [], 0
    for word in WORDS:
        if word.startswith("["):
            offsets.append((0, 0))
        else:
            offsets.append((start, start + len(word)))
            start += len(word) + 1
    text = " ".join(word for word in WORDS if not word.startswith("["))
    special = tuple(word.startswith("[") for word in WORDS)
    return Units("text", "token", WORDS, special, (text,), (0,) * len(WORDS), tuple(offsets))


def explanation(scores: Any, scored_units: Units | None = None, **target: Any) -> Explanation:
    scored_units = units() if scored_units is None else scored_units
    return Explanation(scored_units, np.asarray(scores, dtype=float), "made-up", {"kind": "label", **target}, {})


def spans_of(words: str) -> tuple[CharSpan, ...]:
    all_units = units()
    assert all_units.offsets is not None
    return tuple(CharSpan(*all_units.offsets[WORDS.index(word)]) for word in words)


def example(*sets: str) -> Example:
    question_span = units().offsets[1]  # type: ignore[index]
    return Example("one", "ask a b c d e", 0, tuple(spans_of(words) for words in sets), (CharSpan(*question_span),))


@settings(deadline=None)
@given(
    st.permutations(range(5)),
    st.lists(st.sets(st.sampled_from("abcde"), min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_metrics_equal_reference(order: list[int], sets: list[set[str]]) -> None:
    if set().union(*sets) == set("abcde"):
        return
    scores = [9.0, 8.0, *(float(value) for value in order), 9.5]  # special units and the question score highest
    sample = example(*("".join(sorted(words)) for words in sets))
    (measured,) = KnownEvidence().measure(None, [sample], {"made-up": [explanation(scores)]})  # type: ignore[arg-type]
    ranked = sorted("abcde", key=lambda name: -order["abcde".index(name)])
    expected = replica.metrics_of_sets(ranked, sets)
    assert measured.figures == pytest.approx(expected)
    assert set(measured.figures) == set(expected)


def test_metrics_of_best_and_worst_ranking() -> None:
    best = compute_ranking_metrics(np.array([True, True, False, False]), np.array([1, 0, 2, 3]))
    worst = compute_ranking_metrics(np.array([True, True, False, False]), np.array([2, 3, 0, 1]))
    assert (best["precision"], best["average precision"], best["rank"], best["reach"]) == (1, 1, 0, 0.5)
    assert (worst["precision"], worst["rank"], worst["reach"]) == (0, 1, 1)


def test_magnitude_ranking_counts_negative_scores() -> None:
    scores = [0, 0, -5.0, 1.0, 0.5, 0.2, 0.1, 0]
    figures = {
        by: KnownEvidence(by=by).measure(None, [example("a")], {"m": [explanation(scores)]})[0].figures  # type: ignore[arg-type]
        for by in ("score", "magnitude")
    }
    assert figures["score"]["minimal precision"] == 0 and figures["magnitude"]["minimal precision"] == 1
    with pytest.raises(InputError, match="magnitude"):
        KnownEvidence(by="size").measure(None, [example("a")], {"m": [explanation(scores)]})  # type: ignore[arg-type]


def test_argsort_breaks_ties_by_seed_and_orders_nan() -> None:
    flat = np.zeros(50)
    assert (
        argsort_descending(flat, 0, "x").tolist()
        == argsort_descending(flat, 0, "x").tolist()
        != argsort_descending(flat, 1, "x").tolist()
    )
    assert argsort_descending(flat, 0, "x").tolist() != argsort_descending(flat, 0, "y").tolist()
    assert sorted(argsort_descending(flat, 0).tolist()) == list(range(50))
    assert argsort_descending(np.array([0.0, np.nan, -3.0]), 0).tolist() == [0, 2, 1]


def test_patches_with_little_evidence_are_excluded() -> None:
    """A 2 × 4 grid; the box covers the first column and a quarter of the second."""
    grid = build_patch_units((2, 4))
    sample = Example("p", None, 0, ((ImageBox((0.0, 0.0, 0.3125, 1.0)),),))
    scores = np.array([5, 9, 1, 1, 4, 9, 1, 1])  # the second column scores highest but is excluded
    (measured,) = KnownEvidence().measure(None, [sample], {"m": [explanation(scores, grid)]})  # type: ignore[arg-type]
    assert measured.figures["minimal precision"] == 1 and measured.figures["minimal reach"] == pytest.approx(2 / 6)


def test_region_evidence_is_selected_by_index_and_stream() -> None:
    boxes = ((0.0, 0.0, 0.5, 0.5), (0.0, 0.0, 0.5, 0.5), (0.5, 0.5, 1.0, 1.0))
    regions = Units("regions", "region", ("0", "1", "2"), (False,) * 3, boxes=boxes)
    sample = replace(example("a"), evidence=((*spans_of("a"), UnitIndex(1, "regions")),), streams=("regions",))
    both = MultiStreamExplanation({"text": explanation(np.zeros(8)), "regions": explanation([0, 1, 0], regions)})
    (measured,) = KnownEvidence().measure(None, [sample], {"m": [both]})  # type: ignore[arg-type]
    assert measured.part == "regions" and measured.figures["minimal precision"] == 1


def test_detection_of_evidence_object_is_measured() -> None:
    grid = build_patch_units((2, 2))
    sample = Example("d", None, 0, ((ImageBox((0.0, 0.0, 0.5, 0.5)),),))
    steps = [
        {"kind": "detection", "box": [0.5, 0.5, 1.0, 1.0], "found": True},
        {"kind": "detection", "box": [0.0, 0.0, 0.5, 0.45], "found": True},
    ]
    rows = np.array([[0.0, 0, 0, 1], [1.0, 0, 0, 0]])
    detection = replace(
        explanation(rows.sum(0), grid), matrix=rows, steps=("ring", "ring"), target={"kind": "multiple", "steps": steps}
    )
    (measured,) = KnownEvidence().measure(None, [sample], {"m": [detection]})  # type: ignore[arg-type]
    assert measured.figures["minimal precision"] == 1
    other_object = explanation([1.0, 0, 0, 0], grid, **{**steps[0]})
    assert KnownEvidence().measure(None, [sample], {"m": [other_object]}) == []  # type: ignore[arg-type]


def test_settings_change_hash_and_are_validated() -> None:
    assert (
        KnownEvidence().hash == KnownEvidence().hash != KnownEvidence(seed=1).hash != KnownEvidence(by="magnitude").hash
    )
    with pytest.raises(InputError, match="did you mean 'truth'"):
        make_protocol("thruth")
    with pytest.raises(InputError, match="more_than"):
        make_protocol("truth", more=0.2)


@pytest.mark.parametrize("task", ZOO_TASKS)
def test_saliency_beats_random_on_every_zoo_task(task: str) -> None:
    pytest.importorskip("clearhead_zoo")
    ex = clearhead.load(f"zoo:{task}")
    examples = list(load_benchmark_dataset("known", task=task, count=6))
    assert len(examples) == 6 and all(item.evidence for item in examples)
    methods, unsupported = split_applicable(ex, add_controls(["saliency", "grad-sam"]))
    assert set(map(str, methods)) | set(unsupported) == {"saliency", "grad-sam", "random", "position"}
    truth = KnownEvidence()
    measured = truth.measure(ex, examples, explain_examples(ex, examples, methods, truth).by_method)
    assert {item.part for item in measured} == set(examples[0].streams or measured[0].part.split(","))
    mean = {
        method: np.mean([item.figures["minimal average precision"] for item in measured if item.method == method])
        for method in ("saliency", "random")
    }
    assert mean["saliency"] > mean["random"] + 0.1


def test_failing_method_does_not_affect_others(monkeypatch: pytest.MonkeyPatch) -> None:
    ex = clearhead.load("zoo:logic")
    examples = list(load_benchmark_dataset("known", task="logic", count=2))
    monkeypatch.setattr("clearhead.methods.random.RandomControl.compute_scores", lambda self, tape: 1 / 0)
    results = explain_examples(ex, examples, [Method("generic"), Method("random")], KnownEvidence())
    assert list(results.by_method) == ["generic"] and "ZeroDivisionError" in results.failure_reasons["random"]
    results = explain_examples(ex, examples, [Method("random")], KnownEvidence())
    assert (
        not results.by_method and "ZeroDivisionError" in results.failure_reasons["random"]
    )  # it does not raise as the only method either


def test_unknown_task_and_split_raise() -> None:
    with pytest.raises(InputError, match="did you mean 'logic'"):
        load_benchmark_dataset("known", task="logik")
    with pytest.raises(InputError, match="held-out"):
        load_benchmark_dataset("known", split="train")


def test_recall_4k_examples_have_long_inputs_and_valid_evidence() -> None:
    pytest.importorskip("clearhead_zoo")
    for example in load_benchmark_dataset("known", task="recall-4k", count=3):
        words = example.input.split()
        assert 2 * 256 < len(words) <= 4096 - 1 and isinstance(example.evidence, tuple)
        (key, value), *_ = example.evidence
        assert (
            example.input[key.start : key.stop] == words[-2]
            and example.input[value.start : value.stop] == example.continuation
        )
