"""A model's weights, by the names that replicas read them under."""

import re
from typing import Any

from torch import Tensor

#: What ViT's are called in transformers 5.0, and since.
_VIT = (
    (r"\bencoder\.layer\.", "layers."),
    (r"\battention\.attention\.(query|key|value)\b", lambda found: f"attention.{found[1][0]}_proj"),
    (r"\battention\.output\.dense\b", "attention.o_proj"),
    (r"\bintermediate\.dense\b", "mlp.fc1"),
    (r"\boutput\.dense\b", "mlp.fc2"),
)


def weights(model: Any) -> dict[str, Tensor]:
    found = {name: part.detach().double() for name, part in model.state_dict().items()}
    return {_renamed(name) if name.startswith("vit.") else name: part for name, part in found.items()}


def _renamed(name: str) -> str:
    for old, new in _VIT:
        name = re.sub(old, new, name)
    return name
