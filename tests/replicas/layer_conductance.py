"""Layer conductance as the sum over stretches of the way, one plain pass at each end, one layer at a time."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from jaxtyping import Float


def seen(
    model: Any, layer: Any, run: Callable[[torch.Tensor], torch.Tensor], x: np.ndarray
) -> tuple[Float[np.ndarray, "unit model"], Float[np.ndarray, "unit model"]]:
    """What comes out of a layer, and the target's gradient there."""
    kept: list[torch.Tensor] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        kept.append(output[0] if isinstance(output, tuple) else output)

    handle = layer.register_forward_hook(keep)
    value = run(torch.tensor(x, requires_grad=True))
    handle.remove()
    (gradient,) = torch.autograd.grad(value, kept[0])
    return kept[0].detach()[0].numpy(), gradient[0].numpy()


def scores(
    model: Any,
    layer: Any,
    run: Callable[[torch.Tensor], torch.Tensor],
    x: np.ndarray,
    baseline: np.ndarray,
    ways: Sequence[float],
) -> Float[np.ndarray, "unit"]:
    """Σ over stretches and features of the mean gradient times what the layer's output gains there.

    The gradient at the baseline itself is not used: the first stretch has the one at its end.
    """
    total = 0.0
    ends = [seen(model, layer, run, baseline + along * (x - baseline)) for along in ways]
    ends[0] = (ends[0][0], ends[1][1])
    for (before, slope_before), (after, slope_after) in pairwise(ends):
        total = total + 0.5 * (slope_before + slope_after) * (after - before)
    return np.asarray(total).sum(-1)
