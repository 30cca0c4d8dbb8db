"""A budget of memory: kept by counting, and the same results whatever it is."""

import gc

import numpy as np
import pytest
import torch

import clearhead
from clearhead import Explainer, InputError
from clearhead.budget import Budget, Meter, OverBudget, bytes_of
from tests import models
from tests.laws import cases, snapshot

#: One method or more of each kind of passes.
METHODS = ["generic", "flow", "lrp", "integrated-gradients", "beyond-intuition-head", "occlusion", "kernel-shap"]
FEW = [clearhead.Method("kernel-shap", evaluations=100) if name == "kernel-shap" else name for name in METHODS]
TEXTS = [*models.TEXTS, "I like the wonderful film and the book, you look so confused", "boring", "she is here"]


def explained(ex: Explainer, **how: object) -> dict[str, list[clearhead.Explanation]]:
    return ex.explain(TEXTS, FEW, batch_size=6, **how)


def peak(ex: Explainer, **how: object) -> tuple[int, dict[str, list[clearhead.Explanation]]]:
    """What the tensors of one call take at most, and its results."""
    gc.collect()
    with Meter() as meter:
        found = explained(ex, **how)
    return meter.peak, found


def test_every_kind_is_asked() -> None:
    kinds = {cls.declaration.kind for cls in clearhead.methods.REGISTRY.values()}
    assert {clearhead.Method(name).declaration.kind for name in METHODS} == kinds


def test_passes_keep_to_the_budget_and_the_results_are_the_same() -> None:
    ex = models.explainer("bert/classify")
    ex.explain(TEXTS[0])  # what is tested once is not counted
    free, expected = peak(ex)
    for part in (2, 8, 20):
        allowed = free // part
        taken, found = peak(ex, memory=allowed)
        assert taken <= allowed, f"{taken} of {allowed}"
        for name, explanations in found.items():
            for e, other in zip(explanations, expected[name], strict=True):
                largest = max(float(np.abs(one.scores).max()) for one in expected[name])
                cases.assert_alike(e, other, 1e-9, largest)
    assert taken > allowed / 10, "the budget is made use of"


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
    with Meter() as free:
        expected = ex.explain(text)
    assert expected.steps is not None and len(expected.steps) > 3
    with Meter() as kept:
        e = ex.explain([text, text], memory=free.peak // 2)[1]
    assert kept.peak <= free.peak // 2
    cases.assert_alike(e, expected, 1e-9)


def test_too_small_for_one_says_how_much_one_needs() -> None:
    ex = models.explainer("bert/classify")
    with pytest.raises(InputError, match=r"memory='200 KiB' is too small: one input of \d+ units needs .* KiB") as said:
        ex.explain(TEXTS, "generic", memory="200KiB")
    needed = str(said.value).split("needs ")[1].split(" with")[0]
    ex.explain(TEXTS, "generic", memory=int(bytes_of(needed) * 1.3))  # it is rounded, and AIM leaves room
    with pytest.raises(InputError, match=r"needs more than 2 KiB"):
        ex.explain(TEXTS[0], "generic", memory="1KiB")


@pytest.mark.parametrize("memory", ["much", "2 GiBs", "-1GiB", "0", "", True, "2.GiB"])
def test_what_is_no_memory(memory: object) -> None:
    with pytest.raises(InputError, match="is no amount of memory: say how much, e.g. '2GiB'"):
        models.explainer("bert/classify").explain(TEXTS[0], memory=memory)  # type: ignore[arg-type]


def test_a_pass_that_is_stopped_leaves_the_model_as_it_was() -> None:
    ex = models.explainer("bert/classify")
    ex.explain(TEXTS[0])
    before = snapshot.of_model(ex.subject.model)
    for memory in ("1KiB", "60KiB", "150KiB"):
        with pytest.raises(InputError, match="is too small"):
            explained(ex, memory=memory)
        assert snapshot.changes(before, snapshot.of_model(ex.subject.model)) == []


def test_a_pass_that_is_too_large_is_run_again_with_fewer_rows() -> None:
    """What was learned may be wrong: then the counting itself stops the pass."""
    ex = models.explainer("bert/classify")
    ex.explain(TEXTS[0])
    free, expected = peak(ex)
    tried: list[tuple[str, int]] = []

    class Sanguine(Budget):
        def room(self, kinds: object, width: int) -> int:
            return min(self._capped(kind, width, 6) for kind in kinds)  # type: ignore[attr-defined]

        def shrink(self) -> None:
            tried.append((self.kind, max(self.rows, self.inside)))
            super().shrink()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("clearhead.explainer.Budget", Sanguine)
        taken, found = peak(ex, memory=free // 3)
    assert tried and taken <= free // 3 * 1.1  # what it noticed, it noticed once it was there
    for name, explanations in found.items():
        for e, other in zip(explanations, expected[name], strict=True):
            assert cases.gap(e.scores, other.scores, float(np.abs(other.scores).max())) < 1e-8


class TestMeter:
    def test_counts_what_lives(self) -> None:
        weight = torch.ones(100)
        with Meter() as meter:
            weight.view(10, 10), weight.T, weight.detach()
            assert meter.live == 0
            a = torch.ones(1000)
            b = a.view(10, 100).mT
            assert meter.live == 4000
            c = b.reshape(-1)
            assert meter.live == 8000
            del a
            assert meter.live == 8000  # b is a view of it
            del b, c
        assert (meter.live, meter.peak) == (0, 8000)

    def test_counts_graphs(self) -> None:
        x = torch.ones(1000, requires_grad=True)
        with Meter() as meter:
            y = x.exp().sin().sum()
            assert meter.live >= 8000  # the results that both need on their way back
            torch.autograd.grad(y, x)
            del y
        assert meter.live == 0 and meter.peak >= 12000

    def test_stops_forwards_and_backwards(self) -> None:
        x = torch.ones(1000, requires_grad=True)
        with pytest.raises(OverBudget), Meter(limit=6000):
            x.exp().sin()
        y = x.exp().sin().sum()
        with pytest.raises(OverBudget), Meter(limit=3000):
            torch.autograd.grad(y, x)

    def test_changes_no_number(self) -> None:
        ex = models.explainer("bert/classify")
        plain = ex.explain(TEXTS, ["generic", "integrated-gradients"], batch_size=1)
        with Meter():
            metered = ex.explain(TEXTS, ["generic", "integrated-gradients"], batch_size=1)
        for name in plain:
            for one, other in zip(plain[name], metered[name], strict=True):
                np.testing.assert_array_equal(one.scores, other.scores)
