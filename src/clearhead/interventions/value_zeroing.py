"""A pass in which each layer is run again without the values of one unit after another."""

import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.capture.checks.self_test import TOLERANCE, Place
from clearhead.capture.layers import blocks_of
from clearhead.capture.session import hooks
from clearhead.capture.sources.attention_interface import editing_values
from clearhead.errors import Refusal

#: What a layer may be handed to remember the past in: run again, it must not find itself there.
_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache_params")
Moved = Float[Tensor, "batch query key"]


@contextmanager
def zeroing(model: nn.Module, places: Sequence[Place], chosen: Collection[int]) -> Iterator[dict[int, Moved]]:
    """Inside the `with`, a recorded pass leaves behind how far each unit moves without the values of each other.

    `places` are all attention calls of a pass in their order, `chosen` those that are wanted.
    """
    found: dict[int, Moved] = {}
    thread, blocks = threading.get_ident(), blocks_of(model)
    name = type(model).__name__
    waiting: dict[int, list[int]] = {}
    layers: dict[int, nn.Module] = {}
    for number, place in enumerate(places):
        block = blocks.get(id(model.get_submodule(place.module)))
        if block is None:
            raise Refusal(f"value-zeroing cannot explain {name}: its attention {place.module} sits in no layer")
        if any(places[other].module != place.module for other in waiting.get(id(block), ())):
            raise Refusal(f"value-zeroing cannot explain {name}: one of its layers attends more than once")
        waiting.setdefault(id(block), []).append(number)
        layers[id(block)] = block
    runs = {key: iter(numbers) for key, numbers in waiting.items()}

    def again(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if threading.get_ident() != thread:
            return
        number = next(runs[id(block)], None)
        if number is None or number not in chosen:
            return
        fresh = {key: None if key in _CACHES else value for key, value in kwargs.items()}

        def state(without: int | None) -> Float[Tensor, "batch unit model"]:
            with editing_values(without):
                return _unit(_state(block.forward(*args, **fresh)))

        plain = _unit(_state(output))
        gap = float((state(None) - plain).abs().max())
        if not gap <= TOLERANCE.get(_state(output).dtype, 1e-4):
            raise Refusal(
                f"value-zeroing cannot explain {name}: the layer of {places[number].module} does not give the same "
                f"output when it runs again (gap {gap:.1e}), so what changes it cannot be seen"
            )
        # 1 − cos(a, b) = |a − b|² / 2 for vectors of length one, without the rounding of a difference of ones
        moved = [(state(j) - plain).square().sum(-1) / 2 for j in range(plain.shape[1])]
        found[number] = torch.stack(moved, dim=-1)

    with hooks([block.register_forward_hook(again, with_kwargs=True) for block in layers.values()]):
        yield found


def _state(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple | list) else output


def _unit(state: Float[Tensor, "batch unit model"]) -> Float[Tensor, "batch unit model"]:
    wide = state.detach().double()
    return wide / wide.norm(dim=-1, keepdim=True).clamp(min=1e-300)
