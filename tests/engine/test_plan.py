"""Plans list the passes that run: one clean pass for all methods that need one, and no map that none requires."""

import json
import logging
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
from torch import nn

import clearhead
from clearhead import InputError, Method, PassType
from clearhead.capture.topology import ModelTopology
from clearhead.engine.target_batch import TargetBatch
from clearhead.methods import METHOD_REGISTRY
from tests import models
from tests.golden.models import build_model
from tests.golden.passes import count_passes

TEXTS = ["She hates the book because it isn't good", "So boring!"]
TAPE = [name for name, cls in METHOD_REGISTRY.items() if cls.declaration.pass_type is PassType.TAPE]
PATH = [Method("integrated-gradients", steps=4), Method("smoothgrad", samples=3), Method("tam", steps=3)]
PERTURBATION = [Method("lime", evaluations=20), "occlusion"]
RULES = ["attn-lrp", "lrp", "transformer-attribution", "deeplift"]
WITHOUT_ATTENTION = ["saliency", "input-x-gradient", *PATH[:2], "gradient-shap", *PERTURBATION, "random", "position"]


def load_tested():
    """An explainer of a tiny BERT whose first-call checks have been made for the methods of this file."""
    ex = models.explainer("bert/classify")
    ex.explain(TEXTS[0], [*TAPE, *PATH, *PERTURBATION, *RULES])
    return ex


@pytest.mark.parametrize(
    "methods",
    [TAPE, PATH, PERTURBATION, [*TAPE, *PATH, *PERTURBATION], ["flow", "generic"], ["saliency", "occlusion"]],
    ids=["tape", "path", "perturbation", "all", "maps and reductions", "without attention"],
)
def test_methods_share_one_clean_pass(methods):
    ex = load_tested()
    (plan,) = ex.plan(TEXTS[0], methods)
    assert [planned["purpose"] for planned in plan.passes].count("clean pass") == 1
    exact = sum(planned["forward"] for planned in plan.passes if not planned["is_at_most"])
    with count_passes(ex.adapter.model) as counted:
        explanations = ex.explain(TEXTS[0], methods)
    assert counted.backward == sum(planned["backward"] for planned in plan.passes)
    perturbing = [e for e in explanations.values() if "evaluations" in e.certificate.get("checks", {})]
    assert counted.forward > exact if perturbing else counted.forward == exact


@pytest.mark.parametrize("methods", [[name] for name in RULES] + [[*RULES, "generic", PATH[0]]], ids=str)
def test_rule_based_methods_add_exactly_the_planned_passes(methods):
    ex = load_tested()
    (plan,) = ex.plan(TEXTS[0], methods)
    with count_passes(ex.adapter.model) as counted:
        ex.explain(TEXTS[0], methods)
    assert counted.forward == sum(planned["forward"] for planned in plan.passes)


@pytest.mark.parametrize("methods", [*([name] for name in WITHOUT_ATTENTION), WITHOUT_ATTENTION], ids=str)
def test_no_attention_map_is_built_where_none_is_required(methods):
    ex = load_tested()
    with count_passes(ex.adapter.model) as counted:
        explanations = ex.explain(TEXTS[0], methods)
    assert counted.forward > 0 and counted.maps == 0
    assert {e.certificate["kernel"] for e in explanations.values()} == {"not captured"}


def test_planning_runs_no_pass():
    ex = load_tested()
    with count_passes(ex.adapter.model) as counted:
        ex.plan(TEXTS, ["generic", "lrp", "integrated-gradients", "occlusion"])
    assert counted.forward == 0


def test_scores_and_values_do_not_depend_on_methods_of_the_same_call():
    ex = load_tested()
    together = ex.explain(TEXTS, [*TAPE, *PATH, *PERTURBATION, *RULES])
    for name, explanations in together.items():
        method = next(method for method in [*TAPE, *PATH, *PERTURBATION, *RULES] if str(method) == name)
        for e, alone in zip(explanations, ex.explain(TEXTS, method), strict=True):
            np.testing.assert_allclose(e.scores, alone.scores, atol=1e-9 * abs(alone.scores).max(), err_msg=name)
            assert e.target["value"] == pytest.approx(alone.target["value"], abs=1e-9)
            assert e.prediction["label"] == alone.prediction["label"]


def test_modules_are_walked_once_until_they_change(monkeypatch):
    walks = []
    walk = ModelTopology.__init__

    def count_walk(self, model):
        walks.append(model)
        walk(self, model)

    monkeypatch.setattr(ModelTopology, "__init__", count_walk)
    model, *processor = build_model("bert-classifier")
    ex = clearhead.load((model, *processor))
    ex.explain(TEXTS, ["generic", PATH[0], "occlusion", "attn-lrp"])
    ex.explain(TEXTS, "saliency")
    assert len(walks) == 1
    model.classifier = nn.Sequential(model.classifier)
    ex.explain(TEXTS, "saliency")
    assert len(walks) == 2


def test_plan_is_printed_logged_and_serialised(caplog):
    ex = load_tested()
    plan = ex.plan(TEXTS, ["generic", PATH[0]], batch_size=1)
    assert len(plan) == 2 and str(plan).count("clean pass: 1 forward, 1 backward (1 input") == 2
    assert "materialised maps: the inputs are short" in str(plan)
    assert json.loads(json.dumps(plan.to_dict()))[0]["passes"][0]["records"] == [
        "attention",
        "attention_gradient",
        "inputs",
    ]
    with caplog.at_level(logging.DEBUG, logger="clearhead"):
        ex.explain(TEXTS[0], ["generic", PATH[0]])
    assert "clean pass: 1 forward, 1 backward" in caplog.text


def test_plan_checks_arguments_as_explain_does():
    ex = load_tested()
    with pytest.raises(InputError, match="unknown kernel"):
        ex.plan(TEXTS[0], kernel="fast", method="generic")
    with pytest.raises(InputError, match="memory="):
        ex.plan(TEXTS[0], memory="2GiB", method="generic")
    with pytest.raises(TypeError, match=r"plan\(\) got an unexpected keyword argument 'btch_size'"):
        ex.plan(TEXTS[0], btch_size=2, method="generic")


def test_plan_gives_the_reason_of_tiled_attention(monkeypatch):
    monkeypatch.setattr("clearhead.engine.attention_mode.MAX_FULL_LENGTH", 8)
    ex = load_tested()
    assert "attention: tiled, kernel cached tiles: 17 units exceed 8" in str(ex.plan(TEXTS[0], "generic"))
    assert "materialised maps: a method needs full maps" in str(ex.plan(TEXTS[0], ["generic", "flow"]))


def test_target_batch_is_frozen():
    ex = load_tested()
    (plan,) = ex.plan(TEXTS[0], method="generic")
    assert isinstance(plan.batch, TargetBatch)
    with pytest.raises(FrozenInstanceError):
        plan.batch.seed = 1
