"""Streaming attention on a GPU: torch's own kernels forward and for the usual gradients, Triton's for the sums.

Flash attention says the log-sum-exp of each row's scores, from which the maps can be rebuilt tile by tile. Where it
cannot be used (float32, masks that are neither causal nor absent) the output and the gradients are those of the
attention that the model runs with, whichever kernel that is, and the log-sum-exp is made by a kernel of ours.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.recording.reduce import Reduce
from clearhead.recording.streaming import Gradients, Streamed
from clearhead.recording.triton_sums import WIDEST, Rebuilt

#: What a model says about a call beside its mask, and this kernel knows, or need not know.
KNOWN = frozenset({"scaling", "dropout", "is_causal", "sliding_window", "position_ids", "cache_position", "use_cache"})
#: More rows than these are pushed by tiles of torch, which make each map once for all of them.
MOST_ROWS = 256


class TritonKernel:
    name = "triton"

    def takes(self, call: Streamed, reductions: Sequence[Reduce]) -> bool:
        query, key, value = call.query, call.key, call.value
        told = {name for name, part in call.more.items() if part is not None} <= KNOWN
        widest = max(query.shape[3], value.shape[3])
        fits = widest <= WIDEST.get(query.dtype, 0) and query.dtype == key.dtype == value.dtype
        square = not call.causal or query.shape[2] == key.shape[2]
        few = all(one.rows is None or one.rows.shape[1] <= MOST_ROWS for one in reductions)
        return bool(call.forward is not None and told and fits and square and few)

    def output(self, call: Streamed) -> tuple[Float[Tensor, "batch query head width"], tuple[Tensor, ...]]:
        query, key, value = (part.detach() for part in (call.query, call.key, call.value))
        if not _flashes(call):
            assert call.forward is not None
            return call.forward(call.module, query, key, value, call.mask, **call.more)[0], ()
        output, lse, _, _, _, _, seed, offset, _ = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, call.causal, False, scale=call.scaling
        )
        return output.transpose(1, 2), (output, lse, seed, offset)

    def backward(
        self, call: Streamed, gradient: Float[Tensor, "batch query head width"], reductions: Sequence[Reduce]
    ) -> tuple[Gradients, list[Tensor]]:
        return self._gradients(call, gradient), self.reduced(call, gradient, reductions)

    def reduced(
        self, call: Streamed, gradient: Float[Tensor, "batch query head width"] | None, reductions: Sequence[Reduce]
    ) -> list[Tensor]:
        if not reductions:
            return []
        query, key, value = (part.detach() for part in (call.query, call.key, call.value))
        rebuilt = Rebuilt(
            query,
            key,
            value,
            None if gradient is None else gradient.detach().transpose(1, 2),
            call.saved[1] if _flashes(call) and call.saved else None,
            call.scaling,
            call.causal,
            mask=call.mask,
        )
        rebuilt = rebuilt if rebuilt.lse is not None else rebuilt.with_lse()
        return [_reduced(rebuilt if one.heads is None else rebuilt.of_heads(one.heads), one) for one in reductions]

    def _gradients(self, call: Streamed, gradient: Float[Tensor, "batch query head width"]) -> Gradients:
        query, key, value = (part.detach() for part in (call.query, call.key, call.value))
        if _flashes(call):
            output, lse, seed, offset = call.saved
            dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
                gradient.transpose(1, 2), query, key, value, output, lse, None, None, query.shape[2], key.shape[2],
                0.0, call.causal, seed, offset, scale=call.scaling,
            )  # fmt: skip
            return dq, dk, dv
        assert call.forward is not None
        leaves = [part.requires_grad_() for part in (query, key, value)]
        with torch.enable_grad():
            output = call.forward(call.module, *leaves, call.mask, **call.more)[0]
        dq, dk, dv = torch.autograd.grad(output, leaves, gradient)
        return dq, dk, dv


def _flashes(call: Streamed) -> bool:
    query, value = call.query, call.value
    width = query.shape[3]
    halves = query.dtype in (torch.bfloat16, torch.float16)
    return query.is_cuda and halves and call.mask is None and width == value.shape[3] and width % 8 == 0


def _reduced(rebuilt: Rebuilt, one: Reduce) -> Tensor:
    if one.rows is None:
        return rebuilt.over_keys(None, one.of)
    if one.rows.shape[1] == 1:
        return rebuilt.over_queries(one.rows[:, 0], one.of)[:, :, None] / rebuilt.shape[1]
    return rebuilt.joined(one.rows, one.of)[:, None]
