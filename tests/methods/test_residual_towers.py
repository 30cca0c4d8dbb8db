"""Towers that go on beside a stream and are added to it again (BridgeTower), on maps that are made up: what each method
makes of them is what full matrices give."""

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
TEXT, IMAGE, THERE, BACK = ("text", "text"), ("image", "image"), ("text", "image"), ("image", "text")
#: Two layers of each tower, one of both, one more of each tower, one more of both.
WAYS = [
    *[(*TEXT, True), (*TEXT, True), (*IMAGE, True), (*IMAGE, True)],
    *[(*TEXT, False), (*THERE, False), (*IMAGE, False), (*BACK, False)],
    *[(*TEXT, True), (*IMAGE, True)],
    *[(*TEXT, False), (*THERE, False), (*IMAGE, False), (*BACK, False)],
]


def calls(ways: Sequence[tuple[str, str, bool]]) -> list[AttentionCall]:
    """Random maps of two heads: attention whose rows sum to one, relevance and a gradient of any sign."""
    rng = torch.Generator().manual_seed(3)
    made = []
    for layer, (looks, seen, tower) in enumerate(ways):
        shape = (1, 2, LENGTHS[looks], LENGTHS[seen])
        attention, gradient, relevance = (torch.randn(shape, generator=rng, dtype=torch.float64) for _ in range(3))
        module = f"tower.{layer}" if tower else f"both.{layer}"
        made.append(
            AttentionCall(layer, module, "self" if looks == seen else "cross", looks, seen, attention.softmax(-1))
        )
        made[-1].attention_gradient, made[-1].relevance = gradient, relevance
    return made


def scores(method: str, given: Sequence[AttentionCall], **options: Any) -> dict[str, np.ndarray]:
    """What the method's fold makes of these calls; half of the first row of each stream is read."""
    frames = {stream: _frame(stream, length) for stream, length in LENGTHS.items()}
    both = [call.module for call in given if call.module.startswith("both")]
    blocks = {module: str(place // 4) for place, module in enumerate(both)}
    towers = frozenset(call.module for call in given if call.module.startswith("tower"))
    fold = CROSS_STREAM_REGISTRY[method](
        unit_contexts=frames, layers={}, residual_towers=towers, simultaneous_groups=blocks, **options
    )
    for call in reversed(given):
        fold.process_call(call)
    return {stream: part.scores[0, 0].numpy() for stream, part in fold.compute_scores(None).items()}  # type: ignore[arg-type]


def _frame(stream: str, length: int) -> UnitContext:
    readout = torch.zeros(1, 1, length, dtype=torch.float64)
    readout[..., 0] = 0.5
    valid = torch.ones(1, length, dtype=torch.bool)
    return UnitContext(readout, valid, (0,), layers=range(9), stream=stream)


def looks(given: Sequence[AttentionCall], of: str = "attention") -> list[list[replica.Look]]:
    """The calls as the replicas take them: each by itself, but the four of a layer of both."""
    found = [
        replica.Look(
            call.module,
            getattr(call, of)[0].numpy(),
            call.attention_gradient[0].numpy(),
            call.query_stream,
            call.key_stream,
            call.module.startswith("tower"),
        )
        for call in given
    ]
    return [[one] for one in found[:4]] + [found[4:8]] + [[one] for one in found[8:10]] + [found[10:]]


def check(ours: dict[str, np.ndarray], matrices: dict[tuple[str, str], np.ndarray]) -> None:
    assert ours.keys() == LENGTHS.keys()
    for stream, row in ours.items():
        expected = sum(matrices[other, stream][0] / 2 for other in LENGTHS)
        np.testing.assert_allclose(row, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("options", [{}, {"normalise": False}, {"within": False}, {"lrp": True}])
def test_generic(options: dict[str, bool]) -> None:
    given, kept = calls(WAYS), {key: value for key, value in options.items() if key != "lrp"}
    steps = looks(given, "relevance" if options.get("lrp") else "attention")
    check(scores("generic", given, **options), replica.generic(steps, LENGTHS, **kept))


def test_rollout() -> None:
    given = calls(WAYS)
    check(scores("rollout", given), replica.rollout(looks(given), LENGTHS))


@pytest.mark.parametrize("normalise", [False, True])
def test_transformer_attribution(normalise: bool) -> None:
    given = calls(WAYS)
    expected = replica.attribution(looks(given, "relevance"), LENGTHS, normalise)
    check(scores("transformer-attribution", given, normalise=normalise), expected)


@pytest.mark.parametrize("method", ["rollout", "transformer-attribution"])
def test_rows_still_sum_to_one(method: str) -> None:
    """Where no stream looks at another: a half of each is read."""
    options = {} if method == "rollout" else {"normalise": True}
    alone = calls([way for way in WAYS if way[0] == way[1]])
    for row in scores(method, alone, **options).values():
        assert row.sum() == pytest.approx(0.5) and row.min() > 0


@pytest.mark.parametrize("method", ["generic", "rollout", "transformer-attribution"])
def test_a_tower_alone_is_a_stream(method: str) -> None:
    """Before the streams meet there is nothing beside: a model of towers alone is one of streams."""
    first = calls(WAYS[:4])
    for tower, stream in zip(calls(WAYS[:4]), first, strict=True):
        stream.module = tower.module.replace("tower", "own")
    for stream, row in scores(method, first).items():
        np.testing.assert_allclose(scores(method, calls(WAYS[:4]))[stream], row, rtol=1e-12)


def test_each_layer_counts_once_in_generic() -> None:
    """To first order the scores are the sum of all maps of a stream, whatever bridges they reach the target over."""
    given, small = calls([way for way in WAYS if way[0] == way[1]]), 1e-6
    for call in given:
        call.attention_gradient *= small
    for stream, row in scores("generic", given).items():
        whole = sum(call.positive_product.mean(1)[0, 0] for call in given if call.query_stream == stream)
        np.testing.assert_allclose(row, whole / 2, rtol=1e-5)


def test_a_stream_that_never_looks_at_itself_has_nothing_to_tell_of_itself() -> None:
    only = calls([(*TEXT, False), (*THERE, False)])
    for normalise in (False, True):
        found = scores("transformer-attribution", only, normalise=normalise)
        seen = (only[1].relevance * only[1].attention_gradient).clamp(min=0).mean(1)[0, 0] / 2
        np.testing.assert_allclose(found["image"], seen)
        assert found["text"].min() >= 0 and found["text"].sum() > 0


def test_streams_that_look_at_each_other_again_do_so_in_another_step():
    """With layers= nothing may be left between two blocks; the second still sees what came of the first."""
    look = torch.eye(2)[None]
    both = [StreamMap("text", "image", look, False, None), StreamMap("image", "text", look, False, None)]
    assert [len(step) for step in iter_simultaneous_maps(both * 3)] == [2, 2, 2]
