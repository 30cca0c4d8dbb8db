"""Layer conductance as a sum over segments of the path, with one plain pass at each end, for one layer."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from jaxtyping import Float


def record_layer(
    model: Any, layer: Any, run: Callable[[torch.Tensor], torch.Tensor], x: np.ndarray
) -> tuple[Float[np.ndarray, "unit model"], Float[np.ndarray, "unit model"]]:
    """Return the output of a layer, and the gradient of the target there."""
    outputs: list[torch.Tensor] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        outputs.append(output[0] if isinstance(output, tuple) else output)

    handle = layer.register_forward_hook(keep)
    value = run(torch.tensor(x, requires_grad=True))
    handle.remove()
    (gradient,) = torch.autograd.grad(value, outputs[0])
    return outputs[0].detach()[0].numpy(), gradient[0].numpy()


def scores(
    model: Any,
    layer: Any,
    run: Callable[[torch.Tensor], torch.Tensor],
    x: np.ndarray,
    baseline: np.ndarray,
    points: Sequence[float],
) -> Float[np.ndarray, "unit"]:
    """Σ over segments and features of the mean gradient times the change of the layer's output.

    The gradient at the baseline itself is not used: the first segment uses the gradient at its end.
    """
    total = 0.0
    ends = [record_layer(model, layer, run, baseline + point * (x - baseline)) for point in points]
    ends[0] = (ends[0][0], ends[1][1])
    for (before, slope_before), (after, slope_after) in pairwise(ends):
        total = total + 0.5 * (slope_before + slope_after) * (after - before)
    return np.asarray(total).sum(-1)
