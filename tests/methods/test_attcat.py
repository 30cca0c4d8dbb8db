"""AttCAT, with received attention and with the read-out row, equals its reference implementation."""

import numpy as np
import pytest
import torch

import clearhead
from tests.methods import replica_comparison


@pytest.mark.parametrize("weights", ["received", "row"])
@pytest.mark.parametrize("subject", replica_comparison.SUBJECTS)
def test_equals_reference_implementation(subject: str, weights: str) -> None:
    replica_comparison.assert_equals_reference("attcat", subject, weights=weights)


@pytest.mark.parametrize("weights", ["received", "row"])
@pytest.mark.parametrize("layers", replica_comparison.LAYER_RANGES, ids=str)
@pytest.mark.parametrize("heads", [None, *replica_comparison.HEADS], ids=str)
def test_selected_layers_and_heads_equal_reference(layers: tuple, heads: tuple | None, weights: str) -> None:
    for subject in ("bert/classify", "dinov2/image"):
        replica_comparison.assert_equals_reference("attcat", subject, layers=layers, heads=heads, weights=weights)


@pytest.mark.parametrize("target", replica_comparison.TARGETS)
@pytest.mark.parametrize("subject", ["bert/classify", "roberta/mask", "vit/image"])
def test_targets_and_scales_equal_reference(subject: str, target: str) -> None:
    replica_comparison.assert_equals_reference("attcat", subject, target=target)


@pytest.mark.parametrize("weights", ["received", "row"])
def test_masked_special_tokens_have_zero_scores(weights: str) -> None:
    """The authors mask [CLS] and [SEP] during attribution: no token attends to them, so their scores are zero."""
    ex = replica_comparison.explainer("bert/classify")
    inputs = replica_comparison.SENTENCES[0]
    mask = torch.zeros_like(inputs["attention_mask"])
    mask[:, 1:-1] = 1
    e = ex.explain({**inputs, "attention_mask": mask}, clearhead.Method("attcat", weights=weights))
    assert list(np.flatnonzero(e.scores == 0)) == [0, len(e) - 1]
