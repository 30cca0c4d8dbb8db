"""Value zeroing: reruns each layer with the value vectors of one unit set to zero and measures how its output moves."""

import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.capture.checks.self_test import RELATIVE_TOLERANCE_BY_DTYPE, CallSite
from clearhead.capture.session import remove_hooks_on_exit
from clearhead.capture.sources.attention_interface import zeroed_values
from clearhead.capture.topology import ModelTopology
from clearhead.errors import UnsupportedError

#: Key-value cache arguments of a layer. They are removed for a rerun, which would otherwise see its own first run.
_CACHE_ARGUMENTS = ("past_key_values", "past_key_value", "layer_past", "cache_params")
ValueZeroingDistances = Float[Tensor, "batch query key"]


@contextmanager
def value_zeroing_distances(
    topology: ModelTopology, call_sites: Sequence[CallSite], call_indices: Collection[int]
) -> Iterator[dict[int, ValueZeroingDistances]]:
    """Measure, during the pass inside the `with`, how far each unit's state moves without another unit's values.

    Args:
        topology: The modules of the model, whose session is open.
        call_sites: All attention calls of a pass, in their order.
        call_indices: The calls to measure.

    Yields:
        Call index → cosine distances of each query's layer output, by the key whose values are zero. The dictionary is
        filled during the pass.

    Raises:
        UnsupportedError: If an attention module is outside of all layers, a layer has several of them, or a layer is
            not deterministic.
    """
    distances: dict[int, ValueZeroingDistances] = {}
    thread = threading.get_ident()
    name = type(topology.model).__name__
    call_indices_by_layer: dict[int, list[int]] = {}
    layers: dict[int, nn.Module] = {}
    for index, site in enumerate(call_sites):
        layer = topology.layer_of_module.get(id(topology.model.get_submodule(site.module)))
        if layer is None:
            raise UnsupportedError(
                f"value-zeroing cannot explain {name}: its attention {site.module} is not inside a layer"
            )
        layer_calls = call_indices_by_layer.setdefault(id(layer), [])
        if any(call_sites[layer_call].module != site.module for layer_call in layer_calls):
            raise UnsupportedError(f"value-zeroing cannot explain {name}: one of its layers attends more than once")
        layer_calls.append(index)
        layers[id(layer)] = layer
    next_calls = {layer_id: iter(indices) for layer_id, indices in call_indices_by_layer.items()}

    def rerun_layer(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if threading.get_ident() != thread:
            return
        index = next(next_calls[id(layer)], None)
        if index is None or index not in call_indices:
            return
        kwargs_without_cache = {key: None if key in _CACHE_ARGUMENTS else value for key, value in kwargs.items()}

        def compute_state(zeroed_unit: int | None) -> Float[Tensor, "batch unit model"]:
            with zeroed_values(zeroed_unit):
                return _normalise_to_unit(_get_hidden_state(layer.forward(*args, **kwargs_without_cache)))

        clean_state = _normalise_to_unit(_get_hidden_state(output))
        gap = float((compute_state(None) - clean_state).abs().max())
        if not gap <= RELATIVE_TOLERANCE_BY_DTYPE.get(_get_hidden_state(output).dtype, 1e-4):
            raise UnsupportedError(
                f"value-zeroing cannot explain {name}: the layer of {call_sites[index].module} does not return the "
                f"same output when it runs again (difference {gap:.1e}), so the effect of values cannot be measured"
            )
        # 1 − cos(a, b) = |a − b|² / 2 for unit vectors, without the cancellation of 1 − cos
        per_unit = [(compute_state(j) - clean_state).square().sum(-1) / 2 for j in range(clean_state.shape[1])]
        distances[index] = torch.stack(per_unit, dim=-1)

    with remove_hooks_on_exit(
        [layer.register_forward_hook(rerun_layer, with_kwargs=True) for layer in layers.values()]
    ):
        yield distances


def _get_hidden_state(output: Any) -> Tensor:
    """Return the output of a layer, or the first item of a tuple or list."""
    return output[0] if isinstance(output, tuple | list) else output


def _normalise_to_unit(state: Float[Tensor, "batch unit model"]) -> Float[Tensor, "batch unit model"]:
    """Scale hidden states to unit length, in float64."""
    state64 = state.detach().double()
    return state64 / state64.norm(dim=-1, keepdim=True).clamp(min=1e-300)
