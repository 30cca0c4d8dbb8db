"""Capture of torch's nn.MultiheadAttention: the replaced forward returns the same output and weights."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clearhead.capture.attention_calls import capture_attention_calls
from clearhead.capture.context import CapturedCall
from clearhead.capture.sources.custom_modules import CUSTOM_MODULES, find_custom_forward
from clearhead.capture.topology import ModelTopology
from clearhead.errors import UnsupportedError

WIDTH, HEADS, BATCH, QUERIES, KEYS = 12, 3, 2, 4, 5

#: Boolean masks: True hides, as −∞ does in the float form of the same mask.
CAUSAL = torch.ones(QUERIES, QUERIES, dtype=torch.bool).triu(1)
SHARED_MASK = torch.zeros(QUERIES, KEYS, dtype=torch.bool)
SHARED_MASK[0, 1] = SHARED_MASK[2, 0] = SHARED_MASK[2, 4] = True
PER_HEAD_MASK = torch.zeros(BATCH * HEADS, QUERIES, KEYS, dtype=torch.bool)
PER_HEAD_MASK[0, 0, 1] = PER_HEAD_MASK[4, 3, 2] = True
PADDING = torch.tensor([[False, False, False, True, True], [False, True, False, False, False]])


def as_float(mask: Tensor | None) -> Tensor | None:
    """The additive form of a mask, with finite values, too."""
    if mask is None:
        return None
    torch.manual_seed(1)
    return torch.randn(mask.shape, dtype=torch.float64).masked_fill(mask, float("-inf"))


def make_module(**options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.3, **options).double().eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)  # biases start at zero
    return module


def make_inputs(module: nn.MultiheadAttention, batched: bool = True) -> list[Tensor]:
    torch.manual_seed(2)
    qkv = [
        torch.randn(BATCH, count, width, dtype=torch.float64)
        for count, width in ((QUERIES, WIDTH), (KEYS, module.kdim), (KEYS, module.vdim))
    ]
    if not batched:
        return [tensor[0] for tensor in qkv]
    return qkv if module.batch_first else [tensor.transpose(0, 1) for tensor in qkv]


def capture(module: nn.MultiheadAttention, *args: Any, **kwargs: Any) -> tuple[Any, CapturedCall]:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = module

        def forward(self) -> Any:
            return self.attention(*args, **kwargs)

    wrapper = Wrapper()
    with capture_attention_calls(ModelTopology(wrapper)) as calls, torch.no_grad():
        output = wrapper()
    (call,) = calls
    assert "forward" not in vars(module)
    return output, call


def assert_captured(module: nn.MultiheadAttention, *args: Any, **kwargs: Any) -> CapturedCall:
    """Check the output, the returned weights, and the maps against the per-head weights of torch."""
    with torch.no_grad():
        expected, weights = module(*args, **kwargs)
        _, per_head = module(*args, **{**kwargs, "need_weights": True, "average_attn_weights": False})
    (output, returned), call = capture(module, *args, **kwargs)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    assert (returned is None) == (weights is None)
    if weights is not None:
        torch.testing.assert_close(returned, weights, rtol=0, atol=1e-12)
    batched = per_head if per_head.dim() == 4 else per_head[None]
    torch.testing.assert_close(call.attention, batched, rtol=0, atol=1e-12)
    assert (
        call.source is CUSTOM_MODULES
        and call.values is not None
        and call.values.shape[:3] == (len(batched), HEADS, KEYS)
    )
    return call


@pytest.mark.parametrize(("batch_first", "bias", "separate_dims"), list(product([True, False], repeat=3)))
def test_captured_output_and_weights_equal_torch_for_every_module_option(
    batch_first: bool, bias: bool, separate_dims: bool
) -> None:
    module = make_module(batch_first=batch_first, bias=bias, **({"kdim": 7, "vdim": 9} if separate_dims else {}))
    for need_weights, average_weights in ((True, True), (True, False), (False, True)):
        assert_captured(module, *make_inputs(module), need_weights=need_weights, average_attn_weights=average_weights)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("mask", [None, SHARED_MASK, PER_HEAD_MASK, as_float(SHARED_MASK), as_float(PER_HEAD_MASK)])
@pytest.mark.parametrize("padding", [None, PADDING, as_float(PADDING)])
def test_captured_output_equals_torch_with_masks(
    batch_first: bool, mask: Tensor | None, padding: Tensor | None
) -> None:
    module = make_module(batch_first=batch_first)
    mixed = mask is not None and padding is not None and mask.dtype != padding.dtype
    if mixed:  # torch requires masks of one dtype
        mask = mask if mask is not None and mask.dtype != torch.bool else as_float(mask)
        padding = padding if padding is not None and padding.dtype != torch.bool else as_float(padding)
    call = assert_captured(module, *make_inputs(module), attn_mask=mask, key_padding_mask=padding)
    if padding is PADDING:
        assert not call.attention[0, :, :, 3:].any()


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("mask", [CAUSAL, torch.zeros(4, 4, dtype=torch.float64).masked_fill(CAUSAL, -torch.inf)])
def test_is_causal_hint_masks_future_keys(need_weights: bool, mask: Tensor) -> None:
    module = make_module(batch_first=True)
    x = make_inputs(module)[0]
    with torch.no_grad():
        expected, _ = module(x, x, x, attn_mask=mask, is_causal=True, need_weights=need_weights)
    (output, _), call = capture(module, x, x, x, attn_mask=mask, is_causal=True, need_weights=need_weights)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    assert not call.attention.triu(1).any()


@pytest.mark.parametrize("mask", [None, SHARED_MASK, PER_HEAD_MASK[:HEADS], as_float(SHARED_MASK)])
def test_unbatched_input_is_captured(mask: Tensor | None) -> None:
    for batch_first in (True, False):
        module = make_module(batch_first=batch_first)
        assert_captured(module, *make_inputs(module, batched=False), attn_mask=mask)
    padding = PADDING[0]
    assert_captured(module, *make_inputs(module, batched=False), key_padding_mask=padding)


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}])
def test_bias_kv_and_zero_attn_raise(options: dict[str, bool]) -> None:
    module = make_module(batch_first=True, **options)
    with pytest.raises(UnsupportedError, match="attends to keys that are not units"):
        capture(module, *make_inputs(module))
    assert "forward" not in vars(module)


def test_subclass_with_own_forward_is_not_replaced() -> None:
    class Inherited(nn.MultiheadAttention):
        pass

    class Overridden(nn.MultiheadAttention):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    assert find_custom_forward(Inherited) is not None
    assert find_custom_forward(Overridden) is None


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_transformer_encoder_under_no_grad_is_captured(batch_first: bool, norm_first: bool, padded: bool) -> None:
    """Where torch would use fused layers or nested tensors."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=batch_first, norm_first=norm_first)
    nested = batch_first and not norm_first
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).eval()
    x = torch.randn(BATCH, KEYS, WIDTH)
    is_token = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    inputs = x if batch_first else x.transpose(0, 1)
    padding_mask = ~is_token if padded else None
    with torch.no_grad():
        expected = model(inputs, src_key_padding_mask=padding_mask)
        with capture_attention_calls(ModelTopology(model)) as calls:
            actual = model(inputs, src_key_padding_mask=padding_mask)
    assert [call.module for call in calls] == ["layers.0.self_attn", "layers.1.self_attn"]
    outputs = [tensor if batch_first else tensor.transpose(0, 1) for tensor in (actual, expected)]
    is_compared = is_token if padded else torch.ones_like(is_token)  # torch's fused layers output zeros at padding
    torch.testing.assert_close(outputs[0][is_compared], outputs[1][is_compared], rtol=0, atol=1e-5)
