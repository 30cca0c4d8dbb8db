"""Slopes of functions of one number between two places: Δf/Δz, exact also where the two places all but coincide.

Where a function is known, its slope is written so that nothing cancels: the slope of z² is z + z₀. Of other smooth
functions it is the mean of f′ between the two places, by three points of Gauss, wherever they are so near that the
difference of two values would be mostly rounding.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

#: A function of each number by itself.
Function = Callable[[Tensor], Tensor]
#: That function, and two places → its slope between them.
Slope = Callable[[Function, Tensor, Tensor], Tensor]

#: Places nearer than this, on the scale on which activations bend, are near: there Gauss errs less than rounding does.
NEAR = {torch.float64: 0.1}
WIDE = 0.5  # of every other dtype
_GAUSS = ((0.5 - 0.15**0.5, 5 / 18), (0.5, 8 / 18), (0.5 + 0.15**0.5, 5 / 18))


def smooth(f: Function, z: Tensor, z0: Tensor) -> Tensor:
    near = (z - z0).abs() < NEAR.get(z.dtype, WIDE)
    between = torch.stack([weight * _derivative(f, z0 + place * (z - z0)) for place, weight in _GAUSS]).sum(0)
    return torch.where(near, between, _secant(f, z, z0))


def straight(f: Function, z: Tensor, z0: Tensor) -> Tensor:
    """Of functions made of straight pieces: on one piece its slope, which no difference of values gives as exactly."""
    here, there = _derivative(f, z), _derivative(f, z0)
    one_piece = (z == z0) | (((z - z0).abs() < 0.1) & (here == there))
    return torch.where(one_piece, here, _secant(f, z, z0))


def bent(f: Function, z: Tensor, z0: Tensor) -> Tensor:
    """Of functions that bend abruptly somewhere: f′ only where nothing is left of the difference."""
    tiny = (z - z0).abs() <= torch.finfo(z.dtype).eps ** 0.5
    return torch.where(tiny, _derivative(f, (z + z0) / 2), _secant(f, z, z0))


def of_exp(f: Function, z: Tensor, z0: Tensor) -> Tensor:
    return torch.maximum(f(z), f(z0)) * falling(z - z0)


def falling(difference: Tensor) -> Tensor:
    """(1 − e^−|d|) / |d|: the slope of the exponential function, relative to the larger of its two values."""
    d = difference.abs()
    return torch.where(d == 0, 1.0, -torch.expm1(-d) / torch.where(d == 0, 1.0, d))


def of_tanh(f: Function, z: Tensor, z0: Tensor) -> Tensor:
    return _tanh_over(z - z0) * (1 - f(z) * f(z0))


def of_sigmoid(f: Function, z: Tensor, z0: Tensor) -> Tensor:
    return _tanh_over((z - z0) / 2) * (1 - torch.tanh(z / 2) * torch.tanh(z0 / 2)) / 4


def _tanh_over(d: Tensor) -> Tensor:
    return torch.where(d == 0, 1.0, torch.tanh(d) / torch.where(d == 0, 1.0, d))


def of_log(f: Function, z: Tensor, z0: Tensor) -> Tensor:
    d = (z - z0) / z0
    return torch.where(d == 0, 1.0, torch.log1p(d) / torch.where(d == 0, 1.0, d)) / z0


def of_sqrt(f: Function, z: Tensor, z0: Tensor) -> Tensor:
    return 1 / (f(z) + f(z0))


def of_rsqrt(f: Function, z: Tensor, z0: Tensor) -> Tensor:
    r, r0 = f(z), f(z0)
    return -((r * r0) ** 2) / (r + r0)


def of_reciprocal(f: Function, z: Tensor, z0: Tensor) -> Tensor:
    return -f(z) * f(z0)


def of_square(f: Function, z: Tensor, z0: Tensor) -> Tensor:
    return z + z0


def of_cube(f: Function, z: Tensor, z0: Tensor) -> Tensor:
    return z * z + z * z0 + z0 * z0


def of_power(exponent: Any) -> Slope:
    known: dict[float, Slope] = {
        2.0: of_square,
        3.0: of_cube,
        0.5: of_sqrt,
        -0.5: of_rsqrt,
        -1.0: of_reciprocal,
    }
    return known.get(float(exponent), bent)


SLOPES: dict[str, Slope] = {
    **dict.fromkeys(("gelu", "silu", "mish", "softplus", "logsigmoid", "erf", "sin", "cos", "log1p", "expm1"), smooth),
    **dict.fromkeys(
        ("relu", "leaky_relu", "relu6", "hardtanh", "clamp", "clip", "abs", "threshold", "prelu"), straight
    ),
    **dict.fromkeys(("clamp_min", "clamp_max", "maximum", "minimum", "__abs__"), straight),
    **dict.fromkeys(("elu", "selu", "celu", "hardswish", "hardsigmoid", "softsign", "hardshrink"), bent),
    "exp": of_exp,
    "tanh": of_tanh,
    "sigmoid": of_sigmoid,
    "log": of_log,
    "sqrt": of_sqrt,
    "rsqrt": of_rsqrt,
    "reciprocal": of_reciprocal,
    "square": of_square,
}


def _secant(f: Function, z: Tensor, z0: Tensor) -> Tensor:
    d = z - z0
    return (f(z) - f(z0)) / torch.where(d == 0, 1.0, d)


def _derivative(f: Function, z: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = z.detach().requires_grad_()
        return torch.autograd.grad(f(leaf).sum(), leaf)[0]
