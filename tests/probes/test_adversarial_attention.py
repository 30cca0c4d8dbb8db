"""The adversary respects its bounds and finds weights near the attainable divergence."""

import numpy as np
import pytest
import torch

from clearhead import probes
from clearhead.errors import InputError
from clearhead.probes.adversarial_attention import _compute_smooth_jsd
from clearhead.probes.divergences import MAX_JSD, compute_js_divergence, compute_max_jsd
from tests.models import TEXTS, explainer

SMALL = {"steps": 12, "sets": 2}


@pytest.mark.parametrize("scope", [{}, {"scope": "S2"}, {"scope": "S3", "layer": 1, "heads": [1]}])
def test_adversary_respects_tolerance_and_attainable_bound(scope):
    result = probes.run_adversary_probe(explainer("bert/classify"), TEXTS[:2], tolerance=0.2, **SMALL, **scope)
    jsd, bound = result.get_column("JSD"), result.get_column("attainable JSD")
    assert (jsd >= 0).all() and (jsd <= bound + 1e-12).all() and (bound < MAX_JSD).all()
    assert (result.get_column("TVD") <= 0.2).all()


def test_any_weights_are_allowed_if_values_are_zero():
    ex = explainer("bert/classify")
    ex.adapter.model.bert.encoder.layer[-1].attention.self.value.weight.data.zero_()
    result = probes.run_adversary_probe(ex, TEXTS[0], steps=200, sets=2)
    (record,) = result.records
    assert record["TVD"] < 1e-12 and record["JSD"] > 0.7 * record["attainable JSD"]
    model_weights, adversarial_weights = torch.tensor(record["own weights"]), torch.tensor(record["other weights"])
    assert float(model_weights.sum()) == pytest.approx(1) and float(adversarial_weights.sum()) == pytest.approx(1)
    assert len(record["tokens"]) == len(model_weights) == len(adversarial_weights)


def test_no_tolerance_keeps_the_models_weights():
    (record,) = probes.run_adversary_probe(explainer("bert/classify"), TEXTS[0], tolerance=-1.0, **SMALL).records
    assert record["JSD"] == 0 and record["TVD"] == 0 and record["own weights"] == record["other weights"]


def test_last_row_search_equals_full_model_search(monkeypatch):
    ex = explainer("bert/classify")
    short = probes.run_adversary_probe(ex, TEXTS[0], tolerance=1.0, **SMALL)
    monkeypatch.setattr("clearhead.probes.adversarial_attention.has_last_row_shortcut", lambda probed: False)
    full = probes.run_adversary_probe(ex, TEXTS[0], tolerance=1.0, **SMALL)
    for column in ("JSD", "attainable JSD", "TVD"):
        assert np.allclose(short.get_column(column), full.get_column(column), atol=1e-8)


def test_smooth_jsd_equals_jsd():
    p, q = torch.rand(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).softmax(-1)
    assert float(_compute_smooth_jsd(p, q)) == pytest.approx(float(compute_js_divergence(p, q)), abs=1e-9)
    assert float(compute_max_jsd(p, torch.ones(5, dtype=torch.bool))) >= float(compute_js_divergence(p, q))


def test_zero_steps_are_rejected():
    with pytest.raises(InputError, match="at least 1"):
        probes.run_adversary_probe(explainer("bert/classify"), TEXTS, steps=0)
