"""Encoder–decoders: rows and columns in the place of matrices, from whole maps and streaming, give the same scores."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import clearhead
from clearhead import DetectionQuery, GeneratedToken, Method, UnsupportedError
from clearhead.capture.attention.reductions import MapReduction
from clearhead.capture.attention.tiled import TiledAttention
from clearhead.capture.attention.tiling import TilingConfig
from clearhead.capture.kernels.cpu import CPUKernel
from clearhead.capture.tape import AttentionCall
from clearhead.methods.generic_cross_attention import CrossStreamGenericAttention
from clearhead.methods.rollout import CrossStreamAttentionRollout
from tests import models
from tests.adapters import test_detection as detection
from tests.adapters.test_encoder_decoder import ANSWERS, NEAR, SOURCES, WORDS, explainer, made
from tests.capture.reference_kernel import WholeMaps

METHODS = ["generic", "rollout", Method("generic", heads=(1, 2)), Method("generic", layers=(1, None)), "attention"]
ALL = {"inputs": SOURCES, "answer": ANSWERS}  # every word of each answer: several targets in a pass, padded


def near(found: Any, expected: Any, within: float) -> None:
    sizes = []
    for method, explained in expected.items():
        for one, other in zip(listed(found[method]), listed(explained), strict=True):
            for stream, part in other.by_stream.items():
                size = np.abs(part.matrix if part.matrix is not None else part.scores).max()
                sizes.append(size)
                for mine, yours in ((one[stream].scores, part.scores), (one[stream].matrix, part.matrix)):
                    assert yours is None or np.abs(mine - yours).max() <= within * size, (method, stream)
    assert np.mean(np.array(sizes) > 0) > 0.7  # a clamp may leave nothing


def listed(explained: Any) -> list[Any]:
    return explained if isinstance(explained, list) else [explained]


def case(name: str) -> tuple[clearhead.Explainer, dict[str, Any], float]:
    if name == "detr":
        return detection.explainer("detr"), {"inputs": detection.pixels(), "target": DetectionQuery(1, 2)}, 1e-9
    return explainer(name), ALL, NEAR[name]


@pytest.mark.parametrize("name", ["bart", "t5", "detr"])
def test_rows_are_those_of_the_matrices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ex, how, within = case(name)
    found = ex.explain(**how, method=METHODS)
    multiplied = []
    for cls in (CrossStreamGenericAttention, CrossStreamAttentionRollout):
        monkeypatch.setattr(
            cls, "_compute_by_rows", lambda fold, *maps: multiplied.append(fold) or fold._compute_by_matrices()
        )
    near(found, ex.explain(**how, method=METHODS), within)
    assert multiplied


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("name", ["bart", "t5", "detr"])
def test_streaming_is_materialised(name: str, checkpoint: bool) -> None:
    if not models.on_interface(name):
        pytest.skip(f"this transformers' {name} does not use the attention interface")
    ex, how, within = case(name)
    found = ex.explain(**how, method=METHODS, kernel="tiles", checkpoint=checkpoint)
    near(found, ex.explain(**how, method=METHODS, kernel="materialised"), max(within, 1e-7))
    ran = {one.certificate["kernel"] for explained in found.values() for one in listed(explained)}
    assert ran == {"streaming: torch tiles" + (", layers computed twice" if checkpoint else "")}


class NoColumns(WholeMaps):
    """Takes every call, but leaves columns to tiles."""

    def supports(self, call: TiledAttention, reductions: Sequence[MapReduction]) -> bool:
        return all(one.column_weights is None for one in reductions)


@pytest.mark.parametrize(
    ("kernel", "ran"),
    [(CPUKernel(), "cached tiles"), (WholeMaps(), "whole maps"), (NoColumns(), "torch tiles and whole maps")],
)
def test_kernels_make_what_is_asked_after_the_pass(kernel: Any, ran: str) -> None:
    ex = clearhead.load(made("bart").float(), WORDS)
    ex.recorder.kernel = kernel
    found = ex.explain(**ALL, method=METHODS, kernel="streaming")
    near(found, ex.explain(**ALL, method=METHODS, kernel="materialised"), 1e-5)
    assert found["generic"][0].certificate["kernel"] == f"streaming: {ran}"


class Sizes(TorchDispatchMode):
    """The largest square that a tensor has in it, where it has numbers (an outline has none)."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for part in tree_leaves(found):
            if isinstance(part, torch.Tensor) and part.dim() > 1 and part.is_floating_point() and not part.is_meta:
                self.largest = max(self.largest, min(part.shape[-2:]))
        return found


def test_nothing_has_units_times_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a source that is far longer than the model is wide."""
    ex, source = explainer("bart"), {"input_ids": torch.randint(5, 90, (1, 68))}
    given = source | {"decoder_input_ids": torch.tensor([[2, 5, 9]])}
    monkeypatch.setattr(ex.recorder, "tile_rows", 3)
    how = {"method": ["generic", "rollout"], "target": GeneratedToken(1)}
    ex.explain(given, **how, kernel="tiles")  # the recorder tests itself, with whole maps
    with Sizes() as streaming:
        ex.explain(given, **how, kernel="tiles")
    with Sizes() as materialised:
        ex.explain(given, **how, kernel="materialised")
    assert streaming.largest <= 48 < 68 == materialised.largest  # a layer is 48 wide inside


def test_what_the_target_does_not_depend_on_has_no_relevance() -> None:
    """The decoder, where the number is the encoder's."""
    ex = explainer("bart")
    found: list[AttentionCall] = []
    inputs = {"input_ids": torch.randint(5, 90, (1, 9)), "decoder_input_ids": torch.tensor([[2, 5, 9]])}
    tiles = TilingConfig(tile_passes=0, defers_reductions=True)

    def value(output: Any) -> torch.Tensor:
        return output.encoder_last_hidden_state.square().sum((1, 2))

    ex.recorder.run(inputs, value, ["attention_gradient"], found.append, tiling=tiles)
    sums: dict[str, list[float]] = {}
    for call in found:
        assert call.deferred is not None
        rows = torch.ones(1, 1, call.deferred.tiled_call.meta_attention.shape[2], dtype=torch.float64)
        sums.setdefault(call.query_stream, []).append(
            float(call.deferred.reduce([MapReduction("positive", rows)])[0].sum())
        )
    assert min(sums["source"]) > 0 and set(sums["prefix"]) == {0.0}


@pytest.mark.parametrize("options", [{"aggregate": False}, {"normalise": False}, {"fusion": "mean-clamp"}])
def test_what_needs_matrices_says_so(options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=r"generic\(.*\) cannot be computed tile by tile"):
        explainer("bart").explain(SOURCES[0], Method("generic", **options), answer=ANSWERS[0], kernel="tiles")


@pytest.mark.parametrize("cls", [CrossStreamGenericAttention, CrossStreamAttentionRollout])
def test_streams_that_look_at_each_other_need_whole_maps(cls: Any) -> None:
    alone, between = {("text", "text"), ("image", "image")}, ("text", "image")
    for back, whole in ((set(), False), ({("image", "text")}, True)):
        pairs = dict.fromkeys({*alone, between, *back}, range(2))
        assert cls(unit_contexts={}, layers=pairs).needs_full_maps is whole
