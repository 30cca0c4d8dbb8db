"""Difference quotients Δf/Δz of element-wise functions (secant slopes), accurate also where the points almost coincide.

For known functions the quotient is written in a form without cancellation: that of z² is z + z₀. For other smooth
functions it is the mean of f′ between the two points, by three-point Gauss quadrature, wherever they are so close that
the difference of two values would be mostly rounding.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

#: An element-wise function.
ElementwiseFunction = Callable[[Tensor], Tensor]
#: That function, and two points → its difference quotient between them.
SecantFunction = Callable[[ElementwiseFunction, Tensor, Tensor], Tensor]

#: Below this distance, on the scale on which activations bend, the quadrature error is smaller than the rounding error.
MAX_GAUSS_DISTANCE_BY_DTYPE = {torch.float64: 0.1}
DEFAULT_MAX_GAUSS_DISTANCE = 0.5  # of every other dtype
_GAUSS_NODES = ((0.5 - 0.15**0.5, 5 / 18), (0.5, 8 / 18), (0.5 + 0.15**0.5, 5 / 18))


def smooth_secant(f: ElementwiseFunction, z: Tensor, z0: Tensor) -> Tensor:
    """Secant of a smooth function: the mean derivative where the points are close, else the difference quotient."""
    is_close = (z - z0).abs() < MAX_GAUSS_DISTANCE_BY_DTYPE.get(z.dtype, DEFAULT_MAX_GAUSS_DISTANCE)
    mean_derivative = torch.stack(
        [weight * _compute_derivative(f, z0 + node * (z - z0)) for node, weight in _GAUSS_NODES]
    ).sum(0)
    return torch.where(is_close, mean_derivative, _difference_quotient(f, z, z0))


def piecewise_linear_secant(f: ElementwiseFunction, z: Tensor, z0: Tensor) -> Tensor:
    """Secant of a piecewise linear function: the exact derivative where both points lie on one piece."""
    slope = _compute_derivative(f, z)
    slope0 = _compute_derivative(f, z0)
    is_same_piece = (z == z0) | (((z - z0).abs() < 0.1) & (slope == slope0))
    return torch.where(is_same_piece, slope, _difference_quotient(f, z, z0))


def kinked_secant(f: ElementwiseFunction, z: Tensor, z0: Tensor) -> Tensor:
    """Secant of a function with kinks: the derivative only where the difference of the points is mostly rounding."""
    is_tiny = (z - z0).abs() <= torch.finfo(z.dtype).eps ** 0.5
    return torch.where(is_tiny, _compute_derivative(f, (z + z0) / 2), _difference_quotient(f, z, z0))


def exp_secant(f: ElementwiseFunction, z: Tensor, z0: Tensor) -> Tensor:
    """(e^z − e^z₀) / d = max(e^z, e^z₀) (1 − e^−|d|) / |d|,  d = z − z₀."""
    return torch.maximum(f(z), f(z0)) * expm1_ratio(z - z0)


def expm1_ratio(difference: Tensor) -> Tensor:
    """(1 − e^−|d|) / |d|: the secant of the exponential function, relative to the larger of its two values."""
    d = difference.abs()
    return torch.where(d == 0, 1.0, -torch.expm1(-d) / torch.where(d == 0, 1.0, d))


def tanh_secant(f: ElementwiseFunction, z: Tensor, z0: Tensor) -> Tensor:
    """(tanh z − tanh z₀) / d = tanh(d)/d · (1 − tanh z tanh z₀),  d = z − z₀."""
    return _tanh_ratio(z - z0) * (1 - f(z) * f(z0))


def sigmoid_secant(f: ElementwiseFunction, z: Tensor, z0: Tensor) -> Tensor:
    """(σ(z) − σ(z₀)) / d = tanh(d/2)/(d/2) · (1 − tanh(z/2) tanh(z₀/2)) / 4,  d = z − z₀."""
    return _tanh_ratio((z - z0) / 2) * (1 - torch.tanh(z / 2) * torch.tanh(z0 / 2)) / 4


def _tanh_ratio(d: Tensor) -> Tensor:
    """tanh(d) / d, which is 1 at zero."""
    return torch.where(d == 0, 1.0, torch.tanh(d) / torch.where(d == 0, 1.0, d))


def log_secant(f: ElementwiseFunction, z: Tensor, z0: Tensor) -> Tensor:
    """(log z − log z₀) / (z − z₀) = log(1 + d) / (d z₀),  d = (z − z₀) / z₀."""
    d = (z - z0) / z0
    return torch.where(d == 0, 1.0, torch.log1p(d) / torch.where(d == 0, 1.0, d)) / z0


def sqrt_secant(f: ElementwiseFunction, z: Tensor, z0: Tensor) -> Tensor:
    """(√z − √z₀) / (z − z₀) = 1 / (√z + √z₀)."""
    return 1 / (f(z) + f(z0))


def rsqrt_secant(f: ElementwiseFunction, z: Tensor, z0: Tensor) -> Tensor:
    """−(r r₀)² / (r + r₀),  r = 1/√z,  r₀ = 1/√z₀."""
    r = f(z)
    r0 = f(z0)
    return -((r * r0) ** 2) / (r + r0)


def reciprocal_secant(f: ElementwiseFunction, z: Tensor, z0: Tensor) -> Tensor:
    """(1/z − 1/z₀) / (z − z₀) = −1 / (z z₀)."""
    return -f(z) * f(z0)


def square_secant(f: ElementwiseFunction, z: Tensor, z0: Tensor) -> Tensor:
    """(z² − z₀²) / (z − z₀) = z + z₀."""
    return z + z0


def cube_secant(f: ElementwiseFunction, z: Tensor, z0: Tensor) -> Tensor:
    """(z³ − z₀³) / (z − z₀) = z² + z z₀ + z₀²."""
    return z * z + z * z0 + z0 * z0


def select_power_secant(exponent: Any) -> SecantFunction:
    """Return the secant of z ↦ z^exponent."""
    closed_forms: dict[float, SecantFunction] = {
        2.0: square_secant,
        3.0: cube_secant,
        0.5: sqrt_secant,
        -0.5: rsqrt_secant,
        -1.0: reciprocal_secant,
    }
    return closed_forms.get(float(exponent), kinked_secant)


SECANTS: dict[str, SecantFunction] = {
    **dict.fromkeys(
        ("gelu", "silu", "mish", "softplus", "logsigmoid", "erf", "sin", "cos", "log1p", "expm1"), smooth_secant
    ),
    **dict.fromkeys(
        ("relu", "leaky_relu", "relu6", "hardtanh", "clamp", "clip", "abs", "threshold", "prelu"),
        piecewise_linear_secant,
    ),
    **dict.fromkeys(("clamp_min", "clamp_max", "maximum", "minimum", "__abs__"), piecewise_linear_secant),
    **dict.fromkeys(("elu", "selu", "celu", "hardswish", "hardsigmoid", "softsign", "hardshrink"), kinked_secant),
    "exp": exp_secant,
    "tanh": tanh_secant,
    "sigmoid": sigmoid_secant,
    "log": log_secant,
    "sqrt": sqrt_secant,
    "rsqrt": rsqrt_secant,
    "reciprocal": reciprocal_secant,
    "square": square_secant,
}


def _difference_quotient(f: ElementwiseFunction, z: Tensor, z0: Tensor) -> Tensor:
    """(f(z) − f(z₀)) / (z − z₀) as it stands; zero where the points coincide."""
    d = z - z0
    return (f(z) - f(z0)) / torch.where(d == 0, 1.0, d)


def _compute_derivative(f: ElementwiseFunction, z: Tensor) -> Tensor:
    """f′(z) of an element-wise function, by autograd."""
    with torch.enable_grad():
        leaf = z.detach().requires_grad_()
        return torch.autograd.grad(f(leaf).sum(), leaf)[0]
