"""Half precision: tensors are recorded and reduced in float32, and scores stay close to those of float32."""

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
from tests.capture.attention import test_tiled as tiled_models
from tests.capture.float64_reference import far_from_whole_maps

SUBJECTS = ["bert/classify", "roberta/mask", "deberta/classify", "vit/image"]
#: Much smaller weights than the tests usually have: with those, rounding of the model itself would dominate.
GENTLE = {"initializer_range": 0.1}
#: Methods that cover every way to aggregate attention maps.
METHODS = [
    *("generic", "grad-sam", "attention", "attention-x-gradient", "attention-gradcam", "rollout", "attcat", "cat"),
    Method("grad-sam", received=True),
    *(Method(name, steps=2) for name in ("tam", "beyond-intuition-token")),
]
#: Those of them that support cross-attention.
CROSS_ATTENTION_METHODS = ["generic", "attention", "attention-gradcam", "rollout"]


def make_rounded_pair(subject, dtype):
    """A float32 and a make_rounded_pair-precision explainer of the same, rounded weights."""
    full = models.explainer(subject, torch.float32, **GENTLE)
    rounded = models.explainer(subject, torch.float32, **GENTLE)
    rounded.adapter.model.to(dtype)
    with torch.no_grad():
        for full_parameter, rounded_parameter in zip(
            full.adapter.model.parameters(), rounded.adapter.model.parameters(), strict=True
        ):
            full_parameter.copy_(rounded_parameter.float())
    return full, rounded


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_tensors_are_recorded_in_float32(subject, dtype):
    _, ex = make_rounded_pair(subject, dtype)
    returns_attentions = subject.startswith("deberta")
    requirements = [
        requirement
        for requirement in Requirement.__args__
        if not (returns_attentions and requirement in ("values", "output_projection"))
    ]
    tape = ex.record(models.inputs(subject), requirements)
    assert ex.adapter.model.dtype == dtype
    for call in tape.calls:
        assert {tensor.dtype for _, tensor in call.iter_tensors()} == {torch.float32}
    (inputs,), (gradient,) = tape.inputs.values(), tape.input_gradient.values()
    assert inputs.dtype == gradient.dtype == tape.value.dtype == torch.float32
    assert ex.explain(models.inputs(subject)[0], method="generic").certificate["dtype"] == str(dtype).removeprefix(
        "torch."
    )


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.12), (torch.float16, 0.02)], ids=str)
def test_half_precision_scores_are_close_to_float32(subject, dtype, tolerance):
    full, rounded = make_rounded_pair(subject, dtype)
    label = full.explain(models.inputs(subject)[0], method="random").target["index"]
    methods = ["generic", "rollout", "grad-sam", "attention"]
    expected = full.explain(models.inputs(subject), method=methods, target=label)
    actual = rounded.explain(models.inputs(subject), method=methods, target=label)
    for method in methods:
        for explanation, reference in zip(actual[method], expected[method], strict=True):
            assert explanation.scores.dtype == np.float32
            gap = np.abs(explanation.scores - reference.scores).max() / np.abs(reference.scores).max()
            assert 0 < gap <= tolerance, f"{method}: {gap:.3f}"


def cast_floating(value, dtype):
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def reduce_tiles(call, qkv, output_gradient, dtype):
    """Every reduction of the tiles of a call, with row weights and without; its gradients; its output."""
    kwargs = {name: cast_floating(part, dtype) for name, part in call.kwargs.items()}
    mask = cast_floating(call.mask, dtype)
    tiled = TiledAttention(
        call.eager_forward, call.sdpa_forward, call.module, mask, call.causal, kwargs, TilingConfig(tile_rows=4)
    )
    output = tiled.forward(*(part.to(dtype) for part in qkv))
    batch, _, queries, _ = tiled.meta_attention.shape
    weights = torch.linspace(0.1, 1, queries).expand(batch, 1, queries)
    sums = {}

    def fold(tile, attention, gradient):
        tile_call = AttentionCall(0, "", attention=attention, attention_gradient=gradient)
        for quantity in ("positive", "product", "attention"):
            for row_weights in (None, weights.to(attention.dtype)):
                part = MapReduction(quantity, row_weights).reduce_tile(tile_call, tile, queries)
                key = (quantity, row_weights is None)
                sums[key] = sums.get(key, 0) + part

    gradients = tiled.for_each_tile(output_gradient.to(dtype), fold, with_gradients=True)
    return list(sums.values()), [output, *gradients]


@pytest.mark.parametrize(("name", "implementation"), tiled_models.CASES)
def test_bfloat16_tile_reductions_match_float64(name, implementation, monkeypatch):
    """On the same bfloat16 tensors: reductions are float32, the output and the gradients bfloat16."""
    calls, original_forward = [], TiledAttention.forward

    def record_call(call, *qkv):
        calls.append((call, [tensor.detach().bfloat16() for tensor in qkv]))
        return original_forward(call, *qkv)

    monkeypatch.setattr(TiledAttention, "forward", record_call)
    tiled_models.record_streamed(name, implementation, torch.float64, tile_rows=4)
    for call, qkv in calls[-2:]:
        query, _, value = qkv
        torch.manual_seed(0)
        output_gradient = torch.randn(len(query), query.shape[2], query.shape[1], value.shape[3]).bfloat16()
        call.kwargs = {name: cast_floating(tensor, torch.bfloat16) for name, tensor in call.kwargs.items()}
        (reductions, rounded), (exact_reductions, exact_rounded) = (
            reduce_tiles(call, qkv, output_gradient, dtype) for dtype in (torch.bfloat16, torch.float64)
        )
        for actual, expected, tolerance in ((reductions, exact_reductions, 1e-5), (rounded, exact_rounded, 1e-2)):
            for tensor, reference in zip(actual, expected, strict=True):
                assert tensor.dtype == (torch.float32 if actual is reductions else torch.bfloat16)
                assert (tensor - reference).abs().max() <= tolerance * reference.abs().max()


@pytest.mark.parametrize(("name", "implementation"), tiled_models.CASES)
def test_bfloat16_tiled_scores_match_float64_materialised_maps(name, implementation):
    """Scores of one bfloat16 pass, from tiles and from maps materialised in float64."""
    model = tiled_models.make_model(name, implementation, torch.bfloat16)
    model.config.decoder_start_token_id = 2
    is_encoder_decoder = model.config.is_encoder_decoder
    options = {"kernel": "tiles", "target": GeneratedToken(2, 7) if is_encoder_decoder else 1}
    gaps = far_from_whole_maps(
        clearhead.load(model),
        tiled_models.make_batch(name),
        CROSS_ATTENTION_METHODS if is_encoder_decoder else METHODS,
        **options,
    )
    assert all(gap <= 1e-5 for gap in gaps.values()), gaps
