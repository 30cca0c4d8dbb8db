"""The weights of a model, under the names that replicas use."""

import re
from typing import Any

from torch import Tensor

#: Names of ViT's weights in transformers 5.0, and since then.
_VIT = (
    (r"\bencoder\.layer\.", "layers."),
    (r"\battention\.attention\.(query|key|value)\b", lambda found: f"attention.{found[1][0]}_proj"),
    (r"\battention\.output\.dense\b", "attention.o_proj"),
    (r"\bintermediate\.dense\b", "mlp.fc1"),
    (r"\boutput\.dense\b", "mlp.fc2"),
)


def weights(model: Any) -> dict[str, Tensor]:
    state = {name: tensor.detach().double() for name, tensor in model.state_dict().items()}
    return {_renamed(name) if name.startswith("vit.") else name: tensor for name, tensor in state.items()}


def _renamed(name: str) -> str:
    for old, new in _VIT:
        name = re.sub(old, new, name)
    return name
