"""The gradients of attention with the row push made beside them: launches the kernels of `backward_kernels.py`.

Against torch's backward and the push after it, which rebuild the same maps twice: docs/performance.md.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
import triton
from jaxtyping import Float
from torch import Tensor

from clearhead.capture.attention.tiling import Gradients
from clearhead.capture.kernels.fused_sdpa import HALF
from clearhead.capture.kernels.triton import backward_kernels as kernels
from clearhead.capture.kernels.triton.reductions import Blocks
from clearhead.capture.kernels.validation import by_formula, holds

if TYPE_CHECKING:
    from clearhead.capture.attention.tiled import Streamed

#: Shorter calls take no longer than the CPU takes to launch them, one way or the other; never less than a block has.
LEAST_TOKENS = 2048
#: From so many tokens on there are enough programs where each owns twice as many queries.
MANY_TOKENS = 65536


@dataclass(frozen=True)
class Ways:
    """How the kernels are run: the one that owns keys, and the one that owns queries.

    ahead: whether the numbers of each query (lse, δ, weight) are fetched ahead, as its vectors are
    """

    keys: Blocks
    queries: Blocks
    ahead: bool = False

    def ragged(self, tokens: int) -> bool:
        """Whether some block of theirs is not whole."""
        return any(tokens % size for one in (self.keys, self.queries) for size in (one.own, one.other))


#: By the width of heads, measured on an H200 in bfloat16 with 8 heads of keys (docs/performance.md): the fastest of a
#: dozen for each kernel, at 8,192, 32,768 and 131,072 tokens.
WAYS = {
    64: Ways(Blocks(64, 128, 4, 2), Blocks(64, 64, 4, 3)),
    128: Ways(Blocks(64, 64, 4, 2), Blocks(128, 64, 8, 3), ahead=True),
}
LONG = {64: Ways(Blocks(64, 128, 4, 2), Blocks(128, 64, 4, 3))}


def ways_of(width: int, tokens: int) -> Ways:
    return LONG.get(width, WAYS[width]) if tokens >= MANY_TOKENS else WAYS[width]


@dataclass(frozen=True)
class Backward:
    """One attention call of as many queries as keys, without a mask, on its way back.

    output: of the forward pass. gradient: ∂y/∂output. lse: of the scores
    """

    query: Float[Tensor, "batch head token width"]
    key: Float[Tensor, "batch kv_head token width"]
    value: Float[Tensor, "batch kv_head token width"]
    output: Float[Tensor, "batch head token width"]
    gradient: Float[Tensor, "batch head token width"]
    lse: Float[Tensor, "batch head token"]
    scale: float
    causal: bool
    ways: Ways

    def __call__(self, weights: Float[Tensor, "batch token"]) -> tuple[Gradients, Float[Tensor, "batch head token"]]:
        """∂y/∂query, ∂y/∂key and ∂y/∂value; and Σ_i w[i] (A ⊙ ∂y/∂A)⁺[i, j], head by head."""
        numbers = self.numbers()
        dk, dv, push = self.of_keys(numbers, weights)
        return (self.of_queries(numbers), dk, dv), push

    def numbers(self) -> tuple[Float[Tensor, "batch head token"], Float[Tensor, "batch head token"]]:
        """Of each row: lse in units of log₂ e, and δ."""
        batch, heads, tokens, width = self.query.shape
        levels, delta = _one_each(self.query), _one_each(self.query)
        own = self.ways.queries.own
        kernels.row_numbers[(triton.cdiv(tokens, own), batch * heads)](
            self.output, self.gradient, self.lse.contiguous(), levels, delta, *_strides(self.output, self.gradient),
            heads, tokens, OWN=own, WIDE=width,
        )  # fmt: skip
        return levels, delta

    def of_keys(self, numbers: tuple[Tensor, Tensor], weights: Float[Tensor, "batch token"]) -> tuple[Tensor, ...]:
        """∂y/∂key, ∂y/∂value and the push."""
        batch, _, tokens, _ = self.query.shape
        dk, dv = _empty(self.key), _empty(self.value)
        push = _one_each(self.query)
        blocks = self.ways.keys
        kernels.keys_owned[(triton.cdiv(tokens, blocks.own), batch * self.key.shape[1])](
            described(self.query, blocks.other), self.key, self.value, described(self.gradient, blocks.other), *numbers,
            weights.float().contiguous(), dk, dv, push, *_corners(self.query), *_strides(self.key, self.value),
            *_corners(self.gradient), *self._told(), **self._how(blocks),
            AHEAD=blocks.stages if self.ways.ahead else None,
        )  # fmt: skip
        return dk.transpose(1, 2), dv.transpose(1, 2), push

    def of_queries(self, numbers: tuple[Tensor, Tensor]) -> Float[Tensor, "batch head token width"]:
        """∂y/∂query."""
        batch, heads, tokens, _ = self.query.shape
        dq = _empty(self.query)
        blocks = self.ways.queries
        kernels.queries_owned[(triton.cdiv(tokens, blocks.own), batch * heads)](
            self.query, described(self.key, blocks.other), described(self.value, blocks.other), self.gradient, *numbers,
            dq, *_strides(self.query), *_corners(self.key), *_corners(self.value), *_strides(self.gradient),
            *self._told(), **self._how(blocks),
        )  # fmt: skip
        return dq.transpose(1, 2)

    def _told(self) -> tuple[Any, ...]:
        shared, tokens = self.key.shape[1:3]
        return shared, self.query.shape[1] // shared, tokens, self.scale * kernels.LOG2E.value

    def _how(self, blocks: Blocks) -> dict[str, Any]:
        tokens, width = self.query.shape[2:]
        sizes = {"OWN": blocks.own, "OTHER": blocks.other, "WIDE": width}
        cut = {"CAUSAL": self.causal, "RAGGED": self.ways.ragged(tokens)}
        return sizes | cut | {"num_warps": blocks.warps, "num_stages": blocks.stages}


def of_call(call: "Streamed", gradient: Float[Tensor, "batch head token width"]) -> Backward:
    """What `takes` has been asked about."""
    batch, heads, tokens, width = call.query.shape
    made, said = call.saved[:2]
    query, key, value, output = (laid(part) for part in (call.query, call.key, call.value, made))
    slope = laid(gradient.to(query.dtype))
    lse = said.reshape(batch, heads, -1)[:, :, :tokens]  # a kernel may round the number of queries up
    return Backward(query, key, value, output, slope, lse, call.scaling, call.causal, ways_of(width, tokens))


def takes(call: "Streamed") -> bool:
    """Whether these kernels make the gradients of this call, and do it well."""
    query, key, value = call.query, call.key, call.value
    tokens, width = query.shape[2:]
    plain = call.mask is None and bool(call.saved) and query.dtype in HALF and query.dtype == key.dtype == value.dtype
    if not (plain and tokens == key.shape[2] >= LEAST_TOKENS and width == value.shape[3] and width in WAYS):
        return False
    ways = ways_of(width, tokens)
    return _describes(query.device) and proven(ways, query.dtype, width, call.causal, ways.ragged(tokens), query.device)


def _describes(device: torch.device) -> bool:
    """Whether a GPU copies what a tensor descriptor describes by itself: without it the kernels are slow."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def laid(part: Float[Tensor, "batch head token width"]) -> Float[Tensor, "batch head token width"]:
    """The same where a descriptor can have it: heads beside one another, as a projection leaves them (alone, or among
    others), or after one another, as rotary positions may; whatever lies otherwise is copied."""
    batch, head, row, one = part.stride()
    after = row >= part.shape[3] and head % row == 0
    whole = len(part) == 1 or (row > 0 and batch % row == 0)
    aligned = part.data_ptr() % 16 == 0 and row * part.element_size() % 16 == 0
    fits = one == 1 and (_beside(part) or after) and whole and aligned
    return part if fits else part.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


def described(part: Float[Tensor, "batch head token width"], rows: int) -> Any:
    """All of it as one matrix, whose rows are as far apart as the vectors of a head; a block is so many of these."""
    from triton.tools.tensor_descriptor import TensorDescriptor  # which older ones do not have

    size, heads, tokens, width = part.shape
    sample, down, across = _corners(part)
    shape = [(size - 1) * sample + (heads - 1) * down + tokens, (heads - 1) * across + width]
    return TensorDescriptor(part, shape, [part.stride(2), 1], [rows, width])


def _corners(part: Float[Tensor, "batch head token width"]) -> tuple[int, int, int]:
    """How many rows of that matrix the next sample is further down, and rows and columns the next head."""
    batch, head, row, _ = part.stride()
    sample = batch // row if len(part) > 1 else 0
    return (sample, 0, head) if _beside(part) else (sample, head // row, 0)


def _beside(part: Float[Tensor, "batch head token width"]) -> bool:
    """Whether a token's heads lie between it and the next token."""
    return (part.shape[1] - 1) * part.stride(1) + part.shape[3] <= part.stride(2)


def _empty(part: Float[Tensor, "batch head token width"]) -> Float[Tensor, "batch token head width"]:
    batch, heads, tokens, width = part.shape
    return torch.empty(batch, tokens, heads, width, dtype=part.dtype, device=part.device)


def _one_each(part: Float[Tensor, "batch head token width"]) -> Float[Tensor, "batch head token"]:
    return torch.empty(part.shape[:3], dtype=torch.float32, device=part.device)


def _strides(*parts: Tensor) -> Iterable[int]:
    return (stride for part in parts for stride in part.stride()[:3])


@cache
def proven(ways: Ways, dtype: torch.dtype, width: int, causal: bool, ragged: bool, device: torch.device) -> bool:
    """Whether the compiled kernels give, on this GPU, what the formulas give."""
    agree = partial(_agree, ways, dtype, width, causal, 300 if ragged else 384, device)
    what = "Triton kernels that push a row beside the gradients"
    return holds(agree, what, "torch's backward, and the push after it, take their place")


def _agree(ways: Ways, dtype: torch.dtype, width: int, causal: bool, tokens: int, device: torch.device) -> bool:
    """For two samples and heads that share keys, some as a projection leaves them and some as rotary positions do."""
    draw, scale = torch.Generator(device).manual_seed(0), width**-0.5

    def some(*sizes: int) -> Tensor:
        return torch.randn(2, *sizes, width, generator=draw, device=device).to(dtype)

    query, key = some(4, tokens), some(2, tokens)
    value, gradient = some(tokens, 2).transpose(1, 2), some(tokens, 4).transpose(1, 2)
    weights = torch.rand(2, tokens, generator=draw, device=device)
    seen = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril() if causal else None
    exact = by_formula(query, key, value, gradient, seen)
    push = torch.einsum("bi,bhij->bhj", weights.double(), exact.product.clamp(min=0))
    expected = (*exact.gradients, push)
    output, lse = exact.output.to(dtype), exact.lse.float()
    gradients, pushed = Backward(query, key, value, output, gradient, lse, scale, causal, ways)(weights)
    within = (2e-2, 2e-2, 2e-2, 1e-3)  # gradients are rounded to half precision, the push is not
    found = zip((*gradients, pushed), expected, within, strict=True)
    return all(float((one - other).norm() / other.norm()) < most for one, other, most in found)
