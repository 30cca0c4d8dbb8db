"""Pictures and their heat maps as pixels: scaled up, laid over one another, packed into an address."""

from base64 import b64encode
from io import BytesIO

import numpy as np
from jaxtyping import Int, UInt8
from PIL import Image

from clearhead.explanation.explanation import Explanation
from clearhead.images import upsample
from clearhead.render.colours import LEVELS, NO_SCORE, Rgb, colour, every_level, largest, levels
from clearhead.units import Box

Pixels = UInt8[np.ndarray, "height width 3"]
#: The longest side of a picture in a page.
LONGEST = 336


def fitted(height: int, width: int, longest: int = LONGEST) -> tuple[int, int]:
    """Height and width within a square, proportions kept; small pictures grow."""
    factor = longest / max(height, width)
    return max(1, round(height * factor)), max(1, round(width * factor))


def size(explanation: Explanation, longest: int = LONGEST) -> tuple[int, int]:
    """How large to draw: as the picture, or as the grid of patches where there is no picture."""
    if explanation.picture is not None:
        height, width, _ = explanation.picture.shape
        return fitted(height, width, longest)
    rows, columns = explanation.units.grid or (1, 1)
    return fitted(rows, columns, longest)


def resized(picture: Pixels, height: int, width: int) -> Pixels:
    return np.asarray(Image.fromarray(picture).resize((width, height), Image.Resampling.LANCZOS))


def grey(picture: Pixels) -> Pixels:
    """The picture without colour and a little lighter, so that colour is the heat map's alone."""
    light = np.asarray(Image.fromarray(picture).convert("L"), dtype=float) * 0.8 + 0.2 * 255
    return np.rint(light).astype(np.uint8)[..., None].repeat(3, -1)


def overlaid(
    explanation: Explanation, height: int, width: int, opacity: float = 0.85, full: float | None = None
) -> Pixels:
    """The grey picture with the heat map over it, or with its regions; full colour is the largest score, or `full`."""
    painted = _in_boxes if explanation.units.grid is None else _on_grid
    glaze = _glaze()[painted(explanation, height, width, full or largest(explanation)) + LEVELS]
    alpha = glaze[..., 3:] / 255 * opacity
    below = np.full((height, width, 3), 255.0)
    if explanation.picture is not None:
        below = grey(resized(explanation.picture, height, width)).astype(float)
    return np.rint(below * (1 - alpha) + glaze[..., :3] * alpha).astype(np.uint8)


def _on_grid(explanation: Explanation, height: int, width: int, full: float) -> Int[np.ndarray, "{height} {width}"]:
    return levels(upsample(explanation.heat_map(), height, width), full)


def _in_boxes(explanation: Explanation, height: int, width: int, full: float) -> Int[np.ndarray, "{height} {width}"]:
    """Boxes filled with their level, the strongest on top."""
    steps = levels(explanation.scores, full)
    painted = np.zeros((height, width), dtype=int)
    for place in np.argsort(np.abs(steps), kind="stable"):
        box = (explanation.units.boxes or ())[place]
        if box is not None:
            left, top, right, bottom = edges(box, height, width)
            painted[top:bottom, left:right] = steps[place]
    return painted


def edges(box: Box, height: int, width: int) -> tuple[int, int, int, int]:
    """Left, top, right and bottom in pixels, within the picture and at least one pixel apart.

    >>> edges((-0.1, 0.5, 0.25, 0.5), 10, 20)
    (0, 5, 5, 6)
    """
    left, top = (min(max(int(part * size), 0), size - 1) for part, size in zip(box[:2], (width, height), strict=True))
    ends = (min(round(part * size), size) for part, size in zip(box[2:], (width, height), strict=True))
    right, bottom = (max(end, start + 1) for end, start in zip(ends, (left, top), strict=True))
    return left, top, right, bottom


def framed(pixels: Pixels, box: Box, rgb: Rgb = (0, 0, 0)) -> Pixels:
    """The picture with the outline of a box."""
    drawn = pixels.copy()
    left, top, right, bottom = edges(box, *pixels.shape[:2])
    drawn[[top, bottom - 1], left:right] = rgb
    drawn[top:bottom, [left, right - 1]] = rgb
    return drawn


def _glaze() -> UInt8[np.ndarray, "level 4"]:
    """Each level as a colour to lay over a picture: the nearer to zero, the more transparent."""
    strengths = [level / LEVELS for level in every_level() if level != NO_SCORE]
    colours = [(*colour(np.sign(s) * max(abs(s), 0.85)), round(255 * abs(s) ** 0.8)) for s in strengths]
    return np.array([*colours, (*colour(np.nan), 230)], dtype=np.uint8)


def is_small(picture: Pixels) -> bool:
    return max(picture.shape[:2]) <= 64


def picture_address(picture: Pixels, height: int, width: int) -> str:
    """The picture as a JPEG, or as a PNG where it is so small that pixels should stay pixels."""
    if is_small(picture):
        return _address(Image.fromarray(picture), "PNG", optimize=True)
    return _address(Image.fromarray(resized(picture, height, width)), "JPEG", quality=85, optimize=True)


def _address(image: Image.Image, kind: str, **options: object) -> str:
    buffer = BytesIO()
    image.save(buffer, kind, **options)
    return f"data:image/{kind.lower()};base64,{b64encode(buffer.getvalue()).decode()}"
