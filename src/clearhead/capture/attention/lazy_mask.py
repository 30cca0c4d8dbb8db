"""Attention masks that are computed on demand, one tile at a time.

transformers defines visibility as a function of two positions, and builds a mask of queries × keys from it. In a tiled
pass models get a lazy mask instead. Attention that recognises it requests the tiles it needs, or a compact description
of the full mask (`BandMask`); every other operation on it builds the full mask.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.utils._pytree import tree_map_only

#: Largest number of mask elements computed at once (one byte each; torch's kernels need two or four).
MAX_MASK_ELEMENTS = 2**25
#: A GPU compares this many times more elements at once: there, kernel launches take longer than the comparison.
GPU_MASK_FACTOR = 8
#: Operations that need only the metadata of a mask, so that they do not build it.
_METADATA_OPS = (
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__),
)

#: Whether each query sees at least one key; None if all do.
HasVisibleKey = Bool[Tensor, "batch 1 query 1"] | None


@dataclass(frozen=True)
class BandMask:
    """A mask described by padding and a band around the diagonal.

    Attributes:
        padding: The keys that any query can see; None for all.
        window_before: How many keys a query sees before its own position; None for all.
        window_after: How many keys a query sees after its own position; None for all.
    """

    padding: Bool[Tensor, "batch 1 1 key"] | None
    window_before: int | None
    window_after: int | None

    @property
    def is_same_for_all_queries(self) -> bool:
        """Whether every query sees the same keys."""
        return self.window_before is None and self.window_after is None

    def compute_tile(self, query_slice: slice, key_slice: slice, device: torch.device) -> Bool[Tensor, "*leading key"]:
        """Compute the mask of some queries and keys; true where the query sees the key.

        It broadcasts to batch, head, query and key: leading dimensions that do not matter are left out.
        """
        query_positions = torch.arange(query_slice.start, query_slice.stop, device=device)[:, None]
        key_positions = torch.arange(key_slice.start, key_slice.stop, device=device)
        if self.padding is None:
            visible = torch.ones_like(key_positions, dtype=torch.bool)
        else:
            visible = self.padding[..., key_slice]
        if self.window_after is not None:
            visible = visible & (key_positions <= query_positions + self.window_after)
        if self.window_before is not None:
            visible = visible & (key_positions >= query_positions - self.window_before)
        return visible

    def find_key_span(self, query_slice: slice, num_keys: int) -> slice:
        """Return a span of keys outside of which none of these queries sees a key."""
        start = 0
        stop = num_keys
        if self.window_before is not None:
            start = max(0, query_slice.start - self.window_before)
        if self.window_after is not None:
            stop = min(num_keys, query_slice.stop + self.window_after)
        return slice(start, stop)


class LazyMask(Tensor):
    """A mask that holds the arguments of transformers' `sdpa_mask` in place of the elements.

    Args:
        mask_kwargs: Arguments of `sdpa_mask`.
        device: Device of the mask; by default that of the arguments.
    """

    mask_kwargs: Mapping[str, Any]
    #: Copies for other devices: models that are distributed over several move the mask to each of their layers.
    device_copies: dict[torch.device, "LazyMask"]

    @staticmethod
    def __new__(cls, mask_kwargs: Mapping[str, Any], device: Any = None) -> "LazyMask":
        num_queries, default_device = _get_query_length_and_device(mask_kwargs)
        if device is None:
            device = default_device
        element = torch.empty(1, dtype=torch.bool, device=device)
        mask = element.expand(mask_kwargs["batch_size"], 1, num_queries, mask_kwargs["kv_length"]).as_subclass(cls)
        skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        mask.mask_kwargs = {**mask_kwargs, **skips}
        mask.device_copies = {}
        return mask

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func in _METADATA_OPS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is Tensor.to and (device := _parse_device_only(args[1:], kwargs or {})) is not None:
            return args[0].to_device(device)
        args, kwargs = tree_map_only(LazyMask, lambda mask: mask.full_mask, (args, kwargs or {}))
        return func(*args, **kwargs)

    def to_device(self, device: torch.device) -> "LazyMask":
        """Return the mask for another device; copies are cached."""
        device = torch.empty(0, device=device).device  # adds the index that "cuda" leaves out
        if device == self.device:
            return self
        return self.device_copies.setdefault(device, LazyMask(self.mask_kwargs, device))

    @cached_property
    def full_mask(self) -> Bool[Tensor, "#batch 1 query key"]:
        """The elements of the mask, computed on first use."""
        all_keys = slice(0, self.shape[3])
        chunks = [self._build_tile(query_slice, all_keys) for query_slice in self._split_queries()]
        if len(chunks) == 1:
            return chunks[0]
        return torch.cat(chunks, 2)

    @property
    def fits_in_memory(self) -> bool:
        """Whether the full mask is small enough to be kept."""
        batch, _, queries, keys = self.shape
        return batch * queries * keys <= MAX_MASK_ELEMENTS

    def compute_tile(self, query_slice: slice, key_slice: slice) -> Bool[Tensor, "#batch 1 query key"]:
        """Compute the mask of some queries and keys; true where the query sees the key."""
        if self.fits_in_memory:
            return self.full_mask[:, :, query_slice, key_slice]
        if self.band_mask is not None:
            return self.band_mask.compute_tile(query_slice, key_slice, self.device).expand(
                self.shape[0], 1, query_slice.stop - query_slice.start, -1
            )
        return self._build_tile(query_slice, key_slice)

    def _build_tile(self, query_slice: slice, key_slice: slice) -> Bool[Tensor, "#batch 1 query key"]:
        """The mask of some queries and keys, computed by transformers."""
        from transformers.masking_utils import sdpa_mask

        tile_kwargs = {
            **self.mask_kwargs,
            **_build_query_kwargs(self.mask_kwargs, query_slice),
            "kv_length": key_slice.stop - key_slice.start,
            "kv_offset": self.mask_kwargs.get("kv_offset", 0) + key_slice.start,
        }
        tile = sdpa_mask(**tile_kwargs)
        assert tile is not None  # the skips are disabled
        return tile.to(self.device)

    @cached_property
    def band_mask(self) -> BandMask | None:
        """The mask as a band; None if it is not one. Every element is compared, once."""
        batch, _, queries, keys = self.shape
        padding = self.mask_kwargs.get("attention_mask")
        if padding is not None and padding.shape != (batch, keys):
            return None
        if padding is not None:
            padding = None if padding.all() else padding[:, None, None].bool().to(self.device)
        for window_before, window_after in self._list_candidate_bands(queries == keys):
            candidate = BandMask(padding, window_before, window_after)
            if self._matches(candidate):
                return candidate
        return None

    def _list_candidate_bands(self, is_square: bool) -> list[tuple[int | None, int | None]]:
        """Candidate widths of the band, before and after a query's own position."""
        unlimited = (None, None)
        if not is_square:
            return [unlimited]
        size = self.mask_kwargs.get("local_size")
        if size is None:
            return [unlimited, (None, 0)]
        # A causal window includes the query's own position; a bidirectional one does (Gemma) or does not (ModernBERT).
        return [unlimited, (None, 0), (size - 1, 0), (size, size), (size - 1, size - 1)]

    def _matches(self, candidate: BandMask) -> bool:
        """Whether a band equals the mask in every element, compared chunk by chunk."""
        _, _, queries, keys = self.shape
        all_keys = slice(0, keys)
        build_tile = self.compute_tile if self.fits_in_memory else self._build_tile
        # a wrong candidate differs for the middle query, which has keys before and after it
        middle_query = slice(queries // 2, queries // 2 + 1)
        size_factor = GPU_MASK_FACTOR if self.is_cuda else 1
        for query_slice in (middle_query, *self._split_queries(size_factor)):
            tile = candidate.compute_tile(query_slice, all_keys, self.device)
            if not bool((build_tile(query_slice, all_keys) == tile).all()):
                return False
        return True

    def _split_queries(self, size_factor: int = 1) -> list[slice]:
        """Chunks of queries that are compared at once: an element takes eight bytes while positions are compared."""
        batch, _, queries, keys = self.shape
        size = max(1, size_factor * MAX_MASK_ELEMENTS // (8 * batch * keys))
        return [slice(start, min(start + size, queries)) for start in range(0, queries, size)]

    def find_key_span(self, query_slice: slice) -> slice:
        """Return the span from the first key that one of these queries sees to the last; all keys if there is none."""
        keys = self.shape[3]
        if self.band_mask is not None:
            return self.band_mask.find_key_span(query_slice, keys)
        return find_key_span(self.compute_tile(query_slice, slice(0, keys)))


def make_lazy_mask(**mask_kwargs: Any) -> Tensor | None:
    """Return the lazy mask, or None where transformers skips the mask: it hides nothing, or is causal only.

    Args:
        mask_kwargs: Arguments of transformers' `sdpa_mask`.
    """
    from transformers.masking_utils import sdpa_mask

    # whether the mask is skipped does not depend on the mask function
    cheap_kwargs = {**mask_kwargs, "mask_function": _mask_everything, "use_vmap": False}
    if sdpa_mask(**cheap_kwargs) is None:
        return None
    return LazyMask(mask_kwargs)


def _parse_device_only(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device | None:
    """The device in the arguments of `Tensor.to`, if they change nothing else."""
    if any(isinstance(argument, torch.dtype | Tensor) for argument in (*args, *kwargs.values())):
        return None
    device = kwargs.get("device", next(iter(args), None))
    return None if device is None else torch.device(device)


def find_key_span(visible_mask: Bool[Tensor, "#batch #head query key"]) -> slice:
    """Return the span from the first visible key to the last; all keys if none is visible."""
    visible_keys = visible_mask.any((0, 1, 2)).nonzero().flatten().tolist()
    if not visible_keys:
        return slice(0, visible_mask.shape[3])
    return slice(visible_keys[0], visible_keys[-1] + 1)


def compute_has_visible_key(visible_mask: Bool[Tensor, "#batch #head query key"] | None) -> HasVisibleKey:
    """Return whether each query sees at least one key; None if all do.

    For a query that sees none, torch's kernel has no attention and no gradient, whereas a softmax is uniform.
    """
    if visible_mask is None:
        return None
    has_visible_key = visible_mask.any(-1, keepdim=True)
    if bool(has_visible_key.all()):
        return None
    return has_visible_key


def upcast_mask(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Convert an additive mask to a wider dtype, and the minimum of its dtype to the minimum of the wider one.

    The minimum of a narrow dtype is too close to zero in a wide one to hide every score.
    """
    if mask is None or not mask.is_floating_point() or mask.dtype.itemsize >= dtype.itemsize:
        return mask
    return mask.to(dtype).masked_fill(mask <= torch.finfo(mask.dtype).min, torch.finfo(dtype).min)


def _mask_everything(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Mask function that hides every key from every query: the cheapest one that transformers accepts."""
    return torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=key.device)


def _get_query_length_and_device(mask_kwargs: Mapping[str, Any]) -> tuple[int, Any]:
    """Number of queries, and the device. Early versions of transformers 5 pass the position of each query."""
    if "cache_position" in mask_kwargs:
        return len(mask_kwargs["cache_position"]), mask_kwargs["cache_position"].device
    return mask_kwargs["q_length"], mask_kwargs["device"]


def _build_query_kwargs(mask_kwargs: Mapping[str, Any], query_slice: slice) -> dict[str, Any]:
    """Return the arguments of `sdpa_mask` for some queries, under the names of this transformers version."""
    if "cache_position" in mask_kwargs:
        return {"cache_position": mask_kwargs["cache_position"][query_slice]}
    return {
        "q_length": query_slice.stop - query_slice.start,
        "q_offset": mask_kwargs.get("q_offset", 0) + query_slice.start,
    }
