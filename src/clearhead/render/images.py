"""Images and heat maps as pixels: resizing, overlaying, and encoding as data URLs."""

from base64 import b64encode
from io import BytesIO

import numpy as np
from jaxtyping import Int, UInt8
from PIL import Image

from clearhead.explanation.explanation import Explanation
from clearhead.images import upsample_heat_map
from clearhead.render.colours import (
    COLOUR_LEVELS_PER_SIGN,
    NO_SCORE_LEVEL,
    Rgb,
    compute_colour_levels,
    compute_vmax,
    iter_colour_levels,
    map_score_to_colour,
)
from clearhead.units import Box

RgbArray = UInt8[np.ndarray, "height width 3"]
#: The longest side of an image on a page.
MAX_IMAGE_SIDE = 336


def fit_image_size(height: int, width: int, max_side: int = MAX_IMAGE_SIDE) -> tuple[int, int]:
    """Return height and width scaled to a longest side, with the same proportions; small images are enlarged."""
    factor = max_side / max(height, width)
    return max(1, round(height * factor)), max(1, round(width * factor))


def compute_display_size(explanation: Explanation, max_side: int = MAX_IMAGE_SIDE) -> tuple[int, int]:
    """Return the height and width at which to draw an explanation: that of its image, or of its grid of patches."""
    if explanation.image is not None:
        height, width, _ = explanation.image.shape
        return fit_image_size(height, width, max_side)
    rows, columns = explanation.units.grid or (1, 1)
    return fit_image_size(rows, columns, max_side)


def resize_image(image: RgbArray, height: int, width: int) -> RgbArray:
    """Resize an image with Lanczos resampling."""
    return np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.LANCZOS))


def to_light_greyscale(image: RgbArray) -> RgbArray:
    """Convert an image to greyscale, a little lighter, so that only the heat map has colour."""
    light = np.asarray(Image.fromarray(image).convert("L"), dtype=float) * 0.8 + 0.2 * 255
    return np.rint(light).astype(np.uint8)[..., None].repeat(3, -1)


def overlay_heat_map(
    explanation: Explanation, height: int, width: int, opacity: float = 0.85, vmax: float | None = None
) -> RgbArray:
    """Draw the heat map, or the boxes of regions, over the grey image.

    Args:
        explanation: An explanation of an image.
        height: The height of the result in pixels.
        width: The width of the result in pixels.
        opacity: The opacity of the strongest colour.
        vmax: The score of full colour. Default: the largest score.

    Returns:
        RGB pixels.
    """
    compute_levels = _compute_box_levels if explanation.units.grid is None else _compute_grid_levels
    levels = compute_levels(explanation, height, width, vmax or compute_vmax(explanation))
    overlay = _build_overlay_palette()[levels + COLOUR_LEVELS_PER_SIGN]
    alpha = overlay[..., 3:] / 255 * opacity
    background = np.full((height, width, 3), 255.0)
    if explanation.image is not None:
        background = to_light_greyscale(resize_image(explanation.image, height, width)).astype(float)
    return np.rint(background * (1 - alpha) + overlay[..., :3] * alpha).astype(np.uint8)


def _compute_grid_levels(
    explanation: Explanation, height: int, width: int, vmax: float
) -> Int[np.ndarray, "{height} {width}"]:
    """Return the colour level of each pixel of the heat map, upsampled to height × width."""
    return compute_colour_levels(upsample_heat_map(explanation.heat_map(), height, width), vmax)


def _compute_box_levels(
    explanation: Explanation, height: int, width: int, vmax: float
) -> Int[np.ndarray, "{height} {width}"]:
    """Boxes filled with their colour level, the strongest on top."""
    levels = compute_colour_levels(explanation.scores, vmax)
    pixels = np.zeros((height, width), dtype=int)
    for index in np.argsort(np.abs(levels), kind="stable"):
        box = (explanation.units.boxes or ())[index]
        if box is not None:
            left, top, right, bottom = convert_box_to_pixels(box, height, width)
            pixels[top:bottom, left:right] = levels[index]
    return pixels


def convert_box_to_pixels(box: Box, height: int, width: int) -> tuple[int, int, int, int]:
    """Convert a relative box to pixels, clipped to the image and at least one pixel wide and high.

    Args:
        box: Left, top, right and bottom as fractions of the image.
        height: The height of the image in pixels.
        width: The width of the image in pixels.

    Returns:
        Left, top, right and bottom in pixels.

    Example:
        >>> convert_box_to_pixels((-0.1, 0.5, 0.25, 0.5), 10, 20)
        (0, 5, 5, 6)
    """
    left = min(max(int(box[0] * width), 0), width - 1)
    top = min(max(int(box[1] * height), 0), height - 1)
    right = max(min(round(box[2] * width), width), left + 1)
    bottom = max(min(round(box[3] * height), height), top + 1)
    return left, top, right, bottom


def draw_box_outline(pixels: RgbArray, box: Box, rgb: Rgb = (0, 0, 0)) -> RgbArray:
    """Draw the outline of a box, one pixel wide.

    Args:
        pixels: The image.
        box: Left, top, right, bottom, in fractions of the image.
        rgb: Colour of the line.

    Returns:
        A copy of the image.
    """
    image = pixels.copy()
    left, top, right, bottom = convert_box_to_pixels(box, *pixels.shape[:2])
    image[[top, bottom - 1], left:right] = rgb
    image[top:bottom, [left, right - 1]] = rgb
    return image


def _build_overlay_palette() -> UInt8[np.ndarray, "level 4"]:
    """The RGBA colour of each level over an image: the nearer to zero, the more transparent."""
    strengths = [level / COLOUR_LEVELS_PER_SIGN for level in iter_colour_levels() if level != NO_SCORE_LEVEL]
    colours = [(*map_score_to_colour(np.sign(s) * max(abs(s), 0.85)), round(255 * abs(s) ** 0.8)) for s in strengths]
    return np.array([*colours, (*map_score_to_colour(np.nan), 230)], dtype=np.uint8)


def is_small_image(image: RgbArray) -> bool:
    """Whether an image is so small that its pixels should stay visible."""
    return max(image.shape[:2]) <= 64


def encode_image_data_url(image: RgbArray, height: int, width: int) -> str:
    """Encode an image as a data URL: resized as JPEG, or a small one unchanged as PNG."""
    if is_small_image(image):
        return _encode_data_url(Image.fromarray(image), "PNG", optimize=True)
    return _encode_data_url(Image.fromarray(resize_image(image, height, width)), "JPEG", quality=85, optimize=True)


def _encode_data_url(image: Image.Image, file_format: str, **options: object) -> str:
    """Encode an image as a base64 data URL; `options` are passed to PIL's `save`."""
    buffer = BytesIO()
    image.save(buffer, file_format, **options)
    return f"data:image/{file_format.lower()};base64,{b64encode(buffer.getvalue()).decode()}"
