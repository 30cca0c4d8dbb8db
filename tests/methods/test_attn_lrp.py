"""AttnLRP against a model written anew, on encoders, pictures and decoders; what it conserves, and what it refuses."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import clearhead
from clearhead.adapters import InputOptions
from tests import models
from tests.adapters import test_decoder as decoders
from tests.methods import replica_comparison
from tests.replicas import attn_lrp as replica
from tests.replicas.input_x_gradient import unit_vectors

DECODERS = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "mixtral")
PROMPTS = decoders.PROMPTS[:2]
#: transformers computes the angles of rotary positions in float32.
ROTARY = 1e-6


def test_equals_its_replica_on_texts() -> None:
    ex, texts = replica_comparison.explainer("bert/classify"), models.inputs("bert/classify")
    model = ex.adapter.model
    for e, text in zip(ex.explain(texts, "attn-lrp", target=2), texts, strict=True):
        vectors = model.get_input_embeddings()(replica_comparison.model_inputs("bert/classify", text)["input_ids"])[0]
        assert replica_comparison.gap(e.scores, replica.scores(model, replica.bert, vectors, 2)) < 1e-10


def test_equals_its_replica_on_pictures() -> None:
    ex, pictures = replica_comparison.explainer("vit/image"), models.inputs("vit/image")
    with decoders.Wide():
        own = ex.explain(pictures, "attn-lrp", target=2)
    for e, picture in zip(own, pictures, strict=True):
        pixels = replica_comparison.model_inputs("vit/image", picture)["pixel_values"][0]
        products = replica.scores(ex.adapter.model, replica.vit, pixels, 2)
        assert replica_comparison.gap(e.scores, [sum(vector) for vector in unit_vectors(products, 4, 1)]) < 1e-10


@pytest.mark.parametrize("family", DECODERS)
def test_equals_its_replica_on_decoders(family: str) -> None:
    """In one batch of different lengths; the next word is explained."""
    ex = decoders.explainer(family)
    with decoders.Wide():
        own = ex.explain(PROMPTS, "attn-lrp")
    for e, prompt in zip(own, PROMPTS, strict=True):
        vectors, word = _vectors(ex, prompt), e.target["index"]
        forward = replica.gpt2 if family == "gpt2" else replica.llama
        assert float(forward(replica.Made(ex.adapter.model), vectors)[word]) == pytest.approx(
            e.target["value"], rel=ROTARY
        )
        assert replica_comparison.gap(e.scores, replica.scores(ex.adapter.model, forward, vectors, word)) < ROTARY


def _vectors(ex: clearhead.Explainer, prompt: str) -> torch.Tensor:
    (sample,) = ex.adapter.make_samples(prompt, InputOptions())
    lookup, kind = ex.adapter.model.get_input_embeddings(), ex.adapter.model.config.model_type
    vectors = lookup(sample.inputs["input_ids"]).detach()
    # In transformers 5.0 Gemma 2 scales its words only after they are looked up.
    return vectors if kind != "gemma2" or hasattr(lookup, "embed_scale") else vectors * vectors.shape[-1] ** 0.5


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3"])
def test_relevance_is_conserved_where_there_are_no_biases(family: str) -> None:
    """Relevance starts as the logit; what does not arrive at the words is what the softmaxes keep."""
    ex = decoders.explainer(family)
    assert not any(name.endswith("bias") for name in ex.adapter.model.state_dict())
    with decoders.Wide():
        e = ex.explain(PROMPTS[1], "attn-lrp")
    _, kept = replica.relevance(ex.adapter.model, replica.llama, _vectors(ex, PROMPTS[1]), e.target["index"])
    assert e.scores.sum() + kept == pytest.approx(e.target["value"], rel=ROTARY)
    assert abs(kept) > 0.01 * abs(e.target["value"]), "they keep something, so that this can fail"


def test_steps_of_an_answer_together_are_steps_alone() -> None:
    """All words of an answer in one call, each as if it were the next word of a text that ends there."""
    ex = decoders.explainer("llama")
    ids, count = decoders.ids_of("So", " boring!", ex)
    with decoders.Wide():
        together = ex.explain("So", "attn-lrp", answer=" boring!")
        for step in range(count):
            vectors = ex.adapter.model.get_input_embeddings()(ids[: len(ids) - count + step])
            alone = replica.scores(ex.adapter.model, replica.llama, vectors, int(ids[len(ids) - count + step]))
            assert replica_comparison.gap(together.matrix[step, : len(alone)], alone) < ROTARY


def test_experts_as_the_library_runs_them_by_default() -> None:
    """All experts in one operation, in float32: what it computes is what the slow loop over experts does."""
    model = decoders.made("mixtral", torch.float32)
    slow = clearhead.load(model, decoders.WORDS).explain(PROMPTS[0], "attn-lrp")
    model.set_experts_implementation("grouped_mm")
    fast = clearhead.load(model, decoders.WORDS).explain(PROMPTS[0], "attn-lrp")
    assert replica_comparison.gap(fast.scores, slow.scores) < 1e-4


class Strange(nn.Module):
    """An activation that no family of rules knows, or one that is not zero at zero."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


@pytest.mark.parametrize(
    ("function", "said"),
    [(torch.cos, "cos"), (torch.sort, "sort"), (torch.sigmoid, "sigmoid, which is not zero at zero")],
)
def test_an_operator_without_a_rule_is_refused_by_name(function: Any, said: str) -> None:
    model, processor = models.text_model("bert")
    for layer in model.bert.encoder.layer:
        layer.intermediate.intermediate_act_fn = Strange(
            lambda x: found if isinstance(found := function(x), torch.Tensor) else found[0]
        )
    ex = clearhead.load(model, processor)
    for method in ("attn-lrp",) if "zero" in said else ("attn-lrp", "lrp", "partial-lrp", "transformer-attribution"):
        with pytest.raises(
            clearhead.UnsupportedError, match=f"{method} cannot explain .*: in BertFor.*{said}.* has no rule in"
        ):
            ex.explain("I like the movie.", method)
        (line,) = (line for line in ex.methods() if line.name == method)
        assert not line.applies and said in line.why_not
    assert np.isfinite(ex.explain("I like the movie.", "generic").scores).all(), "the others work on"


def test_nothing_is_left_behind() -> None:
    """After rules, gradients are ordinary again, also after a refusal."""
    ex, text = replica_comparison.explainer("bert/classify"), replica_comparison.SENTENCES[0]
    usual = ex.explain(text, "input-x-gradient")
    ruled = ex.explain(text, "attn-lrp")
    assert replica_comparison.gap(ruled.scores, usual.scores) > 0.01
    np.testing.assert_array_equal(ex.explain(text, "input-x-gradient").scores, usual.scores)
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in ex.adapter.model.modules())
