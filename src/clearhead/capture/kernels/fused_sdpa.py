"""Torch's own kernels, where they say the log-sum-exp of each row's scores: the maps can be rebuilt from it.

Flash attention and cuDNN do, and in float32 the memory-efficient kernel does; the one runs that torch would choose. A
sliding window is flash attention's own, which walks along no more than that; torch offers it to nobody who asks in the
usual way, so that it is proven before it is trusted.
"""

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention import SDPBackend

from clearhead.capture.attention.lazy_mask import Described, Facts
from clearhead.capture.attention.tiling import Gradients
from clearhead.capture.kernels.validation import by_formula, holds

if TYPE_CHECKING:
    from clearhead.capture.attention.tiled import Streamed

FLASH, CUDNN = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
EFFICIENT = SDPBackend.EFFICIENT_ATTENTION
HALF = (torch.bfloat16, torch.float16)
aten = torch.ops.aten


@dataclass(frozen=True)
class Fused:
    """One of torch's kernels, and what it is told.

    window: what flash attention sees, in the place of causal
    """

    backend: SDPBackend
    scale: float
    causal: bool = False
    window: Facts | None = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """The output, the log-sum-exp, and what the backward pass wants to know of dropout, which there is none of."""
        if self.window is not None:
            whole = (part.transpose(1, 2) for part in (query, key, value))
            sizes = (None, None, query.shape[2], key.shape[2])
            made = aten._flash_attention_forward(*whole, *sizes, 0.0, False, False, **self._walked())
            return made[0].transpose(1, 2), *made[1:4]
        how = {"is_causal": self.causal, "scale": self.scale}
        if self.backend == EFFICIENT:
            return tuple(aten._scaled_dot_product_efficient_attention(query, key, value, None, True, **how))
        if self.backend == CUDNN:
            made = aten._scaled_dot_product_cudnn_attention(query, key, value, None, True, **how)
        else:
            made = aten._scaled_dot_product_flash_attention(query, key, value, **how)
        output, lse, _, _, _, _, seed, offset, _ = made
        return output, lse, seed, offset

    def backward(
        self,
        slope: Float[Tensor, "batch head query width"],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        saved: tuple[Tensor, ...],
    ) -> Gradients:
        """∂y/∂query, ∂y/∂key and ∂y/∂value; heads that share keys have their gradients added up."""
        output, lse, seed, offset = saved
        sizes = {"cum_seq_q": None, "cum_seq_k": None, "max_q": query.shape[2], "max_k": key.shape[2]}
        how = {"dropout_p": 0.0, "is_causal": self.causal, "scale": self.scale}
        drawn = {"philox_seed": seed, "philox_offset": offset}
        if self.window is not None:
            whole = (part.transpose(1, 2) for part in (slope, query, key, value, output))
            backward = aten._flash_attention_backward
            found = backward(*whole, lse, *sizes.values(), 0.0, False, seed, offset, **self._walked())
            dq, dk, dv = (part.transpose(1, 2) for part in found)
        elif self.backend == EFFICIENT:
            backward = aten._scaled_dot_product_efficient_attention_backward
            wanted = [True, True, True, False]
            dq, dk, dv, _ = backward(
                slope, query, key, value, None, output, lse, **drawn, grad_input_mask=wanted, **how
            )
        elif self.backend == CUDNN:
            backward = aten._scaled_dot_product_cudnn_attention_backward
            dq, dk, dv = backward(slope, query, key, value, output, lse, attn_bias=None, **drawn, **sizes, **how)
        else:
            backward = aten._scaled_dot_product_flash_attention_backward
            dq, dk, dv = backward(slope, query, key, value, output, lse, **drawn, **sizes, **how)
        return dq, dk, dv

    def _walked(self) -> dict[str, Any]:
        assert self.window is not None
        before, after = (-1 if count is None else count for count in (self.window.before, self.window.after))
        return {"scale": self.scale, "window_size_left": before, "window_size_right": after}


def chosen(call: "Streamed") -> Fused | None:
    """What makes the output and the gradients of a call; None where nothing does that says the log-sum-exp."""
    query, value = call.query, call.value
    if query.shape[3] != value.shape[3] or query.shape[3] % 8:
        return None
    return _without_mask(call) if call.mask is None else _with_window(call)


def _without_mask(call: "Streamed") -> Fused | None:
    query, key, value = call.query, call.key, call.value
    grouped = query.shape[1] != key.shape[1]
    saying = _saying(query.dtype, grouped)
    if not (query.is_cuda and saying):
        return None
    with torch.enable_grad():  # some kernels have no backward pass for some shapes
        one = torch._fused_sdp_choice(
            query.detach().requires_grad_(), key, value, None, 0.0, call.causal, scale=call.scaling, enable_gqa=grouped
        )
    backend = next((each for each in saying if each.value == one), None)
    if backend is None or not _says_lse(backend, query.dtype, query.shape[3], query.device):
        return None
    return Fused(backend, call.scaling, call.causal)


def _with_window(call: "Streamed") -> Fused | None:
    """Flash attention, where torch allows it, a window is all that the mask says, and the mask is too large for the
    kernel that the model runs with, which gets it whole."""
    query, key, value = call.query, call.key, call.value
    if not isinstance(call.mask, Described) or query.dtype not in HALF or query.shape[2] != key.shape[2]:
        return None
    if call.mask.small:
        return None
    grouped = query.shape[1] != key.shape[1]
    with torch.enable_grad():
        asked = SDPAParams(query.detach().requires_grad_(), key, value, None, 0.0, False, grouped)
        allowed = can_use_flash_attention(asked)
    facts = call.mask.facts if allowed else None
    if facts is None or facts.padding is not None or facts.alike:
        return None
    return Fused(FLASH, call.scaling, window=facts) if _windows(query.dtype, query.shape[3], query.device) else None


def ran(call: "Streamed") -> Fused:
    """What has made the output of a call, by what it left for the way back."""
    if isinstance(call.mask, Described):
        return Fused(FLASH, call.scaling, window=call.mask.facts)
    if call.query.dtype not in HALF:
        return Fused(EFFICIENT, call.scaling, call.causal)
    return Fused(CUDNN if call.saved[1].dim() == 4 else FLASH, call.scaling, call.causal)


def _saying(dtype: torch.dtype, grouped: bool) -> tuple[SDPBackend, ...]:
    """The kernels that say the log-sum-exp of such numbers."""
    if dtype in HALF:
        return FLASH, CUDNN
    return () if grouped or dtype != torch.float32 else (EFFICIENT,)


@cache
def _says_lse(backend: SDPBackend, dtype: torch.dtype, width: int, device: torch.device) -> bool:
    """Whether what a kernel calls the log-sum-exp is that: of scaled scores, to the base e, row by row."""

    def agree() -> bool:
        draw = torch.Generator(device).manual_seed(0)
        query, key = (torch.randn(1, 2, 128, width, generator=draw, device=device).to(dtype) for _ in range(2))
        seen = torch.ones(128, 128, dtype=torch.bool, device=device).tril()
        said = Fused(backend, width**-0.5, causal=True).forward(query, key, key)[1].reshape(1, 2, -1)[:, :, :128]
        return bool((said - by_formula(query, key, key, key, seen).lse).abs().max() < 1e-2)

    what = f"the log-sum-exp of {backend.name.lower().replace('_', ' ')}"
    return holds(agree, what, "the attention that the model runs with takes its place")


@cache
def _windows(dtype: torch.dtype, width: int, device: torch.device) -> bool:
    """Whether flash attention gives with windows what the formula gives, backward and where heads share keys, too."""

    def agree() -> bool:
        return all(_agrees(Facts(None, *window), dtype, width, device) for window in ((37, 0), (20, 9), (None, 0)))

    return holds(agree, "flash attention's own windows", "the attention that the model runs with takes their place")


def _agrees(window: Facts, dtype: torch.dtype, width: int, device: torch.device) -> bool:
    draw, count, scale = torch.Generator(device).manual_seed(0), 300, width**-0.5
    sizes = ((4, count, width), (2, count, width), (2, count, width), (4, count, width))
    query, key, value, slope = (torch.randn(2, *size, generator=draw, device=device).to(dtype) for size in sizes)
    fused = Fused(FLASH, scale, window=window)
    saved = fused.forward(query, key, value)
    found = (saved[0], *fused.backward(slope, query, key, value, saved))
    exact = by_formula(query, key, value, slope, window.cells(slice(0, count), slice(0, count), device))
    pairs = zip(found, (exact.output, *exact.gradients), strict=True)
    near = all(float((one - other).norm() / other.norm()) < 2e-2 for one, other in pairs)
    return near and bool((saved[1] - exact.lse).abs().max() < 1e-2)
