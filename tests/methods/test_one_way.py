"""Encoder–decoders: rows and columns in the place of matrices, from whole maps and streaming, give the same scores."""

from typing import Any

import numpy as np
import pytest
import torch

import clearhead
from clearhead import Method, Query, Refusal
from clearhead.methods.generic_across import GenericAcross
from clearhead.methods.rollout import RolloutAcross
from clearhead.recording.cached_tiles import CachedTiles
from tests.recording.test_streaming import WholeMaps
from tests.subjects import test_detection as detection
from tests.subjects.test_encoder_decoder import ANSWERS, NEAR, SOURCES, WORDS, explainer, made

METHODS = ["generic", "rollout", Method("generic", heads=(1, 2)), Method("generic", layers=(1, None)), "attention"]
ALL = {"inputs": SOURCES, "answer": ANSWERS}  # every word of each answer: several targets in a pass, padded


def near(found: Any, expected: Any, within: float) -> None:
    for method, explained in expected.items():
        for one, other in zip(listed(found[method]), listed(explained), strict=True):
            for stream, part in other.parts.items():
                size = np.abs(part.matrix if part.matrix is not None else part.scores).max()
                assert size > 0
                for mine, yours in ((one[stream].scores, part.scores), (one[stream].matrix, part.matrix)):
                    assert yours is None or np.abs(mine - yours).max() <= within * size, (method, stream)


def listed(explained: Any) -> list[Any]:
    return explained if isinstance(explained, list) else [explained]


def case(name: str) -> tuple[clearhead.Explainer, dict[str, Any], float]:
    if name == "detr":
        return detection.explainer("detr"), {"inputs": detection.pixels(), "target": Query(1, 2)}, 1e-9
    return explainer(name), ALL, NEAR[name]


@pytest.mark.parametrize("name", ["bart", "t5", "detr"])
def test_rows_are_those_of_the_matrices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ex, how, within = case(name)
    found = ex.explain(**how, method=METHODS)
    multiplied = []
    for cls in (GenericAcross, RolloutAcross):
        monkeypatch.setattr(cls, "_by_rows", lambda fold, *maps: multiplied.append(fold) or fold._by_matrices())
    near(found, ex.explain(**how, method=METHODS), within)
    assert multiplied


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("name", ["bart", "t5", "detr"])
def test_streaming_is_materialised(name: str, checkpoint: bool) -> None:
    ex, how, within = case(name)
    found = ex.explain(**how, method=METHODS, kernel="tiles", checkpoint=checkpoint)
    near(found, ex.explain(**how, method=METHODS, kernel="materialised"), max(within, 1e-7))
    ran = {one.certificate["kernel"] for explained in found.values() for one in listed(explained)}
    assert ran == {"streaming: torch tiles" + (", layers computed twice" if checkpoint else "")}


@pytest.mark.parametrize("kernel", [CachedTiles(), WholeMaps()], ids=lambda kernel: kernel.name)
def test_kernels_make_what_is_asked_after_the_pass(kernel: Any) -> None:
    ex = clearhead.load(made("bart").float(), WORDS)
    ex.recorder.kernel = kernel
    found = ex.explain(**ALL, method=METHODS, kernel="streaming")
    near(found, ex.explain(**ALL, method=METHODS, kernel="materialised"), 1e-5)
    assert found["generic"][0].certificate["kernel"] == f"streaming: {kernel.name}"


def test_no_map_is_ever_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sources far longer than their answers: the largest tensor that is folded is a tile."""
    from clearhead.recording.reduce import Reduce

    sizes: list[int] = []
    of_tile = Reduce.of_tile

    def watched(one: Reduce, call: Any, *where: Any) -> torch.Tensor:
        sizes.append(call.attention.shape[2])
        return of_tile(one, call, *where)

    monkeypatch.setattr(Reduce, "of_tile", watched)
    ex = explainer("bart")
    monkeypatch.setattr(ex.recorder, "tile_rows", 3)
    ex.explain(SOURCES[1], answer=ANSWERS[1], method=["generic", "rollout"], kernel="tiles")
    assert sizes and max(sizes) == 3


@pytest.mark.parametrize("options", [{"aggregate": False}, {"normalise": False}, {"fusion": "mean-clamp"}])
def test_what_needs_matrices_says_so(options: dict[str, Any]) -> None:
    with pytest.raises(Refusal, match=r"generic\(.*\) cannot be computed tile by tile"):
        explainer("bart").explain(SOURCES[0], Method("generic", **options), answer=ANSWERS[0], kernel="tiles")


@pytest.mark.parametrize("cls", [GenericAcross, RolloutAcross])
def test_streams_that_look_at_each_other_need_whole_maps(cls: Any) -> None:
    alone, between = {("text", "text"), ("image", "image")}, ("text", "image")
    for back, whole in ((set(), False), ({("image", "text")}, True)):
        pairs = dict.fromkeys({*alone, between, *back}, range(2))
        assert cls(frames={}, layers=pairs).needs_whole is whole
