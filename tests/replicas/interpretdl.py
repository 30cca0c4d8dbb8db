"""InterpretDL's BT and GA, from the specification (2.12): gradients of two classes, and z at the first norm."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from tests.replicas import beyond_intuition_head as head
from tests.replicas import beyond_intuition_token as token
from tests.replicas.plain_pass import Seen

Matrix = Float[np.ndarray, "row unit"]


def head_wise(predicted: Seen, wished: Matrix, layers: list[int]) -> Matrix:
    """θ by the predicted class; the feedback is that of the class asked for."""
    return head.matrix(predicted, wished, layers)


def after_attention(model: Any, seen: Seen, layer: int) -> Float[np.ndarray, "unit model"]:
    """The input of a BERT layer's first norm: attention's output, projected, added to what the layer was given."""
    z, block = torch.tensor(seen.hidden[layer]), model.bert.encoder.layer[layer]
    values = block.attention.self.value(z).detach().numpy()
    width = values.shape[-1] // seen.heads
    mixed = [seen.attention[layer, h] @ values[:, h * width : (h + 1) * width] for h in range(seen.heads)]
    projected = block.attention.output.dense(torch.tensor(np.concatenate(mixed, -1)))
    return (z + projected).detach().numpy()


def token_wise_on_bert(model: Any, seen: Seen, wished: Matrix, layers: list[int]) -> Matrix:
    perceived = np.eye(seen.units)
    for layer in layers:
        rho = np.array(token.transported(model, seen, layer))
        before = np.linalg.norm(seen.hidden[layer], axis=-1)
        rho = rho * before / np.linalg.norm(after_attention(model, seen, layer), axis=-1)
        perceived = perceived + (seen.attention[layer].mean(0) * rho[None]) @ perceived
    return perceived * wished
