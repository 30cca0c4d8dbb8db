"""Masks that are nowhere until somebody looks: the cells are those that transformers makes, whoever asks for them."""

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
from tests.capture.attention.test_tiled import ASKS, Together, near, recorder, value

LENGTH = 11
PADDED = torch.tensor([[True] * 11, [False] * 3 + [True] * 8])
PACKED = torch.tensor([[0] * 4 + [1] * 7, [0] * 6 + [1] * 5])
#: The first two keys are seen by nobody, the last three by nobody of the first sample.
HIDDEN = torch.tensor([[False] * 2 + [True] * 6 + [False] * 3, [False] * 2 + [True] * 9])


def functions() -> dict[str, Any]:
    """What each is, and how many keys it looks back on, if that is said."""
    library = transformers.masking_utils
    causal = library.causal_mask_function
    return {
        "causal": (causal, None),
        "both ways": (library.bidirectional_mask_function, None),
        "window": (library.sliding_window_causal_mask_function(4), 4),
        "window that is never left": (library.sliding_window_causal_mask_function(40), 40),
        "window both ways": (_as_near_as(3), 3),
        "window both ways, its size the first that is hidden": (_nearer_than(3), 3),
        "chunks": (library.chunked_causal_mask_function(4, torch.tensor([0, 3])), 4),
        "packed": (library.and_masks(causal, library.packed_sequence_mask_function(PACKED)), None),
        "a prefix both ways": (library.or_masks(causal, lambda batch, head, query, key: key < 3), None),
    }


def _as_near_as(size: int) -> Any:
    """transformers' own, which 5.0 does not have yet."""
    known = getattr(transformers.masking_utils, "sliding_window_bidirectional_mask_function", None)
    return known(size) if known else lambda batch, head, query, key: (query - key).abs() <= size


def _nearer_than(size: int) -> Any:
    return lambda batch, head, query, key: (query - key).abs() < size


#: How many keys a query sees before its own place and after it.
FEW_WORDS = {
    "causal": (None, 0),
    "both ways": (None, None),
    "window": (3, 0),
    "window that is never left": (None, 0),
    "window both ways": (3, 3),
    "window both ways, its size the first that is hidden": (2, 2),
}
#: Of `functions`.
NAMES = (*FEW_WORDS, "chunks", "packed", "a prefix both ways")


def asked(name: str, padded: bool) -> dict[str, Any]:
    function, size = functions()[name]
    by_position = "cache_position" in transformers.masking_utils.sdpa_mask.__code__.co_varnames  # transformers 5.0
    places = {"cache_position": torch.arange(LENGTH)} if by_position else {"q_length": LENGTH, "device": "cpu"}
    padding = PADDED if padded else None
    how = {"allow_is_causal_skip": False, "local_size": size, "attention_mask": padding}
    return {"batch_size": 2, "kv_length": LENGTH, "kv_offset": 0, "mask_function": function, **places, **how}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_tiles_are_the_mask(name: str, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy_mask, "MAX_MASK_ELEMENTS", 60)  # two queries at once
    expected = transformers.masking_utils.sdpa_mask(**asked(name, padded))
    found = lazy_mask.make_lazy_mask(**asked(name, padded))
    assert isinstance(found, LazyMask) and found.shape == expected.shape
    for start in range(0, LENGTH, 4):
        rows = slice(start, min(start + 4, LENGTH))
        seen = found.find_key_span(rows)
        assert torch.equal(found.compute_tile(rows, seen), expected[:, :, rows, seen])
        outside = expected[:, :, rows].clone()
        outside[..., seen] = False
        assert not outside.any()
    if name not in FEW_WORDS:
        assert found.band_mask is None
        return
    assert (
        found.band_mask is not None and (found.band_mask.window_before, found.band_mask.window_after) == FEW_WORDS[name]
    )
    assert (found.band_mask.padding is not None) == padded
    every = slice(0, LENGTH)
    assert torch.equal(found.band_mask.compute_tile(every, every, found.device).expand_as(expected), expected)


def test_whatever_else_is_done_is_done_with_the_mask_itself() -> None:
    expected = transformers.masking_utils.sdpa_mask(**asked("window", True))
    found = lazy_mask.make_lazy_mask(**asked("window", True))
    assert found is not None
    for one, other in (
        (found[:, :, :3], expected[:, :, :3]),
        (~found, ~expected),
        (torch.where(found, 0.0, -1.0), torch.where(expected, 0.0, -1.0)),
        (found.to(torch.float32), expected.float()),
        (torch.cat([expected, found]), torch.cat([expected, expected])),
    ):
        assert type(one) is torch.Tensor and torch.equal(one, other)


def test_one_cell_makes_the_difference() -> None:
    """A mask that is a window but for one cell is no window."""
    window = transformers.masking_utils.sliding_window_causal_mask_function(4)
    extra = transformers.masking_utils.or_masks(window, lambda batch, head, query, key: (query == 9) & (key == 1))
    found = lazy_mask.make_lazy_mask(**{**asked("window", False), "mask_function": extra})
    assert isinstance(found, LazyMask) and found.band_mask is None and bool(found[0, 0, 9, 1])


@pytest.mark.parametrize("cells", [60, lazy_mask.MAX_MASK_ELEMENTS])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_pieces_have_the_gradients_of_the_whole(
    name: str, padded: bool, cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keys that no query of a piece sees are left out of it, and have a gradient of zero."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    monkeypatch.setattr(lazy_mask, "MAX_MASK_ELEMENTS", cells)
    monkeypatch.setattr(chunked_sdpa, "MAX_MASK_ELEMENTS", cells)
    named = asked(name, padded) | {"attention_mask": HIDDEN if padded else None}
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(2, 3, LENGTH, 4, generator=generator, dtype=torch.float64) for _ in range(4)]
    *parts, gradient = parts
    module, outline = torch.nn.Identity(), torch.empty(2, 3, LENGTH, LENGTH, device="meta")
    call = TiledAttention(
        sdpa_attention_forward,
        sdpa_attention_forward,
        module,
        lazy_mask.make_lazy_mask(**named),
        False,
        {},
        TilingConfig(),
    )
    call.saved_tensors, call.meta_attention = tuple(parts), outline
    found = chunked_sdpa.chunked_sdpa_backward(call, gradient.transpose(1, 2))
    leaves = [part.clone().requires_grad_() for part in parts]
    output = sdpa_attention_forward(module, *leaves, transformers.masking_utils.sdpa_mask(**named))[0]
    expected = torch.autograd.grad(output, leaves, gradient.transpose(1, 2))
    torch.testing.assert_close(chunked_sdpa.chunked_sdpa_forward(call), output)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)  # pieces are added in float32


def test_a_mask_that_is_moved_is_still_nowhere() -> None:
    found = lazy_mask.make_lazy_mask(**asked("window", True))
    assert found.to("cpu") is found and found.to(device=torch.device("cpu"), non_blocking=True) is found
    there = found.to("meta")
    assert isinstance(there, LazyMask) and there.device.type == "meta" and found.to("meta") is there
    assert "full_mask" not in found.__dict__ and "full_mask" not in there.__dict__
    assert not isinstance(found.to(torch.float64), LazyMask)


class Largest(TorchDispatchMode):
    """How many numbers the largest tensor has that is made anew, and how many bytes."""

    numbers = memory = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for part in filter(_is_tensor, tree_leaves(made)):
            self.memory = max(self.memory, part.untyped_storage().nbytes())
            self.numbers = max(self.numbers, part.untyped_storage().nbytes() // part.itemsize)
        return made


def _is_tensor(part: Any) -> bool:
    return isinstance(part, torch.Tensor) and part.device.type != "meta"


def test_a_whole_mask_takes_no_more_than_its_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window both ways is made of distances, of eight bytes each: of few queries at a time."""
    monkeypatch.setattr(lazy_mask, "MAX_MASK_ELEMENTS", 2 * LENGTH * LENGTH)
    found = lazy_mask.make_lazy_mask(**asked("window both ways", True))
    assert isinstance(found, LazyMask)
    with Largest() as largest:
        made = found.compute_tile(slice(0, LENGTH), slice(0, LENGTH))
    assert torch.equal(made, transformers.masking_utils.sdpa_mask(**asked("window both ways", True)))
    assert largest.memory <= 2 * LENGTH * LENGTH


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("sliding window", "sdpa"),
        ("sliding window", "eager"),
        ("soft cap", "eager"),
        ("window both ways", "sdpa"),
        ("window both ways", "eager"),
    ],
)
def test_no_pass_makes_a_mask_of_all_cells(name: str, own: str, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    length = 240
    monkeypatch.setattr(lazy_mask, "MAX_MASK_ELEMENTS", 2000)
    monkeypatch.setattr(chunked_sdpa, "MAX_MASK_ELEMENTS", 2000)
    record = recorder(name, own, torch.float64)
    given = {"input_ids": torch.arange(length)[None] * 7 % 37 + 2, "attention_mask": torch.ones(1, length).long()}
    given["attention_mask"][:, length - (3 if padded else 0) :] = 0
    together = Together()
    with Largest() as largest:
        tape = record.record(
            given, value, ASKS, tiling=TilingConfig(together.fold, tile_rows=4, checkpoint_layers=True)
        )
    assert 0 < largest.numbers < length * length
    expected = record.record(given, value, ASKS)
    assert near(tape.input_gradient["input_ids"], expected.input_gradient["input_ids"], name, own, torch.float64)


#: Each query sees itself and the four words at the start.
OWN = (torch.eye(9).bool() | (torch.arange(9) < 4))[None, None]
GIVEN = {
    "packed": {"position_ids": torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]])},
    "a mask of truth": {"attention_mask": OWN},
    "a mask of numbers": {"attention_mask": torch.zeros(1, 1, 9, 9, dtype=torch.float64).masked_fill(~OWN, -1e30)},
}


@pytest.mark.parametrize("name", ["grouped heads", "sliding window"])
@pytest.mark.parametrize("kind", GIVEN)
def test_masks_that_users_give_are_heeded(kind: str, name: str) -> None:
    record = recorder(name, "sdpa", torch.float64)
    given = {"input_ids": torch.arange(9)[None] * 7 % 37 + 2, **GIVEN[kind]}
    together = Together()
    # recorded attention is eager, whose mask is a number to be added
    added = {
        key: part if part.dtype != torch.bool else torch.zeros(part.shape).double().masked_fill(~part, -1e30)
        for key, part in given.items()
    }
    record.record(given, value, ASKS, tiling=TilingConfig(together.fold, tile_rows=4, needs_masked_gradients=True))
    unlike = record.record({"input_ids": given["input_ids"]}, value, ASKS).calls[-1].attention
    for call in record.record(added, value, ASKS).calls:
        attention = together.whole(call, "attention")
        assert near(attention, call.attention, name, "sdpa", torch.float64)
    assert not near(attention, unlike, name, "sdpa", torch.float64)
