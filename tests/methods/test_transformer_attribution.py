"""Transformer Attribution against its replica: whole matrices, layers, heads, rows divided by their sums."""

import copy

import pytest
import torch

import clearhead
from tests import models
from tests.methods import replica_comparison
from tests.methods.relevance_models import SUBJECTS, VARIANTS, WITHIN, explained, walked
from tests.replicas import transformer_attribution as replica


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_equals_its_replica(subject: str, variant: str, normalise: bool) -> None:
    options = {"rules": variant, "normalise": normalise}
    rows = explained(subject, "transformer-attribution", options)
    whole = explained(subject, "transformer-attribution", {**options, "rows": "all"})
    for row, every, (found, seen, readout) in zip(rows, whole, walked(subject, variant), strict=True):
        expected = replica.matrix(found, seen.attention_gradient, normalise=normalise)
        assert replica_comparison.gap(every.matrix, expected) < WITHIN[subject]
        assert replica_comparison.gap(row.scores, readout @ expected) < WITHIN[subject]


@pytest.mark.parametrize("layers", replica_comparison.RANGES, ids=str)
@pytest.mark.parametrize("heads", [None, *replica_comparison.HEADS], ids=str)
def test_layers_and_heads(layers: tuple, heads: tuple | None) -> None:
    own = explained("bert/classify", "transformer-attribution", {}, layers=layers[0], heads=heads and heads[0])
    for e, (found, seen, readout) in zip(own, walked("bert/classify", "ours"), strict=True):
        expected = replica.scores(found, seen.attention_gradient, readout, layers[1], heads and heads[1])
        assert replica_comparison.gap(e.scores, expected) < WITHIN["bert/classify"]


def test_beside_other_methods_nothing_changes() -> None:
    """Methods by the same rules share a pass; those by others have their own."""
    ex, texts = replica_comparison.explainer("bert/classify"), models.inputs("bert/classify")
    methods = ["transformer-attribution", "lrp", "partial-lrp", "attn-lrp", "generic"]
    methods.append(clearhead.Method("transformer-attribution", rules="orig"))
    together = ex.explain(texts, methods)
    for method in methods:
        for e, alone in zip(together[str(method)], ex.explain(texts, method), strict=True):
            assert replica_comparison.gap(e.scores, alone.scores) < 1e-12


def test_scale_of_the_target_matters() -> None:
    """Unlike where gradients alone are summed: the identity keeps its size. Said here, so that nobody is surprised."""
    text = replica_comparison.SENTENCES[0]
    one, ten = (
        replica_comparison.with_classifier_times("bert/classify", factor)
        .explain(text, "transformer-attribution", target=1)
        .scores
        for factor in (1, 10)
    )
    assert replica_comparison.gap(ten / ten.sum(), one / one.sum()) > 1e-3


@pytest.mark.parametrize("rules", VARIANTS)
@pytest.mark.parametrize("subject", ["bert/mask", "modernbert/classify", "beit/image"])
def test_of_a_float32_model_both_passes_run_in_float64(subject: str, rules: str) -> None:
    """So its scores are those of the same weights in float64, rounded once."""
    narrow = models.explainer(subject, torch.float32)
    wide = clearhead.load(copy.deepcopy(narrow.adapter.model).double(), narrow.adapter.processor)
    method = clearhead.Method("transformer-attribution", rules=rules)
    one, other = (ex.explain(models.inputs(subject), method) for ex in (narrow, wide))
    for mine, yours in zip(one, other, strict=True):
        assert replica_comparison.gap(mine.scores, yours.scores) < 1e-6
