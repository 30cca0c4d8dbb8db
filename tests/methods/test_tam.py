"""Transition attention maps equal their reference implementation and a difference of uniform perceptions."""

import pytest

from clearhead import Method
from tests import models
from tests.methods import replica_comparison, replica_inputs
from tests.replicas import beyond_intuition_head as head
from tests.replicas import tam as replica


@pytest.mark.parametrize("layers", [None, (0, None), (0, 2), (-1, None)], ids=str)
@pytest.mark.parametrize("subject", ["bert/classify", "vit/image", "beit/image", "dinov2/image"])
def test_equals_reference_implementation(subject: str, layers: tuple | None) -> None:
    results = replica_comparison.explainer(subject).explain(
        models.inputs(subject), Method("tam", steps=4), layers=layers
    )
    chosen = range(3)[slice(*(layers or (1, None)))]
    for e, case in zip(results, replica_inputs.make_cases(subject), strict=True):
        expected = replica.scores(case.seen, head.compute_feedback(case.evaluator, 4), case.readout, chosen)
        assert replica_comparison.gap(e.scores, expected) < 1e-5


def test_scores_equal_uniform_perception_minus_that_of_the_lower_layers() -> None:
    ex, raw = replica_comparison.explainer("bert/classify"), models.TEXTS[0]
    scores = ex.explain(raw, Method("tam", feedback="none"), layers=(0, None)).scores
    uniform = Method("beyond-intuition-head", perception="uniform", feedback="none")
    all_layers = ex.explain(raw, uniform, layers=(0, None)).scores
    lower_layers = ex.explain(raw, uniform, layers=(0, 2)).scores
    assert replica_comparison.gap(scores, all_layers - lower_layers) < 1e-12
