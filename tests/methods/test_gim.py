"""GIM equals a replica of the paper; its baseline and its temperature do what their names say."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import clearhead
from tests import models
from tests.adapters import test_decoder as decoders
from tests.methods import modified_gradients, replica_comparison
from tests.replicas import attn_lrp, gim, input_x_gradient


def compute_at_zero(model: Any, forward: attn_lrp.Forward, vectors: Tensor, label: int) -> np.ndarray:
    return gim.scores(gim.Layers(model), forward, vectors, torch.zeros_like(vectors), label)


def test_text_scores_equal_replica() -> None:
    modified_gradients.assert_text_equals_replica(clearhead.Method("gim", baseline="zero"), compute_at_zero)


def test_image_scores_equal_replica() -> None:
    modified_gradients.assert_image_equals_replica("gim", compute_at_zero)


@pytest.mark.parametrize("family", modified_gradients.DECODERS)
def test_decoder_scores_equal_replica(family: str) -> None:
    modified_gradients.assert_decoder_equals_replica(clearhead.Method("gim", baseline="zero"), compute_at_zero, family)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_temperature_scales_logits_in_backward_pass(temperature: float) -> None:
    def compute(model: Any, forward: attn_lrp.Forward, vectors: Tensor, label: int) -> np.ndarray:
        return gim.scores(gim.Layers(model, temperature), forward, vectors, torch.zeros_like(vectors), label)

    method = clearhead.Method("gim", baseline="zero", temperature=temperature)
    modified_gradients.assert_text_equals_replica(method, compute)


@pytest.mark.parametrize("temperature", [0, 1e-300, -2.0, float("inf"), float("nan")])
def test_temperatures_without_a_gradient_are_rejected(temperature: float) -> None:
    with pytest.raises(clearhead.InputError, match="temperature="):
        replica_comparison.explainer("bert/classify").explain("So", clearhead.Method("gim", temperature=temperature))


@pytest.mark.parametrize("baseline", [None, "mean"])
def test_baseline_is_subtracted_from_all_but_special_tokens(baseline: str | None) -> None:
    """The mean embedding of the vocabulary is the default where the embedding of padding is zero."""
    model, tokenizer = models.text_model("bert")
    embeddings = model.get_input_embeddings().weight
    assert not embeddings[tokenizer.pad_token_id].any()
    ex = clearhead.load(model, tokenizer)
    for text in models.inputs("bert/classify"):
        vectors = modified_gradients.embed_text(text)
        reference = embeddings.detach().mean(0).expand_as(vectors).clone()
        reference[0], reference[-1] = vectors[0], vectors[-1]
        expected = gim.scores(gim.Layers(model), attn_lrp.bert, vectors, reference, 2)
        e = ex.explain(text, clearhead.Method("gim", baseline=baseline), target=2)
        assert replica_comparison.gap(e.scores, expected) < 1e-10
        assert e.scores[0] == 0 and e.scores[-1] == 0


def test_continuation_steps_equal_single_steps() -> None:
    """All tokens of a continuation in one pass with several targets, each with the same baseline."""
    ex = decoders.explainer("llama")
    ids, count = decoders.ids_of("So", " boring!", ex)
    method = clearhead.Method("gim", baseline="mean")
    with decoders.Wide():
        all_steps = ex.explain("So", method, answer=" boring!")
    embeddings = ex.adapter.model.get_input_embeddings()
    for step in range(count):
        length = len(ids) - count + step
        vectors = embeddings(ids[:length])
        is_special = torch.isin(ids[:length], torch.tensor(ex.adapter.processor.all_special_ids))[:, None]
        reference = torch.where(is_special, vectors, embeddings.weight.mean(0)).detach()
        expected = gim.scores(gim.Layers(ex.adapter.model), attn_lrp.llama, vectors, reference, int(ids[length]))
        gap = replica_comparison.gap(all_steps.matrix[step, :length], expected)
        assert gap < modified_gradients.ROTARY_TOLERANCE


def test_without_scaling_gim_equals_input_x_gradient_with_frozen_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """T = 1, and products that are not halved: the ordinary gradient of a model whose norms have constant scales."""
    ex, text = replica_comparison.explainer("bert/classify"), models.inputs("bert/classify")[1]
    monkeypatch.setattr("clearhead.backward_rules.gim.GIMRules.product", lambda self, apply, a, b: apply(a, b))
    method = clearhead.Method("gim", baseline="zero", temperature=1.0)
    scores = ex.explain(text, method, target=2).scores
    assert replica_comparison.gap(scores, gradient_with_frozen_norms(ex.adapter.model, text)) < 1e-10
    assert replica_comparison.gap(scores, ex.explain(text, "input-x-gradient", target=2).scores) > 0.01


def gradient_with_frozen_norms(model: Any, text: str) -> np.ndarray:
    """Input × gradient of the model itself, with each norm replaced by a linear map with the scale of this input."""
    inputs = replica_comparison.model_inputs("bert/classify", text)
    vectors = modified_gradients.embed_text(text).detach()[None].requires_grad_()

    def freeze(norm: torch.nn.LayerNorm, args: tuple[Tensor], output: Tensor) -> Tensor:
        centred = args[0] - args[0].mean(-1, keepdim=True)
        scale = (centred.detach().square().mean(-1, keepdim=True) + norm.eps).rsqrt()
        return centred * scale * norm.weight + norm.bias

    norms = [module for module in model.modules() if isinstance(module, torch.nn.LayerNorm)]
    handles = [norm.register_forward_hook(freeze) for norm in norms]
    try:
        logits = model(inputs_embeds=vectors, attention_mask=inputs["attention_mask"]).logits
        (gradient,) = torch.autograd.grad(logits[0, 2], vectors)
    finally:
        for handle in handles:
            handle.remove()
    products = (vectors * gradient)[0].detach().numpy()
    return np.array([input_x_gradient.reduce_vector(list(map(float, vector)), "sum") for vector in products])
