"""Beyond Intuition, head-wise, against its replica; checks (e) and (f) of the specification; its factors apart."""

import numpy as np
import pytest
import torch
import transformers

import clearhead
from clearhead import Method
from tests import models
from tests.methods import replica_comparison, replica_inputs
from tests.replicas import beyond_intuition_head as replica

NAME = "beyond-intuition-head"
SUBJECTS = ["bert/classify", "albert/mask", "vit/image", "dinov2/image", "beit/image", "modernbert/classify"]


def wished(one: replica_inputs.Case, steps: int = 20) -> np.ndarray:
    return replica.feedback(one.walker, steps)


@pytest.mark.parametrize("subject", SUBJECTS)
def test_equals_its_replica(subject: str) -> None:
    """Class token, masked word, class token beside mean, mean: the last two need every row before they average."""
    results = replica_comparison.explainer(subject).explain(models.inputs(subject), Method(NAME, steps=4), batch_size=3)
    for e, one in zip(results, replica_inputs.cases(subject), strict=True):
        expected = replica.scores(one.seen, wished(one, 4), one.readout)
        assert replica_comparison.gap(e.scores, expected) < 1e-5


def test_every_row_layers_and_heads() -> None:
    ex, raw, one = (
        replica_comparison.explainer("bert/classify"),
        models.TEXTS[1],
        replica_inputs.cases("bert/classify")[1],
    )
    e = ex.explain(raw, NAME, rows="all", layers=(1, 3))
    assert replica_comparison.gap(e.matrix, replica.matrix(one.seen, wished(one), (1, 2))) < 1e-10
    e = ex.explain(raw, NAME, heads=[1, 3], layers=(0, 2))
    expected = replica.scores(
        one.seen, replica.feedback(one.walker, heads=[1, 3]), one.readout, layers=(0, 1), heads=[1, 3]
    )
    assert replica_comparison.gap(e.scores, expected) < 1e-10


def test_depths() -> None:
    """per_layer[l] is what perception up to layer l gives."""
    for subject in ("bert/classify", "beit/image"):
        ex, raw = replica_comparison.explainer(subject), models.inputs(subject)[0]
        e = ex.explain(raw, NAME, layers=(0, None))
        for layer in range(3):
            assert (
                replica_comparison.gap(e.per_layer[layer], ex.explain(raw, NAME, layers=(0, layer + 1)).scores) < 1e-9
            )


@pytest.mark.parametrize("subject", ["bert/classify", "vit/image", "beit/image"])
def test_its_factors(subject: str) -> None:
    ex, one = replica_comparison.explainer(subject), replica_inputs.cases(subject)[0]
    forms = {
        "uniform": Method(NAME, perception="uniform"),
        "none": Method(NAME, perception="none"),
        "perception": Method(NAME, feedback="none"),
        "gradient": Method(NAME, feedback="gradient"),
    }
    found = ex.explain(models.inputs(subject)[0], list(forms.values()))
    scores = {name: found[str(method)].scores for name, method in forms.items()}
    every = np.ones((one.seen.units, one.seen.units))
    plain = np.where(one.seen.attention_gradient[-1] > 0, one.seen.attention_gradient[-1], 0).mean(0)
    known = {
        "uniform": replica.scores(one.seen, wished(one), one.readout, perception="uniform"),
        "none": one.readout @ wished(one),
        "perception": replica.scores(one.seen, every, one.readout),
        "gradient": replica.scores(one.seen, plain, one.readout),
    }
    for name, expected in known.items():
        assert replica_comparison.gap(scores[name], expected) < 1e-5, name
    e = ex.explain(models.inputs(subject)[0], NAME)
    assert e.provenance["factors"] == ["perception", "feedback"]
    assert (
        replica_comparison.gap(e.factors[0], known["perception"]) < 1e-5
        and replica_comparison.gap(e.factors[1], known["none"]) < 1e-5
    )
    if subject != "beit/image":  # where one row is read, the scores are their product
        assert replica_comparison.gap(e.factors.prod(0), e.scores) < 1e-12
    assert found[str(forms["none"])].factors is None and found[str(forms["perception"])].factors is None
    np.testing.assert_array_equal(clearhead.from_dict(e.to_dict()).factors, e.factors)


def test_uniform_perception_is_rollout() -> None:
    """(f): with all heads alike, perception is rollout that is not halved."""
    for subject in ("bert/classify", "beit/image"):
        ex, raw = replica_comparison.explainer(subject), models.inputs(subject)[0]
        ours = ex.explain(raw, Method(NAME, perception="uniform", feedback="none"), layers=(0, None))
        assert replica_comparison.gap(ours.scores, 8 * ex.explain(raw, "rollout").scores) < 1e-6


def test_smoothed_feedback_is_seeded() -> None:
    ex, text = replica_comparison.explainer("bert/classify"), models.TEXTS[0]
    method = Method(NAME, feedback="smoothed")
    one, same, other = (ex.explain(text, method, seed=seed).scores for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    assert replica_comparison.gap(other, one) > 1e-4


@pytest.mark.parametrize(
    ("method", "depth", "first"),
    [
        (NAME, 12, 3),
        (NAME, 24, 6),
        ("beyond-intuition-token", 12, 6),
        ("beyond-intuition-token", 24, 12),
        ("tam", 12, 4),
    ],
)
def test_layers_scale_with_depth(method: str, depth: int, first: int) -> None:
    """As the authors' scripts for ViT-B, and a ViT-L's depth in proportion."""
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=depth, num_attention_heads=2, intermediate_size=16, image_size=8,
        patch_size=4, num_labels=3, initializer_range=0.3,
    )  # fmt: skip
    ex = clearhead.load(transformers.ViTForImageClassification(config).double().eval())
    picture = ex.adapter.make_example_input()
    e = ex.explain(picture, method)
    assert e.provenance["layers"] == [first, depth] and len(e.per_layer) == depth - first
    np.testing.assert_array_equal(e.scores, ex.explain(picture, method, layers=(first, None)).scores)


def test_too_long_for_a_product_of_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clearhead.methods.beyond_intuition_head.MAX_HEAD_PERCEPTION_LENGTH", 4)
    with pytest.raises(
        clearhead.UnsupportedError, match=r"matrices of .* not supported beyond 4 units: use beyond-intuition-token"
    ):
        replica_comparison.explainer("bert/classify").explain(models.TEXTS[1], NAME)
