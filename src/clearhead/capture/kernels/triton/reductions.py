"""Weighted sums over the rows, columns or heads of attention maps, without the maps: launches the Triton kernels."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from typing import Any, Literal

import torch
import triton
from jaxtyping import Float
from torch import Tensor

from clearhead.capture.kernels.triton import reduction_kernels as kernels
from clearhead.capture.kernels.validation import compute_reference_attention, validate_kernel

MapQuantity = Literal["attention", "product", "positive"]

#: The widest heads: float32 goes to the tensor cores as three tf32 products, which need more registers.
MAX_HEAD_WIDTH = {torch.bfloat16: 256, torch.float16: 256, torch.float32: 128}
#: Up to this many positions, all are visited, whatever their weights.
MAX_UNSEARCHED_LENGTH = 2048


@dataclass(frozen=True)
class BlockConfig:
    """Launch parameters of a Triton kernel.

    Attributes:
        owned_block: The number of positions whose results a program computes.
        loop_block: The number of positions that it loads in each step of its loop.
        num_warps: Warps of a program.
        num_stages: Stages of the software pipeline.
    """

    owned_block: int
    loop_block: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class TritonReducer:
    """Computes sums over the attention maps of one call; the maps are rebuilt tile by tile.

    `causal` and `window` need no mask: a query at i sees keys from i + offset − window + 1 to i + offset, where offset
    is keys − queries + lookahead.

    Attributes:
        gradient: ∂y/∂output; None if only "attention" is reduced.
        lse: The log-sum-exp of the scores, mask included; see `with_computed_lse`.
        scale: The factor of the scores.
        causal: Whether keys after i + offset are hidden.
        window: The number of keys that a query sees; None for all.
        lookahead: The number of keys that a query sees after its own position.
        mask: Boolean (visible keys) or additive mask, element by element.
        blocks: Launch parameters; None for the measured ones.
        query: The queries.
        key: The keys; grouped-query heads share theirs.
        value: The values; None if no gradient is needed.
    """

    query: Float[Tensor, "batch head query width"]
    key: Float[Tensor, "batch kv_head key width"]
    value: Float[Tensor, "batch kv_head key value_width"] | None
    gradient: Float[Tensor, "batch head query value_width"] | None
    lse: Float[Tensor, "batch head query"] | None
    scale: float
    causal: bool = False
    window: int | None = None
    lookahead: int = 0
    mask: Tensor | None = None
    blocks: BlockConfig | None = field(default=None, compare=False)

    def sum_over_queries(
        self, weights: Float[Tensor, "batch query"], quantity: MapQuantity, has_negative_weights: bool = True
    ) -> Float[Tensor, "batch head key"]:
        """Return Σ_i w[i] f_h[i, j].

        Positive weights are moved into the exponent, w exp(x − lse) = exp(x − (lse − log w)), which saves a product for
        each cell. Negative weights need a second pass; without any, its loop is empty on the GPU (checking for them
        there would make the CPU wait).
        """
        if not has_negative_weights:
            return self._sum_per_head(weights, quantity)
        sums = self._sum_per_head(weights.clamp(min=0), quantity)
        negative_weights = (-weights).clamp(min=0)
        if not negative_weights.is_cuda and not negative_weights.any():
            return sums
        return sums - self._sum_per_head(negative_weights, quantity)

    def sum_over_keys(
        self, quantity: MapQuantity, weights: Float[Tensor, "batch key"] | None = None
    ) -> Float[Tensor, "batch head query"]:
        """Return Σ_j f_h[i, j] c[j]; without weights, Σ_j f_h[i, j]. Negative weights as in `sum_over_queries`."""
        if weights is None:
            return self._sum_per_head(None, quantity)
        positive_sums = self._sum_with_key_weights(weights.clamp(min=0), quantity)
        return positive_sums - self._sum_with_key_weights((-weights).clamp(min=0), quantity)

    def _sum_with_key_weights(self, weights: Float[Tensor, "batch key"], quantity: MapQuantity) -> Tensor:
        """The sum over keys with weights that are not negative, visiting only keys with a weight."""
        key_span = _find_weighted_span(weights[:, None])
        return self._with_key_weights(weights)._sum_per_head(None, quantity, key_span)

    def _with_key_weights(self, weights: Float[Tensor, "batch key"]) -> "TritonReducer":
        """Weigh the cells by key: the log of the weight is added to the scores, after the lse was computed."""
        log_weights = weights.float().log()[:, None, None]
        if self.mask is None:
            return replace(self, mask=log_weights)
        if self.mask.dtype == torch.bool:
            return replace(self, mask=torch.where(self.mask, log_weights, -torch.inf))
        return replace(self, mask=self.mask + log_weights)

    def sum_head_mean_over_queries(
        self, weights: Float[Tensor, "batch row query"], quantity: MapQuantity
    ) -> Float[Tensor, "batch row key"]:
        """Return Σ_i w[r, i] E_h[f_h[i, j]]."""
        batch, _, _, keys = self.map_shape
        rows = weights.shape[1]
        out = torch.empty(batch, rows, keys, dtype=torch.float32, device=self.query.device)
        blocks = self.blocks or _choose_head_mean_blocks(self._padded_width)
        row_block = max(16, min(64, triton.next_power_of_2(rows)))
        grid = (triton.cdiv(keys, blocks.owned_block), batch, triton.cdiv(rows, row_block))
        value, gradient = self._get_value_and_gradient(quantity)
        weights = weights.float().contiguous()
        kernels.head_mean_sums_kernel[grid](
            self.query, self.key, value, gradient, self._get_lse(), weights, _find_weighted_span(weights),
            self._get_mask(), out, *_get_strides(self.query, self.key, value, gradient), *self._get_mask_strides(),
            *self._get_scalar_args(), value.shape[3], rows,
            OWN=blocks.owned_block, OTHER=blocks.loop_block, **self._get_width_constexprs(value), ROWS=row_block,
            OF=quantity, **self._get_constexpr_flags(), EXACT="tf32x3" if self.query.is_cuda else "ieee",
            num_warps=blocks.num_warps, num_stages=blocks.num_stages,
        )  # fmt: skip
        return out

    def with_computed_lse(self) -> "TritonReducer":
        """Return the reducer with a computed log-sum-exp, for forward kernels that do not return it."""
        batch, heads, queries, _ = self.map_shape
        out = torch.empty(batch, heads, queries, dtype=torch.float32, device=self.query.device)
        blocks = self.blocks or _choose_per_head_blocks(self._padded_width)
        widths = self._get_width_constexprs(self.query)
        unused_span = torch.empty(0, device=self.query.device)
        kernels.logsumexp_kernel[(triton.cdiv(queries, blocks.owned_block), batch * heads)](
            self.query, self.key, unused_span, self._get_mask(), out,
            *_get_strides(self.query, self.key), *self._get_mask_strides(), *self._get_scalar_args(),
            OWN=blocks.owned_block, OTHER=blocks.loop_block, WIDE=widths["WIDE"], WIDTH=widths["WIDTH"],
            **self._get_constexpr_flags(), num_warps=blocks.num_warps, num_stages=blocks.num_stages,
        )  # fmt: skip
        return replace(self, lse=out)

    def select_heads(self, heads: Sequence[int]) -> "TritonReducer":
        """Return the reducer with only these heads, each with its own keys and values."""
        group_size = self.query.shape[1] // self.key.shape[1]
        query_heads = list(heads)
        kv_heads = [head // group_size for head in heads]
        mask = self.mask
        if mask is not None and mask.shape[1] > 1:
            mask = mask[:, query_heads]
        return replace(
            self,
            query=self.query[:, query_heads],
            key=self.key[:, kv_heads],
            value=None if self.value is None else self.value[:, kv_heads],
            gradient=None if self.gradient is None else self.gradient[:, query_heads],
            lse=None if self.lse is None else self.lse[:, query_heads],
            mask=mask,
        )

    @property
    def map_shape(self) -> tuple[int, int, int, int]:
        """The shape of the maps (batch, heads, queries, keys), which are never materialised."""
        batch, heads, queries, _ = self.query.shape
        return batch, heads, queries, self.key.shape[2]

    def _sum_per_head(
        self, weights: Float[Tensor, "batch query"] | None, quantity: MapQuantity, key_span: Tensor | None = None
    ) -> Tensor:
        """Sum over queries with weights (not negative), or without weights over keys.

        `key_span` holds the first and the last key of each sample to sum over; None for all.
        """
        batch, heads, queries, keys = self.map_shape
        num_owned = queries if weights is None else keys
        out = torch.empty(batch, heads, num_owned, dtype=torch.float32, device=self.query.device)
        blocks = self.blocks or _choose_per_head_blocks(self._padded_width)
        value, gradient = self._get_value_and_gradient(quantity)
        lse = self._get_lse()
        if weights is not None:
            span = _find_weighted_span(weights.float()[:, None])
            lse = lse - weights.float().log()[:, None]
        elif key_span is not None:
            span = key_span
        else:
            span = _make_full_span(batch, keys, out.device)
        kernels.per_head_sums_kernel[(triton.cdiv(num_owned, blocks.owned_block), batch * heads)](
            self.query, self.key, value, gradient, lse, span, self._get_mask(), out,
            *_get_strides(self.query, self.key, value, gradient), *self._get_mask_strides(),
            *self._get_scalar_args(), value.shape[3],
            OWN=blocks.owned_block, OTHER=blocks.loop_block, **self._get_width_constexprs(value),
            KEYS_OWN=weights is not None, OF=quantity, **self._get_constexpr_flags(),
            num_warps=blocks.num_warps, num_stages=blocks.num_stages,
        )  # fmt: skip
        return out

    @property
    def _padded_width(self) -> int:
        """The width of a head as a power of two, counted in elements of two bytes."""
        width = self.query.shape[3]
        if self.value is not None:
            width = max(width, self.value.shape[3])
        return int(triton.next_power_of_2(width)) * (self.query.element_size() // 2)

    def _get_lse(self) -> Tensor:
        """The log-sum-exp, infinite for a row without visible keys: its attention is zero, not NaN."""
        assert self.lse is not None
        return torch.nan_to_num(self.lse.float(), nan=torch.inf, posinf=torch.inf, neginf=torch.inf).contiguous()

    def _get_value_and_gradient(self, quantity: MapQuantity) -> tuple[Tensor, Tensor]:
        """Return V and ∂y/∂output; other tensors, which are not read, if only A is reduced."""
        if quantity == "attention":
            return self.key, self.query  # pointers that are not read
        assert self.value is not None and self.gradient is not None
        return self.value, self.gradient.to(self.value.dtype)

    def _get_mask(self) -> Tensor:
        """The mask as a kernel takes it; any tensor if there is none."""
        if self.mask is None:
            return self.query
        if self.mask.dtype == torch.bool:
            return self.mask.view(torch.uint8)
        return self.mask

    def _get_mask_strides(self) -> tuple[int, ...]:
        """Return the strides of the mask over batch, head, query and key; 0 on broadcast axes."""
        if self.mask is None:
            return (0, 0, 0, 0)
        return self.mask.expand(self.map_shape).stride()

    def _get_scalar_args(self) -> tuple[Any, ...]:
        """Return the scalars that every kernel takes; scores are scaled by log₂ e for exp2."""
        _, heads, queries, keys = self.map_shape
        return (
            heads,
            heads // self.key.shape[1],
            queries,
            keys,
            keys - queries + self.lookahead,
            self.window or 0,
            self.scale * kernels.LOG2E.value,
            self.query.shape[3],
        )

    def _get_width_constexprs(self, value: Tensor) -> dict[str, int]:
        """Return the widths of queries and values, and each rounded up to a power of two, at least 16."""
        width = self.query.shape[3]
        value_width = value.shape[3]
        return {
            "WIDE": max(16, triton.next_power_of_2(width)),
            "VALUE_WIDE": max(16, triton.next_power_of_2(value_width)),
            "WIDTH": width,
            "VALUE_WIDTH": value_width,
        }

    def _get_constexpr_flags(self) -> dict[str, Any]:
        """Return the kernels' compile-time switches: causal, window, type of mask, precision."""
        mask_type = "none"
        if self.mask is not None:
            mask_type = "seen" if self.mask.dtype == torch.bool else "added"
        return {
            "CAUSAL": self.causal,
            "WINDOW": self.window is not None,
            "MASK": mask_type,
            "PRECISION": "tf32x3" if self.query.dtype == torch.float32 and self.query.is_cuda else "ieee",
        }


@cache
def is_reduction_validated(dtype: torch.dtype, width: int, value_width: int, device: torch.device) -> bool:
    """Whether the compiled kernels agree with the formula on this GPU."""
    matches_reference = partial(_matches_reference, dtype, width, value_width, device)
    return validate_kernel(matches_reference, "Triton kernels", "torch tiles are used instead")


def _matches_reference(dtype: torch.dtype, width: int, value_width: int, device: torch.device) -> bool:
    """Compare the sums of a causal call with the formula."""
    generator = torch.Generator(device).manual_seed(0)
    sizes = ((2, 300, width), (1, 300, width), (1, 300, value_width), (2, 300, value_width))
    query, key, value, gradient = (
        torch.randn(1, *size, generator=generator, device=device).to(dtype) for size in sizes
    )
    visible = torch.ones(300, 300, dtype=torch.bool, device=device).tril()
    exact = compute_reference_attention(query, key, value, gradient, visible)
    reducer = TritonReducer(query, key, value, gradient, exact.lse.float(), width**-0.5, causal=True)
    cells = exact.product.clamp(min=0)
    weights = torch.rand(1, 300, generator=generator, device=device)
    errors = (
        reducer.sum_over_queries(weights, "positive") - torch.einsum("bi,bhij->bhj", weights.double(), cells),
        reducer.sum_over_keys("positive", weights) - torch.einsum("bj,bhij->bhi", weights.double(), cells),
        reducer.sum_over_keys("positive") - cells.sum(-1),
    )
    return all(float(error.norm() / cells.norm()) < 1e-3 for error in errors)


def _find_weighted_span(weights: Float[Tensor, "batch row position"]) -> Tensor:
    """The first position of each sample with a weight, and the end after the last, without a GPU synchronisation.

    Short maps are visited altogether: to find the span would take longer.
    """
    batch, _, length = weights.shape
    if length <= MAX_UNSEARCHED_LENGTH:
        return _make_full_span(batch, length, weights.device)
    has_weight = (weights != 0).any(1).to(torch.int8)
    first = has_weight.argmax(1)
    end = has_weight.shape[1] - has_weight.flip(1).argmax(1)
    return torch.stack([first, torch.where(has_weight.any(1), end, first)], 1).to(torch.int32)


@lru_cache(maxsize=64)
def _make_full_span(batch: int, length: int, device: torch.device) -> Tensor:
    """The span of all positions of each sample; kept, because a copy to a GPU makes the CPU wait."""
    return torch.tensor([[0, length]] * batch, dtype=torch.int32, device=device)


def _get_strides(*tensors: Tensor) -> list[int]:
    """Return batch, head and token strides of tensors; the stride of elements is one."""
    return [stride for tensor in tensors for stride in tensor.stride()[:3]]


def _choose_per_head_blocks(width: int) -> BlockConfig:
    """The fastest blocks on an H200 (docs/performance.md); `width` counts elements of two bytes."""
    if width <= 64:
        return BlockConfig(128, 64, 4, 3)
    if width <= 128:
        return BlockConfig(128, 64, 8, 3)
    return BlockConfig(64, 32, 4, 2)


def _choose_head_mean_blocks(width: int) -> BlockConfig:
    """The fastest blocks on an H200 for head means; `width` counts elements of two bytes."""
    if width <= 128:
        return BlockConfig(64, 64, 4, 2)
    return BlockConfig(64, 32, 4, 2)
