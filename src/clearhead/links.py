"""Links between the units of two streams, to be drawn between the words and the regions of one picture."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from clearhead.render.array_codec import packed


@dataclass(frozen=True)
class Links:
    """How strongly units of one stream look at those of another, such as words at regions of a picture."""

    from_stream: str
    to_stream: str
    weights: Float[np.ndarray, "unit other"]
    about: str = "Attention, mean of heads and layers"

    def to_dict(self) -> dict[str, Any]:
        full = float(np.nanmax(self.weights)) or 1.0
        weights = packed(self.weights, full)
        return {"from": self.from_stream, "to": self.to_stream, "weights": weights, "rows": self.about}
