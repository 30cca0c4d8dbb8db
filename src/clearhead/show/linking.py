"""Links between the units of two streams, to be drawn between the words and the regions of one picture."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from clearhead.errors import InputError
from clearhead.show.packing import packed

if TYPE_CHECKING:
    from clearhead.recording.tape import Tape


@dataclass(frozen=True)
class Links:
    """How strongly units of one stream look at those of another, such as words at regions of a picture."""

    from_stream: str
    to_stream: str
    weights: Float[np.ndarray, "unit other"]
    about: str = "Attention, mean of heads and layers"

    @classmethod
    def of(cls, tape: "Tape", from_stream: str, to_stream: str) -> "Links":
        """Mean attention from one stream to another over the layers of a tape that have it."""
        found = [
            call.mean_attention[0].double().cpu().numpy()
            for call in tape.calls
            if (call.query_stream, call.key_stream) == (from_stream, to_stream) and call.attention is not None
        ]
        if not found:
            looks = sorted({f"{call.query_stream} at {call.key_stream}" for call in tape.calls})
            raise InputError(f"{from_stream} does not look at {to_stream} in this tape: there, {', '.join(looks)}")
        return cls(from_stream, to_stream, np.mean(found, axis=0))

    def to_dict(self) -> dict[str, Any]:
        full = float(np.nanmax(self.weights)) or 1.0
        weights = packed(self.weights, full)
        return {"from": self.from_stream, "to": self.to_stream, "weights": weights, "rows": self.about}
