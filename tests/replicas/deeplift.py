"""DeepLIFT on a BERT classifier, layer by layer, from the formulas of the rules: one sample and its reference.

A softmax has its mean Jacobian if `path`; if not, the rule of its exponentials and their sum. Where the log scales of a
norm, or the log sums of a softmax with that rule, differ by more than `far`, the stabilised rules apply; with far = ∞
the closed ones apply everywhere."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from tests.replicas.path_softmax import mean_jacobian, softmax

Array = np.ndarray
FAR = 2.0


def compute_steady_fraction(distance: float, far: float) -> float:
    """t = 1 − (far/d)², and zero for smaller distances."""
    return 1 - (far / distance) ** 2 if abs(distance) > far else 0.0


def slope(f: Callable[[Array], Array], derivative: Callable[[Array], Array], z: Array, z0: Array) -> Array:
    """Δf/Δz, and f′ where |Δz| is tiny."""
    tiny = np.abs(z - z0) < 1e-6
    return np.where(tiny, derivative((z + z0) / 2), (f(z) - f(z0)) / np.where(tiny, 1, z - z0))


_erf = np.vectorize(math.erf)


def gelu(z: Array) -> Array:
    return z * (1 + _erf(z / math.sqrt(2))) / 2


def gelu_derivative(z: Array) -> Array:
    return (1 + _erf(z / math.sqrt(2))) / 2 + z * np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)


@dataclass
class Norm:
    """A layer norm over the last axis."""

    weight: Array
    bias: Array
    eps: float
    far: float

    def forward(self, x: Array) -> Array:
        c = x - x.mean(-1, keepdims=True)
        return c / np.sqrt((c**2).mean(-1, keepdims=True) + self.eps) * self.weight + self.bias

    def backward(self, m: Array, x: Array, x0: Array) -> Array:
        """Centre, variance, root, product, weight – from the last to the first, row by row."""
        result = np.zeros_like(m)
        for i in range(len(m)):
            c, c0 = x[i] - x[i].mean(), x0[i] - x0[i].mean()
            r, r0 = 1 / math.sqrt((c**2).mean() + self.eps), 1 / math.sqrt((c0**2).mean() + self.eps)
            distance = math.log(r / r0)
            odds = math.exp(
                2 * compute_steady_fraction(distance, self.far) * distance
            )  # of the weights of input and reference
            w, w0 = odds / (1 + odds), 1 / (1 + odds)
            m_product = m[i] * self.weight
            m_r = (m_product * (w * c + w0 * c0)).sum()
            m_v = m_r * -((r * r0) ** 2) / (r + r0)
            m_c = m_product * (w0 * r + w * r0) + m_v * (c + c0) / len(c)
            result[i] = m_c - m_c.mean()
        return result


def log_sum(z: Array) -> float:
    return float(z.max() + np.log(np.exp(z - z.max()).sum()))


def softmax_backward(m: Array, z: Array, z0: Array, far: float) -> Array:
    """Of one row: the softmax of z − t log s, which is the same softmax, and then the subtraction itself."""
    log_s, log_s0 = log_sum(z), log_sum(z0)
    t = compute_steady_fraction(log_s - log_s0, far)
    m = plain_softmax_backward(m, z - t * log_s, z0 - t * log_s0)
    shift = max(log_s, log_s0)  # log s = log Σe: the slope of each exponential over that of the logarithm's inverse
    exp = lambda x: np.exp(x - shift)  # noqa: E731
    ratio = slope(exp, exp, z, z0) / slope(exp, exp, np.array(log_s), np.array(log_s0))
    return m - t * ratio * m.sum()


def plain_softmax_backward(m: Array, z: Array, z0: Array) -> Array:
    """Of one row: Δp = Δe · mean(1/s, 1/s₀) − ē · Δs/(s·s₀)."""
    shift = max(z.max(), z0.max())
    e, e0 = np.exp(z - shift), np.exp(z0 - shift)
    s, s0 = e.sum(), e0.sum()
    m_e = m * (1 / s + 1 / s0) / 2 - (m * (e + e0) / 2).sum() / (s * s0)
    return m_e * slope(lambda x: np.exp(x - shift), lambda x: np.exp(x - shift), z, z0)


class Bert:
    """The weights of a BERT classifier, its forward pass and its multipliers."""

    def __init__(self, model: Any, far: float, path: bool) -> None:
        self.far, self.path = far, path
        self.p: dict[str, Array] = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
        self.heads, self.layers = model.config.num_attention_heads, model.config.num_hidden_layers
        self.eps = model.config.layer_norm_eps

    def linear(self, name: str, x: Array) -> Array:
        return x @ self.p[f"{name}.weight"].T + self.p[f"{name}.bias"]

    def linear_backward(self, name: str, m: Array) -> Array:
        return m @ self.p[f"{name}.weight"]

    def norm(self, name: str) -> Norm:
        return Norm(self.p[f"{name}.weight"], self.p[f"{name}.bias"], self.eps, self.far)

    def softmax_backward(self, m: Array, z: Array, z0: Array) -> Array:
        return mean_jacobian(z, z0).T @ m if self.path else softmax_backward(m, z, z0, self.far)

    def split(self, x: Array) -> list[Array]:
        return np.split(x, self.heads, axis=-1)

    def forward(self, x: Array) -> dict[str, Array]:
        """Return the inputs of every nonlinear operation, and the logits."""
        record: dict[str, Any] = {}
        record["words"] = x + self.p["bert.embeddings.position_embeddings.weight"][: len(x)]
        record["words"] = record["words"] + self.p["bert.embeddings.token_type_embeddings.weight"][0]
        h = self.norm("bert.embeddings.LayerNorm").forward(record["words"])
        for layer in range(self.layers):
            at = f"bert.encoder.layer.{layer}"
            projections = {
                name: self.split(self.linear(f"{at}.attention.self.{name}", h)) for name in ("query", "key", "value")
            }
            contexts = []
            for head in range(self.heads):
                q, k, v = (projections[name][head] for name in ("query", "key", "value"))
                z = q @ k.T / math.sqrt(q.shape[1])
                p = np.stack([softmax(row) for row in z])
                record |= {
                    f"{layer} {head} {name}": array for name, array in zip("qkvzp", (q, k, v, z, p), strict=True)
                }
                contexts.append(p @ v)
            record[f"{layer} attended"] = self.linear(f"{at}.attention.output.dense", np.concatenate(contexts, -1)) + h
            h = self.norm(f"{at}.attention.output.LayerNorm").forward(record[f"{layer} attended"])
            record[f"{layer} inner"] = self.linear(f"{at}.intermediate.dense", h)
            record[f"{layer} out"] = self.linear(f"{at}.output.dense", gelu(record[f"{layer} inner"])) + h
            h = self.norm(f"{at}.output.LayerNorm").forward(record[f"{layer} out"])
        record["pooled"] = self.linear("bert.pooler.dense", h[:1])
        record["logits"] = self.linear("classifier", np.tanh(record["pooled"]))[0]
        return record

    def multipliers(self, here: Mapping[str, Array], there: Mapping[str, Array], label: int) -> Array:
        def both(name: str) -> tuple[Array, Array]:
            return here[name], there[name]

        m = self.p["classifier.weight"][label][None]
        m = m * slope(np.tanh, lambda z: 1 - np.tanh(z) ** 2, *both("pooled"))
        m_h = np.zeros_like(here["words"])
        m_h[:1] = self.linear_backward("bert.pooler.dense", m)
        for layer in reversed(range(self.layers)):
            at = f"bert.encoder.layer.{layer}"
            m_out = self.norm(f"{at}.output.LayerNorm").backward(m_h, *both(f"{layer} out"))
            m_inner = self.linear_backward(f"{at}.output.dense", m_out)
            m_inner = m_inner * slope(gelu, gelu_derivative, *both(f"{layer} inner"))
            m_h = m_out + self.linear_backward(f"{at}.intermediate.dense", m_inner)
            m_attended = self.norm(f"{at}.attention.output.LayerNorm").backward(m_h, *both(f"{layer} attended"))
            m_contexts = self.split(self.linear_backward(f"{at}.attention.output.dense", m_attended))
            m_parts: dict[str, list[Array]] = {"query": [], "key": [], "value": []}
            for head, m_context in enumerate(m_contexts):
                q, k, v, p = (sum(both(f"{layer} {head} {name}")) / 2 for name in "qkvp")
                m_p, m_v = m_context @ v.T, p.T @ m_context
                pairs = zip(m_p, *both(f"{layer} {head} z"), strict=True)
                m_z = np.stack([self.softmax_backward(*rows) for rows in pairs]) / math.sqrt(q.shape[1])
                for name, product in (("query", m_z @ k), ("key", m_z.T @ q), ("value", m_v)):
                    m_parts[name].append(product)
            m_h = m_attended
            for name, products in m_parts.items():
                m_h = m_h + self.linear_backward(f"{at}.attention.self.{name}", np.concatenate(products, -1))
        return self.norm("bert.embeddings.LayerNorm").backward(m_h, *both("words"))


def scores(
    model: Any,
    x: Float[np.ndarray, "token model"],
    x0: Float[np.ndarray, "token model"],
    label: int,
    far: float = FAR,
    path: bool = True,
) -> Float[np.ndarray, "token"]:
    bert = Bert(model, far, path)
    return ((x - x0) * bert.multipliers(bert.forward(x), bert.forward(x0), label)).sum(-1)
