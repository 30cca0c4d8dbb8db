"""Reference flash attention with a window for CPUs: torch's two operations with their exact signatures."""

from functools import cache
from typing import Any

import torch
from torch import Tensor


class ReferenceFlashAttention:
    """Replaces `torch.ops.aten`.

    early, late: this many keys more than requested are visible before and after the query.
    base: the base of the log-sum-exp.
    shared: whether the key gradients of a group of heads are summed.
    """

    def __init__(self, early: int = 0, late: int = 0, base: float = torch.e, shared: bool = True) -> None:
        self.early, self.late, self.base, self.shared = early, late, base, shared
        self.windows: list[tuple[str, int, int]] = []

    def _scores(self, query: Tensor, key: Tensor, scale: float, left: int, right: int) -> Tensor:
        """Query and key are batch × position × head × width; a window of −1 is unlimited."""
        (_, queries, heads, _), (_, keys, shared, _) = query.shape, key.shape
        assert heads % shared == 0 and queries == keys
        key = key.repeat_interleave(heads // shared, 2)
        scores = torch.einsum("bihd,bjhd->bhij", query.double(), key.double()) * scale
        before, after = (
            size + extra if size >= 0 else keys for size, extra in ((left, self.early), (right, self.late))
        )
        visible = [[i - before <= j <= i + after for j in range(keys)] for i in range(queries)]
        return scores.masked_fill(~torch.tensor(visible), -torch.inf)

    def _flash_attention_forward(
        self, query: Tensor, key: Tensor, value: Tensor, cum_seq_q: None, cum_seq_k: None, max_q: int, max_k: int,
        dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float, window_size_left: int,
        window_size_right: int,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert cum_seq_q is cum_seq_k is None and (max_q, max_k) == (query.shape[1], key.shape[1])
        assert not (dropout_p or is_causal or return_debug_mask)
        self.windows.append(("forward", window_size_left, window_size_right))
        scores = self._scores(query, key, scale, window_size_left, window_size_right)
        group = query.shape[2] // key.shape[2]
        output = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), value.double().repeat_interleave(group, 2))
        lse = scores.logsumexp(-1) / torch.tensor(self.base).log()
        unused = torch.empty(0)
        return output.to(query.dtype), lse.float(), unused, unused, unused

    def _scaled_dot_product_flash_attention(
        self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float
    ) -> tuple[Tensor | None, ...]:
        qkv = (tensor.transpose(1, 2) for tensor in (query, key, value))
        options = {"scale": scale, "window_size_left": -1, "window_size_right": 0 if is_causal else -1}
        sizes = (None, None, query.shape[2], key.shape[2])
        output, lse, *unused = self._flash_attention_forward(*qkv, *sizes, 0.0, False, False, **options)
        return output.transpose(1, 2), lse, None, None, None, None, *unused

    def _flash_attention_backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
        cum_seq_q: None, cum_seq_k: None, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
        rng_state: Tensor, unused: Tensor, *, scale: float, window_size_left: int, window_size_right: int,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert cum_seq_q is cum_seq_k is None and (max_q, max_k) == (query.shape[1], key.shape[1])
        assert not (dropout_p or is_causal) and out.shape == grad_out.shape == query.shape
        self.windows.append(("backward", window_size_left, window_size_right))
        scores = self._scores(query, key, scale, window_size_left, window_size_right)
        attention = (scores - logsumexp.double()[..., None]).exp()
        group = query.shape[2] // key.shape[2]
        each_key, each_value = (tensor.double().repeat_interleave(group, 2) for tensor in (key, value))
        output_gradient = grad_out.double()
        attention_gradient = torch.einsum("bihd,bjhd->bhij", output_gradient, each_value)
        score_gradient = (
            attention
            * (attention_gradient - (output_gradient * out.double()).sum(-1).transpose(1, 2)[..., None])
            * scale
        )
        dq = torch.einsum("bhij,bjhd->bihd", score_gradient, each_key)
        dk = torch.einsum("bhij,bihd->bjhd", score_gradient, query.double())
        dv = torch.einsum("bhij,bihd->bjhd", attention, output_gradient)
        if self.shared:
            dk, dv = (tensor.unflatten(2, (-1, group)).sum(3) for tensor in (dk, dv))
        return tuple(tensor.to(query.dtype) for tensor in (dq, dk, dv))


def use_reference_flash_attention(
    monkeypatch: Any, flash: ReferenceFlashAttention | None = None
) -> ReferenceFlashAttention:
    """Make flash attention available on a CPU."""
    from clearhead.capture.kernels import fused_sdpa

    flash = flash or ReferenceFlashAttention()
    monkeypatch.setattr(fused_sdpa, "aten", flash)
    monkeypatch.setattr(fused_sdpa, "can_use_flash_attention", lambda asked: True)
    for name in ("_is_window_valid", "_is_lse_valid"):  # without cached results
        monkeypatch.setattr(fused_sdpa, name, cache(getattr(fused_sdpa, name).__wrapped__))
    return flash
