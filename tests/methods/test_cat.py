"""CAT against its replica, and the invariants of the specification."""

import pytest

from tests.methods import replica_comparison
from tests.replicas import cat


@pytest.mark.parametrize("subject", replica_comparison.SUBJECTS)
def test_equals_its_replica(subject: str) -> None:
    replica_comparison.assert_twins("cat", subject)


@pytest.mark.parametrize("layers", replica_comparison.RANGES, ids=str)
@pytest.mark.parametrize("subject", ["bert/classify", "albert/mask", "beit/image"])
def test_layers(subject: str, layers: tuple) -> None:
    replica_comparison.assert_twins("cat", subject, layers=layers)


@pytest.mark.parametrize("target", replica_comparison.TARGETS)
@pytest.mark.parametrize("subject", ["bert/classify", "roberta/mask", "vit/image"])
def test_targets(subject: str, target: str) -> None:
    replica_comparison.assert_twins("cat", subject, target=target)


@pytest.mark.parametrize("method", ["cat", "attcat"])
def test_scales_with_the_row_of_the_classifier(method: str) -> None:
    text = replica_comparison.SENTENCES[0]
    one, scaled = (
        replica_comparison.with_classifier_times("bert/classify", factor, row=2).explain(text, method, target=2).scores
        for factor in (1, -3.5)
    )
    assert replica_comparison.gap(scaled, -3.5 * one) < 1e-12


@pytest.mark.parametrize("subject", ["bert/classify", "albert/classify", "bert/mask", "electra/mask"])
def test_final_hidden_state_is_silent_off_the_read_out(subject: str) -> None:
    """Why the last layer's output is left out: it would speak for one position only."""
    for seen, readout in replica_comparison.slow_batch(subject):
        final = cat.of_state(seen, seen.layers)
        assert (final[readout == 1] != 0).all()
        assert not final[readout == 0].any()
        assert (cat.of_state(seen, seen.layers - 1) != 0).all()
