"""LibraGrad equals a replica of the paper, and its scores add up to the target in models without biases."""

import pytest

from tests.methods import modified_gradients
from tests.replicas import libragrad


def test_text_scores_equal_replica() -> None:
    modified_gradients.assert_text_equals_replica("libragrad", libragrad.scores)


def test_image_scores_equal_replica() -> None:
    modified_gradients.assert_image_equals_replica("libragrad", libragrad.scores)


@pytest.mark.parametrize("family", modified_gradients.DECODERS)
def test_decoder_scores_equal_replica(family: str) -> None:
    modified_gradients.assert_decoder_equals_replica("libragrad", libragrad.scores, family)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3", "mixtral"])
@pytest.mark.parametrize("method", ["libragrad", "cp-lrp"])
def test_scores_sum_to_target_without_biases(family: str, method: str) -> None:
    """Positions are rotary, so that all of the target comes from the tokens."""
    e = modified_gradients.explain_bias_free_decoder(family, method)
    assert e.scores.sum() == pytest.approx(e.target["value"], rel=modified_gradients.ROTARY_TOLERANCE)
    other = modified_gradients.explain_bias_free_decoder(family, "attn-lrp")
    assert abs(other.scores.sum() - e.target["value"]) > 0.01 * abs(e.target["value"]), "or the test could not fail"
