"""Decode and encode images of requests; size limits are enforced before any pixel is decoded."""

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

#: Formats whose decoders start no other program, and which contain no scripts.
ALLOWED_IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_DATA_URL_PATTERN = re.compile(r"data:image/[a-z+.-]{1,20};base64,")


@dataclass(frozen=True)
class UploadedImage:
    """An uploaded image file that passed the checks of its header, not decoded yet.

    Attributes:
        content: The bytes of the file.
        num_pixels: Width × height, as its header states.
    """

    content: bytes
    num_pixels: int


def decode_base64_image(encoded: str, limits: Limits) -> "Image":
    """Decode a base64 string, with or without a `data:image/…;base64,` prefix, to an RGB PIL image.

    Raises:
        InputError: The image is too large, damaged, or of an unknown format.
    """
    return decode_uploaded_image(parse_image_upload(encoded, limits), limits)


def parse_image_upload(encoded: str, limits: Limits) -> UploadedImage:
    """Check format, size and, for a PNG, the checksums of a base64 image, without decoding the pixels.

    Raises:
        InputError: The image is too large, damaged, or of an unknown format.
    """
    prefix = _DATA_URL_PATTERN.match(encoded)
    body = encoded[prefix.end() :] if prefix else encoded
    if len(body) * 3 / 4 > limits.max_image_bytes:
        raise InputError(f"the image is too large: at most {limits.max_image_bytes // 2**20} MiB are accepted")
    try:
        content = b64decode(body, validate=True)
    except (binascii.Error, ValueError):
        raise InputError("the image is not encoded in base64: send the bytes of a PNG or JPEG file in base64") from None
    with _translated_decoder_errors(limits):
        image = _open_without_decoding(content)
        width, height = image.size
        if width * height > limits.max_image_pixels:
            raise InputError(
                f"the image has {width:,} × {height:,} pixels, but at most {limits.max_image_pixels:,} in total are "
                "accepted: use a smaller image"
            )
        image.verify()
    return UploadedImage(content, width * height)


def decode_uploaded_image(upload: UploadedImage, limits: Limits) -> "Image":
    """Decode an image to RGB, rotated according to its EXIF orientation.

    Raises:
        InputError: The image is damaged.
    """
    from PIL import ImageOps

    from clearhead.adapters.readers.image import convert_to_rgb

    with _translated_decoder_errors(limits):
        return convert_to_rgb(ImageOps.exif_transpose(_open_without_decoding(upload.content)))


def _open_without_decoding(content: bytes) -> "Image":
    """Read the header of an image file; Pillow decodes the pixels later."""
    from PIL import Image

    return Image.open(io.BytesIO(content), formats=ALLOWED_IMAGE_FORMATS)


@contextmanager
def _translated_decoder_errors(limits: Limits) -> Iterator[None]:
    """Translate errors of image decoders to an `InputError` of one line."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about large images: our limit is lower
            yield
    except InputError:
        raise
    except Image.DecompressionBombError:  # Pillow's own limit, several times larger than ours
        raise InputError(
            f"the image has far more than the {limits.max_image_pixels:,} pixels that are accepted"
        ) from None
    except Exception as error:  # decoders raise various exceptions on damaged files
        reason = "unknown format" if type(error).__name__ == "UnidentifiedImageError" else "damaged"
        raise InputError(f"the image cannot be opened ({reason}): send a PNG, JPEG, WebP, GIF or BMP") from None


def encode_png_data_url(image: UInt8[np.ndarray, "height width 3"]) -> str:
    """Encode an image losslessly as a PNG data URL."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return f"data:image/png;base64,{b64encode(file.getvalue()).decode()}"


def decode_image_array(encoded: str, limits: Limits) -> UInt8[np.ndarray, "height width 3"]:
    """Decode an image to an array, the inverse of `encode_png_data_url`."""
    return np.asarray(decode_base64_image(encoded, limits))
