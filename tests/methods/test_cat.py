"""CAT equals its reference implementation; the invariants of the specification."""

import pytest

from tests.methods import replica_comparison
from tests.replicas import cat


@pytest.mark.parametrize("subject", replica_comparison.SUBJECTS)
def test_equals_reference_implementation(subject: str) -> None:
    replica_comparison.assert_equals_reference("cat", subject)


@pytest.mark.parametrize("layers", replica_comparison.LAYER_RANGES, ids=str)
@pytest.mark.parametrize("subject", ["bert/classify", "albert/mask", "beit/image"])
def test_selected_layers_equal_reference(subject: str, layers: tuple) -> None:
    replica_comparison.assert_equals_reference("cat", subject, layers=layers)


@pytest.mark.parametrize("target", replica_comparison.TARGETS)
@pytest.mark.parametrize("subject", ["bert/classify", "roberta/mask", "vit/image"])
def test_targets_and_scales_equal_reference(subject: str, target: str) -> None:
    replica_comparison.assert_equals_reference("cat", subject, target=target)


@pytest.mark.parametrize("method", ["cat", "attcat"])
def test_scores_scale_with_the_classifier_row(method: str) -> None:
    text = replica_comparison.SENTENCES[0]
    scores, scaled = (
        replica_comparison.load_with_scaled_classifier("bert/classify", factor, row=2)
        .explain(text, method, target=2)
        .scores
        for factor in (1, -3.5)
    )
    assert replica_comparison.gap(scaled, -3.5 * scores) < 1e-12


@pytest.mark.parametrize("subject", ["bert/classify", "albert/classify", "bert/mask", "electra/mask"])
def test_cat_of_the_final_state_is_zero_outside_the_readout(subject: str) -> None:
    """Why the output of the last layer is left out: its CAT is nonzero at the read-out position only."""
    for seen, readout in replica_comparison.record_plain_passes(subject):
        final = cat.compute_cat(seen, seen.layers)
        assert (final[readout == 1] != 0).all()
        assert not final[readout == 0].any()
        assert (cat.compute_cat(seen, seen.layers - 1) != 0).all()
