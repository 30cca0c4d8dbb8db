"""Explaining works inside the caller's gradient modes, autocast, and targets."""

import pytest
import torch

import clearhead
from tests import models
from tests.invariants import cases

SUBJECTS = ["bert/classify", "roberta/mask", "modernbert/classify", "deberta/classify", "vit/image", "swin/image"]
CONTEXTS = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "enable_grad": torch.enable_grad,
}


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("first_use", [True, False])
def test_explanations_are_the_same_in_every_gradient_mode(subject, context, first_use):
    ex = models.explainer(subject)
    if not first_use:
        ex.explain(models.inputs(subject)[0], method="saliency")
    inputs = models.inputs(subject)
    with CONTEXTS[context]():
        if not first_use:  # inference tensors cannot take part in autograd
            inputs = {name: tensor.clone() for name, tensor in cases.model_inputs(subject).items()}
        explanations = ex.explain(inputs, **cases.all_explain_arguments(subject))
        assert torch.is_grad_enabled() == (context == "enable_grad")
        tape = ex.record(models.inputs(subject), ("attention", "input_gradient"))
    cases.assert_all_alike(explanations, subject)
    assert not any(tensor.requires_grad for tensor in (*tape.input_gradient.values(), tape.calls[0].attention))


def test_target_may_explain_another_model():
    """The target explains with another model while this one is being recorded."""
    outer, inner = models.explainer("bert/classify"), models.explainer("distilbert/classify")
    inner_scores = []

    def target(output):
        inner_scores.append(inner.explain(models.TEXTS[1], method="generic").scores)
        return output.logits[:, 0]

    explanation = outer.explain(models.TEXTS[0], target=target, method="generic")
    assert (
        cases.gap(
            explanation.scores,
            cases.explainer("bert/classify").explain(models.TEXTS[0], target=0, method="generic").scores,
        )
        <= 1e-9
    )
    assert cases.gap(inner_scores[-1], cases.single("distilbert/classify", "generic")["generic"][1].scores) <= 1e-9


def test_target_may_explain_the_same_model():
    ex, inner_scores = models.explainer("bert/classify"), []

    def target(output):
        inner_scores.append(ex.explain(models.TEXTS[1], method="generic").scores)
        return output.logits[:, 0]

    explanation = ex.explain(models.TEXTS[0], target=target, method="generic")
    assert (
        cases.gap(
            explanation.scores,
            cases.explainer("bert/classify").explain(models.TEXTS[0], target=0, method="generic").scores,
        )
        <= 1e-9
    )
    assert cases.gap(inner_scores[-1], cases.single("bert/classify", "generic")["generic"][1].scores) <= 1e-9


def test_autocast_around_first_use_preserves_scores_and_certificate():
    """Under autocast the first-use self-test would measure and cache errors of half precision."""
    ex, plain = (models.explainer("bert/classify", torch.float32) for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = ex.explain(models.TEXTS[0], method="generic")
    assert under_autocast.scores.tobytes() == plain.explain(models.TEXTS[0], method="generic").scores.tobytes()
    assert under_autocast.certificate == plain.explain(models.TEXTS[0], method="generic").certificate


def test_model_created_in_inference_mode_raises_and_is_unchanged():
    with torch.inference_mode():
        model, tokenizer = models.text_model("bert")
    flags = [parameter.requires_grad for parameter in model.parameters()]
    with pytest.raises(clearhead.UnsupportedError, match="inference_mode"):
        clearhead.load(model, tokenizer).explain(models.TEXTS[0], method="generic")
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
