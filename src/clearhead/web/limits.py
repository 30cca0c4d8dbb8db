"""`Limits`: the numbers that bound requests, queue and time; enforced where requests are read and queued."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of the server. The page reads them from the API, to check inputs before it sends them.

    Attributes:
        max_pending_requests: Requests that run or wait; further ones get 429 with a Retry-After header.
        timeout_seconds: Time from a request to the end of its response, including the wait; then it is aborted.
        starvation_seconds: Seconds after which a waiting request is no longer overtaken by cheaper ones.
        max_batch_size: Requests of equal input length that may share a pass.
        num_workers: Worker threads.
        max_body_bytes: Size of a request body.
        max_image_bytes: Size of an image file.
        max_image_pixels: Pixels of an image, or of all images of a request.
        max_text_characters: Length of a text.
        max_attention_units: Units of an input whose attention heads are shown.
        max_cached_map_bytes: Size of the attention maps that are cached.
        max_methods: Methods of one request.
        max_explanations: Explanations that are shown together.
        body_timeout_seconds: Time to receive a request body.
    """

    max_pending_requests: int = 64
    timeout_seconds: float = 120.0
    starvation_seconds: float = 5.0
    max_batch_size: int = 16
    num_workers: int = 2
    max_body_bytes: int = 24 * 2**20
    max_image_bytes: int = 12 * 2**20
    max_image_pixels: int = 24_000_000
    max_text_characters: int = 20_000
    max_attention_units: int = 1024
    max_cached_map_bytes: int = 128 * 2**20
    max_methods: int = 12
    max_explanations: int = 24
    body_timeout_seconds: float = 30.0

    def to_dict(self) -> dict[str, float]:
        """Return the limits by name.

        Returns:
            Every limit by the name of its field.
        """
        return asdict(self)
