"""DeepLIFT's rules: for each operation a map that is linear in Δin and gives Δout, exactly.

    element-wise f    Δf = (Δf/Δz) Δz
    product           Δ(ab) = ā Δb + b̄ Δa
    quotient          Δ(a/b) = mean(1/b, 1/b₀) Δa − ā Δb / (b b₀)
    softmax e/s       Δe = (Δe/Δz) Δz,  Δp = Δe · mean(1/s, 1/s₀) − ē Δs / (s s₀)
    maximum           Δ max = (a Δz_i + b Δz_j) / (a + b),  a = z_i − z_j,  b = z₀_j − z₀_i,  largest: z_i and z₀_j
    norms             c = x − mean x,  Δv = mean((c + c₀) Δc),  Δr = −(r r₀)²/(r + r₀) Δv,  Δ(c r) = c̄ Δr + r̄ Δc

Δ is the value at the input minus that at the reference, a bar the mean of the two. All of them are the same seen from
either side, so that the way back may start from either. Each rule here is handed the operation, what goes in at one
side (a name) and at the other (name 0), and `d…`, what is to be mapped; whatever else is linear needs no rule.

Two of them are steadied where the sides are far apart (`FAR`): else a tiny ViT in float32 has scores of 1e6 that add up
to 1 with an error of 77. They stay complete, and change nothing elsewhere; under `plain` they are not steadied.

    d = log of the two sums' or scales' ratio,  t = 1 − (FAR / max(|d|, FAR))²
    softmax           as above, of z − t log s:  Δ = Δz − t Δ log s,  Δ log s = Σ (Δe/Δz) Δz / (Δs/Δ log s)
    scales c r        Δ(c r) = (w c + w₀ c₀) Δr + (w₀ r + w r₀) Δc,  w = σ(2 t d),  w₀ = 1 − w
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from clearhead.backward_rules.secants import Slope, falling

#: How far apart the logarithms of the two sums of a softmax, or of the two scales of a norm, may be before the rule is
#: steadied: multipliers that are e^FAR times too large, and would have to cancel, are left alone.
FAR = 2.0
_far: ContextVar[float] = ContextVar("far", default=FAR)


@contextmanager
def plain() -> Iterator[None]:
    """Nothing is too far apart to be steadied: the formulas as they are in the table."""
    before = _far.set(float("inf"))
    try:
        yield
    finally:
        _far.reset(before)


def wide(part: Any) -> Any:
    """Half precision as float32: the (r r₀)² of a norm is too much for float16 where both scales are 16."""
    half = isinstance(part, Tensor) and part.dtype in (torch.float16, torch.bfloat16)
    return part.float() if half else part


def elementwise(f: Callable[[Tensor], Tensor], slope: Slope, z: Tensor, z0: Tensor, dz: Tensor) -> Tensor:
    return slope(f, z, z0) * dz


def product(times: Callable[[Tensor, Tensor], Tensor], a: Any, a0: Any, da: Any, b: Any, b0: Any, db: Any) -> Tensor:
    """Whatever is linear in a and linear in b: element by element, of matrices, over named axes."""
    return times(bar(a, a0), db) + times(da, bar(b, b0))


def scaled(c: Tensor, c0: Tensor, dc: Tensor, r: Tensor, r0: Tensor, dr: Tensor) -> Tensor:
    """c · r, of which r is one scale for many numbers.

    Δ(c r) = (w c + w₀ c₀) Δr + (w₀ r + w r₀) Δc for any two weights that add up to one. They are half each, unless one
    scale is far larger than the other: that may be the scale of a vector next to nothing, and it gets next to none.
    """
    alike = r * r0 > 0
    far = torch.where(alike, (r / torch.where(alike, r0, 1.0)).abs().log(), 0.0)
    w = torch.sigmoid(2 * too_much(far) * far)
    return (w * c + (1 - w) * c0) * dr + ((1 - w) * r + w * r0) * dc


def quotient(a: Tensor, a0: Tensor, da: Tensor, b: Tensor, b0: Tensor, db: Tensor) -> Tensor:
    """a times 1/b."""
    rest = (1 / b, 1 / b0, -db / (b * b0))
    return scaled(a, a0, da, *rest) if is_scale(b, a) else product(torch.mul, a, a0, da, *rest)


def is_scale(r: Tensor, c: Tensor) -> bool:
    """Whether each r is for a whole row of c."""
    return r.dim() > 0 and c.dim() > 0 and r.shape[-1] == 1 < c.shape[-1]


def softmax(z: Tensor, z0: Tensor, dz: Tensor, *, axis: int) -> Tensor:
    lse, lse0 = (torch.logsumexp(part, axis, keepdim=True) for part in (z, z0))
    # A softmax is the same after any shift: what is too much of Δ log s is taken off first, which is linear in Δz, too.
    part = too_much(lse - lse0)
    z, z0, dz = z - part * lse, z0 - part * lse0, dz - part * logsumexp(z, z0, dz, axis=axis)
    shift = (lse / 2 + lse0 / 2) * (1 - part)  # which the two sides have in common: neither sum is zero
    e, e0 = (z - shift).exp(), (z0 - shift).exp()
    s, s0 = ((1 - part) * (lse - lse0) / 2).exp(), ((1 - part) * (lse0 - lse) / 2).exp()
    de = torch.maximum(e, e0) * falling(_apart(z, z0)) * dz
    return de * bar(1 / s, 1 / s0) - bar(e, e0) * de.sum(axis, keepdim=True) / (s * s0)


def logsumexp(z: Tensor, z0: Tensor, dz: Tensor, *, axis: Any) -> Tensor:
    """log s as a function of s, after the sum: Σ (Δe/Δz) Δz / (Δs/Δ log s)."""
    lse, lse0 = (torch.logsumexp(part, axis, keepdim=True) for part in (z, z0))
    larger = (torch.maximum(z, z0) - torch.maximum(lse, lse0)).exp()
    return (larger * falling(_apart(z, z0)) * dz).sum(axis, keepdim=True) / falling(lse - lse0)


def _apart(z: Tensor, z0: Tensor) -> Tensor:
    """Δz; a place that is hidden on both sides (−∞) has none."""
    return torch.where(torch.isinf(z) & torch.isinf(z0), 0.0, z - z0)


def norm(x: Tensor, x0: Tensor, dx: Tensor, *, axes: tuple[int, ...], eps: float, centred: bool) -> Tensor:
    """Layer norm (centred) and root-mean-square norm, without their weights."""
    c, c0, dc = (part - part.mean(axes, keepdim=True) if centred else part for part in (x, x0, dx))
    r, r0 = (torch.rsqrt(part.square().mean(axes, keepdim=True) + eps) for part in (c, c0))
    dv = ((c + c0) * dc).mean(axes, keepdim=True)
    dr = -((r * r0) ** 2) / (r + r0) * dv
    return scaled(c, c0, dc, r, r0, dr)


def too_much(far: Tensor) -> Tensor:
    """Which share of a distance lies beyond FAR."""
    return 1 - (far.abs() / _far.get()).clamp(min=1) ** -2


def largest(z: Tensor, z0: Tensor, dz: Tensor, *, axis: int) -> Tensor:
    """Where i is the largest at one side and j at the other, by how much z_i leads there, and z_j here."""
    i, j = (part.argmax(axis, keepdim=True) for part in (z, z0))
    leads, led = z.gather(axis, i) - z.gather(axis, j), z0.gather(axis, j) - z0.gather(axis, i)
    share = torch.where(leads + led > 0, leads / (leads + led), 0.5)
    return share * dz.gather(axis, i) + (1 - share) * dz.gather(axis, j)


def length(n: Tensor, n0: Tensor, x: Tensor, x0: Tensor, dx: Tensor, *, axes: Any) -> Tensor:
    """The Euclidean length: √ of a sum of squares."""
    return ((x + x0) * dx).sum(axes, keepdim=True) / (n + n0).clamp(min=torch.finfo(n.dtype).tiny)


def bar(part: Any, other: Any) -> Any:
    return (part + other) / 2
