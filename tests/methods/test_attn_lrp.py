"""AttnLRP equals a reference implementation on text encoders, ViT and decoders; conservation and rejected operators."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import clearhead
from tests import models
from tests.adapters import test_decoder as decoders
from tests.methods import modified_gradients, replica_comparison
from tests.methods.modified_gradients import PROMPTS, ROTARY_TOLERANCE
from tests.replicas import attn_lrp as replica

DECODERS = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "mixtral")


def compute(model: Any, forward: replica.Forward, vectors: torch.Tensor, label: int) -> np.ndarray:
    return replica.scores(model, forward, vectors, label)


def test_text_scores_equal_reference_implementation() -> None:
    modified_gradients.assert_text_equals_replica("attn-lrp", compute)


def test_profile_of_authors_has_jacobian_of_softmax_itself() -> None:
    published = modified_gradients.multiply_out(replica.PublishedLayers)
    modified_gradients.assert_text_equals_replica("attn-lrp", published, profile="lxt")


def test_image_scores_equal_reference_implementation() -> None:
    modified_gradients.assert_image_equals_replica("attn-lrp", compute)


@pytest.mark.parametrize("family", DECODERS)
def test_decoder_scores_equal_reference_implementation(family: str) -> None:
    modified_gradients.assert_decoder_equals_replica("attn-lrp", compute, family)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3"])
def test_relevance_is_conserved_without_biases(family: str) -> None:
    """Relevance starts as the logit; what does not reach the token embeddings is kept by the softmaxes."""
    ex = decoders.explainer(family)
    e = modified_gradients.explain_bias_free_decoder(family, "attn-lrp")
    vectors = modified_gradients.embed_prompt(ex, PROMPTS[1])
    _, kept_by_softmax = replica.relevance(ex.adapter.model, replica.llama, vectors, e.target["index"])
    assert e.scores.sum() + kept_by_softmax == pytest.approx(e.target["value"], rel=ROTARY_TOLERANCE)
    assert abs(kept_by_softmax) > 0.01 * abs(e.target["value"]), (
        "the softmaxes must keep some relevance, or this test could not fail"
    )


def test_continuation_steps_equal_single_steps() -> None:
    """All tokens of a continuation in one call; each equals the next token of a text that ends before it."""
    ex = decoders.explainer("llama")
    ids, count = decoders.ids_of("So", " boring!", ex)
    with decoders.Wide():
        all_steps = ex.explain("So", "attn-lrp", answer=" boring!")
        for step in range(count):
            vectors = ex.adapter.model.get_input_embeddings()(ids[: len(ids) - count + step])
            single_step = replica.scores(ex.adapter.model, replica.llama, vectors, int(ids[len(ids) - count + step]))
            assert replica_comparison.gap(all_steps.matrix[step, : len(single_step)], single_step) < ROTARY_TOLERANCE


def test_grouped_mm_experts_equal_eager_experts() -> None:
    """The default `grouped_mm`, in float32, equals the eager loop over experts."""
    model = decoders.made("mixtral", torch.float32)
    eager = clearhead.load(model, decoders.WORDS).explain(PROMPTS[0], "attn-lrp")
    model.set_experts_implementation("grouped_mm")
    grouped = clearhead.load(model, decoders.WORDS).explain(PROMPTS[0], "attn-lrp")
    assert replica_comparison.gap(grouped.scores, eager.scores) < 1e-4


class CustomActivation(nn.Module):
    """An activation without a rule, or one that is not zero at zero."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


@pytest.mark.parametrize(
    ("function", "message"),
    [(torch.cos, "cos"), (torch.sort, "sort"), (torch.sigmoid, "sigmoid, whose value at zero is not zero")],
)
def test_operator_without_rule_is_rejected_by_name(function: Any, message: str) -> None:
    model, processor = models.text_model("bert")
    for layer in model.bert.encoder.layer:
        layer.intermediate.intermediate_act_fn = CustomActivation(
            lambda x: output if isinstance(output := function(x), torch.Tensor) else output[0]
        )
    ex = clearhead.load(model, processor)
    for method in ("attn-lrp",) if "zero" in message else ("attn-lrp", "lrp", "partial-lrp", "transformer-attribution"):
        with pytest.raises(
            clearhead.UnsupportedError, match=f"{method} cannot explain .*: in BertFor.*{message}.* has no rule in"
        ):
            ex.explain("I like the movie.", method)
        (row,) = (row for row in ex.methods() if row.name == method)
        assert not row.applies and message in row.why_not
    assert np.isfinite(ex.explain("I like the movie.", "generic").scores).all(), "other methods still work"


def test_gradients_and_hooks_are_unchanged_after_attn_lrp() -> None:
    """After a pass with rules, ordinary gradients are the same as before and no hook remains."""
    ex, text = replica_comparison.explainer("bert/classify"), replica_comparison.SENTENCES[0]
    before = ex.explain(text, "input-x-gradient")
    relevance = ex.explain(text, "attn-lrp")
    assert replica_comparison.gap(relevance.scores, before.scores) > 0.01
    np.testing.assert_array_equal(ex.explain(text, "input-x-gradient").scores, before.scores)
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in ex.adapter.model.modules())
