"""Recording through returned attentions, for models that ignore the attention interface (DeBERTa and its kin).

Switching their implementation does nothing, in silence; but the probabilities they return are in the graph."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from clearhead.errors import Refusal
from clearhead.recording.interface import Captured, blocks_of
from clearhead.recording.scope import hooks, same_attributes


class Returned:
    """Reads the calls out of a model's output after the forward pass."""

    def __init__(self, layers: list[tuple[str, nn.Module]], inputs: dict[int, list[Tensor]]) -> None:
        self.layers, self.inputs = layers, inputs

    def calls(self, output: Any) -> list[Captured]:
        attentions = getattr(output, "attentions", None) or ()
        if any(attention is None for attention in attentions):
            raise Refusal("the model returns no attention: load it with attn_implementation='eager'")
        one_each = len(attentions) == len(self.layers)
        return [
            Captured(
                module=self.layers[place][0] if one_each else f"attentions.{place}",
                attention=attention,
                block_input=self.inputs[id(self.layers[place][1])][-1] if one_each and self.inputs else None,
            )
            for place, attention in enumerate(attentions)
        ]


@contextmanager
def capture(model: nn.Module, block_inputs: bool = False) -> Iterator[Returned]:
    """Give the model `output_attentions=True` inside the `with`, then ask `.calls(output)`."""
    layers = attention_layers(model)
    inputs: dict[int, list[Tensor]] = {}

    thread = threading.get_ident()

    def remember(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() != thread:
            return  # somebody else's pass through the same model
        inputs.setdefault(id(layer), []).append(args[0] if args else kwargs["hidden_states"])

    with same_attributes(model):
        handles = [layer.register_forward_pre_hook(remember, with_kwargs=True) for _, layer in layers if block_inputs]
        with hooks(handles):
            yield Returned(layers, inputs)


def attention_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers (items of a ModuleList) that hold an attention module, in order."""
    blocks = blocks_of(model)
    holding = {id(blocks[id(m)]) for m in model.modules() if "Attention" in type(m).__name__ and id(m) in blocks}
    return [(name, module) for name, module in model.named_modules() if id(module) in holding]
