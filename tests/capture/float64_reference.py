"""The same pass, with whole maps in float64 in the place of whatever a streaming pass makes: what its sums are held to.

Another pass in half precision rounds otherwise, and sharp attention makes much of it. Here queries, keys, values and
gradients stay the bytes that they are, so that all that can differ are the sums.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from clearhead.capture.attention.deferred import DeferredCall
from clearhead.capture.attention.reductions import MapReduction
from clearhead.capture.attention.tiled import QKVGradients, TiledAttention, repeat_for_targets
from clearhead.capture.dispatch import CallDispatcher
from clearhead.capture.tape import AttentionCall
from clearhead.explainer import Explainer


def far_from_whole_maps(ex: Explainer, inputs: Any, methods: list[Any], **how: Any) -> dict[str, float]:
    """How far each method's scores are from what they would be, of the largest; of the input that is furthest."""
    found = ex.explain(inputs, methods, **how)
    with whole_maps_in_float64() as swept:
        exact = ex.explain(inputs, methods, **how)
    assert swept, "no call was streamed"
    return {name: max(map(far, _each(some), _each(exact[name]))) for name, some in found.items()}


def _each(explained: Any) -> list[Any]:
    return explained if isinstance(explained, list) else [explained]


def far(one: Any, exact: Any) -> float:
    """Of the stream that is furthest; where a clamp has left nothing, nothing may be there."""
    gaps = [(one[stream].scores - part.scores, part.scores) for stream, part in exact.by_stream.items()]
    return max(float(np.abs(gap).max() / (np.abs(scores).max() or 1)) for gap, scores in gaps)


@contextmanager
def whole_maps_in_float64() -> Iterator[list[str]]:
    """In the `with`, methods fold whole maps. The list names the attention calls that did so."""
    swept: list[str] = []
    sweep = CallDispatcher._process_maps

    def witnessed(
        visits: CallDispatcher, place: int, gradient: Tensor | None, backward: bool = False
    ) -> QKVGradients | None:
        call, tiles = visits.calls[place], visits.tiling
        assert call.tiled is not None
        visits.tiling = replace(tiles, on_tile=lambda *tile: None, on_reduced=lambda *sums: None)
        gradients = sweep(visits, place, gradient, backward)
        visits.tiling = tiles
        swept.append(call.module)
        attention, slope = maps(call.tiled, gradient)
        for number in range(tiles.tile_passes):
            visits._handle_tile(place, number, slice(0, attention.shape[2]), attention, slope)
        return gradients

    def asked(one: DeferredCall, reductions: Sequence[MapReduction]) -> list[Tensor]:
        swept.append("after the pass")
        attention, slope = maps(one.tiled_call, one.output_gradient)
        whole = AttentionCall(0, "", attention=repeat_for_targets(attention, one.num_targets), attention_gradient=slope)
        calls = [whole if part.heads is None else whole.select_heads(part.heads) for part in reductions]
        every = slice(0, attention.shape[2])
        return [part.reduce_tile(call, every, every.stop) for part, call in zip(reductions, calls, strict=True)]

    with (
        mock.patch.object(CallDispatcher, "_process_maps", witnessed),
        mock.patch.object(DeferredCall, "reduce", asked),
    ):
        yield swept


def maps(call: TiledAttention, gradient: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """A, by the model's own eager attention, and ∂y/∂A = ∂y/∂O Vᵀ: made in float64, handed over in float32."""
    query, key, value = (part.double() for part in (call.query, call.key, call.value))
    every = slice(0, query.shape[2]), slice(0, key.shape[2])
    more = {name: part.double() if _real(part) else part for name, part in call.kwargs.items()}
    added = call.compute_additive_mask(*every, torch.float64)
    with torch.no_grad():
        _, attention = call.eager_forward(
            call.module, query, key, value, None if added is None else added.double(), **more
        )
        seeing = call.compute_has_visible_key(*every)
        attention = attention if seeing is None else attention * seeing
    if gradient is None:
        return attention.float(), None
    shared = value.repeat_interleave(query.shape[1] // value.shape[1], 1).mT
    slopes = [one.double().transpose(1, 2) @ shared for one in gradient.split(len(query))]
    return attention.float(), torch.cat(slopes).float()


def _real(part: object) -> bool:
    return isinstance(part, Tensor) and part.is_floating_point()
