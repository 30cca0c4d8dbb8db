"""Properties of every probe: the model is unchanged, results are deterministic, unsupported models are rejected."""

import pytest
import torch

import clearhead
from clearhead import probes
from clearhead.cli.probe import OPTIONS_BY_PROBE, TRAINING_PROBES
from clearhead.errors import InputError, UnsupportedError
from clearhead.interventions.attention_patch import AttentionPatch, run_patched_forward
from clearhead.probes.uniform_attention import make_uniform_weights
from tests.capture.test_values import gpt2, llama
from tests.invariants.model_snapshot import of_model
from tests.models import TEXTS, explainer, inputs

PROBES = {
    "permutation": {"draws": 3},
    "uniform": {},
    "correlation": {},
    "adversary": {"steps": 2, "sets": 2},
    "heads": {},
    "skips": {},
}


def test_every_command_line_probe_is_covered():
    """Probes that train are in test_fine_tuning.py."""
    assert PROBES.keys() | set(TRAINING_PROBES) == OPTIONS_BY_PROBE.keys()


@pytest.fixture(scope="module")
def ex():
    return explainer("bert/classify")


@pytest.mark.parametrize("name", PROBES)
def test_model_is_unchanged_and_probe_is_deterministic(ex, name):
    ex.adapter.model.train()
    before = of_model(ex.adapter.model)
    once, rerun = (getattr(probes, f"run_{name}_probe")(ex, TEXTS[:2], **PROBES[name]).to_dict() for _ in range(2))
    assert of_model(ex.adapter.model) == before
    assert once == rerun


@pytest.mark.parametrize("make", [gpt2, llama])
def test_causal_rows_attend_to_previous_units_only(make, monkeypatch):
    ex = clearhead.load((make(), None))
    inputs = [{"input_ids": torch.tensor([ids])} for ids in ([5, 6, 7, 8, 9, 11], [5, 9, 7])]
    shortcut = probes.run_permutation_probe(ex, inputs, draws=4).get_column("median TVD")
    monkeypatch.setattr("clearhead.probes.permuted_attention.has_last_row_shortcut", lambda probed: False)
    full = probes.run_permutation_probe(ex, inputs, draws=4).get_column("median TVD")
    assert shortcut == pytest.approx(full, abs=1e-6) and shortcut.min() > 1e-6
    with torch.no_grad():
        _, calls, _ = run_patched_forward(
            ex.recorder,
            {**inputs[0], "attention_mask": torch.ones(1, 6).long()},
            [AttentionPatch(make_uniform_weights)],
        )
    staircase = torch.ones(6, 6).tril() / torch.arange(1, 7)[:, None]
    assert all(torch.allclose(call.attention[0, 0].float(), staircase) for call in calls)


def test_image_models_are_supported():
    ex, images = explainer("vit/image"), inputs("vit/image")[:1]
    assert probes.run_permutation_probe(ex, images, draws=2).get_column("median TVD")[0] > 0
    result = probes.run_correlation_probe(ex, images)
    assert result.records[0]["units"] == 16 and -1 <= result.get_column("τ(last row, gradient)")[0] <= 1


def test_candidates_restrict_the_compared_probabilities():
    ex, texts = explainer("bert/mask"), inputs("bert/mask")[:1]
    full_vocabulary = probes.run_permutation_probe(ex, texts, draws=3)
    two = probes.run_permutation_probe(ex, texts, draws=3, candidates=["he", "she"])
    assert two.records[0]["prediction"] in ("he", "she")
    assert two.get_column("median TVD")[0] != pytest.approx(full_vocabulary.get_column("median TVD")[0], rel=1e-3)
    with pytest.raises(InputError, match="at least two"):
        probes.run_permutation_probe(ex, texts, candidates=["he"])


def test_by_head_equals_scope_s3_of_that_head(ex):
    table = probes.run_permutation_probe(ex, TEXTS[:1], draws=2, by_head=True).tables["median TVD by layer and head"]
    single = probes.run_permutation_probe(ex, TEXTS[:1], "S3", layer=1, heads=[2], draws=2)
    assert len(table) == 3 and table[1][2] == pytest.approx(single.get_column("median TVD")[0], abs=1e-15)


def test_windowed_attention_is_rejected():
    with pytest.raises(UnsupportedError, match=r"does not run over its units|no read-out position"):
        probes.run_permutation_probe(explainer("swin/image"), inputs("swin/image"))
