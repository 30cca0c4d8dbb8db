"""The correlation probe equals a reference implementation on BERT; chance levels and other kinds of models."""

import numpy as np
import pytest

from clearhead import probes
from clearhead.adapters.base import InputOptions
from tests.models import TEXTS, explainer, inputs
from tests.replicas import probes as replica


@pytest.fixture(scope="module")
def ex():
    return explainer("bert/classify")


@pytest.fixture(scope="module")
def record(ex):
    return probes.run_correlation_probe(ex, TEXTS[1], unit="token").records[0]


@pytest.fixture(scope="module")
def ids(ex):
    return ex.adapter.make_samples(TEXTS[1], InputOptions())[0].inputs["input_ids"]


@pytest.mark.parametrize(("kind", "detached"), [("gradient", False), ("gradient, attention detached", True)])
def test_gradient_tau_equals_reference_implementation(ex, ids, record, kind, detached):
    _, _, maps = replica.bert(ex.adapter.model, ids)
    row = maps[-1][:, 0].mean(0)[1:-1].detach().numpy()
    expected = replica.tau_b(row, replica.gradient(ex.adapter.model, ids, detached)[1:-1])
    assert record[f"τ(last row, {kind})"] == pytest.approx(expected, abs=1e-12)


def test_detaching_attention_changes_the_gradient(ex, ids):
    attached, detached_gradient = (replica.gradient(ex.adapter.model, ids, detached) for detached in (False, True))
    assert not np.allclose(attached, detached_gradient, rtol=1e-2)


@pytest.mark.parametrize("how", ["mask", "delete"])
def test_leave_one_out_tau_equals_reference_implementation(ex, ids, record, how):
    _, _, maps = replica.bert(ex.adapter.model, ids)
    differences = replica.leave_one_out(
        ex.adapter.model, ids, ex.adapter.processor.mask_token_id if how == "mask" else None
    )
    for head in range(4):
        row = maps[-1][head, 0][1:-1].detach().numpy()
        assert replica.tau_b(row, differences) <= record[f"τ(best head, left out ({how}))"] + 1e-12
    mean = maps[-1][:, 0].mean(0)[1:-1].detach().numpy()
    assert record[f"τ(last row, left out ({how}))"] == pytest.approx(replica.tau_b(mean, differences), abs=1e-12)


def test_best_head_has_a_positive_chance_level(ex):
    result = probes.run_correlation_probe(ex, TEXTS)
    assert result.get_column("chance, best head").mean() > result.get_column("chance, last row").mean() + 0.1
    assert abs(result.get_column("chance, last row").mean()) < 0.2
    assert set(result.tables["share significant"]) == {f.name for f in result.estimates if f.name.startswith("τ(")}


def test_correlation_supports_masked_words_and_models_with_returned_attention():
    for name in ("roberta/mask", "deberta/classify"):
        result = probes.run_correlation_probe(explainer(name), inputs(name)[1:2])
        assert -1 <= result.get_column("τ(last row, gradient)")[0] <= 1
