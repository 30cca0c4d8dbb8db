"""The adversary stays in its bounds, and finds what can be found."""

import numpy as np
import pytest
import torch

from clearhead import probes
from clearhead.errors import InputError
from clearhead.probes.adversarial_attention import _smooth
from clearhead.probes.divergences import LARGEST, attainable, jensen_shannon
from tests.models import TEXTS, explainer

SMALL = {"steps": 12, "sets": 2}


@pytest.mark.parametrize("scope", [{}, {"scope": "S2"}, {"scope": "S3", "layer": 1, "heads": [1]}])
def test_what_is_found_keeps_the_answer_and_the_bounds(scope):
    result = probes.adversary(explainer("bert/classify"), TEXTS[:2], tolerance=0.2, **SMALL, **scope)
    found, bound = result.column("JSD"), result.column("attainable JSD")
    assert (found >= 0).all() and (found <= bound + 1e-12).all() and (bound < LARGEST).all()
    assert (result.column("TVD") <= 0.2).all()


def test_where_values_are_zero_any_weights_give_the_same_answer():
    ex = explainer("bert/classify")
    ex.subject.model.bert.encoder.layer[-1].attention.self.value.weight.data.zero_()
    result = probes.adversary(ex, TEXTS[0], steps=200, sets=2)
    (line,) = result.lines
    assert line["TVD"] < 1e-12 and line["JSD"] > 0.7 * line["attainable JSD"]
    own, other = torch.tensor(line["own weights"]), torch.tensor(line["other weights"])
    assert float(own.sum()) == pytest.approx(1) and float(other.sum()) == pytest.approx(1)
    assert len(line["tokens"]) == len(own) == len(other)


def test_where_nothing_is_allowed_the_own_weights_stay():
    (line,) = probes.adversary(explainer("bert/classify"), TEXTS[0], tolerance=-1.0, **SMALL).lines
    assert line["JSD"] == 0 and line["TVD"] == 0 and line["own weights"] == line["other weights"]


def test_the_search_on_one_row_is_the_search_in_the_whole_model(monkeypatch):
    ex = explainer("bert/classify")
    short = probes.adversary(ex, TEXTS[0], tolerance=1.0, **SMALL)
    monkeypatch.setattr("clearhead.probes.adversarial_attention.shortens", lambda probed: False)
    whole = probes.adversary(ex, TEXTS[0], tolerance=1.0, **SMALL)
    for column in ("JSD", "attainable JSD", "TVD"):
        assert np.allclose(short.column(column), whole.column(column), atol=1e-8)


def test_the_smooth_divergence_is_the_divergence():
    p, q = torch.rand(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).softmax(-1)
    assert float(_smooth(p, q)) == pytest.approx(float(jensen_shannon(p, q)), abs=1e-9)
    assert float(attainable(p, torch.ones(5, dtype=torch.bool))) >= float(jensen_shannon(p, q))


def test_no_search_is_refused():
    with pytest.raises(InputError, match="at least 1"):
        probes.adversary(explainer("bert/classify"), TEXTS, steps=0)
