"""Correlation against a slow twin on BERT, and at its limits."""

import numpy as np
import pytest

from clearhead import probes
from clearhead.adapters.base import How
from tests.models import TEXTS, explainer, inputs
from tests.replicas import probes as replica


@pytest.fixture(scope="module")
def ex():
    return explainer("bert/classify")


@pytest.fixture(scope="module")
def found(ex):
    return probes.correlation(ex, TEXTS[1], unit="token").lines[0]


@pytest.fixture(scope="module")
def ids(ex):
    return ex.subject.samples(TEXTS[1], How())[0].inputs["input_ids"]


@pytest.mark.parametrize(("kind", "detached"), [("gradient", False), ("gradient, attention detached", True)])
def test_tau_with_the_gradient_is_that_of_the_slow_twin(ex, ids, found, kind, detached):
    _, _, maps = replica.bert(ex.subject.model, ids)
    row = maps[-1][:, 0].mean(0)[1:-1].detach().numpy()
    slow = replica.tau_b(row, replica.gradient(ex.subject.model, ids, detached)[1:-1])
    assert found[f"τ(last row, {kind})"] == pytest.approx(slow, abs=1e-12)


def test_detaching_attention_makes_another_gradient(ex, ids):
    with_it, without = (replica.gradient(ex.subject.model, ids, detached) for detached in (False, True))
    assert not np.allclose(with_it, without, rtol=1e-2)


@pytest.mark.parametrize("how", ["mask", "delete"])
def test_tau_with_leaving_out_is_that_of_the_slow_twin(ex, ids, found, how):
    _, _, maps = replica.bert(ex.subject.model, ids)
    left_out = replica.left_out(ex.subject.model, ids, ex.subject.processor.mask_token_id if how == "mask" else None)
    for head in range(4):
        row = maps[-1][head, 0][1:-1].detach().numpy()
        assert replica.tau_b(row, left_out) <= found[f"τ(best head, left out ({how}))"] + 1e-12
    mean = maps[-1][:, 0].mean(0)[1:-1].detach().numpy()
    assert found[f"τ(last row, left out ({how}))"] == pytest.approx(replica.tau_b(mean, left_out), abs=1e-12)


def test_the_best_of_several_heads_has_a_chance_level_above_zero(ex):
    result = probes.correlation(ex, TEXTS)
    assert result.column("chance, best head").mean() > result.column("chance, last row").mean() + 0.1
    assert abs(result.column("chance, last row").mean()) < 0.2
    assert set(result.tables["share significant"]) == {f.name for f in result.findings if f.name.startswith("τ(")}


def test_masked_words_and_models_that_return_their_attention_are_correlated_too():
    for name in ("roberta/mask", "deberta/classify"):
        result = probes.correlation(explainer(name), inputs(name)[1:2])
        assert -1 <= result.column("τ(last row, gradient)")[0] <= 1
