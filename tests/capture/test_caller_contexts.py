"""Explaining works inside whatever the caller is in the middle of."""

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
def test_gradient_modes(subject, context, first_use):
    ex = models.explainer(subject)
    if not first_use:
        ex.explain(models.inputs(subject)[0], method="saliency")
    given = models.inputs(subject)
    with CONTEXTS[context]():
        if not first_use:  # tensors made inside inference mode cannot take part in autograd as they are
            given = {name: part.clone() for name, part in cases.model_inputs(subject).items()}
        got = ex.explain(given, **cases.everything(subject))
        assert torch.is_grad_enabled() == (context == "enable_grad")
        tape = ex.record(models.inputs(subject), ("attention", "input_gradient"))
    cases.assert_all_alike(got, subject)
    assert not any(part.requires_grad for part in (*tape.input_gradient.values(), tape.calls[0].attention))


def test_explaining_inside_a_target():
    """A target that explains with another model while this one is being recorded."""
    outer, inner = models.explainer("bert/classify"), models.explainer("distilbert/classify")
    inside = []

    def target(output):
        inside.append(inner.explain(models.TEXTS[1]).scores)
        return output.logits[:, 0]

    got = outer.explain(models.TEXTS[0], target=target)
    assert cases.gap(got.scores, cases.explainer("bert/classify").explain(models.TEXTS[0], target=0).scores) <= 1e-9
    assert cases.gap(inside[-1], cases.single("distilbert/classify", "generic")["generic"][1].scores) <= 1e-9


def test_explaining_the_same_model_inside_its_own_target():
    ex, inside = models.explainer("bert/classify"), []

    def target(output):
        inside.append(ex.explain(models.TEXTS[1]).scores)
        return output.logits[:, 0]

    got = ex.explain(models.TEXTS[0], target=target)
    assert cases.gap(got.scores, cases.explainer("bert/classify").explain(models.TEXTS[0], target=0).scores) <= 1e-9
    assert cases.gap(inside[-1], cases.single("bert/classify", "generic")["generic"][1].scores) <= 1e-9


def test_autocast_around_the_first_use_changes_nothing():
    """Half precision that the caller is in the middle of would be recorded, and kept, as this model's exactness."""
    ex, plain = (models.explainer("bert/classify", torch.float32) for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        inside = ex.explain(models.TEXTS[0])
    assert inside.scores.tobytes() == plain.explain(models.TEXTS[0]).scores.tobytes()
    assert inside.certificate == plain.explain(models.TEXTS[0]).certificate


def test_a_model_made_in_inference_mode_is_refused_and_left_alone():
    with torch.inference_mode():
        model, tokenizer = models.text_model("bert")
    flags = [part.requires_grad for part in model.parameters()]
    with pytest.raises(clearhead.UnsupportedError, match="inference_mode"):
        clearhead.load(model, tokenizer).explain(models.TEXTS[0])
    assert [part.requires_grad for part in model.parameters()] == flags
