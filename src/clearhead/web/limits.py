"""`Limits`: the numbers that bound requests, queue and time; enforced where requests are read and queued."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of the server. The page reads them from the API, to check inputs before it sends them.

    Attributes:
        waiting: Requests that run or wait; further ones get 429 with a Retry-After header.
        seconds: Time from a request to the end of its response, including the wait; then it is aborted.
        patience: Seconds after which a waiting request is no longer overtaken by cheaper ones.
        together: Requests of equal input length that may share a pass.
        workers: Worker threads.
        body_bytes: Size of a request body.
        picture_bytes: Size of an image file.
        pixels: Pixels of an image, or of all images of a request.
        characters: Length of a text.
        units: Units of an input whose attention heads are shown.
        map_bytes: Size of the attention maps that are cached.
        methods: Methods of one request.
        explanations: Explanations that are shown together.
        reading_seconds: Time to receive a request body.
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
        """Return the limits by name."""
        return asdict(self)
