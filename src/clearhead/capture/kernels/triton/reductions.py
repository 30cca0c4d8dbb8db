"""Launches the kernels of `reduction_kernels.py`: which blocks, and what they are told about the masks."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Literal

import torch
import triton
from jaxtyping import Float
from torch import Tensor

from clearhead.capture.kernels.triton import reduction_kernels as kernels
from clearhead.capture.kernels.validation import by_formula, holds

Of = Literal["attention", "product", "positive"]

#: How wide heads may be: float32 goes to the tensor cores in three parts, which take more room.
WIDEST = {torch.bfloat16: 256, torch.float16: 256, torch.float32: 128}


@dataclass(frozen=True)
class Blocks:
    """How many places a program owns, how many it looks at together, and how a program is run."""

    own: int
    other: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Rebuilt:
    """What the maps of one attention call are rebuilt from, tile by tile.

    gradient: ∂y/∂output. lse: of the scores, mask included. mask: seen (bool) or added to the scores, cell by cell.
    Causal and window need no mask: a query at i sees keys from i + offset − window + 1 to i + offset, where offset is
    keys − queries, and so many more as a query sees ahead of its own place.
    """

    query: Float[Tensor, "batch head query width"]
    key: Float[Tensor, "batch kv_head key width"]
    value: Float[Tensor, "batch kv_head key value_width"] | None
    gradient: Float[Tensor, "batch head query value_width"] | None
    lse: Float[Tensor, "batch head query"] | None
    scale: float
    causal: bool = False
    window: int | None = None
    ahead: int = 0
    mask: Tensor | None = None
    blocks: Blocks | None = field(default=None, compare=False)

    def over_queries(self, weights: Float[Tensor, "batch query"], of: Of) -> Float[Tensor, "batch head key"]:
        """Σ_i w[i] f_h[i, j].

        w exp(x − lse) = exp(x − (lse − log w)) is a product less for each cell, but for what is not negative. Where
        there is nothing negative the second walk ends where it starts (to look for it would make the CPU wait).
        """
        found = self._apart(weights.clamp(min=0), of)
        below = (-weights).clamp(min=0)
        return found if not below.is_cuda and not below.any() else found - self._apart(below, of)

    def over_keys(self, of: Of, weights: Float[Tensor, "batch key"] | None = None) -> Float[Tensor, "batch head query"]:
        """Σ_j f_h[i, j] c[j]; without weights, Σ_j f_h[i, j]. Negative weights as in `over_queries`."""
        if weights is None:
            return self._apart(None, of)
        above, below = weights.clamp(min=0), (-weights).clamp(min=0)
        found = self._weighed(above)._apart(None, of, _span(above[:, None]))
        return found - self._weighed(below)._apart(None, of, _span(below[:, None]))

    def _weighed(self, weights: Float[Tensor, "batch key"]) -> "Rebuilt":
        """Cells times a weight of their key, as a number that is added to its scores after the lse was made."""
        level = weights.float().log()[:, None, None]
        if self.mask is None:
            return replace(self, mask=level)
        own = torch.where(self.mask, level, -torch.inf) if self.mask.dtype == torch.bool else self.mask + level
        return replace(self, mask=own)

    def joined(self, weights: Float[Tensor, "batch row query"], of: Of) -> Float[Tensor, "batch row key"]:
        """Σ_i w[r, i] E_h[f_h[i, j]]."""
        batch, _, _, keys = self.shape
        rows = weights.shape[1]
        out = torch.empty(batch, rows, keys, dtype=torch.float32, device=self.query.device)
        blocks = self.blocks or _joined_blocks(self._widest)
        wide = max(16, min(64, triton.next_power_of_2(rows)))
        grid = (triton.cdiv(keys, blocks.own), batch, triton.cdiv(rows, wide))
        value, gradient = self._differentiated(of)
        weights = weights.float().contiguous()
        kernels.sums_joined[grid](
            self.query, self.key, value, gradient, self._lse(), weights, _span(weights), self._mask(), out,
            *_strides(self.query, self.key, value, gradient), *self._mask_strides(), *self._numbers(), value.shape[3],
            rows, OWN=blocks.own, OTHER=blocks.other, **self._widths(value), ROWS=wide, OF=of,
            **self._flags(), EXACT="tf32x3" if self.query.is_cuda else "ieee",
            num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip
        return out

    def with_lse(self) -> "Rebuilt":
        """The same with the log-sum-exp of each row's scores, where the forward kernel did not say it."""
        batch, heads, queries, _ = self.shape
        out = torch.empty(batch, heads, queries, dtype=torch.float32, device=self.query.device)
        blocks = self.blocks or _apart_blocks(self._widest)
        widths = self._widths(self.query)
        whole = torch.empty(0, device=self.query.device)
        kernels.log_sums[(triton.cdiv(queries, blocks.own), batch * heads)](
            self.query, self.key, whole, self._mask(), out,
            *_strides(self.query, self.key), *self._mask_strides(), *self._numbers(),
            OWN=blocks.own, OTHER=blocks.other, WIDE=widths["WIDE"], WIDTH=widths["WIDTH"], **self._flags(),
            num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip
        return replace(self, lse=out)

    def of_heads(self, heads: Sequence[int]) -> "Rebuilt":
        """The same with only these heads; those that share keys get their own."""
        group = self.query.shape[1] // self.key.shape[1]
        own, shared = list(heads), [head // group for head in heads]
        per_head = self.mask is not None and self.mask.shape[1] > 1
        return replace(
            self,
            query=self.query[:, own],
            key=self.key[:, shared],
            value=None if self.value is None else self.value[:, shared],
            gradient=None if self.gradient is None else self.gradient[:, own],
            lse=None if self.lse is None else self.lse[:, own],
            mask=self.mask[:, own] if self.mask is not None and per_head else self.mask,
        )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of the maps that are nowhere."""
        batch, heads, queries, _ = self.query.shape
        return batch, heads, queries, self.key.shape[2]

    def _apart(self, weights: Float[Tensor, "batch query"] | None, of: Of, keys_in: Tensor | None = None) -> Tensor:
        """For each key with weights of queries, which must not be negative; without, for each query (of all keys, or
        of those in a span)."""
        batch, heads, queries, keys = self.shape
        own = queries if weights is None else keys
        out = torch.empty(batch, heads, own, dtype=torch.float32, device=self.query.device)
        blocks = self.blocks or _apart_blocks(self._widest)
        value, gradient = self._differentiated(of)
        lse = self._lse()
        if weights is None:
            every = torch.tensor([[0, keys]] * batch, dtype=torch.int32, device=out.device)
            span = every if keys_in is None else keys_in
        else:
            span = _span(weights.float()[:, None])
            lse = lse - weights.float().log()[:, None]
        kernels.sums_apart[(triton.cdiv(own, blocks.own), batch * heads)](
            self.query, self.key, value, gradient, lse, span, self._mask(), out,
            *_strides(self.query, self.key, value, gradient), *self._mask_strides(), *self._numbers(), value.shape[3],
            OWN=blocks.own, OTHER=blocks.other, **self._widths(value), KEYS_OWN=weights is not None, OF=of,
            **self._flags(), num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip
        return out

    @property
    def _widest(self) -> int:
        width = self.query.shape[3] if self.value is None else max(self.query.shape[3], self.value.shape[3])
        return int(triton.next_power_of_2(width)) * (self.query.element_size() // 2)

    def _lse(self) -> Tensor:
        assert self.lse is not None
        # a row that sees nothing has no attention, not NaN
        return torch.nan_to_num(self.lse.float(), nan=torch.inf, posinf=torch.inf, neginf=torch.inf).contiguous()

    def _differentiated(self, of: Of) -> tuple[Tensor, Tensor]:
        if of == "attention":
            return self.key, self.query  # pointers that are not read
        assert self.value is not None and self.gradient is not None
        return self.value, self.gradient.to(self.value.dtype)

    def _mask(self) -> Tensor:
        if self.mask is None:
            return self.query
        return self.mask.view(torch.uint8) if self.mask.dtype == torch.bool else self.mask

    def _mask_strides(self) -> tuple[int, ...]:
        return (0, 0, 0, 0) if self.mask is None else self.mask.expand(self.shape).stride()

    def _numbers(self) -> tuple[Any, ...]:
        _, heads, queries, keys = self.shape
        scale = self.scale * kernels.LOG2E.value
        group = heads // self.key.shape[1]
        return heads, group, queries, keys, keys - queries + self.ahead, self.window or 0, scale, self.query.shape[3]

    def _widths(self, value: Tensor) -> dict[str, int]:
        width, value_width = self.query.shape[3], value.shape[3]
        wide, value_wide = (max(16, triton.next_power_of_2(w)) for w in (width, value_width))
        return {"WIDE": wide, "VALUE_WIDE": value_wide, "WIDTH": width, "VALUE_WIDTH": value_width}

    def _flags(self) -> dict[str, Any]:
        mask = "none" if self.mask is None else "seen" if self.mask.dtype == torch.bool else "added"
        return {
            "CAUSAL": self.causal,
            "WINDOW": self.window is not None,
            "MASK": mask,
            "PRECISION": "tf32x3" if self.query.dtype == torch.float32 and self.query.is_cuda else "ieee",
        }


@cache
def proven(dtype: torch.dtype, width: int, value_width: int, device: torch.device) -> bool:
    """Whether the compiled kernels give, on this GPU, what the formula gives."""
    agree = partial(_agree, dtype, width, value_width, device)
    return holds(agree, "Triton kernels", "torch tiles take their place")


def _agree(dtype: torch.dtype, width: int, value_width: int, device: torch.device) -> bool:
    draw = torch.Generator(device).manual_seed(0)
    sizes = ((2, 300, width), (1, 300, width), (1, 300, value_width), (2, 300, value_width))
    query, key, value, gradient = (torch.randn(1, *size, generator=draw, device=device).to(dtype) for size in sizes)
    seen = torch.ones(300, 300, dtype=torch.bool, device=device).tril()
    exact = by_formula(query, key, value, gradient, seen)
    call = Rebuilt(query, key, value, gradient, exact.lse.float(), width**-0.5, causal=True)
    cells = exact.product.clamp(min=0)
    weights = torch.rand(1, 300, generator=draw, device=device)
    pushed, summed = call.over_queries(weights, "positive"), call.over_keys("positive")
    pulled = call.over_keys("positive", weights)
    gaps = (
        pushed - torch.einsum("bi,bhij->bhj", weights.double(), cells),
        pulled - torch.einsum("bj,bhij->bhi", weights.double(), cells),
        summed - cells.sum(-1),
    )
    return all(float(gap.norm() / cells.norm()) < 1e-3 for gap in gaps)


def _span(weights: Float[Tensor, "batch row other"]) -> Tensor:
    """From the first place of each sample that has a weight to behind the last (nothing is read of the GPU for it)."""
    some = (weights != 0).any(1).to(torch.int8)
    width = some.shape[1]
    first, last = some.argmax(1), width - some.flip(1).argmax(1)
    return torch.stack([first, torch.where(some.any(1), last, first)], 1).to(torch.int32)


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for tensor in tensors for stride in tensor.stride()[:3]]


def _apart_blocks(width: int) -> Blocks:
    """Measured on an H200 (docs/performance.md); `width` counts two bytes a number."""
    if width <= 64:
        return Blocks(128, 64, 4, 3)
    if width <= 128:
        return Blocks(128, 64, 8, 3)
    return Blocks(64, 32, 4, 2)


def _joined_blocks(width: int) -> Blocks:
    if width <= 128:
        return Blocks(64, 64, 4, 2)
    return Blocks(64, 32, 4, 2)
