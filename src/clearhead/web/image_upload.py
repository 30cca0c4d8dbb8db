"""Pictures as they come over the wire and go back: bounded before anything is decoded."""

import binascii
import io
import re
import warnings
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import UInt8

from clearhead.errors import InputError
from clearhead.web.limits import Limits

if TYPE_CHECKING:
    from PIL.Image import Image

#: Formats whose decoders run no other program and hold no scripts.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_DATA_URL = re.compile(r"data:image/[a-z+.-]{1,20};base64,")


@dataclass(frozen=True)
class File:
    """A picture as it came: looked at from outside, not decoded."""

    content: bytes
    pixels: int


def picture_of(sent: str, limits: Limits) -> "Image":
    """A picture that was sent as base64, with or without `data:image/…;base64,` before it."""
    return opened(file_of(sent, limits), limits)


def file_of(sent: str, limits: Limits) -> File:
    """The file of a picture, once its format, its size and, for a PNG, its checksums are found to be right."""
    address = _DATA_URL.match(sent)
    body = sent[address.end() :] if address else sent
    if len(body) * 3 / 4 > limits.picture_bytes:
        raise InputError(f"the picture is too large: {limits.picture_bytes // 2**20} MiB are the most that is taken")
    try:
        content = b64decode(body, validate=True)
    except (binascii.Error, ValueError):
        raise InputError("the picture is not in base64: send the bytes of a PNG or JPEG file in base64") from None
    with _decoding(limits):
        found = _unread(content)
        wide, high = found.size
        if wide * high > limits.pixels:
            raise InputError(
                f"the picture has {wide:,} × {high:,} pixels, and {limits.pixels:,} in all are the most that is "
                "taken: make it smaller"
            )
        found.verify()
    return File(content, wide * high)


def opened(file: File, limits: Limits) -> "Image":
    """A picture from its file."""
    from PIL import ImageOps

    from clearhead.adapters.readers.image import in_colour

    with _decoding(limits):
        return in_colour(ImageOps.exif_transpose(_unread(file.content)))


def _unread(content: bytes) -> "Image":
    """What the head of a file says; no pixel is made."""
    from PIL import Image

    return Image.open(io.BytesIO(content), formats=FORMATS)


@contextmanager
def _decoding(limits: Limits) -> Iterator[None]:
    """Whatever a decoder raises becomes one clear line."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of large pictures: ours is the smaller limit
            yield
    except InputError:
        raise
    except Image.DecompressionBombError:  # several times more than ours is the limit of the decoder itself
        raise InputError(f"the picture has far more than the {limits.pixels:,} pixels that are taken") from None
    except Exception as problem:  # decoders raise what they like about damaged files
        reason = "its content is no known format" if type(problem).__name__ == "UnidentifiedImageError" else "damaged"
        raise InputError(
            f"this is no picture that can be opened ({reason}): send a PNG, JPEG, WebP, GIF or BMP"
        ) from None


def as_url(picture: UInt8[np.ndarray, "height width 3"]) -> str:
    """A picture as a page shows it, exactly."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    return f"data:image/png;base64,{b64encode(file.getvalue()).decode()}"


def pixels_of(sent: str, limits: Limits) -> UInt8[np.ndarray, "height width 3"]:
    """The array that `as_url` was made of."""
    return np.asarray(picture_of(sent, limits))
