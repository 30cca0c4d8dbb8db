"""Torch's fused attention kernels that return the log-sum-exp of each row's scores, from which maps can be rebuilt.

Flash attention and cuDNN return it, and in float32 the memory-efficient kernel does; the kernel that torch would choose
runs. For a sliding window, flash attention's own window argument is used, with which it visits no other keys. Torch's
public interface does not offer this argument, so it is validated before use.
"""

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention import SDPBackend

from clearhead.capture.attention.lazy_mask import BandMask, LazyMask
from clearhead.capture.attention.tiling import QKVGradients
from clearhead.capture.kernels.validation import compute_reference_attention, validate_kernel

if TYPE_CHECKING:
    from clearhead.capture.attention.tiled import TiledAttention

FLASH = SDPBackend.FLASH_ATTENTION
CUDNN = SDPBackend.CUDNN_ATTENTION
EFFICIENT = SDPBackend.EFFICIENT_ATTENTION
HALF_DTYPES = (torch.bfloat16, torch.float16)
aten = torch.ops.aten


@dataclass(frozen=True)
class FusedSDPA:
    """One of torch's kernels with its settings.

    Attributes:
        backend: Which kernel.
        scale: The factor of the scores.
        causal: Whether a query sees only keys up to its own position.
        window: The sliding window of flash attention; it replaces `causal`.
    """

    backend: SDPBackend
    scale: float
    causal: bool = False
    window: BandMask | None = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Run the forward kernel.

        Returns:
            The output, the log-sum-exp, and the seed and offset of dropout, which the backward kernel takes.
        """
        if self.window is not None:
            inputs = (tensor.transpose(1, 2) for tensor in (query, key, value))
            sizes = (None, None, query.shape[2], key.shape[2])
            results = aten._flash_attention_forward(*inputs, *sizes, 0.0, False, False, **self._get_window_kwargs())
            return results[0].transpose(1, 2), *results[1:4]
        settings = {"is_causal": self.causal, "scale": self.scale}
        if self.backend == EFFICIENT:
            return tuple(aten._scaled_dot_product_efficient_attention(query, key, value, None, True, **settings))
        if self.backend == CUDNN:
            results = aten._scaled_dot_product_cudnn_attention(query, key, value, None, True, **settings)
        else:
            results = aten._scaled_dot_product_flash_attention(query, key, value, **settings)
        output, lse, _, _, _, _, seed, offset, _ = results
        return output, lse, seed, offset

    def backward(
        self,
        grad_output: Float[Tensor, "batch head query width"],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        saved: tuple[Tensor, ...],
    ) -> QKVGradients:
        """Run the backward kernel.

        Returns:
            ∂y/∂query, ∂y/∂key and ∂y/∂value; the gradients of heads that share keys are summed.
        """
        output, lse, seed, offset = saved
        sizes = {"cum_seq_q": None, "cum_seq_k": None, "max_q": query.shape[2], "max_k": key.shape[2]}
        settings = {"dropout_p": 0.0, "is_causal": self.causal, "scale": self.scale}
        dropout_state = {"philox_seed": seed, "philox_offset": offset}
        if self.window is not None:
            inputs = (tensor.transpose(1, 2) for tensor in (grad_output, query, key, value, output))
            gradients = aten._flash_attention_backward(
                *inputs, lse, *sizes.values(), 0.0, False, seed, offset, **self._get_window_kwargs()
            )
            dq, dk, dv = (gradient.transpose(1, 2) for gradient in gradients)
        elif self.backend == EFFICIENT:
            backward = aten._scaled_dot_product_efficient_attention_backward
            computed_gradients = [True, True, True, False]
            dq, dk, dv, _ = backward(
                grad_output,
                query,
                key,
                value,
                None,
                output,
                lse,
                **dropout_state,
                grad_input_mask=computed_gradients,
                **settings,
            )
        elif self.backend == CUDNN:
            backward = aten._scaled_dot_product_cudnn_attention_backward
            dq, dk, dv = backward(
                grad_output, query, key, value, output, lse, attn_bias=None, **dropout_state, **sizes, **settings
            )
        else:
            backward = aten._scaled_dot_product_flash_attention_backward
            dq, dk, dv = backward(grad_output, query, key, value, output, lse, **dropout_state, **sizes, **settings)
        return dq, dk, dv

    def _get_window_kwargs(self) -> dict[str, Any]:
        """Return scale and window as flash attention's arguments; a size of −1 is unlimited."""
        assert self.window is not None
        left_size = -1 if self.window.window_before is None else self.window.window_before
        right_size = -1 if self.window.window_after is None else self.window.window_after
        return {"scale": self.scale, "window_size_left": left_size, "window_size_right": right_size}


def select_fused_kernel(call: "TiledAttention") -> FusedSDPA | None:
    """Select the kernel for a call's output and gradients; None if no kernel that returns the log-sum-exp fits."""
    query = call.query
    value = call.value
    if query.shape[3] != value.shape[3] or query.shape[3] % 8:
        return None
    if call.mask is None:
        return _select_unmasked_kernel(call)
    return _select_windowed_kernel(call)


def _select_unmasked_kernel(call: "TiledAttention") -> FusedSDPA | None:
    """The kernel that torch would choose, if it returns a valid log-sum-exp."""
    query = call.query
    is_grouped = query.shape[1] != call.key.shape[1]
    candidates = _list_backends_with_lse(query.dtype, is_grouped)
    if not (query.is_cuda and candidates):
        return None
    with torch.enable_grad():  # some kernels have no backward pass for some shapes
        chosen_value = torch._fused_sdp_choice(
            query.detach().requires_grad_(),
            call.key,
            call.value,
            None,
            0.0,
            call.causal,
            scale=call.scaling,
            enable_gqa=is_grouped,
        )
    backend = next((candidate for candidate in candidates if candidate.value == chosen_value), None)
    if backend is None or not _is_lse_valid(backend, query.dtype, query.shape[3], query.device):
        return None
    return FusedSDPA(backend, call.scaling, call.causal)


def _select_windowed_kernel(call: "TiledAttention") -> FusedSDPA | None:
    """Flash attention with its own window.

    Used if torch allows it, the mask is nothing but a window, and the mask is too large to be materialised for the
    kernel that the model runs with.
    """
    query = call.query
    if not isinstance(call.mask, LazyMask) or query.dtype not in HALF_DTYPES or query.shape[2] != call.key.shape[2]:
        return None
    if call.mask.fits_in_memory:
        return None
    is_grouped = query.shape[1] != call.key.shape[1]
    with torch.enable_grad():
        params = SDPAParams(query.detach().requires_grad_(), call.key, call.value, None, 0.0, False, is_grouped)
        if not can_use_flash_attention(params):
            return None
    band = call.mask.band_mask
    if band is None or band.padding is not None or band.is_same_for_all_queries:
        return None
    if not _is_window_valid(query.dtype, query.shape[3], query.device):
        return None
    return FusedSDPA(FLASH, call.scaling, window=band)


def get_fused_kernel_used(call: "TiledAttention") -> FusedSDPA:
    """Return the kernel that computed the output of a call, judged by the tensors saved for the backward pass."""
    if isinstance(call.mask, LazyMask):
        return FusedSDPA(FLASH, call.scaling, window=call.mask.band_mask)
    if call.query.dtype not in HALF_DTYPES:
        return FusedSDPA(EFFICIENT, call.scaling, call.causal)
    backend = CUDNN if call.kernel_saved_tensors[1].dim() == 4 else FLASH
    return FusedSDPA(backend, call.scaling, call.causal)


def _list_backends_with_lse(dtype: torch.dtype, is_grouped: bool) -> tuple[SDPBackend, ...]:
    """The kernels that return the log-sum-exp for a dtype, and for heads that share keys."""
    if dtype in HALF_DTYPES:
        return FLASH, CUDNN
    if dtype == torch.float32 and not is_grouped:
        return (EFFICIENT,)
    return ()


@cache
def _is_lse_valid(backend: SDPBackend, dtype: torch.dtype, width: int, device: torch.device) -> bool:
    """Whether a kernel's log-sum-exp is that of scaled scores, to the base e, row by row."""

    def matches_reference() -> bool:
        generator = torch.Generator(device).manual_seed(0)
        query, key = (torch.randn(1, 2, 128, width, generator=generator, device=device).to(dtype) for _ in range(2))
        visible = torch.ones(128, 128, dtype=torch.bool, device=device).tril()
        results = FusedSDPA(backend, width**-0.5, causal=True).forward(query, key, key)
        lse = results[1].reshape(1, 2, -1)[:, :, :128]
        return bool((lse - compute_reference_attention(query, key, key, key, visible).lse).abs().max() < 1e-2)

    kernel_name = f"the log-sum-exp of {backend.name.lower().replace('_', ' ')}"
    return validate_kernel(matches_reference, kernel_name, "the model's own attention is used instead")


@cache
def _is_window_valid(dtype: torch.dtype, width: int, device: torch.device) -> bool:
    """Whether flash attention with windows agrees with the formula, forward and backward, with shared keys, too."""

    def matches_reference() -> bool:
        return all(
            _matches_reference(BandMask(None, *window), dtype, width, device)
            for window in ((37, 0), (20, 9), (None, 0))
        )

    return validate_kernel(
        matches_reference, "flash attention's own windows", "the model's own attention is used instead"
    )


def _matches_reference(window: BandMask, dtype: torch.dtype, width: int, device: torch.device) -> bool:
    """Compare flash attention with one window to the formula, for two samples and heads that share keys."""
    generator = torch.Generator(device).manual_seed(0)
    num_tokens = 300
    sizes = [(heads, num_tokens, width) for heads in (4, 2, 2, 4)]
    query, key, value, grad_output = (
        torch.randn(2, *size, generator=generator, device=device).to(dtype) for size in sizes
    )
    fused = FusedSDPA(FLASH, width**-0.5, window=window)
    saved = fused.forward(query, key, value)
    results = (saved[0], *fused.backward(grad_output, query, key, value, saved))
    visible = window.compute_tile(slice(0, num_tokens), slice(0, num_tokens), device)
    exact = compute_reference_attention(query, key, value, grad_output, visible)
    for result, expected in zip(results, (exact.output, *exact.gradients), strict=True):
        if not float((result - expected).norm() / expected.norm()) < 2e-2:
            return False
    return bool((saved[1] - exact.lse).abs().max() < 1e-2)
