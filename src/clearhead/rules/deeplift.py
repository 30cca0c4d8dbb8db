"""DeepLIFT's rules: for each operation a map that is linear in Δin and gives Δout, exactly.

    element-wise f    Δf = (Δf/Δz) Δz
    product           Δ(ab) = ā Δb + b̄ Δa
    quotient          Δ(a/b) = mean(1/b, 1/b₀) Δa − ā Δb / (b b₀)
    softmax e/s       Δe = (Δe/Δz) Δz,  Δp = Δe · mean(1/s, 1/s₀) − ē Δs / (s s₀)
    norms             c = x − mean x,  Δv = mean((c + c₀) Δc),  Δr = −(r r₀)²/(r + r₀) Δv,  Δ(c r) = c̄ Δr + r̄ Δc

Δ is the value at the input minus that at the reference, a bar the mean of the two. All of them are the same seen from
either side, so that the way back may start from either. Each rule here is handed the operation, what goes in at one
side (a name) and at the other (name 0), and `d…`, what is to be mapped; whatever else is linear needs no rule.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from clearhead.rules.slopes import Slope, falling

#: How far apart the logarithms of the two sums of a softmax may be.
FAR = 1.0


def elementwise(f: Callable[[Tensor], Tensor], slope: Slope, z: Tensor, z0: Tensor, dz: Tensor) -> Tensor:
    return slope(f, z, z0) * dz


def product(times: Callable[[Tensor, Tensor], Tensor], a: Any, a0: Any, da: Any, b: Any, b0: Any, db: Any) -> Tensor:
    """Whatever is linear in a and linear in b: element by element, of matrices, over named axes."""
    return times(bar(a, a0), db) + times(da, bar(b, b0))


def quotient(a: Tensor, a0: Tensor, da: Tensor | None, b: Tensor, b0: Tensor, db: Tensor) -> Tensor:
    below = -bar(a, a0) / (b * b0) * db
    return below if da is None else below + bar(1 / b, 1 / b0) * da


def softmax(z: Tensor, z0: Tensor, dz: Tensor, axis: int) -> Tensor:
    lse, lse0 = (torch.logsumexp(part, axis, keepdim=True) for part in (z, z0))
    # A softmax is the same after any shift. Where one sum is e^FAR times the other, multipliers of that size would
    # have to cancel: there part of Δ log s is taken off first, which is linear in Δz, too (at most this; else nothing).
    part = 1 - FAR / (lse - lse0).abs().clamp(min=FAR)
    z, z0, dz = z - part * lse, z0 - part * lse0, dz - part * logsumexp(z, z0, dz, axis)
    e, e0, s, s0, _ = _sums(z, z0, axis)
    de = exponential(e, e0, z, z0) * dz
    return de * bar(1 / s, 1 / s0) - bar(e, e0) * de.sum(axis, keepdim=True) / (s * s0)


def logsumexp(z: Tensor, z0: Tensor, dz: Tensor, axis: Any) -> Tensor:
    """log s, as a function of s, after the sum."""
    e, e0, s, s0, (lse, lse0) = _sums(z, z0, axis)
    de = exponential(e, e0, z, z0) * dz
    return de.sum(axis, keepdim=True) / exponential(s, s0, lse, lse0)


def _sums(z: Tensor, z0: Tensor, axis: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """e and s at both sides, after a shift that they have in common, with which neither sum is zero."""
    lse, lse0 = (torch.logsumexp(part, axis, keepdim=True) for part in (z, z0))
    shift = lse / 2 + lse0 / 2
    return (z - shift).exp(), (z0 - shift).exp(), (lse - shift).exp(), (lse0 - shift).exp(), (lse, lse0)


def norm(x: Tensor, x0: Tensor, dx: Tensor, axes: tuple[int, ...], eps: float, centred: bool) -> Tensor:
    """Layer norm (centred) and root-mean-square norm, without their weights."""
    c, c0, dc = (part - part.mean(axes, keepdim=True) if centred else part for part in (x, x0, dx))
    r, r0 = (torch.rsqrt(part.square().mean(axes, keepdim=True) + eps) for part in (c, c0))
    dv = ((c + c0) * dc).mean(axes, keepdim=True)
    dr = -((r * r0) ** 2) / (r + r0) * dv
    return bar(c, c0) * dr + bar(r, r0) * dc


def length(n: Tensor, n0: Tensor, x: Tensor, x0: Tensor, dx: Tensor, axes: Any) -> Tensor:
    """The Euclidean length: √ of a sum of squares."""
    return ((x + x0) * dx).sum(axes, keepdim=True) / (n + n0)


def bar(part: Any, other: Any) -> Any:
    return (part + other) / 2


def exponential(e: Tensor, e0: Tensor, z: Tensor, z0: Tensor) -> Tensor:
    """Δe/Δz; a place that is hidden on both sides (−∞) has none."""
    hidden = torch.isinf(z) & torch.isinf(z0)
    return torch.maximum(e, e0) * falling(torch.where(hidden, 0.0, z - z0))
