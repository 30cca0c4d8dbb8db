"""Recording modules that are not from transformers: a registered function stands in for their forward meanwhile."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from clearhead.recording.interface import Listener

#: What a stand-in returns: the module's output, its attention (batch head query key) and, where known, its values.
Attended = tuple[Any, Tensor] | tuple[Any, Tensor, Tensor]
Attend = Callable[..., Attended]

_REGISTERED: dict[type[nn.Module], Attend] = {}


def register_attention(kind: type[nn.Module]) -> Callable[[Attend], Attend]:
    """Tell clearhead how a class of modules attends, so that its calls can be recorded.

    The function gets the module and the arguments of its forward, computes the same output, and returns it together
    with the attention it used, batch × head × query × key, and the values, batch × head × key × width, if it has them.
    The self-test compares the model's outputs with and without the stand-in, and refuses if they differ.

        @clearhead.register_attention(MyAttention)
        def attend(module, x, mask=None):
            q, k, v = module.project(x)
            attention = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
            return module.out((attention @ v).transpose(1, 2).flatten(2)), attention, v
    """

    def decorate(function: Attend) -> Attend:
        _REGISTERED[kind] = function
        return function

    return decorate


@contextmanager
def heard(model: nn.Module, listener: "Listener") -> Iterator[None]:
    """Let the stand-ins of registered modules run in this thread's pass inside the `with`."""
    replaced: list[nn.Module] = []
    try:
        for module in model.modules():
            attend = next((_REGISTERED[kind] for kind in type(module).__mro__ if kind in _REGISTERED), None)
            if attend is not None and "forward" not in module.__dict__:
                module.__dict__["forward"] = partial(_stand_in, module, attend, listener)
                replaced.append(module)
        yield
    finally:
        for module in replaced:
            del module.__dict__["forward"]


def _stand_in(module: nn.Module, attend: Attend, listener: "Listener", *args: Any, **kwargs: Any) -> Any:
    if not listener.listening:
        return type(module).forward(module, *args, **kwargs)
    output, attention, *values = attend(module, *args, **kwargs)
    listener.hear(module, attention, values[0] if values else None)
    return output


@register_attention(nn.MultiheadAttention)
def _multihead(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Attended:
    """torch's own multi-head attention, which otherwise returns a copy of its weights or fuses them away."""
    if module.bias_k is not None or module.add_zero_attn:
        raise NotImplementedError("nn.MultiheadAttention with bias_k or add_zero_attn is not recorded")
    if not module.batch_first and query.dim() == 3:
        query, key, value = (part.transpose(0, 1) for part in (query, key, value))
    weights, biases = _projections(module)
    projected = [part @ w.T + b for part, w, b in zip((query, key, value), weights, biases, strict=True)]
    q, k, v = (part.unflatten(-1, (module.num_heads, module.head_dim)).transpose(1, 2) for part in projected)
    scores = q @ k.mT / module.head_dim**0.5
    for mask in (attn_mask, None if key_padding_mask is None else key_padding_mask[:, None, None]):
        if mask is not None:
            mask = mask.unflatten(0, (len(q), -1)) if mask.dim() == 3 else mask
            scores = scores.masked_fill(mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    attention = scores.softmax(-1)
    output = module.out_proj((attention @ v).transpose(1, 2).flatten(2))
    output = output if module.batch_first else output.transpose(0, 1)
    returned = (attention.mean(1) if average_attn_weights else attention) if need_weights else None
    return (output, returned), attention, v


def _projections(module: nn.MultiheadAttention) -> tuple[Sequence[Tensor], Sequence[Tensor | float]]:
    """Weights and biases of queries, keys and values, packed together or not."""
    packed = module.in_proj_weight
    apart = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    biases = (0.0, 0.0, 0.0) if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    return (packed.chunk(3) if packed is not None else apart), biases
