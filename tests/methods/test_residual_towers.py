"""Residual towers, which run in parallel to a stream and are added to it (BridgeTower): on random maps, the scores of
each method equal those of full matrices."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from clearhead.capture.tape import AttentionCall
from clearhead.methods._stream_maps import StreamMap, iter_simultaneous_maps
from clearhead.methods.base import CROSS_STREAM_REGISTRY, UnitContext
from tests.replicas import co_attention as replica

LENGTHS = {"text": 4, "image": 3}
TEXT, IMAGE, TEXT_TO_IMAGE, IMAGE_TO_TEXT = ("text", "text"), ("image", "image"), ("text", "image"), ("image", "text")
#: Two layers of each tower, a joint layer, one more layer of each tower, one more joint layer.
CALL_LAYOUT = [
    *[(*TEXT, True), (*TEXT, True), (*IMAGE, True), (*IMAGE, True)],
    *[(*TEXT, False), (*TEXT_TO_IMAGE, False), (*IMAGE, False), (*IMAGE_TO_TEXT, False)],
    *[(*TEXT, True), (*IMAGE, True)],
    *[(*TEXT, False), (*TEXT_TO_IMAGE, False), (*IMAGE, False), (*IMAGE_TO_TEXT, False)],
]


def make_calls(layout: Sequence[tuple[str, str, bool]]) -> list[AttentionCall]:
    """Draw maps of two heads: attention whose rows sum to one; relevance and gradients of any sign."""
    rng = torch.Generator().manual_seed(3)
    attention_calls = []
    for layer, (query_stream, key_stream, is_tower) in enumerate(layout):
        shape = (1, 2, LENGTHS[query_stream], LENGTHS[key_stream])
        attention, gradient, relevance = (torch.randn(shape, generator=rng, dtype=torch.float64) for _ in range(3))
        module = f"tower.{layer}" if is_tower else f"both.{layer}"
        attention_calls.append(
            AttentionCall(
                layer,
                module,
                "self" if query_stream == key_stream else "cross",
                query_stream,
                key_stream,
                attention.softmax(-1),
            )
        )
        attention_calls[-1].attention_gradient, attention_calls[-1].relevance = gradient, relevance
    return attention_calls


def scores(method: str, attention_calls: Sequence[AttentionCall], **options: Any) -> dict[str, np.ndarray]:
    """Return the scores of a method for these calls; the read-out is half of the first row of each stream."""
    unit_contexts = {stream: _make_unit_context(stream, length) for stream, length in LENGTHS.items()}
    joint_modules = [call.module for call in attention_calls if call.module.startswith("both")]
    groups = {module: str(position // 4) for position, module in enumerate(joint_modules)}
    towers = frozenset(call.module for call in attention_calls if call.module.startswith("tower"))
    attribution = CROSS_STREAM_REGISTRY[method](
        unit_contexts=unit_contexts, layers={}, residual_towers=towers, simultaneous_groups=groups, **options
    )
    for call in reversed(attention_calls):
        attribution.process_call(call)
    return {stream: result.scores[0, 0].numpy() for stream, result in attribution.compute_scores(None).items()}  # type: ignore[arg-type]


def _make_unit_context(stream: str, length: int) -> UnitContext:
    readout = torch.zeros(1, 1, length, dtype=torch.float64)
    readout[..., 0] = 0.5
    valid = torch.ones(1, length, dtype=torch.bool)
    return UnitContext(readout, valid, (0,), layers=range(9), stream=stream)


def group_into_steps(attention_calls: Sequence[AttentionCall], quantity: str = "attention") -> list[list[replica.Look]]:
    """Group the calls into steps of the replica: one call per step, and the four calls of a joint layer in one."""
    steps = [
        replica.Look(
            call.module,
            getattr(call, quantity)[0].numpy(),
            call.attention_gradient[0].numpy(),
            call.query_stream,
            call.key_stream,
            call.module.startswith("tower"),
        )
        for call in attention_calls
    ]
    return [[step] for step in steps[:4]] + [steps[4:8]] + [[step] for step in steps[8:10]] + [steps[10:]]


def assert_equals_matrices(actual: dict[str, np.ndarray], matrices: dict[tuple[str, str], np.ndarray]) -> None:
    assert actual.keys() == LENGTHS.keys()
    for stream, row in actual.items():
        expected = sum(matrices[other, stream][0] / 2 for other in LENGTHS)
        np.testing.assert_allclose(row, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("options", [{}, {"normalise": False}, {"within": False}, {"lrp": True}])
def test_generic_equals_reference_implementation(options: dict[str, bool]) -> None:
    attention_calls, replica_options = (
        make_calls(CALL_LAYOUT),
        {key: value for key, value in options.items() if key != "lrp"},
    )
    steps = group_into_steps(attention_calls, "relevance" if options.get("lrp") else "attention")
    assert_equals_matrices(
        scores("generic", attention_calls, **options), replica.generic(steps, LENGTHS, **replica_options)
    )


def test_rollout_equals_reference_implementation() -> None:
    attention_calls = make_calls(CALL_LAYOUT)
    assert_equals_matrices(
        scores("rollout", attention_calls), replica.rollout(group_into_steps(attention_calls), LENGTHS)
    )


@pytest.mark.parametrize("normalise", [False, True])
def test_transformer_attribution_equals_reference_implementation(normalise: bool) -> None:
    attention_calls = make_calls(CALL_LAYOUT)
    expected = replica.attribution(group_into_steps(attention_calls, "relevance"), LENGTHS, normalise)
    assert_equals_matrices(scores("transformer-attribution", attention_calls, normalise=normalise), expected)


@pytest.mark.parametrize("method", ["rollout", "transformer-attribution"])
def test_rows_sum_to_one_without_cross_attention(method: str) -> None:
    """Without cross-attention, the scores of each stream sum to its read-out weight of one half."""
    options = {} if method == "rollout" else {"normalise": True}
    self_attention_calls = make_calls([layer for layer in CALL_LAYOUT if layer[0] == layer[1]])
    for row in scores(method, self_attention_calls, **options).values():
        assert row.sum() == pytest.approx(0.5) and row.min() > 0


@pytest.mark.parametrize("method", ["generic", "rollout", "transformer-attribution"])
def test_towers_without_cross_attention_equal_streams(method: str) -> None:
    """Before the first joint layer, towers are the same as streams."""
    stream_calls = make_calls(CALL_LAYOUT[:4])
    for tower, stream in zip(make_calls(CALL_LAYOUT[:4]), stream_calls, strict=True):
        stream.module = tower.module.replace("tower", "own")
    for stream, row in scores(method, stream_calls).items():
        np.testing.assert_allclose(scores(method, make_calls(CALL_LAYOUT[:4]))[stream], row, rtol=1e-12)


def test_generic_counts_each_layer_once() -> None:
    """To first order, the scores are the sum of all maps of a stream, through any bridge to the target."""
    attention_calls, small = make_calls([layer for layer in CALL_LAYOUT if layer[0] == layer[1]]), 1e-6
    for call in attention_calls:
        call.attention_gradient *= small
    for stream, row in scores("generic", attention_calls).items():
        expected = sum(call.positive_product.mean(1)[0, 0] for call in attention_calls if call.query_stream == stream)
        np.testing.assert_allclose(row, expected / 2, rtol=1e-5)


def test_stream_without_self_attention_has_only_cross_attention_scores() -> None:
    attention_calls = make_calls([(*TEXT, False), (*TEXT_TO_IMAGE, False)])
    for normalise in (False, True):
        results = scores("transformer-attribution", attention_calls, normalise=normalise)
        expected = (attention_calls[1].relevance * attention_calls[1].attention_gradient).clamp(min=0).mean(1)[0, 0] / 2
        np.testing.assert_allclose(results["image"], expected)
        assert results["text"].min() >= 0 and results["text"].sum() > 0


def test_repeated_mutual_cross_attention_forms_separate_steps():
    """With layers=, two joint layers may be adjacent; the second must still use the result of the first."""
    identity = torch.eye(2)[None]
    maps = [StreamMap("text", "image", identity, False, None), StreamMap("image", "text", identity, False, None)]
    assert [len(step) for step in iter_simultaneous_maps(maps * 3)] == [2, 2, 2]
