"""The probes that train: what must give the model back gives it back, runs go on, and the model stays as it was."""

import numpy as np
import pytest
import torch

from clearhead import probes
from clearhead.errors import InputError
from clearhead.probes.adversarial_training import divergence, misled
from clearhead.probes.base import Scope
from clearhead.probes.fine_tuning import Lessons, Pupil, Training
from clearhead.probes.guided_mlp import Bag, _shares
from tests import custom_models
from tests.invariants.model_snapshot import of_model
from tests.models import TEXTS, explainer

LABELS = [0, 1, 2, 1]
INPUTS = [*TEXTS, "I like the book"]
SHORT = {"steps": 2, "batch": 2, "held_out": 0.5}


@pytest.fixture(scope="module")
def ex():
    return explainer("bert/classify")


def test_an_adversary_without_strength_is_the_model_itself(ex, tmp_path):
    lessons = Lessons(ex, INPUTS, LABELS, 0.5, None, 0)
    weak, strong = (
        misled(lessons, Scope("S1"), strength, Training(6, 2, 1e-3, tmp_path), 0) for strength in (0.0, 1.0)
    )
    for one, other in zip(weak.model.parameters(), lessons.base.model.parameters(), strict=True):
        assert torch.equal(one, other)
    result = probes.frontier(ex, INPUTS, LABELS, strengths=[0, 1e-8, 1.0], seeds=1, rate=1e-3, **SHORT | {"steps": 6})
    zero, tiny, far = (next(line for line in result.lines if line["strength"] == s) for s in (0, 1e-8, 1.0))
    assert zero["TVD"] == 0 and zero["JSD"] < 1e-7
    assert tiny["TVD"] < 0.02
    # where two models attend alike the divergence has no slope: on some CPUs no rounding leads away from there
    assert far["JSD"] == tiny["JSD"] == 0 or far["JSD"] > 10 * max(tiny["JSD"], 1e-6)
    moved = [
        not torch.equal(a, b) for a, b in zip(strong.model.parameters(), lessons.base.model.parameters(), strict=True)
    ]
    assert any(moved) or far["JSD"] == 0


@pytest.mark.parametrize("name", ["seeds", "frontier", "diagnostic"])
def test_the_model_stays_as_it_was_and_so_do_random_numbers(ex, name):
    ex.subject.model.train()
    before, state = of_model(ex.subject.model), torch.get_rng_state()
    kinds = {
        "seeds": {"seeds": 2},
        "frontier": {"strengths": [0.1], "seeds": 1},
        "diagnostic": {"guides": ["base", "generic"]},
    }
    once, again = (getattr(probes, name)(ex, INPUTS, LABELS, **SHORT, **kinds[name]).to_dict() for _ in range(2))
    assert of_model(ex.subject.model) == before and torch.equal(torch.get_rng_state(), state)
    assert once == again


def test_a_run_that_was_cut_goes_on_and_one_that_is_there_is_not_made_again(ex, tmp_path, monkeypatch):
    told = []
    how = {"seeds": 1, "folder": tmp_path, **SHORT, "steps": 4}
    whole = probes.seeds(ex, INPUTS, LABELS, progress=lambda name, share: told.append((name, share)), **how)
    assert told[-1] == ("seed 1", 1.0) and len(told) == 4
    (kept,) = tmp_path.glob("*.safetensors")
    told.clear()
    again = probes.seeds(ex, INPUTS, LABELS, progress=lambda name, share: told.append((name, share)), **how)
    assert not told and again.to_dict() == whole.to_dict() and [*tmp_path.glob("*")] == [kept]
    other = probes.seeds(ex, INPUTS, [1, 1, 1, 1], **how)
    assert other.to_dict() != whole.to_dict() and len([*tmp_path.glob("*")]) == 2


@pytest.mark.parametrize(("fresh", "same"), [(0, 3), (1, 2), ("all", 0)])
def test_layers_start_anew_from_the_top(ex, fresh, same):
    probed = Lessons(ex, INPUTS, LABELS, 0.5, None, 0).probed
    pupil, model = Pupil(probed, fresh, seed=3), ex.subject.model
    kept = [
        torch.equal(a.output.dense.weight.double(), b.output.dense.weight)
        for a, b in zip(pupil.model.bert.encoder.layer, model.bert.encoder.layer, strict=True)
    ]
    assert kept == [True] * same + [False] * (3 - same)
    assert not torch.equal(pupil.model.classifier.weight.double(), model.classifier.weight)
    words = (pupil.model.bert.embeddings.word_embeddings, model.bert.embeddings.word_embeddings)
    assert torch.equal(words[0].weight.double(), words[1].weight) is (fresh != "all")
    other = Pupil(probed, fresh, seed=4)
    assert not torch.equal(other.model.classifier.weight, pupil.model.classifier.weight)


def test_uniform_weights_of_a_pooling_query_are_what_the_uniform_point_measures():
    ex = custom_models.explainer("bilstm", torch.float32)
    inputs = [*custom_models.TEXTS, "w1 w2 w3"]
    result = probes.frontier(ex, inputs, ["bad", "good", "good", "bad"], strengths=[0], seeds=1, fresh="all", **SHORT)
    uniform = next(line for line in result.lines if line["point"] == "uniform")
    lessons = Lessons(ex, inputs, None, 0.5, None, 0)
    texts = [inputs[i] for i in lessons.measured]
    alone = probes.uniform(ex, texts).column("TVD, row that is read")
    assert uniform["TVD"] == pytest.approx(alone.mean(), abs=1e-6) and uniform["JSD"] > 0
    with pytest.raises(InputError, match="fresh=0 is not possible"):
        probes.seeds(ex, inputs, **SHORT)


def test_a_guide_that_knows_the_word_beats_one_that_does_not():
    ex = custom_models.explainer("bilstm", torch.float32)
    rng = np.random.default_rng(0)
    fillers = [f"w{n}" for n in range(10, 28)]
    inputs, labels = [], []
    for number in range(80):
        words = rng.choice(fillers, 8).tolist()
        words[int(rng.integers(8))] = ("w1", "w2")[number % 2]
        inputs.append(" ".join(words))
        labels.append(number % 2)
    found = probes.diagnostic(ex, inputs, labels, guides=["uniform", "own"], steps=150, rate=1e-2)
    means = {one.name: one.value.mean for one in found.findings}
    assert means["own"] >= 0.9 and means["own"] > means["uniform"] - 0.05


def test_weights_of_guides_are_shares_of_what_is_no_special_token():
    special = torch.tensor([True, False, False])
    assert torch.equal(_shares(torch.tensor([5.0, 1.0, 3.0]), special), torch.tensor([0.0, 0.25, 0.75]))
    assert torch.equal(_shares(torch.zeros(3), special), torch.tensor([0.0, 0.5, 0.5]))


def test_words_without_weight_do_not_count():
    table = torch.nn.Embedding(10, 6)
    bag = Bag(table, 6, 2, 4, learns=False)
    weights = torch.tensor([[0.5, 0.5, 0.0]])
    one, other = (bag(torch.tensor([[1, 2, last]]), weights) for last in (3, 4))
    assert torch.equal(one, other)
    own = Bag(table, 6, 2, 4, learns=True)
    assert torch.allclose(own(torch.tensor([[1, 2, 3]]), weights), own(torch.tensor([[1, 2, 4]]), weights))
    assert not [name for name, _ in bag.named_parameters() if "table" in name]


def test_the_divergence_leaves_padding_out():
    one, other = torch.rand(2, 2, 1, 3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).softmax(
        -1
    )
    real = torch.tensor([[0.5, 0.5, 0, 0], [0.25] * 4])
    by_hand = []
    for i, rows in ((0, 2), (1, 4)):
        gaps = [
            float((a * (a / b).log()).sum())
            for h in range(3)
            for a, b in zip(one[i, 0, h, :rows], other[i, 0, h, :rows], strict=True)
        ]
        by_hand.append(np.mean(gaps))
    assert float(divergence(one, other, real)) == pytest.approx(np.mean(by_hand))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"labels": [0]}, "1 labels for 4 inputs"),
        ({"held_out": 0.01}, "leaves none"),
        ({"steps": 0}, "must be above 0"),
        ({"fresh": 7}, "fresh=7 is not possible"),
        ({"seeds": 0}, "at least 1"),
    ],
)
def test_bad_requests_are_refused_in_words(ex, how, said):
    with pytest.raises(InputError, match=said):
        probes.seeds(ex, INPUTS, **{**SHORT, **how})
