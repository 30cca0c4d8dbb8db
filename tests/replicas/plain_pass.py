"""One plain pass of a model, recorded as in the authors' code: eager attention on a copy, the maps and hidden states
that the model returns, one `autograd.grad`. One sample at a time; no code of clearhead is used."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

Value = Callable[[Any], Tensor]


@dataclass(frozen=True)
class Seen:
    """The record of one pass, in float64. Hidden state l is the *input* of layer l; the last one is the output."""

    attention: Float[np.ndarray, "layer head query key"]
    attention_gradient: Float[np.ndarray, "layer head query key"]
    hidden: Float[np.ndarray, "state unit model"]
    hidden_gradient: Float[np.ndarray, "state unit model"]
    inputs: Float[np.ndarray, "*leaf"]
    input_gradient: Float[np.ndarray, "*leaf"]
    logits: Float[np.ndarray, "*classes"]

    @property
    def layers(self) -> int:
        return self.attention.shape[0]

    @property
    def heads(self) -> int:
        return self.attention.shape[1]

    @property
    def units(self) -> int:
        return self.attention.shape[2]


def watch(model: Any, inputs: Mapping[str, Tensor], value: Value) -> Seen:
    """Record one pass of one sample. `value` computes the target from the output of the model."""
    eager = copy.deepcopy(model).eval()
    eager.set_attn_implementation("eager")
    arguments = dict(inputs)
    if "pixel_values" in arguments:
        leaf = arguments["pixel_values"].to(eager.dtype).requires_grad_()
        arguments["pixel_values"] = leaf
    else:
        leaf = eager.get_input_embeddings()(arguments.pop("input_ids")).detach().requires_grad_()
        arguments["inputs_embeds"] = leaf
    output = eager(**arguments, output_attentions=True, output_hidden_states=True)
    attention, hidden = list(output.attentions), list(output.hidden_states)
    y = value(output)
    gradients = torch.autograd.grad(y, [*attention, *hidden, leaf], allow_unused=True)
    filled = [
        torch.zeros_like(tensor) if gradient is None else gradient
        for gradient, tensor in zip(gradients, [*attention, *hidden, leaf], strict=True)
    ]
    # Swin's maps belong to windows, and their size differs between stages: they cannot be stacked.
    stackable = len({attention_map.shape for attention_map in attention}) == 1 and len(attention[0]) == 1
    maps, states = (attention, hidden) if stackable else ([], [])
    return Seen(
        attention=_stacked(maps),
        attention_gradient=_stacked(filled[: len(maps)]),
        hidden=_stacked(states),
        hidden_gradient=_stacked(filled[len(maps) : len(maps) + len(states)]),
        inputs=_plain(leaf[0]),
        input_gradient=_plain(filled[-1][0]),
        logits=_plain(output.logits[0]),
    )


def _stacked(tensors: list[Tensor]) -> np.ndarray:
    return np.stack([_plain(tensor[0]) for tensor in tensors]) if tensors else np.empty((0, 0, 0, 0))


def _plain(tensor: Tensor) -> np.ndarray:
    return tensor.detach().double().numpy()
