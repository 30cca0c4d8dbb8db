"""Mixing error of Beyond-Intuition perceptions against explicit sums from the model's modules, block by block."""

from typing import Any

import numpy as np
import pytest
import torch

from clearhead.bench.chunk_explanations import explain_examples
from clearhead.bench.data import Example
from clearhead.bench.protocols.mixing_error import MIXING_METHODS, MixingError
from clearhead.errors import InputError
from clearhead.methods.base import Method
from tests.models import explainer, inputs


def reference_mixing(
    name: str, attention: np.ndarray, gradient: np.ndarray, projected_values: np.ndarray, tokens: np.ndarray
) -> np.ndarray:
    """Ã by loops, from attention and its gradient (heads × n × n), and W_o v_j and z_j of each token."""
    heads, n, _ = attention.shape
    mixing = np.zeros((n, n))
    weights = [1 / heads] * heads
    if name == "beyond-intuition-head":
        sizes = [np.abs(attention[h].T @ gradient[h]).mean() for h in range(heads)]
        weights = [size / sum(sizes) for size in sizes]
    for i in range(n):
        for j in range(n):
            mixing[i, j] = sum(weights[h] * attention[h, i, j] for h in range(heads))
            if name == "beyond-intuition-token":
                mixing[i, j] *= np.sqrt((projected_values[j] ** 2).sum()) / np.sqrt((tokens[j] ** 2).sum())
    return mixing


def test_mixing_errors_equal_reference() -> None:
    ex, text = explainer("bert/classify"), inputs("bert/classify")[1]
    methods = [Method(name) for name in (*MIXING_METHODS, "random")]
    examples, protocol = [Example("0", text)], MixingError()
    measurements = protocol.measure(ex, examples, explain_examples(ex, examples, methods, protocol).by_method)
    assert [measurement.method for measurement in measurements] == list(MIXING_METHODS)  # random has no mixing matrix

    model, blocks = ex.adapter.model, ex.adapter.model.bert.encoder.layer
    model.set_attn_implementation("eager")  # the other implementations return no attention
    block_inputs_outputs: list[Any] = []
    handles = [
        block.register_forward_hook(
            lambda module, args, block_output: block_inputs_outputs.append(
                (args[0], block_output if torch.is_tensor(block_output) else block_output[0])
            )
        )
        for block in blocks
    ]
    output = model(**ex.adapter.processor(text, return_tensors="pt"), output_attentions=True)
    for handle in handles:
        handle.remove()
    gradients = torch.autograd.grad(output.logits[0].max(), output.attentions)
    expected: dict[str, list[float]] = {name: [] for name in MIXING_METHODS}
    cosines: dict[str, list[float]] = {name: [] for name in MIXING_METHODS}
    for block, (before, after), attention, gradient in zip(
        blocks, block_inputs_outputs, output.attentions, gradients, strict=True
    ):
        tokens = before[0].detach().numpy()
        a, g = attention[0].detach().numpy(), gradient[0].numpy()
        values = block.attention.self.value(before)[0].detach().numpy()
        weight = block.attention.output.dense.weight.detach().numpy()
        width = values.shape[1] // len(a)
        true = tokens.copy()
        for h in range(len(a)):
            head_slice = slice(h * width, (h + 1) * width)
            true += a[h] @ values[:, head_slice] @ weight[:, head_slice].T
        for name in MIXING_METHODS:
            perceived = tokens + reference_mixing(name, a, g, values @ weight.T, tokens) @ tokens
            expected[name].append(np.linalg.norm(true - perceived) / np.linalg.norm(true))
            block_output = after[0].detach().numpy()
            pairs = zip(perceived, block_output, strict=True)
            cosines[name].append(np.mean([p @ o / np.linalg.norm(p) / np.linalg.norm(o) for p, o in pairs]))
    for measurement in measurements:
        assert measurement.curves["error"] == pytest.approx(expected[measurement.method], abs=1e-9)
        assert measurement.figures["error"] == pytest.approx(np.mean(expected[measurement.method]))
        assert measurement.figures["block cosine"] == pytest.approx(np.mean(cosines[measurement.method]))
        assert measurement.figures["unmixed error"] > 0


def test_method_without_mixing_matrix_raises() -> None:
    ex, examples = explainer("bert/classify"), [Example("0", inputs("bert/classify")[0])]
    with pytest.raises(InputError, match="beyond-intuition-token"):
        MixingError().measure(ex, examples, {"saliency": []})


def test_mixing_error_of_images_is_finite() -> None:
    ex = explainer("vit/image", torch.float32)
    examples, protocol = [Example("0", inputs("vit/image")[0])], MixingError()
    explanations = explain_examples(
        ex, examples, [Method("rollout"), Method("beyond-intuition-token")], protocol
    ).by_method
    measurements = protocol.measure(ex, examples, explanations)
    assert len(measurements) == 2 and all(
        np.isfinite(list(measurement.figures.values())).all() for measurement in measurements
    )
    assert not protocol.is_smaller_better("block cosine", "image") and protocol.is_smaller_better("error", "image")
