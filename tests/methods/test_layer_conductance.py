"""Layer conductance equals its reference implementation and captum; the scores of every layer are complete."""

from typing import Any

import numpy as np
import pytest
import torch

from clearhead import Method
from tests import models
from tests.methods import replica_comparison, replica_inputs
from tests.replicas import layer_conductance as replica

LAYERS = {
    "bert/classify": lambda model: model.bert.encoder.layer,
    "distilbert/classify": lambda model: model.distilbert.transformer.layer,
    "vit/image": lambda model: model.vit.layers if hasattr(model.vit, "layers") else model.vit.encoder.layer,
}


def make_target_function(case: replica_inputs.Case, label: int) -> Any:
    evaluator = case.evaluator
    name = "pixel_values" if evaluator.pixels else "inputs_embeds"

    def run(x: torch.Tensor) -> torch.Tensor:
        rest = {key: tensor.expand(len(x), *tensor.shape[1:]) for key, tensor in evaluator.inputs.items()}
        return evaluator.model(**{name: x}, **rest).logits[:, label]

    return run


@pytest.mark.parametrize("subject", LAYERS)
def test_equals_reference_implementation(subject: str) -> None:
    ex, points = replica_comparison.explainer(subject), np.linspace(0, 1, 5)
    method = Method("layer-conductance", steps=4, baseline="mean" if subject != "vit/image" else "zero")
    results = ex.explain(models.inputs(subject), method, layers=(0, None))
    for e, case in zip(results, replica_inputs.make_cases(subject), strict=True):
        model, run = case.evaluator.model, make_target_function(case, e.target["index"])
        baseline = (
            np.zeros_like(case.evaluator.x)
            if subject == "vit/image"
            else replica_inputs.compute_mean_baseline(subject, case)
        )
        for depth, layer in enumerate(LAYERS[subject](model)):
            expected = replica.scores(model, layer, lambda x, run=run: run(x)[0], case.evaluator.x, baseline, points)
            assert replica_comparison.gap(e.per_layer[depth], expected) < (1e-9 if subject != "vit/image" else 1e-5)
        np.testing.assert_array_equal(e.scores, e.per_layer[-1])


@pytest.mark.parametrize("rule", ["gauss-legendre", "riemann-trapezoid"])
@pytest.mark.parametrize("subject", ["bert/classify", "vit/image"])
def test_equals_captum(subject: str, rule: str) -> None:
    from captum.attr import LayerConductance

    ex, case = replica_comparison.explainer(subject), replica_inputs.make_cases(subject)[1]
    method = Method("layer-conductance", steps=9, rule=rule, baseline="zero")
    e = ex.explain(models.inputs(subject)[1], method, layers=(0, None), profile="captum")
    x = torch.tensor(case.evaluator.x)
    run = make_target_function(case, e.target["index"])
    for depth, layer in enumerate(LAYERS[subject](case.evaluator.model)):
        theirs = LayerConductance(run, layer).attribute(
            x, torch.zeros_like(x), n_steps=9, method={"gauss-legendre": "gausslegendre"}.get(rule, "riemann_trapezoid")
        )
        theirs = theirs[0] if isinstance(theirs, tuple) else theirs
        expected = theirs.detach()[0].sum(-1).numpy()
        assert replica_comparison.gap(e.per_layer[depth], expected) < (1e-7 if subject == "bert/classify" else 1e-5)


def test_scores_of_every_layer_sum_to_the_target_minus_the_base_value() -> None:
    ex = replica_comparison.explainer("bert/classify")
    for raw in models.inputs("bert/classify"):
        e = ex.explain(raw, Method("layer-conductance", steps=300), layers=(0, None))
        difference = e.target["value"] - e.base_value
        assert np.abs(e.per_layer.sum(1) - difference).max() < 1e-4 * np.abs(e.per_layer).max()
        gap = abs(e.scores.sum() - difference) / np.abs(e.scores).max()
        assert e.certificate["checks"]["completeness_gap"] == pytest.approx(gap, abs=1e-12)


def test_shared_path_points_do_not_change_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Integrated gradients request path points in another order; the segments between points stay the same."""
    ex, text = replica_comparison.explainer("bert/classify"), models.TEXTS[0]
    method = Method("layer-conductance", steps=6)
    other = Method("integrated-gradients", steps=3, rule="riemann-left")
    single = ex.explain(text, method)
    monkeypatch.setattr("clearhead.engine.passes.path.MAX_PATH_ROWS", 2)
    results = ex.explain(text, [other, method])
    assert replica_comparison.gap(results[str(method)].scores, single.scores) < 1e-10


def test_default_layers_cover_half_the_depth() -> None:
    e = replica_comparison.explainer("bert/classify").explain(models.TEXTS[0], "layer-conductance")
    assert e.provenance["layers"] == [0, 2] and len(e.per_layer) == 2
