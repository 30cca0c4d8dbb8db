"""AttnLRP (Achtibat et al. 2024): input × gradient of a reimplemented model, in which

an activation is z · const(f(z)/z), the gradients of both factors of a product are halved, and the denominators of norms
are constant, and a softmax has its Jacobian averaged between equal logits and its own (`path`), or its own.

One sample at a time, in float64; only the weights and the config of the model are used."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from tests.replicas.path_softmax import mean_jacobian
from tests.replicas.weights import weights

Forward = Callable[["Layers", Tensor], Tensor]


def scores(
    model: Any, forward: Forward, vectors: Tensor, label: int, layers: "Layers | None" = None
) -> Float[np.ndarray, "*unit"]:
    """Σ_k x_ik g_ik over the embedding of a token; for an image, x ⊙ g of each pixel."""
    products, _ = relevance(model, forward, vectors, label, layers)
    return products.sum(-1) if products.ndim == 2 else products


def relevance(
    model: Any, forward: Forward, vectors: Tensor, label: int, layers: "Layers | None" = None
) -> tuple[np.ndarray, float]:
    """Return the relevance of the input, and of the constant terms in the expansions of softmaxes."""
    layers, leaf = layers or Layers(model), vectors.detach().double().clone().requires_grad_()
    y = forward(layers, leaf)[label]
    gradients = torch.autograd.grad(y, [leaf, *(tensor for pair in layers.softmaxes for tensor in pair)])
    kept_by_softmax = sum(
        float(((after * g_after).sum() - (before * g_before).sum()).detach())
        for (before, after), g_before, g_after in zip(layers.softmaxes, gradients[1::2], gradients[2::2], strict=True)
    )
    return (leaf * gradients[0]).detach().numpy(), kept_by_softmax


def halve_gradient(x: Tensor) -> Tensor:
    return x / 2 + x.detach() / 2


class Layers:
    """The layers of a model, by the names of their weights. Replicas of other rules override the operations."""

    path = True

    def __init__(self, model: Any) -> None:
        self.weights = weights(model)
        self.config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
        self.softmaxes: list[tuple[Tensor, Tensor]] = []

    def has(self, name: str) -> bool:
        return f"{name}.weight" in self.weights

    def linear(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def layer_norm(self, name: str, x: Tensor, eps: float) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt().detach()
        return scaled * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def rms_norm(self, name: str, x: Tensor, offset: float) -> Tensor:
        scaled = x / (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt().detach()
        return scaled * (self.weights[f"{name}.weight"] + offset)

    def activate(self, f: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
        denominator = torch.where(z == 0, 1e-9, z).detach()  # at zero, the derivative
        return z * (f(denominator) / denominator)

    def gate(self, f: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
        """A gated unit f(gate) ⊙ up."""
        return halve_gradient(self.activate(f, gate)) * halve_gradient(up)

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        """A product with a weight of a mixture: of a head's values with attention, of an expert's output."""
        return halve_gradient(a) @ halve_gradient(b)

    def add_positions(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + positions

    def rotate(self, x: Tensor, theta: float) -> Tensor:
        """Rotary embeddings: the k-th values of both halves are rotated by position · θ^(−2k/d)."""
        cos, sin = rotary_factors(len(x), x.shape[-1], theta)
        return x * cos + rotate_half(x) * sin

    def softmax(self, x: Tensor) -> Tensor:
        """A softmax; masked entries are left out before."""
        output = x.softmax(-1)
        if self.path:
            z = x.detach().numpy()
            jacobian = torch.tensor(mean_jacobian(z, np.full_like(z, z.mean())))
            linear = jacobian @ x
            output = linear + (output - linear).detach()
        self.softmaxes.append((x, output))
        return output

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, cap: float | None) -> Tensor:
        """Attention, head by head; several heads may share keys and values."""
        heads = []
        for head in range(q.shape[1]):
            shared = head * k.shape[1] // q.shape[1]
            attention_scores = scale * halve_gradient(q[:, head]) @ halve_gradient(k[:, shared]).T
            if cap is not None:
                attention_scores = cap * self.activate(torch.tanh, attention_scores / cap)
            rows = []
            for i in range(len(attention_scores)):
                visible = list(range(len(k))) if mask is None else mask[i].nonzero().flatten().tolist()
                attention = self.softmax(attention_scores[i, visible])
                rows.append(self.multiply(attention, v[visible, shared]))
            heads.append(torch.stack(rows))
        return torch.stack(heads, 1).flatten(1)


class PublishedLayers(Layers):
    """With the softmax's own Jacobian."""

    path = False


def _split_heads(x: Tensor, width: int) -> Tensor:
    return x.reshape(len(x), -1, width)


def bert(layers: Layers, embeddings: Tensor) -> Tensor:
    config, at = layers.config, "bert.embeddings"
    token_types = layers.weights[f"{at}.token_type_embeddings.weight"][0]
    positions = layers.weights[f"{at}.position_embeddings.weight"][: len(embeddings)]
    width, eps = config.hidden_size // config.num_attention_heads, config.layer_norm_eps
    x = layers.layer_norm(f"{at}.LayerNorm", layers.add_positions(embeddings + token_types, positions), eps)
    for layer in range(config.num_hidden_layers):
        at = f"bert.encoder.layer.{layer}"
        q, k, v = (_split_heads(layers.linear(f"{at}.attention.self.{n}", x), width) for n in ("query", "key", "value"))
        out = layers.linear(f"{at}.attention.output.dense", layers.attend(q, k, v, width**-0.5, None, None))
        x = layers.layer_norm(f"{at}.attention.output.LayerNorm", out + x, eps)
        inner = layers.activate(functional.gelu, layers.linear(f"{at}.intermediate.dense", x))
        x = layers.layer_norm(f"{at}.output.LayerNorm", layers.linear(f"{at}.output.dense", inner) + x, eps)
    pooled = layers.activate(torch.tanh, layers.linear("bert.pooler.dense", x[0]))
    return layers.linear("classifier", pooled)


def vit(layers: Layers, pixels: Tensor) -> Tensor:
    config, at = layers.config, "vit.embeddings"
    kernel = layers.weights[f"{at}.patch_embeddings.projection.weight"]
    bias = layers.weights[f"{at}.patch_embeddings.projection.bias"]
    patches = functional.conv2d(pixels[None], kernel, bias, stride=config.patch_size)[0].flatten(1).T
    x = torch.cat([layers.weights[f"{at}.cls_token"][0], patches])
    x = layers.add_positions(x, layers.weights[f"{at}.position_embeddings"][0])
    width, eps = config.hidden_size // config.num_attention_heads, config.layer_norm_eps
    for at in (f"vit.layers.{layer}" for layer in range(config.num_hidden_layers)):
        normed = layers.layer_norm(f"{at}.layernorm_before", x, eps)
        q, k, v = (_split_heads(layers.linear(f"{at}.attention.{n}_proj", normed), width) for n in "qkv")
        x = x + layers.linear(f"{at}.attention.o_proj", layers.attend(q, k, v, width**-0.5, None, None))
        normed = layers.layer_norm(f"{at}.layernorm_after", x, eps)
        x = x + layers.linear(f"{at}.mlp.fc2", layers.activate(functional.gelu, layers.linear(f"{at}.mlp.fc1", normed)))
    return layers.linear("classifier", layers.layer_norm("vit.layernorm", x, eps)[0])


def gpt2(layers: Layers, embeddings: Tensor) -> Tensor:
    config, count = layers.config, len(embeddings)
    x = layers.add_positions(embeddings, layers.weights["transformer.wpe.weight"][:count])
    width, eps = config.n_embd // config.n_head, config.layer_norm_epsilon
    mask = torch.ones(count, count).tril()

    def linear(name: str, x: Tensor) -> Tensor:  # the weight has the shape input × output
        return x @ layers.weights[f"{name}.weight"] + layers.weights[f"{name}.bias"]

    for at in (f"transformer.h.{layer}" for layer in range(config.n_layer)):
        q, k, v = (
            _split_heads(tensor, width)
            for tensor in linear(f"{at}.attn.c_attn", layers.layer_norm(f"{at}.ln_1", x, eps)).chunk(3, -1)
        )
        x = x + linear(f"{at}.attn.c_proj", layers.attend(q, k, v, width**-0.5, mask, None))
        inner = linear(f"{at}.mlp.c_fc", layers.layer_norm(f"{at}.ln_2", x, eps))
        x = x + linear(f"{at}.mlp.c_proj", layers.activate(lambda z: functional.gelu(z, approximate="tanh"), inner))
    last = layers.layer_norm("transformer.ln_f", x, eps)[-1]
    return last @ layers.weights["transformer.wte.weight"].T


def llama(layers: Layers, embeddings: Tensor) -> Tensor:
    """Llama, Mistral, Qwen 2 and 3, Gemma 2 and 3, Mixtral: grouped heads, gated MLPs, soft caps, norms of queries and
    keys, sliding windows, experts."""
    config, count, width = layers.config, len(embeddings), layers.config.head_dim
    gemma = config.model_type.startswith("gemma")
    offset = 1.0 if gemma else 0.0
    scale = (getattr(config, "query_pre_attn_scalar", None) or width) ** -0.5
    f = (lambda z: functional.gelu(z, approximate="tanh")) if gemma else functional.silu
    x = embeddings
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}"
        normed = layers.rms_norm(f"{at}.input_layernorm", x, offset)
        q, k, v = (_split_heads(layers.linear(f"{at}.self_attn.{n}_proj", normed), width) for n in "qkv")
        if layers.has(f"{at}.self_attn.q_norm"):
            q, k = (layers.rms_norm(f"{at}.self_attn.{n}_norm", tensor, offset) for n, tensor in (("q", q), ("k", k)))
        layer_type = (getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)[layer]
        theta = _theta(config, layer_type)
        cap = getattr(config, "attn_logit_softcapping", None)
        out = layers.attend(
            layers.rotate(q, theta),
            layers.rotate(k, theta),
            v,
            scale,
            _make_attention_mask(config, layer_type, count),
            cap,
        )
        out = layers.linear(f"{at}.self_attn.o_proj", out)
        x = x + (layers.rms_norm(f"{at}.post_attention_layernorm", out, offset) if gemma else out)
        name = "pre_feedforward_layernorm" if gemma else "post_attention_layernorm"
        normed = layers.rms_norm(f"{at}.{name}", x, offset)
        out = (
            _experts(layers, f"{at}.mlp", normed, f)
            if layers.has(f"{at}.mlp.gate")
            else _gated_mlp(layers, at, normed, f)
        )
        x = x + (layers.rms_norm(f"{at}.post_feedforward_layernorm", out, offset) if gemma else out)
    logits = layers.linear("lm_head", layers.rms_norm("model.norm", x, offset)[-1])
    cap = getattr(config, "final_logit_softcapping", None)
    return logits if cap is None else cap * layers.activate(torch.tanh, logits / cap)


def _gated_mlp(layers: Layers, at: str, x: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    gate, up = (layers.linear(f"{at}.mlp.{name}_proj", x) for name in ("gate", "up"))
    return layers.linear(f"{at}.mlp.down_proj", layers.gate(f, gate, up))


def _experts(layers: Layers, at: str, x: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    """Each token is processed by the experts of the highest router probabilities, weighted by them."""
    rows = []
    for token in x:
        router_probabilities = layers.softmax(layers.linear(f"{at}.gate", token))
        best = router_probabilities.argsort(descending=True)[: layers.config.num_experts_per_tok]
        weights = router_probabilities[best] / router_probabilities[best].sum().detach()
        total = torch.zeros_like(token)
        for expert, weight in zip(best.tolist(), weights, strict=True):
            gate, up = (layers.weights[f"{at}.experts.gate_up_proj"][expert] @ token).chunk(2)
            out = layers.weights[f"{at}.experts.down_proj"][expert] @ layers.gate(f, gate, up)
            total = total + layers.multiply(weight[None], out[None])
        rows.append(total)
    return torch.stack(rows)


def _theta(config: Any, layer_type: str) -> float:
    settings = config.rope_parameters
    return (settings.get(layer_type) or settings)["rope_theta"]


def _make_attention_mask(config: Any, layer_type: str, count: int) -> Tensor:
    mask = torch.ones(count, count).tril()
    window = getattr(config, "sliding_window", None)
    has_layer_types = getattr(config, "layer_types", None) is not None
    if window and (layer_type == "sliding_attention" or not has_layer_types):
        mask = mask.triu(1 - window)
    return mask


def rotary_factors(count: int, width: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of the angles, position × 1 × width."""
    half = width // 2
    angles = torch.arange(count).double()[:, None] * theta ** (-torch.arange(half).double() / half)
    return torch.cat([angles.cos()] * 2, -1)[:, None], torch.cat([angles.sin()] * 2, -1)[:, None]


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)
