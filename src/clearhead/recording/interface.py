"""Recording through transformers' attention interface: one registered function that delegates to the model's own
eager attention, so position biases, soft caps, sinks, windows and grouped heads stay exact."""

import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from clearhead.errors import Refusal
from clearhead.recording.scope import attention_implementation, hooks

NAME = "clearhead"
_CROSS = re.compile(r"cross|encoder_attn|encdec", re.IGNORECASE)


@dataclass
class Captured:
    """One attention call as the forward pass made it; its tensors are still in the graph."""

    module: str
    attention: Float[Tensor, "batch head query key"]
    values: Float[Tensor, "batch kv_head key width"] | None = None
    output: Float[Tensor, "batch query head width"] | None = None
    output_projection: Float[Tensor, "model heads"] | None = None
    block_input: Float[Tensor, "batch unit model"] | None = None

    @property
    def kind(self) -> Literal["self", "cross"]:
        return "cross" if _CROSS.search(self.module) else "self"

    def values_per_head(self) -> Float[Tensor, "batch head key width"]:
        """Grouped-query heads share values: repeat them so that each attention head has its own."""
        assert self.values is not None
        return self.values.repeat_interleave(self.attention.shape[1] // self.values.shape[1], dim=1)

    def rebuild_error(self) -> float:
        """How far A·V lies from the output that the model really used, relative to its size."""
        assert self.output is not None
        rebuilt = (self.attention @ self.values_per_head()).transpose(1, 2)
        gap = (rebuilt.reshape(-1) - self.output.reshape(-1)).abs().max()
        return float(gap / self.output.abs().max().clamp(min=1e-12))


class _Listener:
    """Collects the calls of the pass that runs in this thread."""

    def __init__(self, names: dict[int, str], blocks: dict[int, nn.Module]) -> None:
        self.names, self.blocks = names, blocks
        self.calls: list[Captured] = []
        self.block_inputs: dict[int, Tensor] = {}

    def hear(self, module: nn.Module, attention: Tensor, values: Tensor, output: Tensor) -> None:
        if attention is None:
            raise Refusal(f"the eager attention of {type(module).__name__} returns no probabilities to record")
        block = self.blocks.get(id(module))
        self.calls.append(
            Captured(
                module=self.names.get(id(module), type(module).__name__),
                attention=attention,
                values=values,
                output=output,
                block_input=self.block_inputs.get(id(block)) if block is not None else None,
            )
        )


_active = threading.local()


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    output, attention = eager_of(module)(module, query, key, value, attention_mask, **kwargs)
    listener = getattr(_active, "listener", None)
    if listener is not None:
        listener.hear(module, attention, value, output)
    return output, attention


AttentionInterface.register(NAME, _attention)
# Without a mask function of the same name transformers drops the padding mask in silence.
AttentionMaskInterface.register(NAME, eager_mask)


def eager_of(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor]]:
    """The `eager_attention_forward` that stands beside the module's class."""
    for cls in type(module).__mro__:
        eager = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if eager is not None:
            return eager
    raise Refusal(
        f"{type(module).__module__} has no eager_attention_forward beside {type(module).__name__}: "
        "its attention cannot be recorded exactly"
    )


def blocks_of(model: nn.Module) -> dict[int, nn.Module]:
    """For each module, the layer it sits in: its innermost ancestor that is an item of a ModuleList."""
    blocks: dict[int, nn.Module] = {}

    def walk(module: nn.Module, block: nn.Module | None) -> None:
        if block is not None:
            blocks[id(module)] = block
        for child in module.children():
            walk(child, child if isinstance(module, nn.ModuleList) else block)

    walk(model, None)
    return blocks


@contextmanager
def capture(model: nn.Module, block_inputs: bool = False, projections: bool = False) -> Iterator[list[Captured]]:
    """Collect every attention call that the model makes in this thread inside the `with`."""
    blocks = blocks_of(model)
    listener = _Listener({id(module): name for name, module in model.named_modules()}, blocks)
    handles: list[Any] = []
    if block_inputs:
        unique = {id(block): block for block in blocks.values()}
        handles += [
            block.register_forward_pre_hook(_remember_input(listener.block_inputs), with_kwargs=True)
            for block in unique.values()
        ]
    if projections:
        handles += [
            module.register_forward_pre_hook(_recognise_projection(listener))
            for module in model.modules()
            if isinstance(getattr(module, "weight", None), Tensor) and module.weight.dim() == 2
        ]
    outer = getattr(_active, "listener", None)
    with hooks(handles), attention_implementation(model, NAME):
        _active.listener = listener
        try:
            yield listener.calls
        finally:
            _active.listener = outer


def _remember_input(block_inputs: dict[int, Tensor]) -> Callable[..., None]:
    def hook(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        block_inputs[id(block)] = args[0] if args else kwargs["hidden_states"]

    return hook


def _recognise_projection(listener: _Listener) -> Callable[..., None]:
    """The linear map that is fed the attention's own output is its output projection, whatever it is called."""

    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        last = listener.calls[-1] if listener.calls else None
        if last is None or last.output is None or last.output_projection is not None or not args:
            return
        if isinstance(args[0], Tensor) and _same_numbers(args[0], last.output):
            weight = module.weight
            assert isinstance(weight, Tensor)
            # GPT-2's Conv1D stores its weight as input × output.
            last.output_projection = weight if isinstance(module, nn.Linear) else weight.T

    return hook


def _same_numbers(one: Tensor, other: Tensor) -> bool:
    if one.numel() != other.numel():
        return False
    return one.data_ptr() == other.data_ptr() or torch.equal(one.reshape(-1), other.reshape(-1))
