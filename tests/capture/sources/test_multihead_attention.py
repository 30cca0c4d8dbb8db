"""torch's nn.MultiheadAttention as it is recorded: the function that stands in for it gives what it gives."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clearhead.capture.sources.attention_interface import CapturedCall, capture_attention_calls
from clearhead.capture.sources.custom_modules import find_custom_forward
from clearhead.errors import UnsupportedError

WIDE, HEADS, BATCH, QUERIES, KEYS = 12, 3, 2, 4, 5

#: Masks that hide the same from each form of them: True hides, and so does −∞.
CAUSAL = torch.ones(QUERIES, QUERIES, dtype=torch.bool).triu(1)
SOME = torch.zeros(QUERIES, KEYS, dtype=torch.bool)
SOME[0, 1] = SOME[2, 0] = SOME[2, 4] = True
EACH = torch.zeros(BATCH * HEADS, QUERIES, KEYS, dtype=torch.bool)
EACH[0, 0, 1] = EACH[4, 3, 2] = True
PADDING = torch.tensor([[False, False, False, True, True], [False, True, False, False, False]])


def as_float(mask: Tensor | None) -> Tensor | None:
    """Not only −∞: whatever is added counts."""
    if mask is None:
        return None
    torch.manual_seed(1)
    return torch.randn(mask.shape, dtype=torch.float64).masked_fill(mask, float("-inf"))


def made(**how: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(WIDE, HEADS, dropout=0.3, **how).double().eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)  # biases start at zero
    return module


def inputs(module: nn.MultiheadAttention, batched: bool = True) -> list[Tensor]:
    torch.manual_seed(2)
    parts = [
        torch.randn(BATCH, count, wide, dtype=torch.float64)
        for count, wide in ((QUERIES, WIDE), (KEYS, module.kdim), (KEYS, module.vdim))
    ]
    if not batched:
        return [part[0] for part in parts]
    return parts if module.batch_first else [part.transpose(0, 1) for part in parts]


def recorded(module: nn.MultiheadAttention, *args: Any, **kwargs: Any) -> tuple[Any, CapturedCall]:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = module

        def forward(self) -> Any:
            return self.attention(*args, **kwargs)

    around = Around()
    with capture_attention_calls(around) as calls, torch.no_grad():
        output = around()
    (call,) = calls
    assert "forward" not in vars(module)
    return output, call


def check(module: nn.MultiheadAttention, *args: Any, **kwargs: Any) -> CapturedCall:
    """The same output, the same returned weights, and the maps that torch itself returns head by head."""
    with torch.no_grad():
        real, weights = module(*args, **kwargs)
        _, per_head = module(*args, **{**kwargs, "need_weights": True, "average_attn_weights": False})
    (output, returned), call = recorded(module, *args, **kwargs)
    torch.testing.assert_close(output, real, rtol=0, atol=1e-12)
    assert (returned is None) == (weights is None)
    if weights is not None:
        torch.testing.assert_close(returned, weights, rtol=0, atol=1e-12)
    batched = per_head if per_head.dim() == 4 else per_head[None]
    torch.testing.assert_close(call.attention, batched, rtol=0, atol=1e-12)
    assert call.is_custom and call.values is not None and call.values.shape[:3] == (len(batched), HEADS, KEYS)
    return call


@pytest.mark.parametrize(("batch_first", "bias", "apart"), list(product([True, False], repeat=3)))
def test_every_kind_of_module(batch_first: bool, bias: bool, apart: bool) -> None:
    module = made(batch_first=batch_first, bias=bias, **({"kdim": 7, "vdim": 9} if apart else {}))
    for need, average in ((True, True), (True, False), (False, True)):
        check(module, *inputs(module), need_weights=need, average_attn_weights=average)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("mask", [None, SOME, EACH, as_float(SOME), as_float(EACH)])
@pytest.mark.parametrize("padding", [None, PADDING, as_float(PADDING)])
def test_masks(batch_first: bool, mask: Tensor | None, padding: Tensor | None) -> None:
    module = made(batch_first=batch_first)
    mixed = mask is not None and padding is not None and mask.dtype != padding.dtype
    if mixed:  # torch wants one kind
        mask = mask if mask is not None and mask.dtype != torch.bool else as_float(mask)
        padding = padding if padding is not None and padding.dtype != torch.bool else as_float(padding)
    call = check(module, *inputs(module), attn_mask=mask, key_padding_mask=padding)
    if padding is PADDING:
        assert not call.attention[0, :, :, 3:].any()


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("mask", [CAUSAL, torch.zeros(4, 4, dtype=torch.float64).masked_fill(CAUSAL, -torch.inf)])
def test_the_causal_hint(need_weights: bool, mask: Tensor) -> None:
    module = made(batch_first=True)
    x = inputs(module)[0]
    with torch.no_grad():
        real, _ = module(x, x, x, attn_mask=mask, is_causal=True, need_weights=need_weights)
    (output, _), call = recorded(module, x, x, x, attn_mask=mask, is_causal=True, need_weights=need_weights)
    torch.testing.assert_close(output, real, rtol=0, atol=1e-12)
    assert not call.attention.triu(1).any()


@pytest.mark.parametrize("mask", [None, SOME, EACH[:HEADS], as_float(SOME)])
def test_one_input_without_a_batch_axis(mask: Tensor | None) -> None:
    for batch_first in (True, False):
        module = made(batch_first=batch_first)
        check(module, *inputs(module, batched=False), attn_mask=mask)
    padding = PADDING[0]
    check(module, *inputs(module, batched=False), key_padding_mask=padding)


@pytest.mark.parametrize("how", [{"add_bias_kv": True}, {"add_zero_attn": True}])
def test_keys_that_are_no_units_are_refused(how: dict[str, bool]) -> None:
    module = made(batch_first=True, **how)
    with pytest.raises(UnsupportedError, match="attends to keys that are no unit"):
        recorded(module, *inputs(module))
    assert "forward" not in vars(module)


def test_a_class_with_a_forward_of_its_own_is_not_stood_in_for() -> None:
    class Plain(nn.MultiheadAttention):
        pass

    class Own(nn.MultiheadAttention):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    assert find_custom_forward(Plain(WIDE, HEADS)) is not None
    assert find_custom_forward(Own(WIDE, HEADS)) is None


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_inside_a_transformer_encoder_without_gradients(batch_first: bool, norm_first: bool, padded: bool) -> None:
    """Where torch would fuse whole layers, or pack the padding away."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDE, 2, 16, batch_first=batch_first, norm_first=norm_first)
    nested = batch_first and not norm_first
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).eval()
    x = torch.randn(BATCH, KEYS, WIDE)
    real = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    given = x if batch_first else x.transpose(0, 1)
    hidden = ~real if padded else None
    with torch.no_grad():
        wanted = model(given, src_key_padding_mask=hidden)
        with capture_attention_calls(model) as calls:
            found = model(given, src_key_padding_mask=hidden)
    assert [call.module for call in calls] == ["layers.0.self_attn", "layers.1.self_attn"]
    both = [part if batch_first else part.transpose(0, 1) for part in (found, wanted)]
    kept = real if padded else torch.ones_like(real)  # torch's fused layers leave zeros in the place of padding
    torch.testing.assert_close(both[0][kept], both[1][kept], rtol=0, atol=1e-5)
