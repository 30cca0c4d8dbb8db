"""The error of perceptions against sums written out, block by block, from the model's own modules."""

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


def mixed(name: str, attention: np.ndarray, gradient: np.ndarray, taken: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Ã with loops: heads × n × n attention and its gradient, W_o v_j and z_j of each token."""
    heads, n, _ = attention.shape
    found = np.zeros((n, n))
    weights = [1 / heads] * heads
    if name == "beyond-intuition-head":
        sizes = [np.abs(attention[h].T @ gradient[h]).mean() for h in range(heads)]
        weights = [size / sum(sizes) for size in sizes]
    for i in range(n):
        for j in range(n):
            found[i, j] = sum(weights[h] * attention[h, i, j] for h in range(heads))
            if name == "beyond-intuition-token":
                found[i, j] *= np.sqrt((taken[j] ** 2).sum()) / np.sqrt((tokens[j] ** 2).sum())
    return found


def test_errors_equal_sums_written_out() -> None:
    ex, text = explainer("bert/classify"), inputs("bert/classify")[1]
    methods = [Method(name) for name in (*MIXING_METHODS, "random")]
    examples, how = [Example("0", text)], MixingError()
    made = how.measure(ex, examples, explain_examples(ex, examples, methods, how).by_method)
    assert [one.method for one in made] == list(MIXING_METHODS)  # random has no mixing

    model, blocks = ex.adapter.model, ex.adapter.model.bert.encoder.layer
    model.set_attn_implementation("eager")  # the other implementations return no attention
    seen: list[Any] = []
    handles = [
        block.register_forward_hook(
            lambda module, args, out: seen.append((args[0], out if torch.is_tensor(out) else out[0]))
        )
        for block in blocks
    ]
    output = model(**ex.adapter.processor(text, return_tensors="pt"), output_attentions=True)
    for handle in handles:
        handle.remove()
    gradients = torch.autograd.grad(output.logits[0].max(), output.attentions)
    expected: dict[str, list[float]] = {name: [] for name in MIXING_METHODS}
    cosines: dict[str, list[float]] = {name: [] for name in MIXING_METHODS}
    for block, (before, after), attention, gradient in zip(blocks, seen, output.attentions, gradients, strict=True):
        tokens = before[0].detach().numpy()
        a, g = attention[0].detach().numpy(), gradient[0].numpy()
        values = block.attention.self.value(before)[0].detach().numpy()
        weight = block.attention.output.dense.weight.detach().numpy()
        width = values.shape[1] // len(a)
        true = tokens.copy()
        for h in range(len(a)):
            part = slice(h * width, (h + 1) * width)
            true += a[h] @ values[:, part] @ weight[:, part].T
        for name in MIXING_METHODS:
            perceived = tokens + mixed(name, a, g, values @ weight.T, tokens) @ tokens
            expected[name].append(np.linalg.norm(true - perceived) / np.linalg.norm(true))
            out = after[0].detach().numpy()
            pairs = zip(perceived, out, strict=True)
            cosines[name].append(np.mean([p @ o / np.linalg.norm(p) / np.linalg.norm(o) for p, o in pairs]))
    for one in made:
        assert one.curves["error"] == pytest.approx(expected[one.method], abs=1e-9)
        assert one.figures["error"] == pytest.approx(np.mean(expected[one.method]))
        assert one.figures["block cosine"] == pytest.approx(np.mean(cosines[one.method]))
        assert one.figures["unmixed error"] > 0


def test_only_perceiving_methods_have_one() -> None:
    ex, examples = explainer("bert/classify"), [Example("0", inputs("bert/classify")[0])]
    with pytest.raises(InputError, match="beyond-intuition-token"):
        MixingError().measure(ex, examples, {"saliency": []})


def test_pictures_have_perceptions_too() -> None:
    ex = explainer("vit/image", torch.float32)
    examples, how = [Example("0", inputs("vit/image")[0])], MixingError()
    own = explain_examples(ex, examples, [Method("rollout"), Method("beyond-intuition-token")], how).by_method
    made = how.measure(ex, examples, own)
    assert len(made) == 2 and all(np.isfinite(list(one.figures.values())).all() for one in made)
    assert not how.is_smaller_better("block cosine", "image") and how.is_smaller_better("error", "image")
