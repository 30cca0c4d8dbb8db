"""Permuted and uniform attention: the last-row shortcut equals the full model; cases that must have no effect."""

import numpy as np
import pytest
import torch

from clearhead import probes
from clearhead.errors import InputError, UnsupportedError
from clearhead.probes import permuted_attention as permuted_attention
from clearhead.probes.permuted_attention import permute_weights
from clearhead.probes.uniform_attention import MEAN_ATTENTION_PREFIX
from tests.invariants.model_snapshot import of_model
from tests.models import TEXTS, explainer, inputs


@pytest.mark.parametrize("name", ["bert/classify", "albert/classify", "roberta/mask", "distilbert/mask"])
def test_last_row_shortcut_equals_full_model(name, monkeypatch):
    ex, texts = explainer(name), inputs(name)
    before = of_model(ex.adapter.model)
    shortcut = probes.run_permutation_probe(ex, texts, draws=5)
    assert of_model(ex.adapter.model) == before
    monkeypatch.setattr(permuted_attention, "has_last_row_shortcut", lambda probed: False)
    full = probes.run_permutation_probe(ex, texts, draws=5)
    for column in ("median TVD", "largest weight", "flips"):
        assert np.allclose(shortcut.get_column(column), full.get_column(column), atol=1e-10)
    assert shortcut.get_column("median TVD").min() > 1e-6


def test_batch_equals_single():
    ex = explainer("bert/classify")
    batched = probes.run_permutation_probe(ex, TEXTS, draws=4)
    for text, record in zip(TEXTS, batched.records, strict=True):
        (single,) = probes.run_permutation_probe(ex, text, draws=4).records
        assert single["median TVD"] == pytest.approx(record["median TVD"], abs=1e-12)


@pytest.mark.parametrize("scope", [{}, {"scope": "S2"}, {"scope": "S3", "layer": 0}, {"scope": "S4"}])
def test_identity_permutation_changes_nothing(scope, monkeypatch):
    monkeypatch.setattr(permuted_attention, "permute_weights", lambda weights, movable, noise: weights)
    result = probes.run_permutation_probe(explainer("bert/classify"), TEXTS[:2], draws=2, **scope)
    assert result.get_column("median TVD").max() < 1e-14  # rounding differs with the size of a batch
    assert not result.get_column("flips").any()


def test_larger_scopes_change_more():
    ex = explainer("bert/classify")
    small = probes.run_permutation_probe(ex, TEXTS, draws=8).get_column("median TVD")
    large = probes.run_permutation_probe(ex, TEXTS, "S4", draws=8).get_column("median TVD")
    head = probes.run_permutation_probe(ex, TEXTS, "S3", layer=1, heads=[0], draws=8).get_column("median TVD")
    assert large.mean() > head.mean() > 0 and large.mean() > small.mean()


def test_weights_on_special_units_and_self_can_be_kept():
    weights = torch.rand(50, 3, 9, generator=torch.Generator().manual_seed(0))
    movable = torch.tensor([False, True, True, False, True, True, True, True, False])
    noise = torch.rand(50, 3, 9, generator=torch.Generator().manual_seed(1))
    permuted = permute_weights(weights, movable, noise)
    assert torch.equal(permuted[..., ~movable], weights[..., ~movable])
    assert torch.equal(permuted.sort(-1).values, weights.sort(-1).values)
    assert not torch.equal(permuted, weights)


def test_permutations_are_uniformly_distributed():
    noise = torch.rand(6000, 3, generator=torch.Generator().manual_seed(0))
    permuted = permute_weights(torch.arange(3.0).expand(6000, 3), torch.ones(3, dtype=torch.bool), noise)
    _, counts = permuted.unique(dim=0, return_counts=True)
    assert len(counts) == 6 and (counts - 1000).abs().max() < 120


def test_uniform_changes_the_output_only_if_values_are_nonzero():
    ex = explainer("bert/classify")
    changed = probes.run_uniform_probe(ex, TEXTS)
    assert changed.get_column("TVD, all layers").min() > 1e-6 and changed.get_column("TVD, read-out row").min() > 1e-6
    for layer in ex.adapter.model.bert.encoder.layer:
        layer.attention.self.value.weight.data.zero_()
    unchanged = probes.run_uniform_probe(ex, TEXTS)
    assert unchanged.get_column("TVD, all layers").max() < 1e-14


def test_mean_attention_is_identity_for_equal_inputs_and_uniform_for_one_input():
    ex = explainer("bert/classify")
    equal_inputs = probes.run_uniform_probe(ex, [TEXTS[0]] * 3)
    names = [key for key in equal_inputs.records[0] if key.startswith(f"TVD, {MEAN_ATTENTION_PREFIX}")]
    assert len(names) == 5 and all(equal_inputs.get_column(name).max() < 1e-9 for name in names)
    (single,) = probes.run_uniform_probe(ex, TEXTS[0]).records
    for name in names:
        assert single[name] == pytest.approx(single[name.replace(MEAN_ATTENTION_PREFIX, "")], abs=1e-12)
    mixed = probes.run_uniform_probe(ex, TEXTS)
    assert mixed.get_column(f"TVD, {MEAN_ATTENTION_PREFIX}all layers").min() > 1e-7


def test_unsupported_requests_are_rejected():
    ex = explainer("bert/classify")
    with pytest.raises(InputError, match="specify it with layer="):
        probes.run_permutation_probe(ex, TEXTS, "S3")
    with pytest.raises(InputError, match="unknown scope"):
        probes.run_permutation_probe(ex, TEXTS, "S5")
    with pytest.raises(InputError, match="at least 1"):
        probes.run_permutation_probe(ex, TEXTS, draws=0)
    with pytest.raises(UnsupportedError, match="rows of its last layer"):
        probes.run_permutation_probe(explainer("modernbert/classify", classifier_pooling="mean"), TEXTS)


def test_result_has_a_conclusion_and_serialises():
    result = probes.run_permutation_probe(explainer("bert/classify"), TEXTS, draws=3)
    data = result.to_dict()
    assert data["estimates"][0]["count"] == len(TEXTS) and data["records"][0]["input"] == TEXTS[0]
    low, mean, high = (data["estimates"][0][name] for name in ("low", "mean", "high"))
    assert low <= mean <= high and "does not show" in data["conclusion"]
