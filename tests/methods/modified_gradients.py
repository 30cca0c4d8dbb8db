"""Compare methods with modified gradients with their replicas, on a text encoder, a vision transformer and decoders."""

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

import clearhead
from clearhead.adapters import InputOptions
from tests import models
from tests.adapters import test_decoder as decoders
from tests.methods import replica_comparison
from tests.replicas import attn_lrp as replica
from tests.replicas.input_x_gradient import unit_vectors

#: Gated units, soft caps, norms of queries and keys, and experts.
DECODERS = ("gpt2", "llama", "qwen3", "gemma2", "mixtral")
PROMPTS = decoders.PROMPTS[:2]
#: transformers computes rotary embeddings in float32.
ROTARY_TOLERANCE = 1e-6

#: Layers, forward pass, input vectors and index of the target → the scores of the replica.
ReplicaScores = Callable[[Any, replica.Forward, Tensor, int], np.ndarray]


def embed_text(text: str) -> Tensor:
    """Return the token embeddings of the BERT classifier."""
    inputs = replica_comparison.model_inputs("bert/classify", text)
    return replica_comparison.explainer("bert/classify").adapter.model.get_input_embeddings()(inputs["input_ids"])[0]


def embed_prompt(ex: clearhead.Explainer, prompt: str) -> Tensor:
    """Return the token embeddings of a decoder."""
    (sample,) = ex.adapter.make_samples(prompt, InputOptions())
    lookup, model_type = ex.adapter.model.get_input_embeddings(), ex.adapter.model.config.model_type
    vectors = lookup(sample.inputs["input_ids"]).detach()
    # In transformers 5.0 Gemma 2 scales its embeddings after the lookup.
    return vectors if model_type != "gemma2" or hasattr(lookup, "embed_scale") else vectors * vectors.shape[-1] ** 0.5


def assert_text_equals_replica(method: Any, compute: ReplicaScores, profile: str | None = None) -> None:
    """Three texts in one padded batch."""
    ex, texts = replica_comparison.explainer("bert/classify"), models.inputs("bert/classify")
    for e, text in zip(ex.explain(texts, method, target=2, profile=profile), texts, strict=True):
        expected = compute(ex.adapter.model, replica.bert, embed_text(text), 2)
        assert replica_comparison.gap(e.scores, expected) < 1e-10


def assert_image_equals_replica(method: Any, compute: ReplicaScores) -> None:
    """Three images; the replica returns the products of pixels."""
    ex, images = replica_comparison.explainer("vit/image"), models.inputs("vit/image")
    with decoders.Wide():
        results = ex.explain(images, method, target=2)
    for e, image in zip(results, images, strict=True):
        pixels = replica_comparison.model_inputs("vit/image", image)["pixel_values"][0]
        products = compute(ex.adapter.model, replica.vit, pixels, 2)
        assert replica_comparison.gap(e.scores, [sum(vector) for vector in unit_vectors(products, 4, 1)]) < 1e-10


def assert_decoder_equals_replica(method: Any, compute: ReplicaScores, family: str) -> None:
    """The next token of two prompts in one padded batch."""
    ex = decoders.explainer(family)
    with decoders.Wide():
        results = ex.explain(PROMPTS, method)
    forward = replica.gpt2 if family == "gpt2" else replica.llama
    for e, prompt in zip(results, PROMPTS, strict=True):
        expected = compute(ex.adapter.model, forward, embed_prompt(ex, prompt), e.target["index"])
        assert replica_comparison.gap(e.scores, expected) < ROTARY_TOLERANCE


def explain_bias_free_decoder(family: str, method: Any) -> clearhead.Explanation:
    """Explain the next token by a decoder that has no biases."""
    ex = decoders.explainer(family)
    assert not any(name.endswith("bias") for name in ex.adapter.model.state_dict())
    with decoders.Wide():
        return ex.explain(PROMPTS[1], method)


def multiply_out(layers_type: Callable[[Any], replica.Layers]) -> ReplicaScores:
    """Return the scores x ⊙ g of a replica, as a function of the model."""

    def compute(model: Any, forward: replica.Forward, vectors: Tensor, label: int) -> np.ndarray:
        return replica.scores(model, forward, vectors, label, layers_type(model))

    return compute
