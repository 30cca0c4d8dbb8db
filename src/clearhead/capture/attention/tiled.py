"""Attention without its maps: the fastest exact kernel forward, and backward one tile of rows after another.

    A[i] = softmax(q_i Kᵀ s + mask_i),     ∂y/∂A[i] = ∂y/∂o_i Vᵀ          i: the queries of one tile

A tile holds whole rows, so that its softmax needs nothing of other tiles, and is made by the model's own eager
attention, called with some of the queries: position biases, soft caps, sinks, windows and grouped heads stay exact.
What methods fold from A and ∂y/∂A is folded from each tile, in the loop that makes the usual gradients (but in half
precision, where these are rounded, in a loop of its own); no map of all queries is ever there. Memory is queries, keys
and values of each layer and one tile; with activation checkpointing (`activation_checkpointing.py`) of one layer and
one tile; and what is set aside for methods that ask later (`deferred.py`).

A `Kernel` that cuts the keys, too, takes the place of the loop for calls that it knows how to make, where all that
methods want are sums (`reductions.py`).
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import pad

from clearhead.capture.attention import chunked_sdpa
from clearhead.capture.attention.lazy_mask import Described, Seeing, widened
from clearhead.capture.attention.lazy_mask import seeing as seeing_of
from clearhead.capture.attention.lazy_mask import span as span_of
from clearhead.capture.attention.reductions import Reduce
from clearhead.capture.attention.tiling import TORCH, Tiles
from clearhead.capture.attention.tiling import Gradients as Gradients

#: How many numbers a map of one tile may hold (16 MiB in float32); but a tile has some rows at least.
CELLS = 2**22
LEAST_ROWS = 16

#: Up to so many keys, tiles that make outputs leave none out: to add up fewer products is to round otherwise, and where
#: attention is sharp the layers above make much of it.
KEYS = 4096

#: What is handed each tile: its queries, their attention, and the gradient of it (None: there is none).
FoldTile = Callable[[slice, Float[Tensor, "batch head query key"], Tensor | None], None]


@dataclass
class Streamed:
    """One attention call whose maps are made tile by tile, as often as they are asked for.

    forward: the kernel that makes the output at once; None where only the model's eager attention is exact
    mask: which keys each query sees (or what is added to the scores); causal: it sees none that comes after it
    """

    eager: Callable[..., tuple[Tensor, Tensor]]
    forward: Callable[..., tuple[Tensor, Any]] | None
    module: nn.Module
    mask: Tensor | None
    causal: bool
    more: Mapping[str, Any]
    tiles: Tiles
    #: Queries, keys, values, and what a kernel wants of its forward pass.
    held: tuple[Tensor, ...] | None = None
    #: What holds them until the backward pass comes here, weakly: it holds this call, in a circle nobody would see.
    holder: Callable[[], Any] | None = None
    #: Through which of autograd's edges a gradient passes that has passed the attention.
    edge: Any = None
    #: Called with ∂y/∂output when the backward pass comes here; returns what belongs to query, key and value.
    arrives: Callable[[Tensor], Gradients] | None = None
    #: Whether its parts are held for good: backward passes may come here several times.
    stays: bool = False

    def hold(self, query: Tensor, key: Tensor, value: Tensor) -> Float[Tensor, "batch query head width"] | None:
        """Be there for backward passes, however many come, to an output that is made elsewhere: unless a kernel wants
        to know on the way back what it found out when it made it."""
        self.stays = True
        self._begin(query, key, value)
        if self.kernel is None:
            return None
        output, saved = self.kernel.output(self)
        self.held = (*self._parts(), *saved)
        return output

    def _begin(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        self.held = (query.detach(), key.detach(), value.detach())
        self.outline = torch.empty((*query.shape[:3], key.shape[2]), dtype=query.dtype, device="meta")
        self.kernel = self.tiles.kernel if self.tiles.kernel and self.tiles.kernel.takes(self, ()) else None
        self.tiles.ran.outputs.add(self.kernel.name if self.kernel else TORCH)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Float[Tensor, "batch query head width"]:
        self._begin(query, key, value)
        if query.requires_grad:
            self.edge = torch.autograd.graph.get_gradient_edge(query)
        output: Tensor = _Attend.apply(query, key, value, self)
        if output.requires_grad:
            self.held = None  # autograd keeps them, or makes them again
        return output

    def release(self) -> None:
        """Let go of everything that this call holds."""
        self.held = self.holder = self.edge = self.arrives = None

    def aside(self) -> "Streamed":
        """The same call without the graph, which is let go of when the pass ends, and without those who fold tiles."""
        own = copy(self)
        own.held, own.holder, own.edge, own.arrives = self._parts(), None, None, None
        own.tiles = Tiles(rows=self.tiles.rows, kernel=self.tiles.kernel, ran=self.tiles.ran)
        return own

    def _parts(self) -> tuple[Tensor, ...]:
        if self.held is None:
            assert self.holder is not None
            self.held = tuple(part.detach() for part in self.holder().saved_tensors)
        return self.held

    @property
    def query(self) -> Float[Tensor, "batch head query width"]:
        return self._parts()[0]

    @property
    def key(self) -> Float[Tensor, "batch kv_head key width"]:
        return self._parts()[1]

    @property
    def value(self) -> Float[Tensor, "batch kv_head key width"]:
        return self._parts()[2]

    @property
    def saved(self) -> tuple[Tensor, ...]:
        """What the kernel wanted of its forward pass."""
        return self._parts()[3:]

    @property
    def scaling(self) -> float:
        given = self.more.get("scaling")
        return self.query.shape[3] ** -0.5 if given is None else float(given)

    def output(self) -> tuple[Float[Tensor, "batch query head width"], tuple[Tensor, ...]]:
        if self.kernel is not None:
            return self.kernel.output(self)
        if self.forward is not None:
            return chunked_sdpa.output(self), ()
        query, key, value = self._parts()
        parts = [
            self._tile(rows, keys, query[:, :, rows], key[:, :, keys], value[:, :, keys])[0]
            for rows, keys in self._spans(key.shape[2] <= KEYS, 1, self.tiles.rows)
        ]
        return torch.cat(parts, dim=1), ()

    def back(self, gradient: Float[Tensor, "*target batch query head width"]) -> Gradients:
        """The backward pass comes here: ∂y/∂query, ∂y/∂key and ∂y/∂value, and whatever else is made of it."""
        flat = gradient.reshape(-1, *gradient.shape[-3:])
        if self.arrives is not None:
            found = self.arrives(flat)
        else:
            found = self.gradients(flat)
            if not self.stays:
                self.release()
        dq, dk, dv = (part.reshape(*gradient.shape[:-3], *part.shape[1:]) for part in found)
        return dq, dk, dv

    def gradients(self, gradient: Float[Tensor, "row query head width"]) -> Gradients:
        """∂y/∂query, ∂y/∂key and ∂y/∂value, target × sample."""
        if self.kernel is not None:
            parts = [self.kernel.backward(self, one, ())[0] for one in gradient.split(len(self.query))]
            return _joined(parts)
        found = self.sweep(gradient, None, backward=True)
        assert found is not None
        return found

    def sums(
        self, gradient: Tensor | None, reductions: Sequence[Reduce] | None, targets: int, backward: bool
    ) -> tuple[Gradients | None, list[Tensor]] | None:
        """The sums, by the kernel, and `backward` the gradients, too; None where tiles are needed."""
        if self.kernel is None or reductions is None or not self.kernel.takes(self, reductions):
            return None
        size = len(self.query)
        gradients: list[Gradients] = []
        sums: list[list[Tensor]] = []
        for target in range(targets):
            own = slice(target * size, (target + 1) * size)
            wanted = [one.of_samples(own, self.query.device) for one in reductions]
            if backward and gradient is not None:
                found, parts = self.kernel.backward(self, gradient[own], wanted)
                gradients.append(found)
            else:
                parts = self.kernel.reduced(self, None if gradient is None else gradient[own], wanted)
            sums.append(parts)
        return _joined(gradients) if gradients else None, [torch.cat(parts) for parts in zip(*sums, strict=True)]

    def sweep(
        self,
        gradient: Float[Tensor, "row query head width"] | None,
        fold: FoldTile | None,
        backward: bool = False,
        targets: int = 1,
    ) -> Gradients | None:
        """Make each tile once, in the order of the queries, for `fold` and, `backward`, for the usual gradients.

        The gradient is that of one target, or of several (target × sample), for which the tile is made once. Without
        a gradient `targets` says for how many `fold` repeats it. Gradients that are made apart are made of tiles whose
        size nobody else has a say in.
        """
        whole, differentiates = self._parts()[:3], gradient is not None
        each = () if gradient is None else gradient.split(len(whole[0]))
        sums = [part.new_zeros((len(each), *part.shape), dtype=wide(part.dtype)) for part in whole if backward]
        hidden, count, size = self.tiles.hidden and fold is not None, max(targets, len(each)), self.tiles.rows
        if self.apart and fold is None:
            count, size = 1, None
        for rows, keys in self._spans(hidden, count, size):
            places = (rows, keys, keys)
            # a model in half precision has its relevance in float32 all the same
            parts = [part[:, :, at].to(wide(part.dtype)) for part, at in zip(whole, places, strict=True)]
            parts = [part.requires_grad_(differentiates) for part in parts]
            with torch.set_grad_enabled(differentiates):
                output, attention = self._tile(rows, keys, *parts)
            seeing = self.seeing(rows, keys)
            nodes = (attention, *parts) if backward else (attention,)
            slopes: list[Tensor] = []
            for i, one in enumerate(each):
                more = i + 1 < len(each)
                slope = one[:, rows] if seeing is None else one[:, rows] * seeing.transpose(1, 2)
                found = torch.autograd.grad(output, nodes, slope.to(output.dtype), retain_graph=more)
                slopes += found[:1] if fold is not None else ()
                for sum_, at, part in zip(sums, places, found[1:], strict=False):
                    sum_[i, :, :, at] += part
            if fold is not None:
                around = (keys.start, whole[1].shape[2] - keys.stop)
                shown = attention.detach() if seeing is None else attention.detach() * seeing
                fold(rows, pad(shown, around), pad(torch.cat(slopes), around) if slopes else None)
        if not backward:
            return None
        dq, dk, dv = (sum_.flatten(0, 1).to(part.dtype) for sum_, part in zip(sums, whole, strict=True))
        return dq, dk, dv

    def _tile(
        self, rows: slice, keys: slice, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Float[Tensor, "batch query head width"], Float[Tensor, "batch head query key"]]:
        """The model's own attention of some queries to some keys."""
        more = {name: self.cut(part, rows, keys) for name, part in self.more.items()}
        return self.eager(self.module, query, key, value, self.added(rows, keys, query.dtype), **more)

    @property
    def apart(self) -> bool:
        """Whether gradients are made apart from what methods fold. In half precision they are rounded, and tiles of
        another size would round some otherwise: what they are must not depend on who asks for what."""
        return wide(self.query.dtype) != self.query.dtype

    def seeing(self, rows: slice, keys: slice) -> Seeing:
        """Which of these queries see something, where torch's kernel runs."""
        return None if self.forward is None or self.causal else seeing_of(self.seen(rows, keys))

    def cut(self, part: Any, rows: slice, keys: slice) -> Any:
        """The tile's part of what lies along queries and keys, as position biases do."""
        _, _, queries, count = self.outline.shape
        if not isinstance(part, Tensor) or part.dim() != 4 or part.shape[3] != count:
            return part
        part = part[..., keys]
        return part[:, :, rows] if part.shape[2] == queries else part

    def added(self, rows: slice, keys: slice, dtype: torch.dtype) -> Float[Tensor, "batch 1 query key"] | None:
        """The mask as eager attention takes it: zero, or so little that nothing is left by a softmax."""
        seen = self.seen(rows, keys)
        if seen is None:
            return None if self.mask is None else widened(self.cut(self.mask, rows, keys), dtype)
        # Float64's least number is −∞ to a softmax in float32, which makes NaN of a padded row that sees nothing else.
        least = max(torch.finfo(dtype).min, torch.finfo(torch.float32).min)
        return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, least)

    def seen(self, rows: slice, keys: slice) -> Bool[Tensor, "batch 1 query key"] | None:
        """Which of these keys these queries see; None where that is not said in so many words."""
        if self.causal:
            at, there = (torch.arange(part.start, part.stop, device=self.query.device) for part in (rows, keys))
            return (there <= at[:, None])[None, None]
        if isinstance(self.mask, Described):
            return self.mask.cells(rows, keys).to(self.query.device)
        if self.mask is None or self.mask.dtype != torch.bool:
            return None
        return self.cut(self.mask, rows, keys)

    def _spans(self, hidden: bool, targets: int, size: int | None) -> Iterator[tuple[slice, slice]]:
        """The queries of each tile, and the keys from the first that they see to the last (all, if `hidden`)."""
        batch, heads, count, width = self.outline.shape
        size = size or max(LEAST_ROWS, CELLS // (targets * batch * heads * width))
        for start in range(0, count, size):
            rows = slice(start, min(start + size, count))
            yield rows, slice(0, width) if hidden or self._evenly(rows) else self.span(rows)

    def _evenly(self, rows: slice) -> bool:
        """Whether one of these queries sees nothing, so that eager attention looks at all keys alike."""
        if self.forward is not None:
            return False
        if isinstance(self.mask, Described) and self.mask.facts is not None and self.mask.facts.padding is None:
            return False  # every query sees its own place at least
        return seeing_of(self.seen(rows, slice(0, self.outline.shape[3]))) is not None

    def span(self, rows: slice) -> slice:
        every = slice(0, self.outline.shape[3])
        if self.causal:
            return slice(0, min(rows.stop, every.stop))
        if isinstance(self.mask, Described):
            return self.mask.span(rows)
        seen = self.seen(rows, every)
        return every if seen is None else span_of(seen)


class _Attend(torch.autograd.Function):
    """The output at once; its gradient through tiles."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: Streamed) -> Tensor:
        output, saved = call.output()
        ctx.save_for_backward(query, key, value, *saved)
        ctx.call, call.holder = call, weakref.ref(ctx)
        call.held = (*call.held, *saved) if call.held else None
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return *reached(ctx.call, gradients[0]), None


def reached(call: Streamed, gradient: Float[Tensor, "batch query head width"]) -> Gradients:
    """The backward pass comes to a call, of one target or, batched, of several."""
    if torch._C._are_functorch_transforms_active():
        found: Gradients = _Back.apply(gradient, call)
        return found
    return call.back(gradient)


class _Back(torch.autograd.Function):
    """What a call does when the backward pass of several targets comes to it: all of them at once."""

    @staticmethod
    def forward(gradient: Tensor, call: Streamed) -> Gradients:
        return call.back(gradient)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, dims: Any, gradient: Tensor, call: Streamed) -> tuple[Gradients, tuple[int, int, int]]:
        where = dims[0]
        every = gradient[None].expand(info.batch_size, *gradient.shape) if where is None else gradient.movedim(where, 0)
        return call.back(every), (0, 0, 0)


def repeated(tensor: Tensor, count: int) -> Tensor:
    """The same for each target: target × sample as one axis (without a copy where there is one sample)."""
    return tensor if count == 1 else tensor.expand(count, *tensor.shape).flatten(0, 1)


def _joined(parts: Sequence[Gradients]) -> Gradients:
    if len(parts) == 1:
        return parts[0]
    dq, dk, dv = (torch.cat(same) for same in zip(*parts, strict=True))
    return dq, dk, dv


def wide(dtype: torch.dtype) -> torch.dtype:
    """Wide enough to add up in."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
