"""A budget of memory: kept by counting, and the same results whatever it is."""

import gc
from collections.abc import Collection

import numpy as np
import pytest
import torch

import clearhead
from clearhead import Explainer, InputError
from clearhead.engine.memory_budget import (
    MemoryBudget,
    MemoryBudgetExceededError,
    TensorMemoryMeter,
    budgeted_passes,
    start_budgeted_pass,
)
from tests import models
from tests.invariants import cases, model_snapshot

#: One method of each kind of passes, none of which takes long.
METHODS = [
    "generic",
    "flow",
    clearhead.Method("lrp"),
    clearhead.Method("integrated-gradients", steps=4),
    "occlusion",
    "deeplift",
    "value-zeroing",
]
TEXTS = [*models.TEXTS, "I like the wonderful film and the book"]


def explained(ex: Explainer, **how: object) -> dict[str, list[clearhead.Explanation]]:
    return ex.explain(TEXTS, METHODS, batch_size=6, **how)


def peak(ex: Explainer, **how: object) -> tuple[int, dict[str, list[clearhead.Explanation]]]:
    """What the tensors of one call take at most, and its results."""
    gc.collect()
    with TensorMemoryMeter() as meter:
        found = explained(ex, **how)
    return meter.peak_bytes, found


def test_every_kind_is_asked() -> None:
    kinds = {cls.declaration.pass_type for cls in clearhead.methods.METHOD_REGISTRY.values()}
    asked = [clearhead.Method(one) if isinstance(one, str) else one for one in METHODS]
    assert {one.declaration.pass_type for one in asked} == kinds


def test_passes_keep_to_the_budget_and_the_results_are_the_same() -> None:
    ex = models.explainer("bert/classify")
    ex.explain(TEXTS[0])  # what is tested once is not counted
    free, expected = peak(ex)
    for part in (2, 6):
        allowed = free // part
        taken, found = peak(ex, memory=allowed)
        assert taken <= allowed, f"{taken} of {allowed}"
        for name, explanations in found.items():
            for e, other in zip(explanations, expected[name], strict=True):
                largest = max(float(np.abs(one.scores).max()) for one in expected[name])
                cases.assert_alike(e, other, 1e-9, largest)
        assert taken > allowed / 8, "the budget is made use of"


@pytest.mark.parametrize("subject", ["vit/image", "modernbert/mask"])
def test_other_subjects(subject: str) -> None:
    ex, raws = models.explainer(subject), models.inputs(subject)
    methods = ["generic", "attcat", "saliency"]
    free, kept = (ex.explain(raws, methods, **how) for how in ({}, {"memory": "1 MiB"}))
    for name in methods:
        for e, other in zip(kept[name], free[name], strict=True):
            cases.assert_alike(e, other, cases.tolerance(subject), float(np.abs(other.scores).max()))


def test_steps_are_run_in_parts_too() -> None:
    """Labels of many tokens: their targets share a pass as far as there is room."""
    labels = {0: "O", 1: "PER", 2: "LOC"}
    ex = clearhead.load(models.text_model("bert", "ForTokenClassification", id2label=labels))
    text = "She hates the book because it isn't good"
    ex.explain(text)
    with TensorMemoryMeter() as free:
        expected = ex.explain(text)
    assert expected.steps is not None and len(expected.steps) > 3
    with TensorMemoryMeter() as kept:
        e = ex.explain([text, text], memory=free.peak_bytes // 2)[1]
    assert kept.peak_bytes <= free.peak_bytes // 2
    cases.assert_alike(e, expected, 1e-9)


def test_passes_of_two_methods_are_counted_each_by_its_own_rows() -> None:
    """One takes a megabyte a row, the other little, in many rows: the mean of both would be too few for the first."""
    budget, width = MemoryBudget(2**30), 10
    with budget.measure_batch(["path"], width, torch.device("cpu")), budgeted_passes("path", 1, width):
        for rows, each in ((1, 2**20), (64, 2**10)):
            start_budgeted_pass(rows)
            torch.zeros(rows * each, dtype=torch.uint8)
    assert budget.measurements["path"].compute_inner_rows(8 * 2**20, width, rows=1) == 8
    assert budget.required_bytes == 2**20


def test_too_small_for_one_says_how_much_one_needs() -> None:
    ex = models.explainer("bert/classify")
    ex.explain(TEXTS[0])
    with TensorMemoryMeter() as meter:
        ex.explain(TEXTS[1])
    short = int(meter.peak_bytes * 0.7)
    with pytest.raises(
        InputError, match=rf"is too small: one input of 17 units needs {meter.peak_bytes / 1024:,.0f} KiB"
    ):
        ex.explain(TEXTS[1], memory=short)
    ex.explain(TEXTS[1], memory=meter.peak_bytes + 1)
    with pytest.raises(InputError, match=r"needs more than 2 KiB"):
        ex.explain(TEXTS[1], memory="1KiB")


@pytest.mark.parametrize("memory", ["much", "2 GiBs", "-1GiB", "0", "", True, "2.GiB"])
def test_what_is_no_memory(memory: object) -> None:
    with pytest.raises(InputError, match="is not an amount of memory: pass for example"):
        models.explainer("bert/classify").explain(TEXTS[0], memory=memory)  # type: ignore[arg-type]


def test_a_pass_that_is_stopped_leaves_the_model_as_it_was() -> None:
    ex = models.explainer("bert/classify")
    ex.explain(TEXTS[0])
    before = model_snapshot.of_model(ex.adapter.model)
    for memory in ("1KiB", "60KiB"):  # stopped forwards; stopped, or found to need too much, later
        with pytest.raises(InputError, match="is too small"):
            ex.explain(TEXTS[1], METHODS[:3], memory=memory)
        assert model_snapshot.changes(before, model_snapshot.of_model(ex.adapter.model)) == []


def test_a_pass_that_is_too_large_is_run_again_with_fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was learned may be wrong: then the counting itself stops the pass."""
    ex, tried = models.explainer("bert/classify"), []
    ex.explain(TEXTS[0])
    with TensorMemoryMeter() as free:
        expected = ex.explain(TEXTS)

    class Sanguine(MemoryBudget):
        def compute_batch_rows(self, kinds: Collection[str], width: int) -> int:
            return min(self._cap_rows(kind, width, 6) for kind in kinds)

        def shrink_after_exceeding(self) -> None:
            tried.append(self.batch_rows)
            super().shrink_after_exceeding()

    monkeypatch.setattr("clearhead.explainer.MemoryBudget", Sanguine)
    with TensorMemoryMeter() as kept:
        found = ex.explain(TEXTS, memory=int(free.peak_bytes * 0.4))
    assert tried == [4, 2]
    assert kept.peak_bytes <= free.peak_bytes * 0.5  # what was too much was noticed once it was there
    for e, other in zip(found, expected, strict=True):
        cases.assert_alike(e, other, 1e-9)


class TestMeter:
    def test_counts_what_lives(self) -> None:
        weight = torch.ones(100)
        with TensorMemoryMeter() as meter:
            _ = weight.view(10, 10), weight[3:], weight.detach()
            assert meter.live_bytes == 0
            a = torch.ones(1000)
            b = a.view(10, 100).mT
            assert meter.live_bytes == 4000
            c = b.reshape(-1)
            assert meter.live_bytes == 8000
            del a
            assert meter.live_bytes == 8000  # b is a view of it
            del b, c
        assert (meter.live_bytes, meter.peak_bytes) == (0, 8000)

    def test_counts_graphs(self) -> None:
        x = torch.ones(1000, requires_grad=True)
        with TensorMemoryMeter() as meter:
            y = x.exp().exp().sum()
            assert meter.live_bytes == 8004  # the results that both need on their way back
            torch.autograd.grad(y, x)
            del y
        assert meter.live_bytes == 0 and meter.peak_bytes >= 12000

    def test_stops_forwards_and_backwards(self) -> None:
        x = torch.ones(1000, requires_grad=True)
        with pytest.raises(MemoryBudgetExceededError), TensorMemoryMeter(limit_bytes=6000):
            x.exp().sin()
        y = x.exp().sin().sum()
        with pytest.raises(MemoryBudgetExceededError), TensorMemoryMeter(limit_bytes=3000):
            torch.autograd.grad(y, x)

    def test_changes_no_number(self) -> None:
        ex = models.explainer("bert/classify")
        plain = explained(ex)
        with TensorMemoryMeter():
            metered = explained(ex)
        for name in plain:
            for one, other in zip(plain[name], metered[name], strict=True):
                np.testing.assert_array_equal(one.scores, other.scores)
