"""Layer conductance against its replica and captum; every layer's scores add up."""

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


def runner(one: replica_inputs.Case, label: int) -> Any:
    walker = one.walker
    name = "pixel_values" if walker.pixels else "inputs_embeds"

    def run(x: torch.Tensor) -> torch.Tensor:
        rest = {key: part.expand(len(x), *part.shape[1:]) for key, part in walker.inputs.items()}
        return walker.model(**{name: x}, **rest).logits[:, label]

    return run


@pytest.mark.parametrize("subject", LAYERS)
def test_equals_its_replica(subject: str) -> None:
    ex, ways = replica_comparison.explainer(subject), np.linspace(0, 1, 5)
    method = Method("layer-conductance", steps=4, baseline="mean" if subject != "vit/image" else "zero")
    results = ex.explain(models.inputs(subject), method, layers=(0, None))
    for e, one in zip(results, replica_inputs.cases(subject), strict=True):
        model, run = one.walker.model, runner(one, e.target["index"])
        baseline = np.zeros_like(one.walker.x) if subject == "vit/image" else replica_inputs.mean_word(subject, one)
        for depth, layer in enumerate(LAYERS[subject](model)):
            expected = replica.scores(model, layer, lambda x, run=run: run(x)[0], one.walker.x, baseline, ways)
            assert replica_comparison.gap(e.per_layer[depth], expected) < (1e-9 if subject != "vit/image" else 1e-5)
        np.testing.assert_array_equal(e.scores, e.per_layer[-1])


@pytest.mark.parametrize("rule", ["gauss-legendre", "riemann-trapezoid"])
@pytest.mark.parametrize("subject", ["bert/classify", "vit/image"])
def test_equals_captum(subject: str, rule: str) -> None:
    from captum.attr import LayerConductance

    ex, one = replica_comparison.explainer(subject), replica_inputs.cases(subject)[1]
    method = Method("layer-conductance", steps=9, rule=rule, baseline="zero")
    e = ex.explain(models.inputs(subject)[1], method, layers=(0, None), profile="captum")
    x = torch.tensor(one.walker.x)
    run = runner(one, e.target["index"])
    for depth, layer in enumerate(LAYERS[subject](one.walker.model)):
        theirs = LayerConductance(run, layer).attribute(
            x, torch.zeros_like(x), n_steps=9, method={"gauss-legendre": "gausslegendre"}.get(rule, "riemann_trapezoid")
        )
        theirs = theirs[0] if isinstance(theirs, tuple) else theirs
        expected = theirs.detach()[0].sum(-1).numpy()
        assert replica_comparison.gap(e.per_layer[depth], expected) < (1e-7 if subject == "bert/classify" else 1e-5)


def test_every_layer_adds_up() -> None:
    ex = replica_comparison.explainer("bert/classify")
    for raw in models.inputs("bert/classify"):
        e = ex.explain(raw, Method("layer-conductance", steps=300), layers=(0, None))
        gained = e.target["value"] - e.base_value
        assert np.abs(e.per_layer.sum(1) - gained).max() < 1e-4 * np.abs(e.per_layer).max()
        gap = abs(e.scores.sum() - gained) / np.abs(e.scores).max()
        assert e.certificate["checks"]["completeness_gap"] == pytest.approx(gap, abs=1e-12)


def test_stretches_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Points that integrated gradients want first come in another order: the same stretches all the same."""
    ex, text = replica_comparison.explainer("bert/classify"), models.TEXTS[0]
    method = Method("layer-conductance", steps=6)
    other = Method("integrated-gradients", steps=3, rule="riemann-left")
    alone = ex.explain(text, method)
    monkeypatch.setattr("clearhead.engine.passes.path.MAX_PATH_ROWS", 2)
    together = ex.explain(text, [other, method])
    assert replica_comparison.gap(together[str(method)].scores, alone.scores) < 1e-10


def test_half_the_depth_by_default() -> None:
    e = replica_comparison.explainer("bert/classify").explain(models.TEXTS[0], "layer-conductance")
    assert e.provenance["layers"] == [0, 2] and len(e.per_layer) == 2
