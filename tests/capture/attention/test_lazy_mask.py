"""Lazy masks: computed on demand, their cells equal the masks that transformers makes."""

from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from clearhead.capture.attention import chunked_sdpa, lazy_mask
from clearhead.capture.attention.lazy_mask import LazyMask
from clearhead.capture.attention.tiled import TiledAttention
from clearhead.capture.attention.tiling import TilingConfig
from tests.capture.attention.test_tiled import REQUIREMENTS, TileCollector, is_close, make_recorder, target_logit

LENGTH = 11
PADDED = torch.tensor([[True] * 11, [False] * 3 + [True] * 8])
PACKED = torch.tensor([[0] * 4 + [1] * 7, [0] * 6 + [1] * 5])
#: The first two keys are masked for every query, the last three for every query of the first sample.
HIDDEN = torch.tensor([[False] * 2 + [True] * 6 + [False] * 3, [False] * 2 + [True] * 9])


def mask_functions() -> dict[str, Any]:
    """Each mask function, and its window size where it has one."""
    library = transformers.masking_utils
    causal = library.causal_mask_function
    return {
        "causal": (causal, None),
        "bidirectional": (library.bidirectional_mask_function, None),
        "window": (library.sliding_window_causal_mask_function(4), 4),
        "window longer than the input": (library.sliding_window_causal_mask_function(40), 40),
        "bidirectional window": (_within_distance(3), 3),
        "bidirectional window, exclusive size": (_below_distance(3), 3),
        "chunks": (library.chunked_causal_mask_function(4, torch.tensor([0, 3])), 4),
        "packed": (library.and_masks(causal, library.packed_sequence_mask_function(PACKED)), None),
        "bidirectional prefix": (library.or_masks(causal, lambda batch, head, query, key: key < 3), None),
    }


def _within_distance(size: int) -> Any:
    """The function of transformers where it exists (not in 5.0), else the same formula."""
    known = getattr(transformers.masking_utils, "sliding_window_bidirectional_mask_function", None)
    return known(size) if known else lambda batch, head, query, key: (query - key).abs() <= size


def _below_distance(size: int) -> Any:
    return lambda batch, head, query, key: (query - key).abs() < size


#: How many keys a query attends to before its own position and after it.
WINDOWS = {
    "causal": (None, 0),
    "bidirectional": (None, None),
    "window": (3, 0),
    "window longer than the input": (None, 0),
    "bidirectional window": (3, 3),
    "bidirectional window, exclusive size": (2, 2),
}
#: The keys of `mask_functions()`.
NAMES = (*WINDOWS, "chunks", "packed", "bidirectional prefix")


def mask_arguments(name: str, padded: bool) -> dict[str, Any]:
    function, size = mask_functions()[name]
    by_position = "cache_position" in transformers.masking_utils.sdpa_mask.__code__.co_varnames  # transformers 5.0
    positions = {"cache_position": torch.arange(LENGTH)} if by_position else {"q_length": LENGTH, "device": "cpu"}
    padding = PADDED if padded else None
    options = {"allow_is_causal_skip": False, "local_size": size, "attention_mask": padding}
    return {"batch_size": 2, "kv_length": LENGTH, "kv_offset": 0, "mask_function": function, **positions, **options}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_lazy_mask_tiles_equal_sdpa_mask(name: str, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy_mask, "MAX_MASK_ELEMENTS", 60)  # two queries at once
    expected = transformers.masking_utils.sdpa_mask(**mask_arguments(name, padded))
    mask = lazy_mask.make_lazy_mask(**mask_arguments(name, padded))
    assert isinstance(mask, LazyMask) and mask.shape == expected.shape
    for start in range(0, LENGTH, 4):
        rows = slice(start, min(start + 4, LENGTH))
        key_span = mask.find_key_span(rows)
        assert torch.equal(mask.compute_tile(rows, key_span), expected[:, :, rows, key_span])
        outside = expected[:, :, rows].clone()
        outside[..., key_span] = False
        assert not outside.any()
    if name not in WINDOWS:
        assert mask.band_mask is None
        return
    assert mask.band_mask is not None and (mask.band_mask.window_before, mask.band_mask.window_after) == WINDOWS[name]
    assert (mask.band_mask.padding is not None) == padded
    all_rows = slice(0, LENGTH)
    assert torch.equal(mask.band_mask.compute_tile(all_rows, all_rows, mask.device).expand_as(expected), expected)


def test_tensor_operations_materialise_lazy_mask() -> None:
    expected = transformers.masking_utils.sdpa_mask(**mask_arguments("window", True))
    mask = lazy_mask.make_lazy_mask(**mask_arguments("window", True))
    assert mask is not None
    for actual, reference in (
        (mask[:, :, :3], expected[:, :, :3]),
        (~mask, ~expected),
        (torch.where(mask, 0.0, -1.0), torch.where(expected, 0.0, -1.0)),
        (mask.to(torch.float32), expected.float()),
        (torch.cat([expected, mask]), torch.cat([expected, expected])),
    ):
        assert type(actual) is torch.Tensor and torch.equal(actual, reference)


def test_window_with_one_extra_cell_has_no_band_mask() -> None:
    """A mask that differs from a window in one cell has no band mask."""
    window = transformers.masking_utils.sliding_window_causal_mask_function(4)
    extra = transformers.masking_utils.or_masks(window, lambda batch, head, query, key: (query == 9) & (key == 1))
    mask = lazy_mask.make_lazy_mask(**{**mask_arguments("window", False), "mask_function": extra})
    assert isinstance(mask, LazyMask) and mask.band_mask is None and bool(mask[0, 0, 9, 1])


@pytest.mark.parametrize("cells", [60, lazy_mask.MAX_MASK_ELEMENTS])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_chunked_sdpa_output_and_gradients_equal_full_mask(
    name: str, padded: bool, cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys that are masked for every query of a chunk are skipped and have a gradient of zero."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    monkeypatch.setattr(lazy_mask, "MAX_MASK_ELEMENTS", cells)
    monkeypatch.setattr(chunked_sdpa, "MAX_MASK_ELEMENTS", cells)
    arguments = mask_arguments(name, padded) | {"attention_mask": HIDDEN if padded else None}
    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(2, 3, LENGTH, 4, generator=generator, dtype=torch.float64) for _ in range(4)]
    *qkv, gradient = qkv
    module, meta_attention = torch.nn.Identity(), torch.empty(2, 3, LENGTH, LENGTH, device="meta")
    call = TiledAttention(
        sdpa_attention_forward,
        sdpa_attention_forward,
        module,
        lazy_mask.make_lazy_mask(**arguments),
        False,
        {},
        TilingConfig(),
    )
    call.saved_tensors, call.meta_attention = tuple(qkv), meta_attention
    actual = chunked_sdpa.chunked_sdpa_backward(call, gradient.transpose(1, 2))
    leaves = [tensor.clone().requires_grad_() for tensor in qkv]
    output = sdpa_attention_forward(module, *leaves, transformers.masking_utils.sdpa_mask(**arguments))[0]
    expected = torch.autograd.grad(output, leaves, gradient.transpose(1, 2))
    torch.testing.assert_close(chunked_sdpa.chunked_sdpa_forward(call), output)
    for actual_gradient, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(actual_gradient, reference, rtol=0, atol=1e-6)  # chunks are summed in float32


def test_moving_lazy_mask_does_not_materialise_it() -> None:
    mask = lazy_mask.make_lazy_mask(**mask_arguments("window", True))
    assert mask.to("cpu") is mask and mask.to(device=torch.device("cpu"), non_blocking=True) is mask
    moved = mask.to("meta")
    assert isinstance(moved, LazyMask) and moved.device.type == "meta" and mask.to("meta") is moved
    assert "full_mask" not in mask.__dict__ and "full_mask" not in moved.__dict__
    assert not isinstance(mask.to(torch.float64), LazyMask)


class AllocationTracker(TorchDispatchMode):
    """Element count and bytes of the largest tensor allocated in the context."""

    elements = bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in filter(_is_tensor, tree_leaves(result)):
            self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
            self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.itemsize)
        return result


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type != "meta"


def test_full_mask_allocates_no_more_than_its_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bidirectional window is computed from int64 distances, for a few queries at a time."""
    monkeypatch.setattr(lazy_mask, "MAX_MASK_ELEMENTS", 2 * LENGTH * LENGTH)
    mask = lazy_mask.make_lazy_mask(**mask_arguments("bidirectional window", True))
    assert isinstance(mask, LazyMask)
    with AllocationTracker() as largest:
        tile = mask.compute_tile(slice(0, LENGTH), slice(0, LENGTH))
    assert torch.equal(tile, transformers.masking_utils.sdpa_mask(**mask_arguments("bidirectional window", True)))
    assert largest.bytes <= 2 * LENGTH * LENGTH


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        ("sliding window", "sdpa"),
        ("sliding window", "eager"),
        ("soft cap", "eager"),
        ("bidirectional window", "sdpa"),
        ("bidirectional window", "eager"),
    ],
)
def test_streaming_pass_never_allocates_full_mask(
    name: str, implementation: str, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    length = 240
    monkeypatch.setattr(lazy_mask, "MAX_MASK_ELEMENTS", 2000)
    monkeypatch.setattr(chunked_sdpa, "MAX_MASK_ELEMENTS", 2000)
    recorder = make_recorder(name, implementation, torch.float64)
    inputs = {"input_ids": torch.arange(length)[None] * 7 % 37 + 2, "attention_mask": torch.ones(1, length).long()}
    inputs["attention_mask"][:, length - (3 if padded else 0) :] = 0
    collector = TileCollector()
    with AllocationTracker() as largest:
        tape = recorder.record(
            inputs, target_logit, REQUIREMENTS, tiling=TilingConfig(collector.fold, tile_rows=4, checkpoint_layers=True)
        )
    assert 0 < largest.elements < length * length
    expected = recorder.record(inputs, target_logit, REQUIREMENTS)
    assert is_close(
        tape.input_gradient["input_ids"], expected.input_gradient["input_ids"], name, implementation, torch.float64
    )


#: Each query attends to itself and to the first four tokens.
CUSTOM_MASK = (torch.eye(9).bool() | (torch.arange(9) < 4))[None, None]
USER_MASKS = {
    "packed": {"position_ids": torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]])},
    "boolean mask": {"attention_mask": CUSTOM_MASK},
    "additive mask": {"attention_mask": torch.zeros(1, 1, 9, 9, dtype=torch.float64).masked_fill(~CUSTOM_MASK, -1e30)},
}


@pytest.mark.parametrize("name", ["grouped heads", "sliding window"])
@pytest.mark.parametrize("kind", USER_MASKS)
def test_user_masks_are_applied_in_tiles(kind: str, name: str) -> None:
    recorder = make_recorder(name, "sdpa", torch.float64)
    inputs = {"input_ids": torch.arange(9)[None] * 7 % 37 + 2, **USER_MASKS[kind]}
    collector = TileCollector()
    # recorded attention is eager, whose mask is additive
    additive_inputs = {
        key: tensor if tensor.dtype != torch.bool else torch.zeros(tensor.shape).double().masked_fill(~tensor, -1e30)
        for key, tensor in inputs.items()
    }
    recorder.record(
        inputs,
        target_logit,
        REQUIREMENTS,
        tiling=TilingConfig(collector.fold, tile_rows=4, needs_masked_gradients=True),
    )
    unmasked = recorder.record({"input_ids": inputs["input_ids"]}, target_logit, REQUIREMENTS).calls[-1].attention
    for call in recorder.record(additive_inputs, target_logit, REQUIREMENTS).calls:
        attention = collector.full_map(call, "attention")
        assert is_close(attention, call.attention, name, "sdpa", torch.float64)
    assert not is_close(attention, unmasked, name, "sdpa", torch.float64)
