"""Gradients of attention fused with the reduction of one row ("push"): launches the kernels of `backward_kernels.py`.

Torch's backward pass followed by a separate push rebuilds the same maps twice. Measurements are in docs/performance.md.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
import triton
from jaxtyping import Float
from torch import Tensor

from clearhead.capture.attention.tiling import QKVGradients
from clearhead.capture.kernels.fused_sdpa import HALF_DTYPES
from clearhead.capture.kernels.triton import backward_kernels as kernels
from clearhead.capture.kernels.triton.reductions import BlockConfig
from clearhead.capture.kernels.validation import compute_reference_attention, validate_kernel

if TYPE_CHECKING:
    from clearhead.capture.attention.tiled import TiledAttention

#: Shorter calls are bound by the launch time on the CPU with any kernel. Must not be less than the size of a block.
MIN_BACKWARD_TOKENS = 2048
#: From this length on there are enough programs even if each owns twice as many queries.
LONG_SEQUENCE_TOKENS = 65536


@dataclass(frozen=True)
class BackwardLaunchConfig:
    """Launch parameters of the backward kernels.

    Attributes:
        key_blocks: Blocks of the kernel whose programs own keys.
        query_blocks: Blocks of the kernel whose programs own queries.
        prefetches_row_values: Whether the scalars of each query (lse, δ, weight) are prefetched, as its vectors are.
    """

    key_blocks: BlockConfig
    query_blocks: BlockConfig
    prefetches_row_values: bool = False

    def has_partial_blocks(self, num_tokens: int) -> bool:
        """Whether the last block of some kernel is incomplete."""
        return any(
            num_tokens % size
            for blocks in (self.key_blocks, self.query_blocks)
            for size in (blocks.owned_block, blocks.loop_block)
        )


#: By the width of heads, measured on an H200 in bfloat16 with 8 heads of keys (docs/performance.md): the fastest of a
#: dozen for each kernel, at 8,192, 32,768 and 131,072 tokens.
LAUNCH_CONFIGS = {
    64: BackwardLaunchConfig(BlockConfig(64, 128, 4, 2), BlockConfig(64, 64, 4, 3)),
    128: BackwardLaunchConfig(BlockConfig(64, 64, 4, 2), BlockConfig(128, 64, 8, 3), prefetches_row_values=True),
}
LONG_LAUNCH_CONFIGS = {64: BackwardLaunchConfig(BlockConfig(64, 128, 4, 2), BlockConfig(128, 64, 4, 3))}


def get_launch_config(head_width: int, num_tokens: int) -> BackwardLaunchConfig:
    """Return the fastest measured launch parameters for a head width and a sequence length."""
    if num_tokens >= LONG_SEQUENCE_TOKENS and head_width in LONG_LAUNCH_CONFIGS:
        return LONG_LAUNCH_CONFIGS[head_width]
    return LAUNCH_CONFIGS[head_width]


@dataclass(frozen=True)
class TritonBackward:
    """The backward pass of one attention call without a mask, with as many queries as keys.

    Attributes:
        output: The output of the forward pass.
        gradient: ∂y/∂output.
        lse: The log-sum-exp of each query's scores.
        query: The queries.
        key: The keys; grouped-query heads share theirs.
        value: The values.
        scale: The factor of the scores.
        causal: Whether keys after the query are hidden.
        launch_config: Tile sizes and number of warps.
    """

    query: Float[Tensor, "batch head token width"]
    key: Float[Tensor, "batch kv_head token width"]
    value: Float[Tensor, "batch kv_head token width"]
    output: Float[Tensor, "batch head token width"]
    gradient: Float[Tensor, "batch head token width"]
    lse: Float[Tensor, "batch head token"]
    scale: float
    causal: bool
    launch_config: BackwardLaunchConfig

    def __call__(self, weights: Float[Tensor, "batch token"]) -> tuple[QKVGradients, Float[Tensor, "batch head token"]]:
        """Return ∂y/∂query, ∂y/∂key and ∂y/∂value; and the push Σ_i w[i] (A ⊙ ∂y/∂A)⁺[i, j] of each head."""
        row_statistics = self.compute_row_statistics()
        dk, dv, push = self.compute_key_gradients(row_statistics, weights)
        return (self.compute_query_gradients(row_statistics), dk, dv), push

    def compute_row_statistics(self) -> tuple[Float[Tensor, "batch head token"], Float[Tensor, "batch head token"]]:
        """Return, for each row, lse in units of log₂ e, and δ."""
        batch, heads, tokens, width = self.query.shape
        levels = _empty_row_values(self.query)
        delta = _empty_row_values(self.query)
        block = self.launch_config.query_blocks.owned_block
        kernels.row_statistics_kernel[(triton.cdiv(tokens, block), batch * heads)](
            self.output, self.gradient, self.lse.contiguous(), levels, delta,
            *_iter_strides(self.output, self.gradient), heads, tokens, OWN=block, WIDE=width,
        )  # fmt: skip
        return levels, delta

    def compute_key_gradients(
        self, row_statistics: tuple[Tensor, Tensor], weights: Float[Tensor, "batch token"]
    ) -> tuple[Tensor, ...]:
        """Return ∂y/∂key, ∂y/∂value and the push."""
        batch, _, tokens, _ = self.query.shape
        dk = _empty_bthd(self.key)
        dv = _empty_bthd(self.value)
        push = _empty_row_values(self.query)
        blocks = self.launch_config.key_blocks
        kernels.key_gradient_kernel[(triton.cdiv(tokens, blocks.owned_block), batch * self.key.shape[1])](
            make_tensor_descriptor(self.query, blocks.loop_block), self.key, self.value,
            make_tensor_descriptor(self.gradient, blocks.loop_block), *row_statistics,
            weights.float().contiguous(), dk, dv, push,
            *_get_descriptor_strides(self.query), *_iter_strides(self.key, self.value),
            *_get_descriptor_strides(self.gradient), *self._get_scalar_args(), **self._get_launch_options(blocks),
            AHEAD=blocks.num_stages if self.launch_config.prefetches_row_values else None,
        )  # fmt: skip
        return dk.transpose(1, 2), dv.transpose(1, 2), push

    def compute_query_gradients(self, row_statistics: tuple[Tensor, Tensor]) -> Float[Tensor, "batch head token width"]:
        """Return ∂y/∂query."""
        batch, heads, tokens, _ = self.query.shape
        dq = _empty_bthd(self.query)
        blocks = self.launch_config.query_blocks
        kernels.query_gradient_kernel[(triton.cdiv(tokens, blocks.owned_block), batch * heads)](
            self.query, make_tensor_descriptor(self.key, blocks.loop_block),
            make_tensor_descriptor(self.value, blocks.loop_block), self.gradient, *row_statistics, dq,
            *_iter_strides(self.query), *_get_descriptor_strides(self.key), *_get_descriptor_strides(self.value),
            *_iter_strides(self.gradient), *self._get_scalar_args(), **self._get_launch_options(blocks),
        )  # fmt: skip
        return dq.transpose(1, 2)

    def _get_scalar_args(self) -> tuple[Any, ...]:
        """Return the kernels' scalars: key heads, heads per key head, tokens, scale · log₂ e."""
        kv_heads, tokens = self.key.shape[1:3]
        return kv_heads, self.query.shape[1] // kv_heads, tokens, self.scale * kernels.LOG2E.value

    def _get_launch_options(self, blocks: BlockConfig) -> dict[str, Any]:
        """Return the compile-time constants, warps and stages of a kernel with these blocks."""
        tokens, width = self.query.shape[2:]
        return {
            "OWN": blocks.owned_block,
            "OTHER": blocks.loop_block,
            "WIDE": width,
            "CAUSAL": self.causal,
            "RAGGED": self.launch_config.has_partial_blocks(tokens),
            "num_warps": blocks.num_warps,
            "num_stages": blocks.num_stages,
        }


def build_backward(call: "TiledAttention", gradient: Float[Tensor, "batch head token width"]) -> TritonBackward:
    """Build the backward pass of a call that `supports_backward` accepts.

    Args:
        call: The attention call.
        gradient: ∂y/∂output.
    """
    batch, heads, tokens, width = call.query.shape
    output, lse = call.kernel_saved_tensors[:2]
    lse = lse.reshape(batch, heads, -1)[:, :, :tokens]  # a kernel may round the number of queries up
    return TritonBackward(
        to_descriptor_layout(call.query),
        to_descriptor_layout(call.key),
        to_descriptor_layout(call.value),
        to_descriptor_layout(output),
        to_descriptor_layout(gradient.to(call.query.dtype)),
        lse,
        call.scaling,
        call.causal,
        get_launch_config(width, tokens),
    )


def supports_backward(call: "TiledAttention") -> bool:
    """Whether these kernels can compute the gradients of a call, are fast for it, and were validated on its GPU."""
    query = call.query
    tokens, width = query.shape[2:]
    if call.mask is not None or not call.kernel_saved_tensors:
        return False
    if query.dtype not in HALF_DTYPES or not query.dtype == call.key.dtype == call.value.dtype:
        return False
    if not tokens == call.key.shape[2] >= MIN_BACKWARD_TOKENS:
        return False
    if width != call.value.shape[3] or width not in LAUNCH_CONFIGS:
        return False
    config = get_launch_config(width, tokens)
    return _supports_tensor_descriptors(query.device) and is_backward_validated(
        config, query.dtype, width, call.causal, config.has_partial_blocks(tokens), query.device
    )


def _supports_tensor_descriptors(device: torch.device) -> bool:
    """Whether a GPU has hardware for tensor descriptors: without it the kernels are slow."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def to_descriptor_layout(tensor: Float[Tensor, "batch head token width"]) -> Float[Tensor, "batch head token width"]:
    """Return a tensor in a memory layout that a descriptor can describe; copy it if necessary.

    Two layouts need no copy: the heads of a token interleaved, as a projection leaves them (alone, or with queries,
    keys and values together), and one head after another, as rotary position embeddings may leave them.
    """
    batch_stride, head_stride, row_stride, element_stride = tensor.stride()
    has_consecutive_heads = row_stride >= tensor.shape[3] and head_stride % row_stride == 0
    has_whole_samples = len(tensor) == 1 or (row_stride > 0 and batch_stride % row_stride == 0)
    is_aligned = tensor.data_ptr() % 16 == 0 and row_stride * tensor.element_size() % 16 == 0
    is_known_layout = _has_interleaved_heads(tensor) or has_consecutive_heads
    if element_stride == 1 and is_known_layout and has_whole_samples and is_aligned:
        return tensor
    return tensor.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


def make_tensor_descriptor(tensor: Float[Tensor, "batch head token width"], block_rows: int) -> Any:
    """Describe a tensor as one matrix, whose row stride is that of the vectors of a head.

    Args:
        tensor: A tensor in the layout of `to_descriptor_layout`.
        block_rows: The number of rows that a kernel loads at once.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor  # missing in older versions of Triton

    batch_size, heads, tokens, width = tensor.shape
    sample_rows, head_rows, head_columns = _get_descriptor_strides(tensor)
    num_rows = (batch_size - 1) * sample_rows + (heads - 1) * head_rows + tokens
    num_columns = (heads - 1) * head_columns + width
    return TensorDescriptor(tensor, [num_rows, num_columns], [tensor.stride(2), 1], [block_rows, width])


def _get_descriptor_strides(tensor: Float[Tensor, "batch head token width"]) -> tuple[int, int, int]:
    """The offsets in that matrix: rows to the next sample, rows to the next head, columns to the next head."""
    batch_stride, head_stride, row_stride, _ = tensor.stride()
    sample_rows = batch_stride // row_stride if len(tensor) > 1 else 0
    if _has_interleaved_heads(tensor):
        return sample_rows, 0, head_stride
    return sample_rows, head_stride // row_stride, 0


def _has_interleaved_heads(tensor: Float[Tensor, "batch head token width"]) -> bool:
    """Whether all heads of a token lie before the next token."""
    return (tensor.shape[1] - 1) * tensor.stride(1) + tensor.shape[3] <= tensor.stride(2)


def _empty_bthd(tensor: Float[Tensor, "batch head token width"]) -> Float[Tensor, "batch token head width"]:
    """Allocate a gradient as batch × token × head × width, which linear maps take without a copy."""
    batch, heads, tokens, width = tensor.shape
    return torch.empty(batch, tokens, heads, width, dtype=tensor.dtype, device=tensor.device)


def _empty_row_values(tensor: Float[Tensor, "batch head token width"]) -> Float[Tensor, "batch head token"]:
    """Allocate one float32 number for each query of each head."""
    return torch.empty(tensor.shape[:3], dtype=torch.float32, device=tensor.device)


def _iter_strides(*tensors: Tensor) -> Iterable[int]:
    """Iterate over batch, head and token strides of tensors; the stride of elements is one."""
    return (stride for tensor in tensors for stride in tensor.stride()[:3])


@cache
def is_backward_validated(
    launch_config: BackwardLaunchConfig,
    dtype: torch.dtype,
    width: int,
    causal: bool,
    has_partial_blocks: bool,
    device: torch.device,
) -> bool:
    """Whether the compiled kernels agree with the formulas on this GPU."""
    num_tokens = 300 if has_partial_blocks else 384
    matches_reference = partial(_matches_reference, launch_config, dtype, width, causal, num_tokens, device)
    kernel_name = "Triton kernels that fuse the push of a row with the gradients"
    return validate_kernel(matches_reference, kernel_name, "torch's backward and a separate push are used instead")


def _matches_reference(
    config: BackwardLaunchConfig, dtype: torch.dtype, width: int, causal: bool, tokens: int, device: torch.device
) -> bool:
    """Compare the kernels with the formulas, for two samples, heads that share keys, and both memory layouts."""
    generator = torch.Generator(device).manual_seed(0)

    def make_random(*sizes: int) -> Tensor:
        return torch.randn(2, *sizes, width, generator=generator, device=device).to(dtype)

    query = make_random(4, tokens)
    key = make_random(2, tokens)
    value = make_random(tokens, 2).transpose(1, 2)
    gradient = make_random(tokens, 4).transpose(1, 2)
    weights = torch.rand(2, tokens, generator=generator, device=device)
    visible = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril() if causal else None
    exact = compute_reference_attention(query, key, value, gradient, visible)
    expected_push = torch.einsum("bi,bhij->bhj", weights.double(), exact.product.clamp(min=0))
    run_backward = TritonBackward(
        query, key, value, exact.output.to(dtype), gradient, exact.lse.float(), width**-0.5, causal, config
    )
    gradients, push = run_backward(weights)
    tolerances = (2e-2, 2e-2, 2e-2, 1e-3)  # gradients are rounded to half precision, the push is not
    comparisons = zip((*gradients, push), (*exact.gradients, expected_push), tolerances, strict=True)
    return all(
        float((actual - expected).norm() / expected.norm()) < tolerance for actual, expected, tolerance in comparisons
    )
