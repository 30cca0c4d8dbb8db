"""Long texts: tile by tile, the pair is found that zoo:recall-4k was asked about, as it is from whole maps."""

from typing import Any

import numpy as np
import pytest
import torch

import clearhead
from clearhead import Method
from tests.recording.same_pass import far_from_whole_maps

clearhead_zoo = pytest.importorskip("clearhead_zoo")
from clearhead_zoo.tasks import recall  # noqa: E402

METHODS = [
    *("generic", "grad-sam", "attcat", "attention", "attention-gradcam", "attention-x-gradient", "rollout"),
    *(Method(name, steps=2) for name in ("tam", "beyond-intuition-token")),
]


def both_ways(tokens: int, dtype: torch.dtype, within: float, methods: list[Any] = METHODS) -> None:
    example = recall.examples(1, seed=2024, pairs=recall.most_pairs(tokens))[0]
    ex = clearhead.load("zoo:recall-4k")
    ex.subject.model.to(dtype).set_attn_implementation(
        "eager"
    )  # two forward kernels would differ by more than tiles do
    whole, tiles = (ex.explain(example.text, method=methods, kernel=kernel) for kernel in ("materialised", "tiles"))
    for name, expected in whole.items():
        e = tiles[name]
        assert e.certificate["kernel"] == "streaming: torch tiles" and e.target["name"] == example.label
        np.testing.assert_allclose(e.scores, expected.scores, atol=within * abs(expected.scores).max(), rtol=0)
    e = tiles["generic"]
    words = [i for i, special in enumerate(e.units.special) if not special]
    best = sorted(words[: -len(example.question)], key=lambda i: e.scores[i], reverse=True)[:2]
    # by its place: at 4,096 tokens a value of the same name stands in thirty other pairs
    assert set(best) & {words[place] for place in example.evidence}


def test_at_512_tokens() -> None:
    both_ways(512, torch.float32, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "within"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_at_4096_tokens(dtype: torch.dtype, within: float) -> None:
    """In float32 rounding grows with length: whole maps are then 1.3e-5 from those in float64 themselves (attcat)."""
    both_ways(4096, dtype, within, ["generic", "attcat"] if dtype == torch.float64 else METHODS)


@pytest.mark.parametrize("tokens", [512, pytest.param(4096, marks=pytest.mark.slow)])
def test_tiles_in_the_cache(tokens: int) -> None:
    """Where torch's own kernel runs, and all that is wanted are sums: against whole maps by another forward kernel."""
    ex = clearhead.load("zoo:recall-4k", dtype="float32")
    example = recall.examples(1, seed=2024, pairs=recall.most_pairs(tokens))[0]
    methods = [method for method in METHODS if method != "attention-gradcam"]
    whole, tiles = (ex.explain(example.text, methods, kernel=kernel) for kernel in ("materialised", "streaming"))
    for name, expected in whole.items():
        e = tiles[name]
        assert "cached tiles" in e.certificate["kernel"]  # points on a path are by torch tiles
        np.testing.assert_allclose(e.scores, expected.scores, atol=1e-5 * abs(expected.scores).max(), rtol=0)


@pytest.mark.parametrize("tokens", [512, pytest.param(4096, marks=pytest.mark.slow)])
def test_half_precision_against_float64(tokens: int) -> None:
    """In a bfloat16 pass scores are those of whole maps in float64, of the same queries, keys, values and gradients.
    Those are the model's own: at this length the attention that it pays in bfloat16 is up to 0.03 from what it pays in
    float64, whoever looks at it (`benchmarks/performance.py --parts exact`)."""
    ex = clearhead.load("zoo:recall-4k", dtype="bfloat16")
    example = recall.examples(1, seed=2024, pairs=recall.most_pairs(tokens))[0]
    gaps = far_from_whole_maps(ex, example.text, METHODS, kernel="streaming")
    assert len(gaps) == len(METHODS) and max(gaps.values()) <= 1e-5, gaps
