"""Probes that train: limits that equal the original model, resumed runs, and an unchanged model afterwards."""

import numpy as np
import pytest
import torch

from clearhead import probes
from clearhead.errors import InputError
from clearhead.probes.adversarial_training import compute_mean_kl, train_adversary
from clearhead.probes.base import ProbeScope
from clearhead.probes.fine_tuning import FineTuningConfig, LabelledSplit, ModelCopy
from clearhead.probes.guided_mlp import GuidedBagOfWords, _normalise_weights
from tests import custom_models
from tests.invariants.model_snapshot import of_model
from tests.models import TEXTS, explainer

LABELS = [0, 1, 2, 1]
INPUTS = [*TEXTS, "I like the book"]
SHORT = {"steps": 2, "batch_size": 2, "held_out": 0.5}


@pytest.fixture(scope="module")
def ex():
    return explainer("bert/classify")


def test_adversary_with_zero_strength_equals_the_model(ex, tmp_path):
    split = LabelledSplit(ex, INPUTS, LABELS, 0.5, None, 0)
    weak, strong = (
        train_adversary(split, ProbeScope("S1"), strength, FineTuningConfig(6, 2, 1e-3, tmp_path), 0)
        for strength in (0.0, 1.0)
    )
    for parameter, base_parameter in zip(weak.model.parameters(), split.base_copy.model.parameters(), strict=True):
        assert torch.equal(parameter, base_parameter)
    result = probes.run_frontier_probe(
        ex, INPUTS, LABELS, strengths=[0, 1.0], seeds=1, learning_rate=1e-3, **SHORT | {"steps": 6}
    )
    zero, full = (next(line for line in result.records if line["strength"] == s) for s in (0, 1.0))
    assert zero["TVD"] == 0 and zero["JSD"] < 1e-7
    # For equal attention the divergence has zero gradient: on some CPUs no rounding error leaves this point. If one
    # does, Adam makes full steps, whatever the strength, so strengths between 0 and 1 have no order after 6 steps.
    assert full["JSD"] == 0 or full["JSD"] > 1e-5
    is_changed = [
        not torch.equal(a, b)
        for a, b in zip(strong.model.parameters(), split.base_copy.model.parameters(), strict=True)
    ]
    assert any(is_changed) or full["JSD"] == 0


@pytest.mark.parametrize("name", ["seeds", "frontier", "diagnostic"])
def test_model_and_random_state_are_unchanged(ex, name):
    ex.adapter.model.train()
    before, state = of_model(ex.adapter.model), torch.get_rng_state()
    kinds = {
        "seeds": {"seeds": 2},
        "frontier": {"strengths": [0.1], "seeds": 1},
        "diagnostic": {"guides": ["base", "generic"]},
    }
    once, rerun = (
        getattr(probes, f"run_{name}_probe")(ex, INPUTS, LABELS, **SHORT, **kinds[name]).to_dict() for _ in range(2)
    )
    assert of_model(ex.adapter.model) == before and torch.equal(torch.get_rng_state(), state)
    assert once == rerun


def test_interrupted_run_resumes_and_finished_run_is_not_repeated(ex, tmp_path, monkeypatch):
    progress_calls = []
    settings = {"seeds": 1, "checkpoint_dir": tmp_path, **SHORT, "steps": 4}
    full = probes.run_seeds_probe(
        ex, INPUTS, LABELS, progress=lambda name, fraction: progress_calls.append((name, fraction)), **settings
    )
    assert progress_calls[-1] == ("seed 1", 1.0) and len(progress_calls) == 4
    (file,) = tmp_path.glob("*.safetensors")
    progress_calls.clear()
    rerun = probes.run_seeds_probe(
        ex, INPUTS, LABELS, progress=lambda name, fraction: progress_calls.append((name, fraction)), **settings
    )
    assert not progress_calls and rerun.to_dict() == full.to_dict() and [*tmp_path.glob("*")] == [file]
    other_labels = probes.run_seeds_probe(ex, INPUTS, [1, 1, 1, 1], **settings)
    assert other_labels.to_dict() != full.to_dict() and len([*tmp_path.glob("*")]) == 2


@pytest.mark.parametrize(("fresh", "same"), [(0, 3), (1, 2), ("all", 0)])
def test_last_layers_are_reinitialised(ex, fresh, same):
    probed = LabelledSplit(ex, INPUTS, LABELS, 0.5, None, 0).context
    copy, model = ModelCopy(probed, fresh, seed=3), ex.adapter.model
    is_same = [
        torch.equal(a.output.dense.weight.double(), b.output.dense.weight)
        for a, b in zip(copy.model.bert.encoder.layer, model.bert.encoder.layer, strict=True)
    ]
    assert is_same == [True] * same + [False] * (3 - same)
    assert not torch.equal(copy.model.classifier.weight.double(), model.classifier.weight)
    embeddings = (copy.model.bert.embeddings.word_embeddings, model.bert.embeddings.word_embeddings)
    assert torch.equal(embeddings[0].weight.double(), embeddings[1].weight) is (fresh != "all")
    other_seed = ModelCopy(probed, fresh, seed=4)
    assert not torch.equal(other_seed.model.classifier.weight, copy.model.classifier.weight)


def test_uniform_point_of_a_pooling_query_equals_the_uniform_probe():
    ex = custom_models.explainer("bilstm", torch.float32)
    inputs = [*custom_models.TEXTS, "w1 w2 w3"]
    result = probes.run_frontier_probe(
        ex, inputs, ["bad", "good", "good", "bad"], strengths=[0], seeds=1, fresh="all", **SHORT
    )
    uniform = next(line for line in result.records if line["point"] == "uniform")
    split = LabelledSplit(ex, inputs, None, 0.5, None, 0)
    texts = [inputs[i] for i in split.test_indices]
    single = probes.run_uniform_probe(ex, texts).get_column("TVD, read-out row")
    assert uniform["TVD"] == pytest.approx(single.mean(), abs=1e-6) and uniform["JSD"] > 0
    with pytest.raises(InputError, match="fresh=0 is not valid"):
        probes.run_seeds_probe(ex, inputs, **SHORT)


def test_informative_guide_beats_uninformative_guide():
    ex = custom_models.explainer("bilstm", torch.float32)
    rng = np.random.default_rng(0)
    fillers = [f"w{n}" for n in range(10, 28)]
    inputs, labels = [], []
    for number in range(80):
        words = rng.choice(fillers, 8).tolist()
        words[int(rng.integers(8))] = ("w1", "w2")[number % 2]
        inputs.append(" ".join(words))
        labels.append(number % 2)
    result = probes.run_diagnostic_probe(ex, inputs, labels, guides=["uniform", "own"], steps=150, learning_rate=1e-2)
    means = {estimate.name: estimate.interval.mean for estimate in result.estimates}
    assert means["own"] >= 0.9 and means["own"] > means["uniform"] - 0.05


def test_guide_weights_sum_to_one_without_special_tokens():
    special = torch.tensor([True, False, False])
    assert torch.equal(_normalise_weights(torch.tensor([5.0, 1.0, 3.0]), special), torch.tensor([0.0, 0.25, 0.75]))
    assert torch.equal(_normalise_weights(torch.zeros(3), special), torch.tensor([0.0, 0.5, 0.5]))


def test_words_with_zero_weight_have_no_effect():
    table = torch.nn.Embedding(10, 6)
    bag = GuidedBagOfWords(table, 6, 2, 4, learns_weights=False)
    weights = torch.tensor([[0.5, 0.5, 0.0]])
    first, second = (bag(torch.tensor([[1, 2, last]]), weights) for last in (3, 4))
    assert torch.equal(first, second)
    learned = GuidedBagOfWords(table, 6, 2, 4, learns_weights=True)
    assert torch.allclose(learned(torch.tensor([[1, 2, 3]]), weights), learned(torch.tensor([[1, 2, 4]]), weights))
    assert not [name for name, _ in bag.named_parameters() if "table" in name]


def test_divergence_ignores_padding():
    first, second = torch.rand(
        2, 2, 1, 3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).softmax(-1)
    row_weights = torch.tensor([[0.5, 0.5, 0, 0], [0.25] * 4])
    expected = []
    for i, rows in ((0, 2), (1, 4)):
        gaps = [
            float((a * (a / b).log()).sum())
            for h in range(3)
            for a, b in zip(first[i, 0, h, :rows], second[i, 0, h, :rows], strict=True)
        ]
        expected.append(np.mean(gaps))
    assert float(compute_mean_kl(first, second, row_weights)) == pytest.approx(np.mean(expected))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": [0]}, "1 labels for 4 inputs"),
        ({"held_out": 0.01}, "leaves no inputs"),
        ({"steps": 0}, "must be above 0"),
        ({"fresh": 7}, "fresh=7 is not valid"),
        ({"seeds": 0}, "at least 1"),
    ],
)
def test_invalid_options_are_rejected(ex, options, message):
    with pytest.raises(InputError, match=message):
        probes.run_seeds_probe(ex, INPUTS, **{**SHORT, **options})
