"""Memory budget: tensors are counted, the budget is kept, and results do not depend on it."""

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

#: One fast method of each pass type.
METHODS = [
    "generic",
    "flow",
    clearhead.Method("lrp"),
    clearhead.Method("integrated-gradients", steps=4),
    "occlusion",
    "deeplift",
    "value-zeroing",
    "ensemble",
]
TEXTS = [*models.TEXTS, "I like the wonderful film and the book"]


def explain_texts(ex: Explainer, **options: object) -> dict[str, list[clearhead.Explanation]]:
    return ex.explain(TEXTS, METHODS, batch_size=6, **options)


def measure_peak(ex: Explainer, **options: object) -> tuple[int, dict[str, list[clearhead.Explanation]]]:
    """The peak tensor memory of one call, and its results."""
    gc.collect()
    with TensorMemoryMeter() as meter:
        explanations = explain_texts(ex, **options)
    return meter.peak_bytes, explanations


def test_methods_cover_every_pass_type() -> None:
    pass_types = {cls.declaration.pass_type for cls in clearhead.methods.METHOD_REGISTRY.values()}
    methods = [clearhead.Method(method) if isinstance(method, str) else method for method in METHODS]
    assert {method.declaration.pass_type for method in methods} == pass_types


def test_peak_stays_within_budget_and_scores_are_the_same() -> None:
    ex = models.explainer("bert/classify")
    ex.explain(TEXTS[0], method="generic")  # the self-test on first use is not measured
    unlimited, expected = measure_peak(ex)
    for divisor in (2, 6):
        allowed = unlimited // divisor
        used, actual = measure_peak(ex, memory=allowed)
        assert used <= allowed, f"{used} of {allowed}"
        for name, explanations in actual.items():
            for explanation, reference in zip(explanations, expected[name], strict=True):
                largest = max(float(np.abs(each.scores).max()) for each in expected[name])
                cases.assert_alike(explanation, reference, 1e-9, largest)
        assert used > allowed / 8, "the budget is used"


@pytest.mark.parametrize("subject", ["vit/image", "modernbert/mask"])
def test_budget_preserves_scores_of_other_models(subject: str) -> None:
    ex, raws = models.explainer(subject), models.inputs(subject)
    methods = ["generic", "attcat", "saliency"]
    unlimited, limited = (ex.explain(raws, methods, **options) for options in ({}, {"memory": "1 MiB"}))
    for name in methods:
        for explanation, reference in zip(limited[name], unlimited[name], strict=True):
            cases.assert_alike(explanation, reference, cases.tolerance(subject), float(np.abs(reference.scores).max()))


def test_targets_of_token_classifier_are_split_within_budget() -> None:
    """Token classification: the targets of all tokens share a pass as far as the budget allows."""
    labels = {0: "O", 1: "PER", 2: "LOC"}
    ex = clearhead.load(models.text_model("bert", "ForTokenClassification", id2label=labels))
    text = "She hates the book because it isn't good"
    ex.explain(text, method="generic")
    with TensorMemoryMeter() as unlimited:
        expected = ex.explain(text, method="generic")
    assert expected.steps is not None and len(expected.steps) > 3
    with TensorMemoryMeter() as limited:
        explanation = ex.explain([text, text], memory=unlimited.peak_bytes // 2, method="generic")[1]
    assert limited.peak_bytes <= unlimited.peak_bytes // 2
    cases.assert_alike(explanation, expected, 1e-9)


def test_pass_sizes_are_measured_separately() -> None:
    """One takes 1 MiB a row, the other 1 KiB in many rows: the mean of both would underestimate the first."""
    budget, width = MemoryBudget(2**30), 10
    with budget.measure_batch(["path"], width, torch.device("cpu")), budgeted_passes("path", 1, width):
        for rows, each in ((1, 2**20), (64, 2**10)):
            start_budgeted_pass(rows)
            torch.zeros(rows * each, dtype=torch.uint8)
    assert budget.measurements["path"].compute_inner_rows(8 * 2**20, width, rows=1) == 8
    assert budget.required_bytes == 2**20


def test_budget_below_one_input_raises_with_required_memory() -> None:
    ex = models.explainer("bert/classify")
    ex.explain(TEXTS[0], method="generic")
    with TensorMemoryMeter() as meter:
        ex.explain(TEXTS[1], method="generic")
    short = int(meter.peak_bytes * 0.7)
    with pytest.raises(
        InputError, match=rf"is too small: one input of 17 units needs {meter.peak_bytes / 1024:,.0f} KiB"
    ):
        ex.explain(TEXTS[1], memory=short, method="generic")
    ex.explain(TEXTS[1], memory=meter.peak_bytes + 1, method="generic")
    with pytest.raises(InputError, match=r"needs more than 2 KiB"):
        ex.explain(TEXTS[1], memory="1KiB", method="generic")


@pytest.mark.parametrize("memory", ["much", "2 GiBs", "-1GiB", "0", "", True, "2.GiB"])
def test_invalid_memory_amount_raises(memory: object) -> None:
    with pytest.raises(InputError, match="is not an amount of memory: use, for example,"):
        models.explainer("bert/classify").explain(TEXTS[0], memory=memory, method="generic")  # type: ignore[arg-type]


def test_stopped_pass_leaves_model_unchanged() -> None:
    ex = models.explainer("bert/classify")
    ex.explain(TEXTS[0], method="generic")
    before = model_snapshot.of_model(ex.adapter.model)
    for memory in ("1KiB", "60KiB"):  # stopped in the forward pass; stopped later
        with pytest.raises(InputError, match="is too small"):
            ex.explain(TEXTS[1], METHODS[:3], memory=memory)
        assert model_snapshot.changes(before, model_snapshot.of_model(ex.adapter.model)) == []


def test_pass_over_budget_is_retried_with_fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the estimate is wrong, the memory meter stops the pass."""
    ex, batch_rows = models.explainer("bert/classify"), []
    ex.explain(TEXTS[0], method="generic")
    with TensorMemoryMeter() as unlimited:
        expected = ex.explain(TEXTS, method="generic")

    class UnderestimatingBudget(MemoryBudget):
        def compute_batch_rows(self, kinds: Collection[str], width: int) -> int:
            return min(self._cap_rows(pass_type, width, 6) for pass_type in kinds)

        def shrink_after_exceeding(self) -> None:
            batch_rows.append(self.batch_rows)
            super().shrink_after_exceeding()

    monkeypatch.setattr("clearhead.explainer.MemoryBudget", UnderestimatingBudget)
    with TensorMemoryMeter() as limited:
        actual = ex.explain(TEXTS, memory=int(unlimited.peak_bytes * 0.4), method="generic")
    assert batch_rows == [4, 2]
    assert limited.peak_bytes <= unlimited.peak_bytes * 0.5  # an allocation is counted after it was made
    for explanation, reference in zip(actual, expected, strict=True):
        cases.assert_alike(explanation, reference, 1e-9)


class TestTensorMemoryMeter:
    def test_counts_live_storages_once(self) -> None:
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

    def test_counts_tensors_saved_for_backward(self) -> None:
        x = torch.ones(1000, requires_grad=True)
        with TensorMemoryMeter() as meter:
            y = x.exp().exp().sum()
            assert meter.live_bytes == 8004  # the results that both need in the backward pass
            torch.autograd.grad(y, x)
            del y
        assert meter.live_bytes == 0 and meter.peak_bytes >= 12000

    def test_limit_raises_in_forward_and_backward(self) -> None:
        x = torch.ones(1000, requires_grad=True)
        with pytest.raises(MemoryBudgetExceededError), TensorMemoryMeter(limit_bytes=6000):
            x.exp().sin()
        y = x.exp().sin().sum()
        with pytest.raises(MemoryBudgetExceededError), TensorMemoryMeter(limit_bytes=3000):
            torch.autograd.grad(y, x)

    def test_metering_preserves_scores_bitwise(self) -> None:
        ex = models.explainer("bert/classify")
        plain = explain_texts(ex)
        with TensorMemoryMeter():
            metered = explain_texts(ex)
        for name in plain:
            for explanation, reference in zip(plain[name], metered[name], strict=True):
                np.testing.assert_array_equal(explanation.scores, reference.scores)
