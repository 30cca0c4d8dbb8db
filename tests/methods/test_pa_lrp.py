"""PA-LRP equals a replica of the paper, conserves relevance with positions, and rejects models without positions."""

from typing import Any

import numpy as np
import pytest
from torch import Tensor

import clearhead
from tests import models
from tests.adapters import test_decoder as decoders
from tests.adapters import test_encoder_decoder as encoder_decoders
from tests.methods import modified_gradients, replica_comparison
from tests.replicas import attn_lrp, pa_lrp
from tests.replicas.input_x_gradient import unit_vectors


def test_text_scores_equal_replica() -> None:
    modified_gradients.assert_text_equals_replica("pa-lrp", pa_lrp.scores)


def test_published_softmax_equals_replica() -> None:
    def compute(model: Any, forward: attn_lrp.Forward, vectors: Tensor, label: int) -> np.ndarray:
        return sum(pa_lrp.relevance(pa_lrp.PublishedLayers(model), forward, vectors, label))

    modified_gradients.assert_text_equals_replica(clearhead.Method("pa-lrp", softmax="gradient"), compute)


def test_image_scores_equal_replica() -> None:
    """The class token has no pixels, but a position."""
    ex, images = replica_comparison.explainer("vit/image"), models.inputs("vit/image")
    with decoders.Wide():
        results = ex.explain(images, "pa-lrp", target=2)
    for e, image in zip(results, images, strict=True):
        pixels = replica_comparison.model_inputs("vit/image", image)["pixel_values"][0]
        by_pixel, by_position = pa_lrp.relevance(pa_lrp.Layers(ex.adapter.model), attn_lrp.vit, pixels, 2)
        by_patch = np.array([sum(vector) for vector in unit_vectors(by_pixel, 4, 1)])
        assert replica_comparison.gap(e.scores, by_patch + by_position) < 1e-10
        assert replica_comparison.gap(e.components["position"], by_position) < 1e-10
        assert abs(e.scores[0]) > 0


@pytest.mark.parametrize("family", [*modified_gradients.DECODERS, "gemma3"])
def test_decoder_scores_equal_replica(family: str) -> None:
    """Learned positions in GPT-2, rotary ones in the others; Gemma 3 has two kinds."""
    modified_gradients.assert_decoder_equals_replica("pa-lrp", pa_lrp.scores, family)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3"])
def test_relevance_of_tokens_positions_and_softmaxes_is_conserved(family: str) -> None:
    ex = decoders.explainer(family)
    e = modified_gradients.explain_bias_free_decoder(family, "pa-lrp")
    vectors = modified_gradients.embed_prompt(ex, modified_gradients.PROMPTS[1])
    _, kept_by_softmax = attn_lrp.relevance(
        ex.adapter.model, attn_lrp.llama, vectors, e.target["index"], pa_lrp.Layers(ex.adapter.model)
    )
    assert e.scores.sum() + kept_by_softmax == pytest.approx(e.target["value"], rel=modified_gradients.ROTARY_TOLERANCE)
    np.testing.assert_allclose(e.components["token"] + e.components["position"], e.scores, atol=1e-12)
    assert np.abs(e.components["position"]).sum() > 0.01 * np.abs(e.scores).sum(), "or the test could not fail"


def test_tokens_get_the_scores_of_attn_lrp_if_positions_are_added() -> None:
    """A sum does not change what either term gets; a rotation halves what queries and keys get."""
    ex, text = replica_comparison.explainer("bert/classify"), models.inputs("bert/classify")[1]
    results = ex.explain(text, ["pa-lrp", "attn-lrp"])
    np.testing.assert_allclose(results["pa-lrp"].components["token"], results["attn-lrp"].scores, atol=1e-12)
    rotary = decoders.explainer("llama").explain(modified_gradients.PROMPTS[1], ["pa-lrp", "attn-lrp"])
    assert replica_comparison.gap(rotary["pa-lrp"].components["token"], rotary["attn-lrp"].scores) > 0.01


def test_continuation_steps_equal_single_steps() -> None:
    """All tokens of a continuation in one pass with several targets."""
    ex = decoders.explainer("llama")
    ids, count = decoders.ids_of("So", " boring!", ex)
    with decoders.Wide():
        all_steps = ex.explain("So", "pa-lrp", answer=" boring!")
    for step in range(count):
        length = len(ids) - count + step
        vectors = ex.adapter.model.get_input_embeddings()(ids[:length])
        expected = pa_lrp.scores(ex.adapter.model, attn_lrp.llama, vectors, int(ids[length]))
        gap = replica_comparison.gap(all_steps.matrix[step, :length], expected)
        assert gap < modified_gradients.ROTARY_TOLERANCE


@pytest.mark.parametrize(
    ("subject", "reason"),
    [
        ("swin/image", "no position embeddings were found.*Choose attn-lrp"),
        ("beit/image", "no position embeddings were found.*Choose attn-lrp"),
        ("dinov2-registers/image", r"position embeddings cover \d+ positions, but there are \d+ units.*attn-lrp"),
    ],
)
def test_model_without_positions_of_its_units_is_rejected(subject: str, reason: str) -> None:
    ex = replica_comparison.explainer(subject)
    with pytest.raises(clearhead.UnsupportedError, match=rf"pa-lrp cannot explain .*: in \w+, {reason}"):
        ex.explain(models.inputs(subject)[0], "pa-lrp")
    (row,) = (row for row in ex.methods() if row.name == "pa-lrp")
    assert not row.applies and "position embeddings" in row.why_not


def test_model_with_several_inputs_is_rejected() -> None:
    """Encoder and decoder have positions of their own."""
    ex = encoder_decoders.explainer("bart")
    with pytest.raises(clearhead.UnsupportedError, match=r"several inputs \(input_ids, decoder_input_ids\).* attn-lrp"):
        ex.explain("So", "pa-lrp", answer=" boring!")


def test_explained_choice_of_multiple_choice_gets_its_own_positions() -> None:
    ex = clearhead.load(*models.text_model("bert", "ForMultipleChoice"))
    texts = ("I like the movie", ["it is wonderful and moving", "boring"])
    for choice in range(2):
        results = ex.explain(texts, ["pa-lrp", "attn-lrp"], target=choice)
        components = results["pa-lrp"].components
        np.testing.assert_allclose(components["token"], results["attn-lrp"].scores, atol=1e-12)
        assert len(components["position"]) == len(components["token"]) and components["position"].all()


def test_model_is_unchanged_after_pa_lrp() -> None:
    """Position parameters and modules are those of before, and have no gradients and no hooks."""
    ex, images = replica_comparison.explainer("vit/image"), models.inputs("vit/image")
    model = ex.adapter.model
    before = {name: (id(parameter), parameter.requires_grad) for name, parameter in model.named_parameters()}
    scores = ex.explain(images[0], "input-x-gradient").scores
    ex.explain(images[0], "pa-lrp")
    assert before == {name: (id(p), p.requires_grad) for name, p in model.named_parameters()}
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    np.testing.assert_array_equal(ex.explain(images[0], "input-x-gradient").scores, scores)
