"""Generic Attention equals its reference implementation; checks (c), (d) and pitfalls 1, 4, 6 of the specification."""

import copy
from typing import Any

import numpy as np
import pytest
import scipy
import torch

import clearhead
from tests import models
from tests.methods import replica_comparison
from tests.replicas import generic


@pytest.mark.parametrize("subject", replica_comparison.SUBJECTS)
def test_equals_reference_implementation(subject: str) -> None:
    replica_comparison.assert_equals_reference("generic", subject)


@pytest.mark.parametrize("subject", replica_comparison.ONE_PER_READOUT)
def test_all_rows_equal_reference(subject: str) -> None:
    replica_comparison.assert_equals_reference("generic", subject, all_rows=True)


@pytest.mark.parametrize("layers", replica_comparison.LAYER_RANGES, ids=str)
@pytest.mark.parametrize("heads", [None, *replica_comparison.HEADS], ids=str)
def test_selected_layers_and_heads_equal_reference(layers: tuple, heads: tuple | None) -> None:
    replica_comparison.assert_equals_reference("generic", "bert/classify", layers=layers, heads=heads)
    replica_comparison.assert_equals_reference("generic", "dinov2/image", layers=layers, heads=heads, all_rows=True)


@pytest.mark.parametrize("fusion", ["mean-clamp", "separate-means"])
@pytest.mark.parametrize("subject", ["bert/classify", "beit/image", "modernbert/mask"])
def test_fusion_options_equal_reference_and_change_scores(subject: str, fusion: str) -> None:
    """All rows, so that the full matrix is compared; each order of clamp and mean gives other scores."""
    replica_comparison.assert_equals_reference("generic", subject, fusion=fusion, all_rows=True)
    ex, raw = replica_comparison.explainer(subject), models.inputs(subject)[0]
    other = ex.explain(raw, clearhead.Method("generic", fusion=fusion), per="head")
    assert other.per_head is None and other.per_layer.sum(0) == pytest.approx(other.scores)
    assert replica_comparison.gap(ex.explain(raw, method="generic").scores, other.scores) > 0.05


@pytest.mark.parametrize("target", replica_comparison.TARGETS)
@pytest.mark.parametrize("subject", ["bert/classify", "roberta/mask", "vit/image"])
def test_targets_and_scales_equal_reference(subject: str, target: str) -> None:
    replica_comparison.assert_equals_reference("generic", subject, target=target)


@pytest.mark.parametrize("subject", ["modernbert/classify"])
def test_padded_batch_with_sliding_window_equals_reference(subject: str) -> None:
    """ModernBERT computes its softmax in float32, which limits the agreement of a padded batch."""
    assert replica_comparison.compute_largest_gap("generic", subject, batch_size=3) < 1e-5


def test_one_layer_equals_the_mean_positive_map() -> None:
    """(c): R = I + Ā; scores leave out the identity."""
    ex, raw = replica_comparison.explainer("bert/classify"), models.inputs("bert/classify")
    for layer in range(3):
        layers = (layer, layer + 1)
        results = ex.explain(raw, "generic", layers=layers, rows="all")
        for e, (seen, _) in zip(results, replica_comparison.record_plain_passes("bert/classify"), strict=True):
            maps = seen.attention[layer] * seen.attention_gradient[layer]
            assert replica_comparison.gap(e.matrix, np.where(maps > 0, maps, 0).mean(0)) < 1e-12


@pytest.mark.parametrize("subject", replica_comparison.ONE_PER_READOUT)
def test_all_layers_equal_the_explicit_product(subject: str) -> None:
    """(d): R = (I + Ā_2)(I + Ā_1)(I + Ā_0)."""
    results = replica_comparison.explainer(subject).explain(models.inputs(subject), "generic", rows="all", batch_size=1)
    for e, (seen, _) in zip(results, replica_comparison.record_plain_passes(subject), strict=True):
        identity = np.eye(seen.units)
        first, second, third = (identity + generic.mean_positive(seen, layer) for layer in range(3))
        assert replica_comparison.gap(e.matrix + identity, third @ second @ first) < 1e-6
        assert replica_comparison.gap(e.matrix, third @ second @ first - identity) < 1e-6


def test_scores_are_not_linear_in_the_scale_of_the_target() -> None:
    """Pitfall 1: Π(I + c Ā) is not homogeneous in c, so ten times the logits is not ten times the scores."""
    text = replica_comparison.SENTENCES[0]
    scores, scaled_scores = (
        replica_comparison.load_with_scaled_classifier("bert/classify", factor)
        .explain(text, "generic", target=1)
        .scores
        for factor in (1, 10)
    )
    assert replica_comparison.gap(scaled_scores, 10 * scores) > 0.05
    assert (np.argsort(scores) != np.argsort(scaled_scores)).any(), "the order of the tokens changes, too"


def test_scores_of_one_layer_are_linear_in_the_scale_of_the_target() -> None:
    text = replica_comparison.SENTENCES[0]
    scores, scaled_scores = (
        replica_comparison.load_with_scaled_classifier("bert/classify", factor)
        .explain(text, "generic", target=1, layers=(-1, None))
        .scores
        for factor in (1, 10)
    )
    assert replica_comparison.gap(scaled_scores, 10 * scores) < 1e-12


@pytest.mark.parametrize("rows", [None, "all"])
def test_tiny_gradients_keep_precision_in_float32(rows: str | None) -> None:
    """Pitfall 6: with logits of size 1e-9, I + Ā would round to I in float32; the identity is never added."""
    text = replica_comparison.SENTENCES[0]
    single, double = (
        replica_comparison.load_with_scaled_classifier("bert/classify", 1e-9, dtype=dtype).explain(
            text, "generic", target=1, rows=rows
        )
        for dtype in (torch.float32, torch.float64)
    )
    pair = (single.matrix, double.matrix) if rows else (single.scores, double.scores)
    assert 0 < np.abs(pair[1]).max() < 1e-7
    np.testing.assert_allclose(*pair, rtol=1e-3, atol=1e-5 * np.abs(pair[1]).max())


@pytest.mark.parametrize("subject", ["bert/classify", "modernbert/mask", "vit/image", "dinov2/image"])
def test_bfloat16_scores_are_close_to_float32(subject: str) -> None:
    """Pitfall 4: maps have half precision, relevance is accumulated in float32."""
    half_explainer = models.explainer(subject, torch.bfloat16, initializer_range=0.1)
    full_explainer = clearhead.load(
        (copy.deepcopy(half_explainer.adapter.model).float(), half_explainer.adapter.processor)
    )
    inputs = models.inputs(subject)
    for bfloat16, float32 in zip(
        half_explainer.explain(inputs, target=1, method="generic"),
        full_explainer.explain(inputs, target=1, method="generic"),
        strict=True,
    ):
        assert bfloat16.scores.dtype == np.float32
        assert replica_comparison.gap(bfloat16.scores, float32.scores) < 0.03
        assert scipy.stats.spearmanr(bfloat16.scores, float32.scores).statistic > 0.97


@pytest.mark.parametrize("option", [{"normalise": False}, {"within": False}, {"guard": "none"}])
def test_cross_stream_options_are_rejected_for_one_stream(option: dict[str, Any]) -> None:
    with pytest.raises(clearhead.InputError, match="streams that attend to each other"):
        replica_comparison.explainer("bert/classify").explain("a text", clearhead.Method("generic", **option))
