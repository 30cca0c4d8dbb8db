"""Head-wise Beyond Intuition equals its reference implementation; factors; checks (e), (f) of the specification."""

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


def compute_feedback(case: replica_inputs.Case, steps: int = 20) -> np.ndarray:
    return replica.compute_feedback(case.evaluator, steps)


@pytest.mark.parametrize("subject", SUBJECTS)
def test_equals_reference_implementation(subject: str) -> None:
    """Read-outs: class token, masked token, class token and mean, mean; the last two average over all rows."""
    results = replica_comparison.explainer(subject).explain(models.inputs(subject), Method(NAME, steps=4), batch_size=3)
    for e, case in zip(results, replica_inputs.make_cases(subject), strict=True):
        expected = replica.scores(case.seen, compute_feedback(case, 4), case.readout)
        assert replica_comparison.gap(e.scores, expected) < 1e-5


def test_all_rows_layers_and_heads_equal_reference() -> None:
    ex, raw, case = (
        replica_comparison.explainer("bert/classify"),
        models.TEXTS[1],
        replica_inputs.make_cases("bert/classify")[1],
    )
    e = ex.explain(raw, NAME, rows="all", layers=(1, 3))
    assert replica_comparison.gap(e.matrix, replica.matrix(case.seen, compute_feedback(case), (1, 2))) < 1e-10
    e = ex.explain(raw, NAME, heads=[1, 3], layers=(0, 2))
    expected = replica.scores(
        case.seen, replica.compute_feedback(case.evaluator, heads=[1, 3]), case.readout, layers=(0, 1), heads=[1, 3]
    )
    assert replica_comparison.gap(e.scores, expected) < 1e-10


def test_per_layer_equals_scores_up_to_that_layer() -> None:
    """per_layer[l] equals the scores with the layers up to l."""
    for subject in ("bert/classify", "beit/image"):
        ex, raw = replica_comparison.explainer(subject), models.inputs(subject)[0]
        e = ex.explain(raw, NAME, layers=(0, None))
        for layer in range(3):
            assert (
                replica_comparison.gap(e.per_layer[layer], ex.explain(raw, NAME, layers=(0, layer + 1)).scores) < 1e-9
            )


@pytest.mark.parametrize("subject", ["bert/classify", "vit/image", "beit/image"])
def test_factors_equal_reference_implementation(subject: str) -> None:
    ex, case = replica_comparison.explainer(subject), replica_inputs.make_cases(subject)[0]
    forms = {
        "uniform": Method(NAME, perception="uniform"),
        "none": Method(NAME, perception="none"),
        "perception": Method(NAME, feedback="none"),
        "gradient": Method(NAME, feedback="gradient"),
    }
    results = ex.explain(models.inputs(subject)[0], list(forms.values()))
    scores = {name: results[str(method)].scores for name, method in forms.items()}
    ones = np.ones((case.seen.units, case.seen.units))
    gradient = np.where(case.seen.attention_gradient[-1] > 0, case.seen.attention_gradient[-1], 0).mean(0)
    expected_scores = {
        "uniform": replica.scores(case.seen, compute_feedback(case), case.readout, perception="uniform"),
        "none": case.readout @ compute_feedback(case),
        "perception": replica.scores(case.seen, ones, case.readout),
        "gradient": replica.scores(case.seen, gradient, case.readout),
    }
    for name, expected in expected_scores.items():
        assert replica_comparison.gap(scores[name], expected) < 1e-5, name
    e = ex.explain(models.inputs(subject)[0], NAME)
    assert e.provenance["factors"] == ["perception", "feedback"]
    assert (
        replica_comparison.gap(e.factors[0], expected_scores["perception"]) < 1e-5
        and replica_comparison.gap(e.factors[1], expected_scores["none"]) < 1e-5
    )
    if subject != "beit/image":  # with one read-out row, the scores are the product of the factors
        assert replica_comparison.gap(e.factors.prod(0), e.scores) < 1e-12
    assert results[str(forms["none"])].factors is None and results[str(forms["perception"])].factors is None
    np.testing.assert_array_equal(clearhead.from_dict(e.to_dict()).factors, e.factors)


def test_uniform_perception_equals_unhalved_rollout() -> None:
    """(f): with equal head weights, perception is rollout without the factor 1/2 per layer."""
    for subject in ("bert/classify", "beit/image"):
        ex, raw = replica_comparison.explainer(subject), models.inputs(subject)[0]
        e = ex.explain(raw, Method(NAME, perception="uniform", feedback="none"), layers=(0, None))
        assert replica_comparison.gap(e.scores, 8 * ex.explain(raw, "rollout").scores) < 1e-6


def test_smoothed_feedback_depends_on_the_seed() -> None:
    ex, text = replica_comparison.explainer("bert/classify"), models.TEXTS[0]
    method = Method(NAME, feedback="smoothed")
    scores, repeated, other_seed = (ex.explain(text, method, seed=seed).scores for seed in (0, 0, 1))
    np.testing.assert_array_equal(scores, repeated)
    assert replica_comparison.gap(other_seed, scores) > 1e-4


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
def test_default_start_layer_scales_with_depth(method: str, depth: int, first: int) -> None:
    """As in the authors' scripts for ViT-B, and in proportion for the depth of ViT-L."""
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=depth, num_attention_heads=2, intermediate_size=16, image_size=8,
        patch_size=4, num_labels=3, initializer_range=0.3,
    )  # fmt: skip
    ex = clearhead.load(transformers.ViTForImageClassification(config).double().eval())
    image = ex.adapter.make_example_input()
    e = ex.explain(image, method)
    assert e.provenance["layers"] == [first, depth] and len(e.per_layer) == depth - first
    np.testing.assert_array_equal(e.scores, ex.explain(image, method, layers=(first, None)).scores)


def test_too_many_units_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clearhead.methods.beyond_intuition_head.MAX_HEAD_PERCEPTION_LENGTH", 4)
    with pytest.raises(
        clearhead.UnsupportedError, match=r"matrices of .* not supported beyond 4 units: use beyond-intuition-token"
    ):
        replica_comparison.explainer("bert/classify").explain(models.TEXTS[1], NAME)
