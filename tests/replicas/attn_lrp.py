"""AttnLRP (Achtibat et al. 2024): input × gradient of a model written anew, in which

an activation is z · const(f(z)/z), a product of two is that of both halved, and what norms divide by is constant.

One sample at a time, in float64; of the model only its weights and settings are used."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from tests.replicas.weights import weights

Forward = Callable[["Made", Tensor], Tensor]


def scores(model: Any, forward: Forward, vectors: Tensor, label: int) -> Float[np.ndarray, "*unit"]:
    """Σ_k x_ik g_ik over a word's vector; of a picture, x ⊙ g as it is."""
    products, _ = relevance(model, forward, vectors, label)
    return products.sum(-1) if products.ndim == 2 else products


def relevance(model: Any, forward: Forward, vectors: Tensor, label: int) -> tuple[np.ndarray, float]:
    """What arrives at the input, and what the softmaxes kept: the constant part of their first-order expansion."""
    made, leaf = Made(model), vectors.detach().double().clone().requires_grad_()
    y = forward(made, leaf)[label]
    gradients = torch.autograd.grad(y, [leaf, *(part for pair in made.softmaxes for part in pair)])
    kept = sum(
        float(((after * g_after).sum() - (before * g_before).sum()).detach())
        for (before, after), g_before, g_after in zip(made.softmaxes, gradients[1::2], gradients[2::2], strict=True)
    )
    return (leaf * gradients[0]).detach().numpy(), kept


def halved(x: Tensor) -> Tensor:
    return x / 2 + x.detach() / 2


def activated(f: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    near = torch.where(z == 0, 1e-9, z).detach()  # at zero itself, the slope there
    return z * (f(near) / near)


class Made:
    """The parts that models are made of, by the names of their weights."""

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

    def rms_norm(self, name: str, x: Tensor, more: float) -> Tensor:
        scaled = x / (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt().detach()
        return scaled * (self.weights[f"{name}.weight"] + more)

    def softmax(self, x: Tensor) -> Tensor:
        """Its ordinary gradient. What is −∞ has no part in it."""
        found = x.softmax(-1)
        self.softmaxes.append((x, found))
        return found

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, cap: float | None) -> Tensor:
        """Head by head; several heads may share keys and values."""
        heads = []
        for head in range(q.shape[1]):
            shared = head * k.shape[1] // q.shape[1]
            points = scale * halved(q[:, head]) @ halved(k[:, shared]).T
            if cap is not None:
                points = cap * activated(torch.tanh, points / cap)
            rows = []
            for i in range(len(points)):
                seen = list(range(len(k))) if mask is None else mask[i].nonzero().flatten().tolist()
                attention = self.softmax(points[i, seen])
                rows.append(halved(attention) @ halved(v[seen, shared]))
            heads.append(torch.stack(rows))
        return torch.stack(heads, 1).flatten(1)


def _split(x: Tensor, width: int) -> Tensor:
    return x.reshape(len(x), -1, width)


def bert(made: Made, words: Tensor) -> Tensor:
    config, at = made.config, "bert.embeddings"
    typed = made.weights[f"{at}.token_type_embeddings.weight"][0]
    positions = made.weights[f"{at}.position_embeddings.weight"][: len(words)]
    width, eps = config.hidden_size // config.num_attention_heads, config.layer_norm_eps
    x = made.layer_norm(f"{at}.LayerNorm", words + typed + positions, eps)
    for layer in range(config.num_hidden_layers):
        at = f"bert.encoder.layer.{layer}"
        q, k, v = (_split(made.linear(f"{at}.attention.self.{n}", x), width) for n in ("query", "key", "value"))
        out = made.linear(f"{at}.attention.output.dense", made.attend(q, k, v, width**-0.5, None, None))
        x = made.layer_norm(f"{at}.attention.output.LayerNorm", out + x, eps)
        wide = activated(functional.gelu, made.linear(f"{at}.intermediate.dense", x))
        x = made.layer_norm(f"{at}.output.LayerNorm", made.linear(f"{at}.output.dense", wide) + x, eps)
    pooled = activated(torch.tanh, made.linear("bert.pooler.dense", x[0]))
    return made.linear("classifier", pooled)


def vit(made: Made, pixels: Tensor) -> Tensor:
    config, at = made.config, "vit.embeddings"
    kernel = made.weights[f"{at}.patch_embeddings.projection.weight"]
    bias = made.weights[f"{at}.patch_embeddings.projection.bias"]
    patches = functional.conv2d(pixels[None], kernel, bias, stride=config.patch_size)[0].flatten(1).T
    x = torch.cat([made.weights[f"{at}.cls_token"][0], patches]) + made.weights[f"{at}.position_embeddings"][0]
    width, eps = config.hidden_size // config.num_attention_heads, config.layer_norm_eps
    for at in (f"vit.layers.{layer}" for layer in range(config.num_hidden_layers)):
        normed = made.layer_norm(f"{at}.layernorm_before", x, eps)
        q, k, v = (_split(made.linear(f"{at}.attention.{n}_proj", normed), width) for n in "qkv")
        x = x + made.linear(f"{at}.attention.o_proj", made.attend(q, k, v, width**-0.5, None, None))
        normed = made.layer_norm(f"{at}.layernorm_after", x, eps)
        x = x + made.linear(f"{at}.mlp.fc2", activated(functional.gelu, made.linear(f"{at}.mlp.fc1", normed)))
    return made.linear("classifier", made.layer_norm("vit.layernorm", x, eps)[0])


def gpt2(made: Made, words: Tensor) -> Tensor:
    config, count = made.config, len(words)
    x = words + made.weights["transformer.wpe.weight"][:count]
    width, eps = config.n_embd // config.n_head, config.layer_norm_epsilon
    before = torch.ones(count, count).tril()

    def linear(name: str, x: Tensor) -> Tensor:  # weights lie input × output
        return x @ made.weights[f"{name}.weight"] + made.weights[f"{name}.bias"]

    for at in (f"transformer.h.{layer}" for layer in range(config.n_layer)):
        q, k, v = (
            _split(part, width)
            for part in linear(f"{at}.attn.c_attn", made.layer_norm(f"{at}.ln_1", x, eps)).chunk(3, -1)
        )
        x = x + linear(f"{at}.attn.c_proj", made.attend(q, k, v, width**-0.5, before, None))
        wide = linear(f"{at}.mlp.c_fc", made.layer_norm(f"{at}.ln_2", x, eps))
        x = x + linear(f"{at}.mlp.c_proj", activated(lambda z: functional.gelu(z, approximate="tanh"), wide))
    last = made.layer_norm("transformer.ln_f", x, eps)[-1]
    return last @ made.weights["transformer.wte.weight"].T


def llama(made: Made, words: Tensor) -> Tensor:
    """Llama, Mistral, Qwen 2 and 3, Gemma 2 and 3, Mixtral: grouped heads, gated units, soft caps, norms of queries and
    keys, windows, experts."""
    config, count, width = made.config, len(words), made.config.head_dim
    gemma = config.model_type.startswith("gemma")
    more = 1.0 if gemma else 0.0
    scale = (getattr(config, "query_pre_attn_scalar", None) or width) ** -0.5
    f = (lambda z: functional.gelu(z, approximate="tanh")) if gemma else functional.silu
    x = words
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}"
        normed = made.rms_norm(f"{at}.input_layernorm", x, more)
        q, k, v = (_split(made.linear(f"{at}.self_attn.{n}_proj", normed), width) for n in "qkv")
        if made.has(f"{at}.self_attn.q_norm"):
            q, k = (made.rms_norm(f"{at}.self_attn.{n}_norm", part, more) for n, part in (("q", q), ("k", k)))
        kind = (getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)[layer]
        theta = _theta(config, kind)
        cap = getattr(config, "attn_logit_softcapping", None)
        out = made.attend(_turned(q, theta), _turned(k, theta), v, scale, _seen(config, kind, count), cap)
        out = made.linear(f"{at}.self_attn.o_proj", out)
        x = x + (made.rms_norm(f"{at}.post_attention_layernorm", out, more) if gemma else out)
        name = "pre_feedforward_layernorm" if gemma else "post_attention_layernorm"
        normed = made.rms_norm(f"{at}.{name}", x, more)
        out = _experts(made, f"{at}.mlp", normed, f) if made.has(f"{at}.mlp.gate") else _gated(made, at, normed, f)
        x = x + (made.rms_norm(f"{at}.post_feedforward_layernorm", out, more) if gemma else out)
    logits = made.linear("lm_head", made.rms_norm("model.norm", x, more)[-1])
    cap = getattr(config, "final_logit_softcapping", None)
    return logits if cap is None else cap * activated(torch.tanh, logits / cap)


def _gated(made: Made, at: str, x: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    gate, up = (made.linear(f"{at}.mlp.{name}_proj", x) for name in ("gate", "up"))
    return made.linear(f"{at}.mlp.down_proj", halved(activated(f, gate)) * halved(up))


def _experts(made: Made, at: str, x: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    """Each word goes to the experts that its router likes best, weighted by how much it does."""
    rows = []
    for word in x:
        liked = made.softmax(made.linear(f"{at}.gate", word))
        best = liked.argsort(descending=True)[: made.config.num_experts_per_tok]
        weights = liked[best] / liked[best].sum().detach()
        total = torch.zeros_like(word)
        for expert, weight in zip(best.tolist(), weights, strict=True):
            gate, up = (made.weights[f"{at}.experts.gate_up_proj"][expert] @ word).chunk(2)
            out = made.weights[f"{at}.experts.down_proj"][expert] @ (halved(activated(f, gate)) * halved(up))
            total = total + halved(weight) * halved(out)
        rows.append(total)
    return torch.stack(rows)


def _theta(config: Any, kind: str) -> float:
    settings = config.rope_parameters
    return (settings.get(kind) or settings)["rope_theta"]


def _seen(config: Any, kind: str, count: int) -> Tensor:
    seen = torch.ones(count, count).tril()
    window = getattr(config, "sliding_window", None)
    layered = getattr(config, "layer_types", None) is not None
    if window and (kind == "sliding_attention" or not layered):
        seen = seen.triu(1 - window)
    return seen


def _turned(x: Tensor, theta: float) -> Tensor:
    """Rotary positions: the k-th number of the first half and of the second are turned by position · θ^(−2k/d)."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x)).double()[:, None] * theta ** (-torch.arange(half).double() / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
