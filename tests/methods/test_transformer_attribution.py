"""Transformer Attribution equals its reference implementation: full matrices, layers, heads, normalised rows."""

import copy

import pytest
import torch

import clearhead
from tests import models
from tests.methods import replica_comparison
from tests.methods.relevance_models import SUBJECTS, TOLERANCES, VARIANTS, explain_batch, walk_batch
from tests.replicas import transformer_attribution as replica


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_equals_reference_implementation(subject: str, variant: str, normalise: bool) -> None:
    options = {"rules": variant, "normalise": normalise}
    readout_results = explain_batch(subject, "transformer-attribution", options)
    all_rows_results = explain_batch(subject, "transformer-attribution", {**options, "rows": "all"})
    for row, all_rows, (relevance, seen, readout) in zip(
        readout_results, all_rows_results, walk_batch(subject, variant), strict=True
    ):
        expected = replica.matrix(relevance, seen.attention_gradient, normalise=normalise)
        assert replica_comparison.gap(all_rows.matrix, expected) < TOLERANCES[subject]
        assert replica_comparison.gap(row.scores, readout @ expected) < TOLERANCES[subject]


@pytest.mark.parametrize("layers", replica_comparison.LAYER_RANGES, ids=str)
@pytest.mark.parametrize("heads", [None, *replica_comparison.HEADS], ids=str)
def test_selected_layers_and_heads_equal_reference(layers: tuple, heads: tuple | None) -> None:
    results = explain_batch("bert/classify", "transformer-attribution", {}, layers=layers[0], heads=heads and heads[0])
    for e, (relevance, seen, readout) in zip(results, walk_batch("bert/classify", "ours"), strict=True):
        expected = replica.scores(relevance, seen.attention_gradient, readout, layers[1], heads and heads[1])
        assert replica_comparison.gap(e.scores, expected) < TOLERANCES["bert/classify"]


def test_shared_pass_does_not_change_scores() -> None:
    """Methods with the same rules share a pass; methods with other rules have their own."""
    ex, texts = replica_comparison.explainer("bert/classify"), models.inputs("bert/classify")
    methods = ["transformer-attribution", "lrp", "partial-lrp", "attn-lrp", "generic"]
    methods.append(clearhead.Method("transformer-attribution", rules="orig"))
    shared = ex.explain(texts, methods)
    for method in methods:
        for e, single in zip(shared[str(method)], ex.explain(texts, method), strict=True):
            assert replica_comparison.gap(e.scores, single.scores) < 1e-12


def test_normalised_scores_depend_on_the_scale_of_the_target() -> None:
    """Unlike methods that only sum gradients: the identity does not scale with the target."""
    text = replica_comparison.SENTENCES[0]
    scores, scaled_scores = (
        replica_comparison.load_with_scaled_classifier("bert/classify", factor)
        .explain(text, "transformer-attribution", target=1)
        .scores
        for factor in (1, 10)
    )
    assert replica_comparison.gap(scaled_scores / scaled_scores.sum(), scores / scores.sum()) > 1e-3


@pytest.mark.parametrize("rules", VARIANTS)
@pytest.mark.parametrize("subject", ["bert/mask", "modernbert/classify", "beit/image"])
def test_float32_model_scores_equal_float64_scores(subject: str, rules: str) -> None:
    """Both passes run in float64, so scores equal those of the same weights in float64."""
    single = models.explainer(subject, torch.float32)
    double = clearhead.load(copy.deepcopy(single.adapter.model).double(), single.adapter.processor)
    method = clearhead.Method("transformer-attribution", rules=rules)
    single_results, double_results = (ex.explain(models.inputs(subject), method) for ex in (single, double))
    for actual, expected in zip(single_results, double_results, strict=True):
        assert replica_comparison.gap(actual.scores, expected.scores) < 1e-6
