"""What holds for every probe: the model stays as it was, a second run gives the same, other models are refused."""

import pytest
import torch

import clearhead
from clearhead import probes
from clearhead.cli.probe import OPTIONS, TRAINING
from clearhead.errors import InputError, Refusal
from clearhead.interventions.attention_patch import Patch, patched
from clearhead.probes.uniform_attention import flat
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


def test_every_probe_of_the_command_line_is_held_to_this():
    """Those that train are in test_training.py."""
    assert PROBES.keys() | set(TRAINING) == OPTIONS.keys()


@pytest.fixture(scope="module")
def ex():
    return explainer("bert/classify")


@pytest.mark.parametrize("name", PROBES)
def test_the_model_stays_as_it_was_and_a_second_run_gives_the_same(ex, name):
    ex.subject.model.train()
    before = of_model(ex.subject.model)
    once, again = (getattr(probes, name)(ex, TEXTS[:2], **PROBES[name]).to_dict() for _ in range(2))
    assert of_model(ex.subject.model) == before
    assert once == again


@pytest.mark.parametrize("make", [gpt2, llama])
def test_causal_rows_see_what_comes_before_them_alone(make, monkeypatch):
    ex = clearhead.load((make(), None))
    given = [{"input_ids": torch.tensor([ids])} for ids in ([5, 6, 7, 8, 9, 11], [5, 9, 7])]
    short = probes.permutation(ex, given, draws=4).column("median TVD")
    monkeypatch.setattr("clearhead.probes.permuted_attention.shortens", lambda probed: False)
    whole = probes.permutation(ex, given, draws=4).column("median TVD")
    assert short == pytest.approx(whole, abs=1e-6) and short.min() > 1e-6
    with torch.no_grad():
        _, calls, _ = patched(ex.recorder, {**given[0], "attention_mask": torch.ones(1, 6).long()}, [Patch(flat)])
    staircase = torch.ones(6, 6).tril() / torch.arange(1, 7)[:, None]
    assert all(torch.allclose(call.attention[0, 0].float(), staircase) for call in calls)


def test_pictures_are_probed_as_texts_are():
    ex, some = explainer("vit/image"), inputs("vit/image")[:1]
    assert probes.permutation(ex, some, draws=2).column("median TVD")[0] > 0
    found = probes.correlation(ex, some)
    assert found.lines[0]["units"] == 16 and -1 <= found.column("τ(last row, gradient)")[0] <= 1


def test_probabilities_of_candidates_are_compared_among_themselves():
    ex, some = explainer("bert/mask"), inputs("bert/mask")[:1]
    every = probes.permutation(ex, some, draws=3)
    two = probes.permutation(ex, some, draws=3, candidates=["he", "she"])
    assert two.lines[0]["prediction"] in ("he", "she")
    assert two.column("median TVD")[0] != pytest.approx(every.column("median TVD")[0], rel=1e-3)
    with pytest.raises(InputError, match="at least two"):
        probes.permutation(ex, some, candidates=["he"])


def test_every_head_by_itself_is_scope_s3_of_that_head(ex):
    table = probes.permutation(ex, TEXTS[:1], draws=2, by_head=True).tables["median TVD by layer and head"]
    alone = probes.permutation(ex, TEXTS[:1], "S3", layer=1, heads=[2], draws=2)
    assert len(table) == 3 and table[1][2] == pytest.approx(alone.column("median TVD")[0], abs=1e-15)


def test_windows_are_refused():
    with pytest.raises(Refusal, match=r"does not run over its units|no row"):
        probes.permutation(explainer("swin/image"), inputs("swin/image"))
