"""Captures the attention that modules return, for models that ignore the attention interface (LXMERT, DeBERTa …).

Switching their implementation silently does nothing; but the attention weights that they return, some only with
`output_attentions=True`, are in the graph.
"""

import inspect
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from clearhead.capture.context import CaptureContext
from clearhead.capture.session import remove_hooks_on_exit
from clearhead.capture.sources.base import CaptureSource


class ReturnedAttentions(CaptureSource):
    """Hooks that request and capture the attention of each innermost attention module.

    Calls that another source has captured are skipped.
    """

    name = "returned"

    def capturing(self, context: CaptureContext) -> AbstractContextManager[None]:
        handles: list[RemovableHandle] = []
        for module in context.topology.attention_modules:
            hook = _OutputAttentionsHook(module, context)
            handles.append(module.register_forward_pre_hook(hook.pre_forward_hook, with_kwargs=True))
            handles.append(module.register_forward_hook(hook.forward_hook))
        return remove_hooks_on_exit(handles)


RETURNED_ATTENTIONS = ReturnedAttentions()


class _OutputAttentionsHook:
    """Forward hooks of one attention module."""

    def __init__(self, module: nn.Module, context: CaptureContext) -> None:
        self.context = context
        names = list(inspect.signature(module.forward).parameters)
        self.argument_index: int | None = None
        if "output_attentions" in names:
            self.argument_index = names.index("output_attentions")
        self.previous_call_count = 0
        self.added_request = False  # whether this hook, and not the caller, requested the attention

    def pre_forward_hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Set `output_attentions=True` in the arguments of the module."""
        if not self.context.is_active:
            return None
        self.previous_call_count = self.context.call_counts[id(module)]
        if self.argument_index is None:
            return None
        if len(args) > self.argument_index:
            self.added_request = not args[self.argument_index]
            return (*args[: self.argument_index], True, *args[self.argument_index + 1 :]), kwargs
        self.added_request = not kwargs.get("output_attentions")
        return args, {**kwargs, "output_attentions": True}

    def forward_hook(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Record the returned attention, unless another source has already captured this call."""
        is_captured = self.context.call_counts[id(module)] > self.previous_call_count
        if not self.context.is_active or is_captured or not isinstance(output, tuple | list):
            return None
        maps = [item for item in output[1:] if isinstance(item, Tensor) and _can_be_attention(item, output[0])]
        if not maps:
            return None
        if self.added_request and len(maps) > 1 and output[-1] is maps[-1]:
            # T5 in transformers 5.0 also returns its position bias, which looks like a map, and, if requested, its
            # attention after it. Its stack expects as many outputs as it requested, so the attention is removed.
            self.context.record_call(RETURNED_ATTENTIONS, module, maps[-1])
            return self.context.maybe_zero_output(output[:-1])
        self.context.record_call(RETURNED_ATTENTIONS, module, maps[0])
        if self.context.zero_attention:
            return self.context.maybe_zero_output(output)
        return None


def _can_be_attention(tensor: Tensor, output: Any) -> bool:
    """Whether a returned tensor can be an attention map, with a row for each query: linear attention returns states."""
    if tensor.dim() != 4:
        return False
    return not isinstance(output, Tensor) or output.dim() != 3 or tensor.shape[2] in output.shape[:2]
