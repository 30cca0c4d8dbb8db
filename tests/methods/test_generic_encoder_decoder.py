"""Encoder–decoders: rows and columns instead of matrices, materialised and streamed, give the same scores."""

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
ALL_ARGUMENTS = {
    "inputs": SOURCES,
    "answer": ANSWERS,
}  # all tokens of each continuation: several targets in a pass, padded


def assert_results_close(results: Any, expected: Any, tolerance: float) -> None:
    sizes = []
    for method, expected_explanations in expected.items():
        for explanation, expected_explanation in zip(
            as_list(results[method]), as_list(expected_explanations), strict=True
        ):
            for stream, expected_stream in expected_explanation.by_stream.items():
                size = np.abs(
                    expected_stream.matrix if expected_stream.matrix is not None else expected_stream.scores
                ).max()
                sizes.append(size)
                for actual, wanted in (
                    (explanation[stream].scores, expected_stream.scores),
                    (explanation[stream].matrix, expected_stream.matrix),
                ):
                    assert wanted is None or np.abs(actual - wanted).max() <= tolerance * size, (method, stream)
    assert np.mean(np.array(sizes) > 0) > 0.7  # a clamp may leave only zeros


def as_list(result: Any) -> list[Any]:
    return result if isinstance(result, list) else [result]


def get_case(name: str) -> tuple[clearhead.Explainer, dict[str, Any], float]:
    if name == "detr":
        return detection.explainer("detr"), {"inputs": detection.pixels(), "target": DetectionQuery(1, 2)}, 1e-9
    return explainer(name), ALL_ARGUMENTS, NEAR[name]


@pytest.mark.parametrize("name", ["bart", "t5", "detr"])
def test_row_computation_equals_matrix_computation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ex, arguments, tolerance = get_case(name)
    results = ex.explain(**arguments, method=METHODS)
    matrix_calls = []
    for cls in (CrossStreamGenericAttention, CrossStreamAttentionRollout):
        monkeypatch.setattr(
            cls, "_compute_by_rows", lambda method, *maps: matrix_calls.append(method) or method._compute_by_matrices()
        )
    assert_results_close(results, ex.explain(**arguments, method=METHODS), tolerance)
    assert matrix_calls


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("name", ["bart", "t5", "detr"])
def test_streamed_attention_equals_materialised_attention(name: str, checkpoint: bool) -> None:
    if not models.on_interface(name):
        pytest.skip(f"this transformers' {name} does not use the attention interface")
    ex, arguments, tolerance = get_case(name)
    results = ex.explain(**arguments, method=METHODS, kernel="tiles", checkpoint=checkpoint)
    assert_results_close(results, ex.explain(**arguments, method=METHODS, kernel="materialised"), max(tolerance, 1e-7))
    kernels = {e.certificate["kernel"] for result in results.values() for e in as_list(result)}
    assert kernels == {"streaming: torch tiles" + (", layers computed twice" if checkpoint else "")}


class RowsOnlyKernel(WholeMaps):
    """Supports every call, but leaves column reductions to tiles."""

    def supports(self, call: TiledAttention, reductions: Sequence[MapReduction]) -> bool:
        return all(reduction.column_weights is None for reduction in reductions)


@pytest.mark.parametrize(
    ("kernel", "kernel_name"),
    [(CPUKernel(), "cached tiles"), (WholeMaps(), "whole maps"), (RowsOnlyKernel(), "torch tiles and whole maps")],
)
def test_deferred_reductions_of_each_kernel_equal_materialised_attention(kernel: Any, kernel_name: str) -> None:
    ex = clearhead.load(made("bart").float(), WORDS)
    ex.recorder.kernel = kernel
    results = ex.explain(**ALL_ARGUMENTS, method=METHODS, kernel="streaming")
    assert_results_close(results, ex.explain(**ALL_ARGUMENTS, method=METHODS, kernel="materialised"), 1e-5)
    assert results["generic"][0].certificate["kernel"] == f"streaming: {kernel_name}"


class LargestSquareMode(TorchDispatchMode):
    """Records the side of the largest square in the last two axes of any tensor that is not on the meta device."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.dim() > 1
                and tensor.is_floating_point()
                and not tensor.is_meta
            ):
                self.largest = max(self.largest, min(tensor.shape[-2:]))
        return output


def test_streamed_attention_allocates_no_full_map(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a source that is much longer than the model is wide."""
    ex, source = explainer("bart"), {"input_ids": torch.randint(5, 90, (1, 68))}
    inputs = source | {"decoder_input_ids": torch.tensor([[2, 5, 9]])}
    monkeypatch.setattr(ex.recorder, "tile_rows", 3)
    arguments = {"method": ["generic", "rollout"], "target": GeneratedToken(1)}
    ex.explain(inputs, **arguments, kernel="tiles")  # the recorder's self-test materialises maps
    with LargestSquareMode() as streaming:
        ex.explain(inputs, **arguments, kernel="tiles")
    with LargestSquareMode() as materialised:
        ex.explain(inputs, **arguments, kernel="materialised")
    assert streaming.largest <= 48 < 68 == materialised.largest  # 48 is the hidden size of the feed-forward layers


def test_decoder_has_no_relevance_for_a_target_in_the_encoder() -> None:
    """The target is computed from the encoder's last hidden state."""
    ex = explainer("bart")
    calls: list[AttentionCall] = []
    inputs = {"input_ids": torch.randint(5, 90, (1, 9)), "decoder_input_ids": torch.tensor([[2, 5, 9]])}
    tiles = TilingConfig(tile_passes=0, defers_reductions=True)

    def value(output: Any) -> torch.Tensor:
        return output.encoder_last_hidden_state.square().sum((1, 2))

    ex.recorder.run(inputs, value, ["attention_gradient"], calls.append, tiling=tiles)
    sums: dict[str, list[float]] = {}
    for call in calls:
        assert call.deferred is not None
        rows = torch.ones(1, 1, call.deferred.tiled_call.meta_attention.shape[2], dtype=torch.float64)
        sums.setdefault(call.query_stream, []).append(
            float(call.deferred.reduce([MapReduction("positive", rows)])[0].sum())
        )
    assert min(sums["source"]) > 0 and set(sums["prefix"]) == {0.0}


@pytest.mark.parametrize("options", [{"aggregate": False}, {"normalise": False}, {"fusion": "mean-clamp"}])
def test_options_that_need_matrices_are_rejected_with_tiles(options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=r"generic\(.*\) cannot be computed tile by tile"):
        explainer("bart").explain(SOURCES[0], Method("generic", **options), answer=ANSWERS[0], kernel="tiles")


@pytest.mark.parametrize("cls", [CrossStreamGenericAttention, CrossStreamAttentionRollout])
def test_mutual_cross_attention_needs_full_maps(cls: Any) -> None:
    within, between = {("text", "text"), ("image", "image")}, ("text", "image")
    for reverse, needs_full_maps in ((set(), False), ({("image", "text")}, True)):
        pairs = dict.fromkeys({*within, between, *reverse}, range(2))
        assert cls(unit_contexts={}, layers=pairs).needs_full_maps is needs_full_maps
