"""Recording through returned attentions, for models that ignore the attention interface (DeBERTa and its kin).

Switching their implementation does nothing, in silence; but the probabilities they return are in the graph."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from clearhead.errors import Refusal
from clearhead.recording.blocks import Watch, blocks_of
from clearhead.recording.interface import Captured
from clearhead.recording.scope import attention_implementation, hooks, same_attributes


class Returned:
    """Reads the calls out of a model's output after the forward pass."""

    def __init__(self, layers: list[tuple[str, nn.Module]], watch: Watch) -> None:
        self.layers, self.watch = layers, watch

    def calls(self, output: Any) -> list[Captured]:
        attentions = getattr(output, "attentions", None) or ()
        if any(attention is None for attention in attentions):
            raise Refusal("the model returns no attention: load it with attn_implementation='eager'")
        if len(attentions) != len(self.layers):
            return [Captured(f"attentions.{place}", attention) for place, attention in enumerate(attentions)]
        pairs = zip(self.layers, attentions, strict=True)
        return [Captured(name, attention, run=self.watch.of(layer)) for (name, layer), attention in pairs]


@contextmanager
def capture(model: nn.Module, layers: bool = False) -> Iterator[Returned]:
    """Give the model `output_attentions=True` inside the `with`, then ask `.calls(output)`."""
    holding = attention_layers(model)
    with same_attributes(model), attention_implementation(model, "eager"):
        watch = Watch([layer for _, layer in holding] if layers else ())
        with hooks(watch.handles):
            yield Returned(holding, watch)


def attention_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers (items of a ModuleList) that hold an attention module, in order."""
    blocks = blocks_of(model)
    holding = {id(blocks[id(m)]) for m in model.modules() if "Attention" in type(m).__name__ and id(m) in blocks}
    return [(name, module) for name, module in model.named_modules() if id(module) in holding]
