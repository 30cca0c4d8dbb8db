"""The same pass with maps materialised in float64 in place of the tiles: a reference for streaming reductions.

A separate pass in half precision rounds differently, which sharp attention amplifies. Here queries, keys, values and
gradients stay bitwise the same, so only the reductions can differ.
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


def far_from_whole_maps(ex: Explainer, inputs: Any, methods: list[Any], **options: Any) -> dict[str, float]:
    """The largest deviation of each method's scores over all inputs, relative to the largest score."""
    actual = ex.explain(inputs, methods, **options)
    with whole_maps_in_float64() as replaced:
        exact = ex.explain(inputs, methods, **options)
    assert replaced, "no call was streamed"
    return {name: max(map(far, _as_list(explanations), _as_list(exact[name]))) for name, explanations in actual.items()}


def _as_list(explanations: Any) -> list[Any]:
    return explanations if isinstance(explanations, list) else [explanations]


def far(actual: Any, exact: Any) -> float:
    """The largest relative deviation over streams; where the reference is zero after a clamp, zero is expected."""
    gaps = [
        (actual[stream].scores - explanation.scores, explanation.scores)
        for stream, explanation in exact.by_stream.items()
    ]
    return max(float(np.abs(gap).max() / (np.abs(scores).max() or 1)) for gap, scores in gaps)


@contextmanager
def whole_maps_in_float64() -> Iterator[list[str]]:
    """Within the context, methods use materialised maps. The list names the attention calls that were replaced."""
    replaced: list[str] = []
    original = CallDispatcher._process_maps

    def process_maps(
        dispatcher: CallDispatcher, index: int, gradient: Tensor | None, backward: bool = False
    ) -> QKVGradients | None:
        call, tiling = dispatcher.calls[index], dispatcher.tiling
        assert call.tiled is not None
        dispatcher.tiling = replace(tiling, on_tile=lambda *tile: None, on_reduced=lambda *sums: None)
        gradients = original(dispatcher, index, gradient, backward)
        dispatcher.tiling = tiling
        replaced.append(call.module)
        attention, attention_gradient = maps(call.tiled, gradient)
        for tile_pass in range(tiling.tile_passes):
            dispatcher._handle_tile(index, tile_pass, slice(0, attention.shape[2]), attention, attention_gradient)
        return gradients

    def reduce_deferred(deferred: DeferredCall, reductions: Sequence[MapReduction]) -> list[Tensor]:
        replaced.append("after the pass")
        attention, attention_gradient = maps(deferred.tiled_call, deferred.output_gradient)
        materialised = AttentionCall(
            0, "", attention=repeat_for_targets(attention, deferred.num_targets), attention_gradient=attention_gradient
        )
        calls = [
            materialised if reduction.heads is None else materialised.select_heads(reduction.heads)
            for reduction in reductions
        ]
        all_rows = slice(0, attention.shape[2])
        return [
            reduction.reduce_tile(call, all_rows, all_rows.stop)
            for reduction, call in zip(reductions, calls, strict=True)
        ]

    with (
        mock.patch.object(CallDispatcher, "_process_maps", process_maps),
        mock.patch.object(DeferredCall, "reduce", reduce_deferred),
    ):
        yield replaced


def maps(call: TiledAttention, gradient: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """A, by the model's eager attention, and ∂y/∂A = ∂y/∂O Vᵀ, computed in float64 and returned in float32."""
    query, key, value = (tensor.double() for tensor in (call.query, call.key, call.value))
    all_cells = slice(0, query.shape[2]), slice(0, key.shape[2])
    kwargs = {name: argument.double() if _is_floating(argument) else argument for name, argument in call.kwargs.items()}
    mask = call.compute_additive_mask(*all_cells, torch.float64)
    with torch.no_grad():
        _, attention = call.eager_forward(
            call.module, query, key, value, None if mask is None else mask.double(), **kwargs
        )
        has_visible_key = call.compute_has_visible_key(*all_cells)
        attention = attention if has_visible_key is None else attention * has_visible_key
    if gradient is None:
        return attention.float(), None
    value_t = value.repeat_interleave(query.shape[1] // value.shape[1], 1).mT
    attention_gradients = [
        target_gradient.double().transpose(1, 2) @ value_t for target_gradient in gradient.split(len(query))
    ]
    return attention.float(), torch.cat(attention_gradients).float()


def _is_floating(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
