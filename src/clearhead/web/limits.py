"""How much one request may ask for, and how many may wait."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Limits:
    """What the page accepts; the page itself is told, so that it can say so before anything is sent.

    waiting: requests that are worked on or wait; whoever comes then is told when to come again (429)
    seconds: from a request to the end of its answer, waiting included; what is not done by then is given up
    patience: after so many seconds a request is no longer passed by cheaper ones
    together: requests of equal length that may share a pass
    units: of an input whose heads are looked at one by one; map_bytes: of all heads' maps that are kept to be looked at
    """

    waiting: int = 64
    seconds: float = 120.0
    patience: float = 5.0
    together: int = 16
    workers: int = 2
    body_bytes: int = 24 * 2**20
    picture_bytes: int = 12 * 2**20
    pixels: int = 24_000_000
    characters: int = 20_000
    units: int = 1024
    map_bytes: int = 128 * 2**20
    methods: int = 12
    explanations: int = 24
    reading_seconds: float = 30.0

    def to_dict(self) -> dict[str, float]:
        return asdict(self)
