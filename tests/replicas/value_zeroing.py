"""Value zeroing (Mohebbi et al. 2023), token by token: the full model runs again with one value vector set to zero in
one layer, and the output of that layer is compared with its output before."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor


def layer_outputs(model: Any, inputs: Mapping[str, Tensor], layers: Sequence[Any]) -> list[Float[np.ndarray, "unit d"]]:
    """Return the output of each layer, run by run (a shared layer runs several times)."""
    outputs: list[np.ndarray] = []

    def record_output(module: Any, args: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        outputs.append(first[0].detach().double().numpy())

    handles = [layer.register_forward_hook(record_output) for layer in dict.fromkeys(layers)]
    with torch.no_grad():
        model(**inputs)
    for handle in handles:
        handle.remove()
    return outputs


def compute_maps(
    model: Any, inputs: Mapping[str, Tensor], layers: Sequence[str], values: Sequence[str]
) -> Float[np.ndarray, "layer query key"]:
    """Return C^l, whose rows sum to one. `layers` and `values` name the layers and their value projections, in the
    order in which they run (a shared module several times)."""
    eager = copy.deepcopy(model).eval()
    eager.set_attn_implementation("eager")
    modules = [eager.get_submodule(name) for name in layers]
    plain_outputs = layer_outputs(eager, inputs, modules)
    units = len(plain_outputs[0])
    maps = np.zeros((len(layers), units, units))
    for index in range(len(layers)):
        projection, occurrence = eager.get_submodule(values[index]), list(values[:index]).count(values[index])
        for j in range(units):
            times = [0]

            def zero(
                module: Any, args: Any, output: Tensor, j: int = j, times: list = times, occurrence: int = occurrence
            ) -> Any:
                times[0] += 1
                if times[0] - 1 != occurrence:
                    return None
                changed = output.clone()
                changed[:, j] = 0
                return changed

            handle = projection.register_forward_hook(zero)
            altered = layer_outputs(eager, inputs, modules)[index]
            handle.remove()
            for i in range(units):
                a, b = plain_outputs[index][i], altered[i]
                maps[index, i, j] = 1 - a @ b / (np.linalg.norm(a) * np.linalg.norm(b))
        for i in range(units):
            maps[index, i] /= maps[index, i].sum()
    return maps


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
    """Return the scores up to each layer."""
    return np.array([readout @ matrix(maps[: last + 1]) for last in range(len(maps))])
