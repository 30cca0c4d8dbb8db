"""Beyond Intuition (Chen et al., 2023), token-wise: Ã_ij = E_h A_ij · ‖W_o v_j‖ / ‖z_j‖, with full matrices."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch.nn import functional

from tests.replicas.plain_pass import Seen
from tests.replicas.weights import weights

Matrix = Float[np.ndarray, "row unit"]


def compute_transport(model: Any, seen: Seen, layer: int) -> list[float]:
    """Return ρ of every token, from the weights of a BERT or a ViT."""
    z = torch.tensor(seen.hidden[layer])
    if model.config.model_type == "bert":
        block = model.bert.encoder.layer[layer]
        values, project = block.attention.self.value(z), block.attention.output.dense.weight
    else:
        parameters, at = weights(model), f"vit.layers.{layer}"
        norm, value = (
            (parameters[f"{at}.{module}.weight"], parameters[f"{at}.{module}.bias"])
            for module in ("layernorm_before", "attention.v_proj")
        )
        normed = functional.layer_norm(z, z.shape[-1:], *norm, model.config.layer_norm_eps)
        values, project = functional.linear(normed, *value), parameters[f"{at}.attention.o_proj.weight"]
    projected = (values @ project.T).detach().numpy()
    return [float(np.linalg.norm(projected[j]) / np.linalg.norm(seen.hidden[layer][j])) for j in range(seen.units)]


def matrix(model: Any, seen: Seen, feedback: Matrix, layers: Sequence[int] = (1, 2)) -> Matrix:
    perception = np.eye(seen.units)
    for layer in layers:
        mixed = seen.attention[layer].mean(0) * np.array(compute_transport(model, seen, layer))[None, :]
        perception = perception + mixed @ perception
    return perception * feedback


def scores(
    model: Any, seen: Seen, feedback: Matrix, readout: Float[np.ndarray, "unit"], layers: Sequence[int] = (1, 2)
) -> Float[np.ndarray, "unit"]:
    return readout @ matrix(model, seen, feedback, layers)
