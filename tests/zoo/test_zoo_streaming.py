"""Long texts: tile by tile, the pair is found that zoo:recall-4k was asked about, as it is from whole maps."""

from typing import Any

import numpy as np
import pytest
import torch

import clearhead
from clearhead import Method
from clearhead.recording.streaming import Streamed
from clearhead.recording.tape import Call
from clearhead.recording.tiles import Tiles

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


def sums_of(attention: torch.Tensor, gradient: torch.Tensor, start: int) -> dict[str, torch.Tensor]:
    """Every sum that methods fold from some queries of a map: of keys, with a weight for each query, and of queries."""
    weights = torch.linspace(0.1, 1, 5000, dtype=torch.float64)[start : start + attention.shape[2]].to(attention)
    maps = {"positive": (attention * gradient).clamp(min=0), "product": attention * gradient, "attention": attention}
    pushed = {f"{of}, pushed": torch.einsum("i,bhij->bhj", weights, part) for of, part in maps.items()}
    return pushed | {f"{of}, rows": part.sum(3) for of, part in maps.items()}


def of_formula(call: Streamed, slope: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same in float64 and from whole maps, of the numbers in half precision that the model has there."""
    query, key, value = (part.double() for part in (call.query, call.key, call.value))
    key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], 1) for part in (key, value))
    hidden = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).triu(1)
    attention = (query @ key.mT * call.scaling).masked_fill(hidden, -torch.inf).softmax(-1)
    return sums_of(attention, slope.double().transpose(1, 2) @ value.mT, 0)


@pytest.mark.parametrize("tokens", [512, pytest.param(4096, marks=pytest.mark.slow)])
def test_half_precision_against_float64(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums in a bfloat16 pass are those of float64 on the same numbers. Those numbers are the model's own: at this
    length the attention that it pays in bfloat16 is up to 0.03 from what it pays in float64, whoever looks at it."""
    ex = clearhead.load("zoo:recall-4k", dtype="bfloat16")
    example = recall.examples(1, seed=2024, pairs=recall.most_pairs(tokens))[0]
    given = ex.subject.processor(example.text, return_tensors="pt")
    found: dict[int, dict[str, torch.Tensor]] = {}
    exact: list[dict[str, torch.Tensor]] = []
    back = Streamed.back

    def fold(call: Call, queries: slice, sweep: int) -> None:
        total = found.setdefault(call.layer, {})
        for name, part in sums_of(call.attention, call.attention_gradient, queries.start).items():
            ends = (queries.start, tokens_of(given) - queries.stop)
            part = torch.nn.functional.pad(part, ends) if name.endswith("rows") else part
            total[name] = total.get(name, 0) + part

    def listen(call: Streamed, slope: torch.Tensor) -> Any:
        exact.insert(0, of_formula(call, slope))
        return back(call, slope)

    monkeypatch.setattr(Streamed, "back", listen)
    inputs = {"input_ids": given["input_ids"], "attention_mask": given["attention_mask"]}
    ex.recorder.run(inputs, lambda output: output.logits[:, -1].amax(-1), ["attention_gradient"], tiles=Tiles(fold))
    assert sorted(found) == list(range(len(exact))) and len(exact) == 3
    for layer, expected in enumerate(exact):
        for name, true in expected.items():
            one = found[layer][name]
            assert one.dtype == torch.float32
            assert (one - true).abs().max() <= 1e-5 * true.abs().max(), f"layer {layer}, {name}"


def tokens_of(given: Any) -> int:
    return int(given["input_ids"].shape[1])
