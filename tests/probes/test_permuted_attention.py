"""Permutation and uniform: the short way is the long way, and what must be nothing is nothing."""

import numpy as np
import pytest
import torch

from clearhead import probes
from clearhead.errors import InputError, Refusal
from clearhead.probes import permuted_attention as page
from clearhead.probes.permuted_attention import shuffled
from clearhead.probes.uniform_attention import MEAN
from tests.invariants.model_snapshot import of_model
from tests.models import TEXTS, explainer, inputs


@pytest.mark.parametrize("name", ["bert/classify", "albert/classify", "roberta/mask", "distilbert/mask"])
def test_the_last_row_alone_gives_what_the_whole_model_gives(name, monkeypatch):
    ex, texts = explainer(name), inputs(name)
    before = of_model(ex.subject.model)
    short = probes.permutation(ex, texts, draws=5)
    assert of_model(ex.subject.model) == before
    monkeypatch.setattr(page, "shortens", lambda probed: False)
    whole = probes.permutation(ex, texts, draws=5)
    for column in ("median TVD", "largest weight", "flips"):
        assert np.allclose(short.column(column), whole.column(column), atol=1e-10)
    assert short.column("median TVD").min() > 1e-6


def test_one_input_gives_the_same_alone_and_among_others():
    ex = explainer("bert/classify")
    together = probes.permutation(ex, TEXTS, draws=4)
    for text, line in zip(TEXTS, together.lines, strict=True):
        (alone,) = probes.permutation(ex, text, draws=4).lines
        assert alone["median TVD"] == pytest.approx(line["median TVD"], abs=1e-12)


@pytest.mark.parametrize("scope", [{}, {"scope": "S2"}, {"scope": "S3", "layer": 0}, {"scope": "S4"}])
def test_the_identity_moves_nothing(scope, monkeypatch):
    monkeypatch.setattr(page, "shuffled", lambda weights, movable, noise: weights)
    found = probes.permutation(explainer("bert/classify"), TEXTS[:2], draws=2, **scope)
    assert found.column("median TVD").max() < 1e-14  # rounding differs with the size of a batch
    assert not found.column("flips").any()


def test_scopes_reach_farther_and_farther():
    ex = explainer("bert/classify")
    small = probes.permutation(ex, TEXTS, draws=8).column("median TVD")
    large = probes.permutation(ex, TEXTS, "S4", draws=8).column("median TVD")
    head = probes.permutation(ex, TEXTS, "S3", layer=1, heads=[0], draws=8).column("median TVD")
    assert large.mean() > head.mean() > 0 and large.mean() > small.mean()


def test_weights_on_special_units_and_on_itself_can_be_kept():
    weights = torch.rand(50, 3, 9, generator=torch.Generator().manual_seed(0))
    movable = torch.tensor([False, True, True, False, True, True, True, True, False])
    noise = torch.rand(50, 3, 9, generator=torch.Generator().manual_seed(1))
    moved = shuffled(weights, movable, noise)
    assert torch.equal(moved[..., ~movable], weights[..., ~movable])
    assert torch.equal(moved.sort(-1).values, weights.sort(-1).values)
    assert not torch.equal(moved, weights)


def test_every_order_is_as_likely_as_any_other():
    noise = torch.rand(6000, 3, generator=torch.Generator().manual_seed(0))
    moved = shuffled(torch.arange(3.0).expand(6000, 3), torch.ones(3, dtype=torch.bool), noise)
    _, counts = moved.unique(dim=0, return_counts=True)
    assert len(counts) == 6 and (counts - 1000).abs().max() < 120


def test_uniform_changes_nothing_where_values_are_zero_and_something_where_not():
    ex = explainer("bert/classify")
    moved = probes.uniform(ex, TEXTS)
    assert moved.column("TVD, all layers").min() > 1e-6 and moved.column("TVD, row that is read").min() > 1e-6
    for layer in ex.subject.model.bert.encoder.layer:
        layer.attention.self.value.weight.data.zero_()
    still = probes.uniform(ex, TEXTS)
    assert still.column("TVD, all layers").max() < 1e-14


def test_mean_attention_moves_nothing_where_all_inputs_attend_alike_and_is_uniform_without_others():
    ex = explainer("bert/classify")
    alike = probes.uniform(ex, [TEXTS[0]] * 3)
    names = [key for key in alike.lines[0] if key.startswith(f"TVD, {MEAN}")]
    assert len(names) == 5 and all(alike.column(name).max() < 1e-9 for name in names)
    (alone,) = probes.uniform(ex, TEXTS[0]).lines
    for name in names:
        assert alone[name] == pytest.approx(alone[name.replace(MEAN, "")], abs=1e-12)
    apart = probes.uniform(ex, TEXTS)
    assert apart.column(f"TVD, {MEAN}all layers").min() > 1e-7


def test_what_cannot_be_probed_is_refused_in_words():
    ex = explainer("bert/classify")
    with pytest.raises(InputError, match="say which with layer="):
        probes.permutation(ex, TEXTS, "S3")
    with pytest.raises(InputError, match="unknown scope"):
        probes.permutation(ex, TEXTS, "S5")
    with pytest.raises(InputError, match="at least 1"):
        probes.permutation(ex, TEXTS, draws=0)
    with pytest.raises(Refusal, match="rows of its last layer"):
        probes.permutation(explainer("modernbert/classify", classifier_pooling="mean"), TEXTS)


def test_a_result_says_what_it_shows_and_becomes_plain_data():
    found = probes.permutation(explainer("bert/classify"), TEXTS, draws=3)
    data = found.to_dict()
    assert data["findings"][0]["count"] == len(TEXTS) and data["lines"][0]["input"] == TEXTS[0]
    low, mean, high = (data["findings"][0][name] for name in ("low", "mean", "high"))
    assert low <= mean <= high and "says nothing about" in data["says"]
