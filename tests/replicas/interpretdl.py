"""InterpretDL's BT and GA, from the specification (2.12): gradients of two classes, and z at the first norm."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from tests.replicas import beyond_intuition_head as head
from tests.replicas import beyond_intuition_token as token
from tests.replicas.plain_pass import Seen

Matrix = Float[np.ndarray, "row unit"]


def head_wise(predicted: Seen, feedback: Matrix, layers: list[int]) -> Matrix:
    """θ comes from the predicted class, the feedback from the target class."""
    return head.matrix(predicted, feedback, layers)


def after_attention(model: Any, seen: Seen, layer: int) -> Float[np.ndarray, "unit model"]:
    """Return the input of the first norm of a BERT layer: projected attention output plus the input of the layer."""
    z, block = torch.tensor(seen.hidden[layer]), model.bert.encoder.layer[layer]
    values = block.attention.self.value(z).detach().numpy()
    width = values.shape[-1] // seen.heads
    mixed = [seen.attention[layer, h] @ values[:, h * width : (h + 1) * width] for h in range(seen.heads)]
    projected = block.attention.output.dense(torch.tensor(np.concatenate(mixed, -1)))
    return (z + projected).detach().numpy()


def token_wise_on_bert(model: Any, seen: Seen, feedback: Matrix, layers: list[int]) -> Matrix:
    perception = np.eye(seen.units)
    for layer in layers:
        rho = np.array(token.compute_transport(model, seen, layer))
        input_norms = np.linalg.norm(seen.hidden[layer], axis=-1)
        rho = rho * input_norms / np.linalg.norm(after_attention(model, seen, layer), axis=-1)
        perception = perception + (seen.attention[layer].mean(0) * rho[None]) @ perception
    return perception * feedback
