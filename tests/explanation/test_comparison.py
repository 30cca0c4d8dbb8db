"""Agreement of methods on one input."""

import json

import numpy as np
import pytest
import scipy
import torch

import clearhead
from clearhead import InputError, Method
from tests import joint_models
from tests.models import TEXTS, explainer, inputs


def test_agreement_is_kendalls_tau_without_special_tokens() -> None:
    ex = explainer("bert/classify")
    comparison = clearhead.compare(ex, TEXTS[1], ["generic", "grad-sam", "random"])
    assert comparison.methods == list(comparison) == ["generic", "grad-sam", "random"]
    kept = comparison["generic"].units.content_indices()
    tau = comparison.agreement
    assert np.diag(tau) == pytest.approx(1) and tau == pytest.approx(tau.T)
    expected = scipy.stats.kendalltau(comparison["generic"].scores[kept], comparison["grad-sam"].scores[kept]).statistic
    assert tau[0, 1] == pytest.approx(expected)
    single = ex.explain(TEXTS[1], "grad-sam")
    assert comparison["grad-sam"].scores == pytest.approx(single.scores)


def test_comparison_accepts_method_options_and_images() -> None:
    ex = explainer("vit/image")
    last_layer = Method("generic", layers=(-1, None))
    comparison = clearhead.compare(ex, inputs("vit/image")[0], ["generic", last_layer], target=1)
    assert comparison.methods == ["generic", "generic(layers=(-1, None))"]
    assert all(e.target["index"] == 1 for e in comparison.explanations.values())


def test_agreement_with_constant_scores_is_nan() -> None:
    ex = explainer("bert/classify")
    comparison = clearhead.compare(ex, "I", ["generic", "cat"])
    assert np.isnan(comparison.agreement).all() or len(comparison["cat"].units.content_indices()) > 1
    form = json.loads(json.dumps(comparison.to_dict(), allow_nan=False))
    assert form["schema"] == "clearhead/comparison" and set(form["explanations"]) == {"generic", "cat"}


def test_invalid_comparisons_raise() -> None:
    ex = explainer("bert/classify")
    for methods in ("generic", ["generic"]):
        with pytest.raises(InputError, match="at least two methods"):
            clearhead.compare(ex, TEXTS[0], methods)
    with pytest.raises(InputError, match="different methods"):
        clearhead.compare(ex, TEXTS[0], ["cat", "cat"])
    with pytest.raises(InputError, match="one input"):
        clearhead.compare(ex, TEXTS, ["cat", "attcat"])
    with pytest.raises(InputError, match="several were given"):
        clearhead.compare(ex, {"input_ids": torch.tensor([[5, 6], [7, 8]])}, ["cat", "attcat"])


def test_default_methods_are_those_that_apply() -> None:
    assert clearhead.compare(explainer("bert/classify"), TEXTS[0]).methods == ["ensemble", "generic", "grad-sam"]
    lxmert = joint_models.explainer("lxmert")
    comparison = clearhead.compare(lxmert, text=TEXTS[0], regions=joint_models.regions(3))
    assert comparison.methods == ["ensemble", "generic", "rollout"]
