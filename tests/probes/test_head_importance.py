"""Heads: measures against slow twins, names of planted patterns, and the skip connection at its limits."""

import numpy as np
import pytest
import torch

from clearhead import probes
from clearhead.adapters.base import How
from clearhead.errors import Refusal
from clearhead.interventions.attention_patch import Patch, patched
from clearhead.probes.head_patterns import READINGS, figures, pattern
from tests.models import TEXTS, explainer
from tests.replicas import probes as replica

NAMES = ("[CLS]", "the", "cat", "saw", "the", "dog", "[SEP]")
SPECIAL = torch.tensor([name.startswith("[") for name in NAMES])


@pytest.fixture(scope="module")
def ex():
    return explainer("bert/classify")


@pytest.fixture(scope="module")
def found(ex):
    return probes.heads(ex, TEXTS[:1])


def planted(name):
    n = len(NAMES)
    maps = {
        "previous token": torch.eye(n).roll(-1, 1),
        "next token": torch.eye(n).roll(1, 1),
        "itself": torch.eye(n),
        "class token": torch.eye(n)[[0] * n],
        "separator": torch.eye(n)[[n - 1] * n],
        "same word": torch.eye(n)[[5, 4, 3, 5, 1, 2, 3]],
        "one unit": torch.eye(n)[[2] * n],
        "broad": torch.full((n, n), 1 / n),
        "mixed": torch.eye(n)[[3, 5, 6, 0, 6, 2, 2]] * 0.3 + torch.eye(n)[[2, 3, 5, 1, 1, 1, 0]] * 0.7,
    }
    return maps[name]


@pytest.mark.parametrize("name", READINGS)
def test_a_planted_pattern_gets_its_name(name):
    looks = figures(planted(name)[None], SPECIAL, NAMES)
    assert pattern({key: float(part[0]) for key, part in looks.items()}) == name


def test_figures_of_known_maps():
    looks = figures(torch.stack([planted("broad"), planted("class token")]), SPECIAL, NAMES)
    assert looks["entropy"].tolist() == pytest.approx([1, 0])
    assert looks["distance"].tolist() == pytest.approx([16 / 7, 3])  # of all pairs, and of 0 … 6 from the first
    assert looks["sink"].tolist() == pytest.approx([1 / 7, 1])


def test_measures_are_those_of_the_slow_twin(ex, found):
    ids = ex.subject.samples(TEXTS[0], How())[0].inputs["input_ids"]
    model = ex.subject.model
    whole, _, maps = replica.bert(model, ids)
    n = len(ids)
    for layer, head in ((0, 3), (2, 1)):
        (line,) = (one for one in found.lines if (one["layer"], one["head"]) == (layer, head))
        for measure, instead in (("ablation", torch.zeros(n, n)), ("patching", torch.full((n, n), 1 / n))):
            changed = maps[layer].detach().clone()
            changed[head] = instead  # other heads of the layer stay, and later layers attend anew
            answer, _, _ = replica.bert(model, ids, {layer: changed})
            assert line[measure] == pytest.approx((answer - whole).abs().sum().item() / 2, abs=1e-10)


def test_the_gradient_is_the_slope_along_a_head(ex, found):
    sample = ex.subject.samples(TEXTS[0], How())[0]
    batch = ex.subject.collate([sample])

    def logit(scale):
        patch = Patch(lambda attention, visible, layer: attention * scale, [1], [2], normalised=False)
        with torch.no_grad():
            return patched(ex.recorder, batch, [patch])[0].logits[0].max().item()

    (line,) = (one for one in found.lines if (one["layer"], one["head"]) == (1, 2))
    assert line["gradient"] == pytest.approx(abs(logit(1 + 1e-5) - logit(1 - 1e-5)) / 2e-5, rel=1e-5)


def test_with_no_head_silenced_all_predictions_stay(found):
    for curve in found.tables["pruning"].values():
        assert curve[0] == {"silenced": 0, "agreement": 1.0} and curve[-1]["silenced"] == 12


def test_skip_shares_lie_between_nothing_and_all_and_are_all_without_output_projections():
    pytest.importorskip("igraph")
    ex = explainer("bert/classify")
    result = probes.skips(ex, TEXTS[:1])
    for form in ("flow", "norm", "gradient"):
        assert ((result.column(form) > 0) & (result.column(form) < 1)).all()
    for layer in ex.subject.model.bert.encoder.layer:
        layer.attention.output.dense.weight.data.zero_()
    without = probes.skips(ex, TEXTS[:1])
    assert np.allclose(without.column("norm"), 1) and np.allclose(without.column("gradient"), 1)


def test_skip_shares_need_values():
    with pytest.raises(Refusal, match="values cannot be recorded"):
        probes.skips(explainer("deberta/classify"), TEXTS[:1])
