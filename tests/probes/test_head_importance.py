"""Head importance equals reference implementations; planted patterns are classified; skip-connection fractions."""

import numpy as np
import pytest
import torch

from clearhead import probes
from clearhead.adapters.base import InputOptions
from clearhead.errors import UnsupportedError
from clearhead.interventions.attention_patch import AttentionPatch, run_patched_forward
from clearhead.probes.head_patterns import PATTERN_DESCRIPTIONS, classify_head_pattern, compute_head_statistics
from tests.models import TEXTS, explainer
from tests.replicas import probes as replica

NAMES = ("[CLS]", "the", "cat", "saw", "the", "dog", "[SEP]")
SPECIAL = torch.tensor([name.startswith("[") for name in NAMES])


@pytest.fixture(scope="module")
def ex():
    return explainer("bert/classify")


@pytest.fixture(scope="module")
def result(ex):
    return probes.run_heads_probe(ex, TEXTS[:1])


def make_pattern(name):
    n = len(NAMES)
    maps = {
        "previous_token": torch.eye(n).roll(-1, 1),
        "next_token": torch.eye(n).roll(1, 1),
        "self": torch.eye(n),
        "class_token": torch.eye(n)[[0] * n],
        "separator": torch.eye(n)[[n - 1] * n],
        "same_word": torch.eye(n)[[5, 4, 3, 5, 1, 2, 3]],
        "single_key": torch.eye(n)[[2] * n],
        "broad": torch.full((n, n), 1 / n),
        "mixed": torch.eye(n)[[3, 5, 6, 0, 6, 2, 2]] * 0.3 + torch.eye(n)[[2, 3, 5, 1, 1, 1, 0]] * 0.7,
    }
    return maps[name]


@pytest.mark.parametrize("name", PATTERN_DESCRIPTIONS)
def test_planted_pattern_is_classified(name):
    statistics = compute_head_statistics(make_pattern(name)[None], SPECIAL, NAMES)
    assert classify_head_pattern({key: float(values[0]) for key, values in statistics.items()}) == name


def test_statistics_of_known_maps():
    statistics = compute_head_statistics(
        torch.stack([make_pattern("broad"), make_pattern("class_token")]), SPECIAL, NAMES
    )
    assert statistics["entropy"].tolist() == pytest.approx([1, 0])
    assert statistics["distance"].tolist() == pytest.approx(
        [16 / 7, 3]
    )  # the mean over all pairs, and over 0 … 6 from the first token
    assert statistics["sink"].tolist() == pytest.approx([1 / 7, 1])


def test_importance_equals_reference_implementation(ex, result):
    ids = ex.adapter.make_samples(TEXTS[0], InputOptions())[0].inputs["input_ids"]
    model = ex.adapter.model
    probabilities, _, maps = replica.bert(model, ids)
    n = len(ids)
    for layer, head in ((0, 3), (2, 1)):
        (record,) = (entry for entry in result.records if (entry["layer"], entry["head"]) == (layer, head))
        for measure, replacement in (("ablation", torch.zeros(n, n)), ("patching", torch.full((n, n), 1 / n))):
            changed = maps[layer].detach().clone()
            changed[head] = (
                replacement  # other heads of the layer are kept, and later layers compute their attention again
            )
            changed_probabilities, _, _ = replica.bert(model, ids, {layer: changed})
            assert record[measure] == pytest.approx(
                (changed_probabilities - probabilities).abs().sum().item() / 2, abs=1e-10
            )


def test_gradient_importance_equals_finite_difference(ex, result):
    sample = ex.adapter.make_samples(TEXTS[0], InputOptions())[0]
    batch = ex.adapter.collate([sample])

    def logit(scale):
        patch = AttentionPatch(lambda attention, visible, layer: attention * scale, [1], [2], keep_row_sums=False)
        with torch.no_grad():
            return run_patched_forward(ex.recorder, batch, [patch])[0].logits[0].max().item()

    (record,) = (entry for entry in result.records if (entry["layer"], entry["head"]) == (1, 2))
    assert record["gradient"] == pytest.approx(abs(logit(1 + 1e-5) - logit(1 - 1e-5)) / 2e-5, rel=1e-5)


def test_pruning_no_head_keeps_all_predictions(result):
    for curve in result.tables["pruning"].values():
        assert curve[0] == {"silenced": 0, "agreement": 1.0} and curve[-1]["silenced"] == 12


def test_skip_fractions_are_in_0_1_and_equal_1_without_output_projections():
    pytest.importorskip("igraph")
    ex = explainer("bert/classify")
    result = probes.run_skips_probe(ex, TEXTS[:1])
    for form in ("flow", "norm", "gradient"):
        assert ((result.get_column(form) > 0) & (result.get_column(form) < 1)).all()
    for layer in ex.adapter.model.bert.encoder.layer:
        layer.attention.output.dense.weight.data.zero_()
    without_projections = probes.run_skips_probe(ex, TEXTS[:1])
    assert np.allclose(without_projections.get_column("norm"), 1) and np.allclose(
        without_projections.get_column("gradient"), 1
    )


def test_skip_fractions_need_recorded_values():
    with pytest.raises(UnsupportedError, match="values cannot be recorded"):
        probes.run_skips_probe(explainer("deberta/classify"), TEXTS[:1])
