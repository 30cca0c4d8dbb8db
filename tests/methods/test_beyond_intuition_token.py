"""Token-wise Beyond Intuition equals its reference implementation."""

import pytest

import clearhead
from clearhead import Method
from tests import models
from tests.methods import replica_comparison, replica_inputs
from tests.replicas import beyond_intuition_head as head
from tests.replicas import beyond_intuition_token as replica

NAME = "beyond-intuition-token"


@pytest.mark.parametrize("subject", ["bert/classify", "bert/mask", "vit/image"])
def test_equals_reference_implementation(subject: str) -> None:
    ex = replica_comparison.explainer(subject)
    results = ex.explain(models.inputs(subject), Method(NAME, steps=4))
    for e, case in zip(results, replica_inputs.make_cases(subject), strict=True):
        expected = replica.scores(ex.adapter.model, case.seen, head.compute_feedback(case.evaluator, 4), case.readout)
        assert replica_comparison.gap(e.scores, expected) < max(replica_inputs.get_tolerance(subject), 1e-9)


def test_all_rows_and_selected_layers_equal_reference() -> None:
    ex, case = replica_comparison.explainer("bert/classify"), replica_inputs.make_cases("bert/classify")[1]
    e = ex.explain(models.TEXTS[1], NAME, rows="all", layers=(0, 2))
    expected = replica.matrix(ex.adapter.model, case.seen, head.compute_feedback(case.evaluator), (0, 1))
    assert replica_comparison.gap(e.matrix, expected) < 1e-9


def test_uniform_perception_equals_beyond_intuition_head() -> None:
    """(f): without ρ and θ both methods are the same."""
    for subject in ("bert/classify", "beit/image"):
        ex, raw = replica_comparison.explainer(subject), models.inputs(subject)[0]
        token_wise, head_wise = (
            ex.explain(raw, Method(name, perception="uniform"), layers=(0, None))
            for name in (NAME, "beyond-intuition-head")
        )
        assert replica_comparison.gap(token_wise.scores, head_wise.scores) < 1e-12


def test_perception_does_not_depend_on_the_target() -> None:
    ex, text = replica_comparison.explainer("bert/classify"), models.TEXTS[0]
    first, second = (ex.explain(text, Method(NAME, feedback="none"), target=label).scores for label in (0, 1))
    assert replica_comparison.gap(first, second) == 0
    first, second = (ex.explain(text, NAME, target=label).scores for label in (0, 1))
    assert replica_comparison.gap(first, second) > 1e-3


def test_model_without_recorded_values_is_rejected() -> None:
    with pytest.raises(clearhead.UnsupportedError, match="its values cannot be recorded"):
        replica_comparison.explainer("deberta/classify").explain(models.TEXTS[0], NAME)
