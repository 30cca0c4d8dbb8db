"""Value zeroing (Mohebbi et al. 2023), token by token: the whole model is run again with one value vector set to zero
in one layer, and what that layer puts out is compared with what it put out before."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor


def layer_outputs(model: Any, inputs: Mapping[str, Tensor], layers: Sequence[Any]) -> list[Float[np.ndarray, "unit d"]]:
    """What each layer puts out, run by run (a shared layer runs several times)."""
    seen: list[np.ndarray] = []

    def hear(module: Any, args: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        seen.append(first[0].detach().double().numpy())

    handles = [layer.register_forward_hook(hear) for layer in dict.fromkeys(layers)]
    with torch.no_grad():
        model(**inputs)
    for handle in handles:
        handle.remove()
    return seen


def contributions(
    model: Any, inputs: Mapping[str, Tensor], layers: Sequence[str], values: Sequence[str]
) -> Float[np.ndarray, "layer query key"]:
    """C^l, rows summing to one. `layers` and `values` name the layers and the linear maps that make their values, in
    the order in which they run (one name several times where they are shared)."""
    twin = copy.deepcopy(model).eval()
    twin.set_attn_implementation("eager")
    modules = [twin.get_submodule(name) for name in layers]
    plain = layer_outputs(twin, inputs, modules)
    units = len(plain[0])
    found = np.zeros((len(layers), units, units))
    for place in range(len(layers)):
        projection, which = twin.get_submodule(values[place]), list(values[:place]).count(values[place])
        for j in range(units):
            times = [0]

            def zero(
                module: Any, args: Any, output: Tensor, j: int = j, times: list = times, which: int = which
            ) -> Any:
                times[0] += 1
                if times[0] - 1 != which:
                    return None
                changed = output.clone()
                changed[:, j] = 0
                return changed

            handle = projection.register_forward_hook(zero)
            altered = layer_outputs(twin, inputs, modules)[place]
            handle.remove()
            for i in range(units):
                a, b = plain[place][i], altered[i]
                found[place, i, j] = 1 - a @ b / (np.linalg.norm(a) * np.linalg.norm(b))
        for i in range(units):
            found[place, i] /= found[place, i].sum()
    return found


def matrix(maps: Float[np.ndarray, "layer query key"]) -> Float[np.ndarray, "query key"]:
    """Rollout without an identity: later layers from the left."""
    joint = np.eye(maps.shape[1])
    for layer in maps:
        joint = layer @ joint
    return joint


def scores(
    maps: Float[np.ndarray, "layer query key"], readout: Float[np.ndarray, "unit"], layers: Sequence[int] | None = None
) -> Float[np.ndarray, "unit"]:
    return readout @ matrix(maps if layers is None else maps[list(layers)])


def depths(
    maps: Float[np.ndarray, "layer query key"], readout: Float[np.ndarray, "unit"]
) -> Float[np.ndarray, "layer unit"]:
    """The read-out after each layer."""
    return np.array([readout @ matrix(maps[: place + 1]) for place in range(len(maps))])
