"""Masks of attention that are nowhere until somebody looks, and then a tile at a time.

transformers says which keys a query sees as a function of two places, and makes of it a mask of queries × keys. In a
streaming pass models are handed a stand-in for it. Attention that knows the stand-in asks for the tiles it needs, or
for the whole of it in a few words (`Facts`); whatever else is done with it is done with the mask itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.utils._pytree import tree_map_only

#: How many cells of a mask are made at once (a byte each; torch's kernels make two or four of it).
CELLS = 2**25
#: A GPU looks at so many times as many: it is soon done with cells, and what it is told each time takes longer.
ON_GPU = 8
#: What may be asked about a mask that is nowhere.
_OUTLINE = (
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__),
)


#: The queries that see something; None where all do.
Seeing = Bool[Tensor, "batch 1 query 1"] | None


@dataclass(frozen=True)
class Facts:
    """A mask in a few words.

    padding: the keys that are seen at all (None: every one). before, after: how many a query sees before its own place
    and after it; None for all
    """

    padding: Bool[Tensor, "batch 1 1 key"] | None
    before: int | None
    after: int | None

    @property
    def alike(self) -> bool:
        """Whether every query sees the same keys."""
        return self.before is None and self.after is None

    def cells(self, rows: slice, keys: slice, device: torch.device) -> Bool[Tensor, "#batch 1 #query key"]:
        at, there = (torch.arange(part.start, part.stop, device=device) for part in (rows, keys))
        at = at[:, None]
        seen = torch.ones_like(there, dtype=torch.bool) if self.padding is None else self.padding[..., keys]
        if self.after is not None:
            seen = seen & (there <= at + self.after)
        if self.before is not None:
            seen = seen & (there >= at - self.before)
        return seen

    def span(self, rows: slice, count: int) -> slice:
        """No query of these sees a key outside."""
        first = 0 if self.before is None else max(0, rows.start - self.before)
        return slice(first, count if self.after is None else min(count, rows.stop + self.after))


class Described(Tensor):
    """A mask as transformers describes it: what `sdpa_mask` would be called with."""

    named: Mapping[str, Any]
    #: The same mask for other devices: models that are spread over several move it to each of their layers.
    elsewhere: dict[torch.device, "Described"]

    @staticmethod
    def __new__(cls, named: Mapping[str, Any], where: Any = None) -> "Described":
        queries, made_on = _queries(named)
        outline = torch.empty(1, dtype=torch.bool, device=made_on if where is None else where)
        found = outline.expand(named["batch_size"], 1, queries, named["kv_length"]).as_subclass(cls)
        skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        found.named, found.elsewhere = {**named, **skips}, {}
        return found

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func in _OUTLINE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is Tensor.to and (device := _device_alone(args[1:], kwargs or {})) is not None:
            return args[0].on(device)
        args, kwargs = tree_map_only(Described, lambda mask: mask.whole, (args, kwargs or {}))
        return func(*args, **kwargs)

    def on(self, device: torch.device) -> "Described":
        device = torch.empty(0, device=device).device  # which says its number, too
        if device == self.device:
            return self
        return self.elsewhere.setdefault(device, Described(self.named, device))

    @cached_property
    def whole(self) -> Bool[Tensor, "batch 1 query key"]:
        parts = [self._made(rows, slice(0, self.shape[3])) for rows in self._pieces()]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    @property
    def small(self) -> bool:
        """Whether all of it is made at once."""
        batch, _, queries, count = self.shape
        return batch * queries * count <= CELLS

    def cells(self, rows: slice, keys: slice) -> Bool[Tensor, "batch 1 query key"]:
        if self.small:
            return self.whole[:, :, rows, keys]
        if self.facts is not None:
            return self.facts.cells(rows, keys, self.device).expand(self.shape[0], 1, rows.stop - rows.start, -1)
        return self._made(rows, keys)

    def _made(self, rows: slice, keys: slice) -> Bool[Tensor, "batch 1 query key"]:
        from transformers.masking_utils import sdpa_mask

        count, offset = keys.stop - keys.start, self.named.get("kv_offset", 0) + keys.start
        made = sdpa_mask(**{**self.named, **_rows(self.named, rows), "kv_length": count, "kv_offset": offset})
        assert made is not None  # nothing may be skipped
        return made.to(self.device)

    @cached_property
    def facts(self) -> Facts | None:
        """The few words, if there are such; every cell was compared."""
        batch, _, queries, keys = self.shape
        padding = self.named.get("attention_mask")
        if padding is not None and padding.shape != (batch, keys):
            return None
        padding = None if padding is None or padding.all() else padding[:, None, None].bool().to(self.device)
        guesses = (Facts(padding, before, after) for before, after in self._guesses(queries == keys))
        return next((one for one in guesses if self._is(one)), None)

    def _guesses(self, square: bool) -> list[tuple[int | None, int | None]]:
        """How many keys each query may see before its own place and after it; a wrong guess is soon found out."""
        size, everything = self.named.get("local_size"), (None, None)
        if not square:
            return [everything]
        # a causal window counts the query's own place, one both ways does (Gemma's) or does not (ModernBERT's)
        windows = [] if size is None else [(size - 1, 0), (size, size), (size - 1, size - 1)]
        return [everything, (None, 0), *windows]

    def _is(self, facts: Facts) -> bool:
        _, _, queries, count = self.shape
        keys = slice(0, count)
        # a wrong guess differs in the middle, where there is something before a query and something after it
        tiles = (slice(queries // 2, queries // 2 + 1), *self._pieces(ON_GPU if self.is_cuda else 1))
        made = self.cells if self.small else self._made
        return all(bool((made(rows, keys) == facts.cells(rows, keys, self.device)).all()) for rows in tiles)

    def _pieces(self, larger: int = 1) -> list[slice]:
        """So many queries at a time as are looked at together: a distance, before it is a cell, takes eight bytes."""
        batch, _, queries, count = self.shape
        size = max(1, larger * CELLS // (8 * batch * count))
        return [slice(start, min(start + size, queries)) for start in range(0, queries, size)]

    def span(self, rows: slice) -> slice:
        """From the first key that one of these queries sees to the last; all, if there is none."""
        count = self.shape[3]
        if self.facts is not None:
            return self.facts.span(rows, count)
        return span(self.cells(rows, slice(0, count)))


def described(**named: Any) -> Tensor | None:
    """The mask, as far as it is needed: nothing where it hides nothing, or only what comes after each query."""
    from transformers.masking_utils import sdpa_mask

    blank = {**named, "mask_function": _none_seen, "use_vmap": False}  # whether it is needed depends on its outline
    return None if sdpa_mask(**blank) is None else Described(named)


def _device_alone(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device | None:
    """Where a tensor is moved to, if nothing else is asked of it."""
    said = kwargs.get("device", args[0] if args else None)
    aside = any(isinstance(part, torch.dtype | Tensor) for part in (*args, *kwargs.values()))
    return None if aside or said is None else torch.device(said)


def span(seen: Bool[Tensor, "batch 1 query key"]) -> slice:
    places = seen.any((0, 1, 2)).nonzero().flatten().tolist()
    return slice(places[0], places[-1] + 1) if places else slice(0, seen.shape[3])


def seeing(seen: Bool[Tensor, "batch 1 query key"] | None) -> Seeing:
    """Torch's kernel has no attention where a query sees nothing, and hands no gradient on; a softmax is uniform."""
    some = None if seen is None else seen.any(-1, keepdim=True)
    return None if some is None or bool(some.all()) else some


def widened(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The least number of a narrow format is not small enough in a wide one for scores to be lost in it."""
    if mask is None or not mask.is_floating_point() or mask.dtype.itemsize >= dtype.itemsize:
        return mask
    return mask.to(dtype).masked_fill(mask <= torch.finfo(mask.dtype).min, torch.finfo(dtype).min)


def _none_seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=key.device)


def _queries(named: Mapping[str, Any]) -> tuple[int, Any]:
    """How many queries there are, and on which device. Early versions of transformers 5 name the place of each."""
    if "cache_position" in named:
        return len(named["cache_position"]), named["cache_position"].device
    return named["q_length"], named["device"]


def _rows(named: Mapping[str, Any], rows: slice) -> dict[str, Any]:
    if "cache_position" in named:
        return {"cache_position": named["cache_position"][rows]}
    return {"q_length": rows.stop - rows.start, "q_offset": named.get("q_offset", 0) + rows.start}
