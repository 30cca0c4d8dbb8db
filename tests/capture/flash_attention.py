"""Flash attention with a window, slowly and without a GPU: torch's two operations as their signatures state them."""

from functools import cache
from typing import Any

import torch
from torch import Tensor


class Flash:
    """In the place of `torch.ops.aten`.

    early, late: so many keys more are seen before and after than was said. base: of the log-sum-exp
    shared: whether the gradients of heads that share keys are added up
    """

    def __init__(self, early: int = 0, late: int = 0, base: float = torch.e, shared: bool = True) -> None:
        self.early, self.late, self.base, self.shared = early, late, base, shared
        self.windows: list[tuple[str, int, int]] = []

    def _scores(self, query: Tensor, key: Tensor, scale: float, left: int, right: int) -> Tensor:
        """Query and key are batch × place × head × width; a window of −1 has no end."""
        (_, queries, heads, _), (_, keys, shared, _) = query.shape, key.shape
        assert heads % shared == 0 and queries == keys
        key = key.repeat_interleave(heads // shared, 2)
        scores = torch.einsum("bihd,bjhd->bhij", query.double(), key.double()) * scale
        before, after = (end + more if end >= 0 else keys for end, more in ((left, self.early), (right, self.late)))
        seen = [[i - before <= j <= i + after for j in range(keys)] for i in range(queries)]
        return scores.masked_fill(~torch.tensor(seen), -torch.inf)

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
        none = torch.empty(0)
        return output.to(query.dtype), lse.float(), none, none, none

    def _scaled_dot_product_flash_attention(
        self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float
    ) -> tuple[Tensor | None, ...]:
        whole = (part.transpose(1, 2) for part in (query, key, value))
        how = {"scale": scale, "window_size_left": -1, "window_size_right": 0 if is_causal else -1}
        sizes = (None, None, query.shape[2], key.shape[2])
        output, lse, *none = self._flash_attention_forward(*whole, *sizes, 0.0, False, False, **how)
        return output.transpose(1, 2), lse, None, None, None, None, *none

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
        each_key, each_value = (part.double().repeat_interleave(group, 2) for part in (key, value))
        slope = grad_out.double()
        into = torch.einsum("bihd,bjhd->bhij", slope, each_value)
        steep = attention * (into - (slope * out.double()).sum(-1).transpose(1, 2)[..., None]) * scale
        dq = torch.einsum("bhij,bjhd->bihd", steep, each_key)
        dk = torch.einsum("bhij,bihd->bjhd", steep, query.double())
        dv = torch.einsum("bhij,bihd->bjhd", attention, slope)
        if self.shared:
            dk, dv = (part.unflatten(2, (-1, group)).sum(3) for part in (dk, dv))
        return tuple(part.to(query.dtype) for part in (dq, dk, dv))


def allow(monkeypatch: Any, flash: Flash | None = None) -> Flash:
    """Flash attention is there, on a CPU, too."""
    from clearhead.capture.kernels import fused_sdpa

    flash = flash or Flash()
    monkeypatch.setattr(fused_sdpa, "aten", flash)
    monkeypatch.setattr(fused_sdpa, "can_use_flash_attention", lambda asked: True)
    for proof in ("_is_window_valid", "_is_lse_valid"):  # proven anew
        monkeypatch.setattr(fused_sdpa, proof, cache(getattr(fused_sdpa, proof).__wrapped__))
    return flash
