"""Generic Attention against its replica; checks (c) and (d) and traps 1, 4 and 6 of the specification."""

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
def test_equals_its_replica(subject: str) -> None:
    replica_comparison.assert_twins("generic", subject)


@pytest.mark.parametrize("subject", replica_comparison.FEW)
def test_every_row(subject: str) -> None:
    replica_comparison.assert_twins("generic", subject, every_row=True)


@pytest.mark.parametrize("layers", replica_comparison.RANGES, ids=str)
@pytest.mark.parametrize("heads", [None, *replica_comparison.HEADS], ids=str)
def test_layers_and_heads(layers: tuple, heads: tuple | None) -> None:
    replica_comparison.assert_twins("generic", "bert/classify", layers=layers, heads=heads)
    replica_comparison.assert_twins("generic", "dinov2/image", layers=layers, heads=heads, every_row=True)


@pytest.mark.parametrize("fusion", ["mean-clamp", "separate-means"])
@pytest.mark.parametrize("subject", ["bert/classify", "beit/image", "modernbert/mask"])
def test_heads_joined_in_another_order(subject: str, fusion: str) -> None:
    """Every row, so that the whole matrix is compared; the three orders give three answers."""
    replica_comparison.assert_twins("generic", subject, fusion=fusion, every_row=True)
    ex, raw = replica_comparison.explainer(subject), models.inputs(subject)[0]
    other = ex.explain(raw, clearhead.Method("generic", fusion=fusion), per="head")
    assert other.per_head is None and other.per_layer.sum(0) == pytest.approx(other.scores)
    assert replica_comparison.gap(ex.explain(raw).scores, other.scores) > 0.05


@pytest.mark.parametrize("target", replica_comparison.TARGETS)
@pytest.mark.parametrize("subject", ["bert/classify", "roberta/mask", "vit/image"])
def test_targets(subject: str, target: str) -> None:
    replica_comparison.assert_twins("generic", subject, target=target)


@pytest.mark.parametrize("subject", ["modernbert/classify"])
def test_padding_under_a_sliding_window(subject: str) -> None:
    """ModernBERT's softmax is float32's, so a padded batch agrees to what that leaves."""
    assert replica_comparison.worst_gap("generic", subject, batch_size=3) < 1e-5


def test_one_block_is_its_mean_positive_map() -> None:
    """(c): R = I + Ā, of which the identity is left out."""
    ex, raw = replica_comparison.explainer("bert/classify"), models.inputs("bert/classify")
    for layer in range(3):
        chosen = (layer, layer + 1)
        results = ex.explain(raw, "generic", layers=chosen, rows="all")
        for e, (seen, _) in zip(results, replica_comparison.slow_batch("bert/classify"), strict=True):
            maps = seen.attention[layer] * seen.attention_gradient[layer]
            assert replica_comparison.gap(e.matrix, np.where(maps > 0, maps, 0).mean(0)) < 1e-12


@pytest.mark.parametrize("subject", replica_comparison.FEW)
def test_all_blocks_are_the_explicit_product(subject: str) -> None:
    """(d): R = (I + Ā_2)(I + Ā_1)(I + Ā_0)."""
    results = replica_comparison.explainer(subject).explain(models.inputs(subject), "generic", rows="all", batch_size=1)
    for e, (seen, _) in zip(results, replica_comparison.slow_batch(subject), strict=True):
        one = np.eye(seen.units)
        first, second, third = (one + generic.mean_positive(seen, layer) for layer in range(3))
        assert replica_comparison.gap(e.matrix + one, third @ second @ first) < 1e-6
        assert replica_comparison.gap(e.matrix, third @ second @ first - one) < 1e-6


def test_is_not_scale_free() -> None:
    """Trap 1: Π(I + c Ā) is not homogeneous in c. Ten times the logits is not ten times the scores."""
    text = replica_comparison.SENTENCES[0]
    one, ten = (
        replica_comparison.with_classifier_times("bert/classify", factor).explain(text, "generic", target=1).scores
        for factor in (1, 10)
    )
    assert replica_comparison.gap(ten, 10 * one) > 0.05
    assert (np.argsort(one) != np.argsort(ten)).any(), "the order of the tokens changes, too"


def test_one_block_is_scale_free() -> None:
    text = replica_comparison.SENTENCES[0]
    one, ten = (
        replica_comparison.with_classifier_times("bert/classify", factor)
        .explain(text, "generic", target=1, layers=(-1, None))
        .scores
        for factor in (1, 10)
    )
    assert replica_comparison.gap(ten, 10 * one) < 1e-12


@pytest.mark.parametrize("rows", [None, "all"])
def test_tiny_gradients_are_not_lost_in_the_identity(rows: str | None) -> None:
    """Trap 6: at 1e-9 of the logits' size, I + Ā would be I in float32; what is never added cannot be lost."""
    text = replica_comparison.SENTENCES[0]
    narrow, wide = (
        replica_comparison.with_classifier_times("bert/classify", 1e-9, dtype=dtype).explain(
            text, "generic", target=1, rows=rows
        )
        for dtype in (torch.float32, torch.float64)
    )
    pair = (narrow.matrix, wide.matrix) if rows else (narrow.scores, wide.scores)
    assert 0 < np.abs(pair[1]).max() < 1e-7
    np.testing.assert_allclose(*pair, rtol=1e-3, atol=1e-5 * np.abs(pair[1]).max())


@pytest.mark.parametrize("subject", ["bert/classify", "modernbert/mask", "vit/image", "dinov2/image"])
def test_bfloat16_against_float32_of_the_same_weights(subject: str) -> None:
    """Trap 4: maps come in half precision, relevance is gathered in float32."""
    half = models.explainer(subject, torch.bfloat16, initializer_range=0.1)
    full = clearhead.load((copy.deepcopy(half.adapter.model).float(), half.adapter.processor))
    inputs = models.inputs(subject)
    for narrow, wide in zip(half.explain(inputs, target=1), full.explain(inputs, target=1), strict=True):
        assert narrow.scores.dtype == np.float32
        assert replica_comparison.gap(narrow.scores, wide.scores) < 0.03
        assert scipy.stats.spearmanr(narrow.scores, wide.scores).statistic > 0.97


@pytest.mark.parametrize("option", [{"normalise": False}, {"within": False}, {"guard": "none"}])
def test_rules_between_streams_are_refused_where_there_is_one(option: dict[str, Any]) -> None:
    with pytest.raises(clearhead.InputError, match="streams that attend to each other"):
        replica_comparison.explainer("bert/classify").explain("a text", clearhead.Method("generic", **option))
