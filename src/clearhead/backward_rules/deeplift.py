"""DeepLIFT's rules: for each operation a map that is linear in Δin and returns Δout exactly.

    element-wise f    Δf = (Δf/Δz) Δz
    product           Δ(ab) = ā Δb + b̄ Δa
    quotient          Δ(a/b) = mean(1/b, 1/b₀) Δa − ā Δb / (b b₀)
    softmax           Δp = M′ Δz,  M′ the mean of its Jacobian between the two sides (`path_softmax.py`)
    softmax e/s       Δe = (Δe/Δz) Δz,  Δp = Δe · mean(1/s, 1/s₀) − ē Δs / (s s₀)
    maximum           Δ max = (a Δz_i + b Δz_j) / (a + b),  a = z_i − z_j,  b = z₀_j − z₀_i,  largest: z_i and z₀_j
    norms             c = x − mean x,  Δv = mean((c + c₀) Δc),  Δr = −(r r₀)²/(r + r₀) Δv,  Δ(c r) = c̄ Δr + r̄ Δc

Δ is the value at the input minus that at the reference; a bar is the mean of the two. Of the two rules of the softmax,
the form "path" has the first, the forms "stabilised" and "closed" have the second. All rules are symmetric in the two
sides, so the backward pass may start from either. Each function here takes the operation, its input at one side (`x`)
and at the other (`x0`), and the tangent to map (`dx`). Operations that are linear need no rule.

Two rules are stabilised where the sides are far apart (`MAX_LOG_RATIO`, L below): otherwise a tiny ViT in float32 has
scores of 1e6 that add up to 1 with an error of 77. They stay complete, and are unchanged elsewhere; the form "closed"
turns this off.

    d = log of the ratio of the two sums or scales,  t = 1 − (L / max(|d|, L))²
    softmax e/s       as above, of z − t log s:  Δ = Δz − t Δ log s,  Δ log s = Σ (Δe/Δz) Δz / (Δs/Δ log s)
    scales c r        Δ(c r) = (w c + w₀ c₀) Δr + (w₀ r + w r₀) Δc,  w = σ(2 t d),  w₀ = 1 − w
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import torch
from torch import Tensor

from clearhead.backward_rules.path_softmax import PathSoftmaxFunction
from clearhead.backward_rules.secants import SecantFunction, expm1_ratio

#: How far apart the logarithms of the two sums of a softmax, or of the two scales of a norm, may be before the rule is
#: stabilised: multipliers up to e² times too large, which have to cancel, are accepted.
MAX_LOG_RATIO = 2.0
#: The softmax by its mean Jacobian and stabilised norms; stabilised closed forms of both; closed forms as they are.
RuleForm = Literal["path", "stabilised", "closed"]
_rule_form: ContextVar[RuleForm] = ContextVar("rule_form", default="path")


@contextmanager
def use_rule_form(form: RuleForm) -> Iterator[None]:
    """Inside the `with`, softmax and norms have rules of this form."""
    token = _rule_form.set(form)
    try:
        yield
    finally:
        _rule_form.reset(token)


def upcast_half(value: Any) -> Any:
    """Cast half precision to float32: the (r r₀)² of a norm overflows float16 where both scales are 16."""
    if isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16):
        return value.float()
    return value


def elementwise_rule(
    f: Callable[[Tensor], Tensor], secant: SecantFunction, z: Tensor, z0: Tensor, dz: Tensor
) -> Tensor:
    """Δf of an element-wise function: its difference quotient times Δz."""
    return secant(f, z, z0) * dz


def product_rule(
    multiply: Callable[[Tensor, Tensor], Tensor], a: Any, a0: Any, da: Any, b: Any, b0: Any, db: Any
) -> Tensor:
    """Δ(ab) of a bilinear operation: an element-wise product, a matrix product, an einsum."""
    return multiply(midpoint(a, a0), db) + multiply(da, midpoint(b, b0))


def scale_rule(c: Tensor, c0: Tensor, dc: Tensor, r: Tensor, r0: Tensor, dr: Tensor) -> Tensor:
    """Δ(c r), where r is one scale for many values of c.

    Δ(c r) = (w c + w₀ c₀) Δr + (w₀ r + w r₀) Δc for any two weights that add up to one. They are ½ each, unless one
    scale is far larger than the other: it may belong to a vector of almost zero length, and its weight goes to zero.
    """
    same_sign = r * r0 > 0
    log_ratio = torch.where(same_sign, (r / torch.where(same_sign, r0, 1.0)).abs().log(), 0.0)
    w = torch.sigmoid(2 * compute_stabilisation_weight(log_ratio) * log_ratio)
    return (w * c + (1 - w) * c0) * dr + ((1 - w) * r + w * r0) * dc


def quotient_rule(a: Tensor, a0: Tensor, da: Tensor, b: Tensor, b0: Tensor, db: Tensor) -> Tensor:
    """Δ(a/b), as the product of a and 1/b."""
    inverse = (1 / b, 1 / b0, -db / (b * b0))
    if is_scale(b, a):
        return scale_rule(a, a0, da, *inverse)
    return product_rule(torch.mul, a, a0, da, *inverse)


def is_scale(r: Tensor, c: Tensor) -> bool:
    """Whether each value of r scales a whole row of c."""
    return r.dim() > 0 and c.dim() > 0 and r.shape[-1] == 1 < c.shape[-1]


def softmax_rule(z: Tensor, z0: Tensor, dz: Tensor, *, axis: int) -> Tensor:
    """Δp of a softmax over one axis."""
    if _rule_form.get() == "path":
        connected: Tensor = PathSoftmaxFunction.apply(dz, z, z0, axis)
        return connected
    lse = torch.logsumexp(z, axis, keepdim=True)
    lse0 = torch.logsumexp(z0, axis, keepdim=True)
    # A softmax is invariant to shifts: the excess of Δ log s is subtracted first, which is linear in Δz, too.
    t = compute_stabilisation_weight(lse - lse0)
    dz = dz - t * logsumexp_rule(z, z0, dz, axis=axis)
    z = z - t * lse
    z0 = z0 - t * lse0
    shift = (lse / 2 + lse0 / 2) * (1 - t)  # the same for both sides, so that neither sum underflows to zero
    e = (z - shift).exp()
    e0 = (z0 - shift).exp()
    s = ((1 - t) * (lse - lse0) / 2).exp()
    s0 = ((1 - t) * (lse0 - lse) / 2).exp()
    de = torch.maximum(e, e0) * expm1_ratio(_compute_delta(z, z0)) * dz
    return de * midpoint(1 / s, 1 / s0) - midpoint(e, e0) * de.sum(axis, keepdim=True) / (s * s0)


def logsumexp_rule(z: Tensor, z0: Tensor, dz: Tensor, *, axis: Any) -> Tensor:
    """Δ log s, with log s as a function of the sum s: Σ (Δe/Δz) Δz / (Δs/Δ log s)."""
    lse = torch.logsumexp(z, axis, keepdim=True)
    lse0 = torch.logsumexp(z0, axis, keepdim=True)
    larger = (torch.maximum(z, z0) - torch.maximum(lse, lse0)).exp()
    return (larger * expm1_ratio(_compute_delta(z, z0)) * dz).sum(axis, keepdim=True) / expm1_ratio(lse - lse0)


def _compute_delta(z: Tensor, z0: Tensor) -> Tensor:
    """Δz, which is zero where both sides are masked (−∞)."""
    return torch.where(torch.isinf(z) & torch.isinf(z0), 0.0, z - z0)


def normalisation_rule(
    x: Tensor, x0: Tensor, dx: Tensor, *, axes: tuple[int, ...], eps: float, is_centred: bool
) -> Tensor:
    """Δ of a layer norm (`is_centred`) or a root-mean-square norm, without their weights."""
    if is_centred:
        c, c0, dc = (tensor - tensor.mean(axes, keepdim=True) for tensor in (x, x0, dx))
    else:
        c, c0, dc = (x, x0, dx)
    r = torch.rsqrt(c.square().mean(axes, keepdim=True) + eps)
    r0 = torch.rsqrt(c0.square().mean(axes, keepdim=True) + eps)
    dv = ((c + c0) * dc).mean(axes, keepdim=True)
    dr = -((r * r0) ** 2) / (r + r0) * dv
    return scale_rule(c, c0, dc, r, r0, dr)


def compute_stabilisation_weight(log_ratio: Tensor) -> Tensor:
    """The weight t of the stabilisation: 0 up to `MAX_LOG_RATIO`, and towards 1 beyond it."""
    if _rule_form.get() == "closed":
        return torch.zeros_like(log_ratio)
    return 1 - (log_ratio.abs() / MAX_LOG_RATIO).clamp(min=1) ** -2


def max_rule(z: Tensor, z0: Tensor, dz: Tensor, *, axis: int) -> Tensor:
    """Δ of a maximum: i is the argmax at one side, j at the other; each is weighted by its lead at its side."""
    i = z.argmax(axis, keepdim=True)
    j = z0.argmax(axis, keepdim=True)
    lead_i = z.gather(axis, i) - z.gather(axis, j)
    lead_j = z0.gather(axis, j) - z0.gather(axis, i)
    weight_i = torch.where(lead_i + lead_j > 0, lead_i / (lead_i + lead_j), 0.5)
    return weight_i * dz.gather(axis, i) + (1 - weight_i) * dz.gather(axis, j)


def vector_norm_rule(n: Tensor, n0: Tensor, x: Tensor, x0: Tensor, dx: Tensor, *, axes: Any) -> Tensor:
    """Δ of a Euclidean norm: the square root of a sum of squares."""
    return ((x + x0) * dx).sum(axes, keepdim=True) / (n + n0).clamp(min=torch.finfo(n.dtype).tiny)


def midpoint(a: Any, b: Any) -> Any:
    """The mean of the values at the two sides."""
    return (a + b) / 2
