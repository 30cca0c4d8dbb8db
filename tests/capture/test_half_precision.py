"""Half precision: tensors are handed over in float32, sums run in float32, and the picture stays the same."""

import numpy as np
import pytest
import torch

import clearhead
from clearhead import GeneratedToken, Method
from clearhead.capture.attention.reductions import MapReduction
from clearhead.capture.attention.tiled import TiledAttention
from clearhead.capture.attention.tiling import TilingConfig
from clearhead.capture.tape import AttentionCall, Requirement
from tests import models
from tests.capture.attention import test_tiled as streaming
from tests.capture.float64_reference import far_from_whole_maps

SUBJECTS = ["bert/classify", "roberta/mask", "deberta/classify", "vit/image"]
#: Far less wild than the tests' usual weights: what half precision does to those says nothing about recording.
GENTLE = {"initializer_range": 0.1}
#: Every way in which methods join maps.
METHODS = [
    *("generic", "grad-sam", "attention", "attention-x-gradient", "attention-gradcam", "rollout", "attcat", "cat"),
    Method("grad-sam", received=True),
    *(Method(name, steps=2) for name in ("tam", "beyond-intuition-token")),
]
#: Those of them that have a rule for streams that look at each other.
ACROSS = ["generic", "attention", "attention-gradcam", "rollout"]


def half(subject, dtype):
    """The same weights, rounded."""
    wide = models.explainer(subject, torch.float32, **GENTLE)
    narrow = models.explainer(subject, torch.float32, **GENTLE)
    narrow.adapter.model.to(dtype)
    with torch.no_grad():
        for mine, yours in zip(wide.adapter.model.parameters(), narrow.adapter.model.parameters(), strict=True):
            mine.copy_(yours.float())
    return wide, narrow


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_recorded_in_float32(subject, dtype):
    _, ex = half(subject, dtype)
    returned = subject.startswith("deberta")
    asks = [ask for ask in Requirement.__args__ if not (returned and ask in ("values", "output_projection"))]
    tape = ex.record(models.inputs(subject), asks)
    assert ex.adapter.model.dtype == dtype
    for call in tape.calls:
        assert {part.dtype for _, part in call.iter_tensors()} == {torch.float32}
    (inputs,), (gradient,) = tape.inputs.values(), tape.input_gradient.values()
    assert inputs.dtype == gradient.dtype == tape.value.dtype == torch.float32
    assert ex.explain(models.inputs(subject)[0]).certificate["dtype"] == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize(("dtype", "within"), [(torch.bfloat16, 0.12), (torch.float16, 0.02)], ids=str)
def test_scores_are_near_those_of_float32(subject, dtype, within):
    wide, narrow = half(subject, dtype)
    label = wide.explain(models.inputs(subject)[0], method="random").target["index"]
    methods = ["generic", "rollout", "grad-sam", "attention"]
    exact = wide.explain(models.inputs(subject), method=methods, target=label)
    rough = narrow.explain(models.inputs(subject), method=methods, target=label)
    for method in methods:
        for one, other in zip(rough[method], exact[method], strict=True):
            assert one.scores.dtype == np.float32
            gap = np.abs(one.scores - other.scores).max() / np.abs(other.scores).max()
            assert 0 < gap <= within, f"{method}: {gap:.3f}"


def in_format(part, dtype):
    return part.to(dtype) if isinstance(part, torch.Tensor) and part.is_floating_point() else part


def folded(call, parts, slope, dtype):
    """Every sum that methods fold from the tiles of a call, by pushed rows and without; its gradients; its output."""
    more = {name: in_format(part, dtype) for name, part in call.kwargs.items()}
    mask = in_format(call.mask, dtype)
    own = TiledAttention(
        call.eager_forward, call.sdpa_forward, call.module, mask, call.causal, more, TilingConfig(tile_rows=4)
    )
    output = own.forward(*(part.to(dtype) for part in parts))
    batch, _, queries, _ = own.meta_attention.shape
    rows = torch.linspace(0.1, 1, queries).expand(batch, 1, queries)
    sums = {}

    def fold(tile, attention, gradient):
        made = AttentionCall(0, "", attention=attention, attention_gradient=gradient)
        for of in ("positive", "product", "attention"):
            for pushed in (None, rows.to(attention.dtype)):
                part = MapReduction(of, pushed).reduce_tile(made, tile, queries)
                key = (of, pushed is None)
                sums[key] = sums.get(key, 0) + part

    gradients = own.for_each_tile(slope.to(dtype), fold, with_gradients=True)
    return list(sums.values()), [output, *gradients]


@pytest.mark.parametrize(("name", "own"), streaming.CASES)
def test_tiles_of_every_kind_against_float64(name, own, monkeypatch):
    """Attention of every kind on the same bfloat16 numbers: sums are float32's, all else is bfloat16's."""
    calls, attend = [], TiledAttention.forward

    def listen(call, *parts):
        calls.append((call, [part.detach().bfloat16() for part in parts]))
        return attend(call, *parts)

    monkeypatch.setattr(TiledAttention, "forward", listen)
    streaming.streamed(name, own, torch.float64, tile_rows=4)
    for call, parts in calls[-2:]:
        query, _, value = parts
        torch.manual_seed(0)
        slope = torch.randn(len(query), query.shape[2], query.shape[1], value.shape[3]).bfloat16()
        call.kwargs = {name: in_format(part, torch.bfloat16) for name, part in call.kwargs.items()}
        (sums, others), (exact_sums, exact) = (
            folded(call, parts, slope, dtype) for dtype in (torch.bfloat16, torch.float64)
        )
        for found, expected, within in ((sums, exact_sums, 1e-5), (others, exact, 1e-2)):
            for one, other in zip(found, expected, strict=True):
                assert one.dtype == (torch.float32 if found is sums else torch.bfloat16)
                assert (one - other).abs().max() <= within * other.abs().max()


@pytest.mark.parametrize(("name", "own"), streaming.CASES)
def test_scores_of_every_kind_are_those_of_whole_maps_in_float64(name, own):
    """Methods to their end, in one bfloat16 pass: from tiles, and from the whole maps of float64."""
    model = streaming.model_of(name, own, torch.bfloat16)
    model.config.decoder_start_token_id = 2
    across = model.config.is_encoder_decoder
    how = {"kernel": "tiles", "target": GeneratedToken(2, 7) if across else 1}
    gaps = far_from_whole_maps(clearhead.load(model), streaming.batch(name), ACROSS if across else METHODS, **how)
    assert all(far <= 1e-5 for far in gaps.values()), gaps
