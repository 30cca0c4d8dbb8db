"""Attention links between two streams, drawn between the words of a text and the regions of an image."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from clearhead.render.array_codec import encode_array


@dataclass(frozen=True)
class AttentionLinks:
    """How strongly units of one stream attend to those of another, such as words to image regions.

    Attributes:
        from_stream: The stream of the queries.
        to_stream: The stream of the keys.
        weights: Attention weights, queries × keys.
        description: How the weights were aggregated.
    """

    from_stream: str
    to_stream: str
    weights: Float[np.ndarray, "unit other"]
    description: str = "Attention, mean of heads and layers"

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, with the weights encoded relative to the largest.

        Returns:
            "from", "to", "description" and "weights", quantised to bytes as `encode_array` does.
        """
        max_weight = float(np.nanmax(self.weights)) or 1.0
        weights = encode_array(self.weights, max_weight)
        return {"from": self.from_stream, "to": self.to_stream, "weights": weights, "description": self.description}
