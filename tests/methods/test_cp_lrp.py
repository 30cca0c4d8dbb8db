"""CP-LRP equals a replica of the paper; it differs from LibraGrad at gated units only."""

import numpy as np
import pytest

from tests import models
from tests.adapters import test_decoder as decoders
from tests.methods import modified_gradients, replica_comparison
from tests.replicas import cp_lrp


def test_text_scores_equal_replica() -> None:
    modified_gradients.assert_text_equals_replica("cp-lrp", cp_lrp.scores)


def test_image_scores_equal_replica() -> None:
    modified_gradients.assert_image_equals_replica("cp-lrp", cp_lrp.scores)


@pytest.mark.parametrize("family", modified_gradients.DECODERS)
def test_decoder_scores_equal_replica(family: str) -> None:
    modified_gradients.assert_decoder_equals_replica("cp-lrp", cp_lrp.scores, family)


@pytest.mark.parametrize("subject", ["bert/classify", "vit/image"])
def test_scores_equal_libragrad_without_gated_units(subject: str) -> None:
    results = replica_comparison.explainer(subject).explain(models.inputs(subject), ["cp-lrp", "libragrad"])
    for a, b in zip(results["cp-lrp"], results["libragrad"], strict=True):
        np.testing.assert_array_equal(a.scores, b.scores)


def test_scores_differ_from_libragrad_with_gated_units() -> None:
    results = decoders.explainer("llama").explain(modified_gradients.PROMPTS, ["cp-lrp", "libragrad"])
    for a, b in zip(results["cp-lrp"], results["libragrad"], strict=True):
        assert replica_comparison.gap(a.scores, b.scores) > 0.01
