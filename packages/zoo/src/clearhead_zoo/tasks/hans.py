"""Images with a word pasted on them: the word alone is the label, and its position is known exactly, in pixels.

A Clever Hans model uses a cue instead of the animal. Here the cue is "cat" or "dog" in some size, colour, position and
tilt, outlined so that it is legible on anything; the image below it is sampled independently of the word. Any images
can be used (synthetic ones by default), so the ground truth can be generated without any data.

>>> example = make_examples(1, seed=0)[0]
>>> example.label, example.image.shape
('cat', (96, 96, 3))
>>> left, top, right, bottom = example.box
>>> bool(example.mask[top:bottom, left:right].sum() == example.mask.sum() > 100)
True

Needs numpy and Pillow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from clearhead_zoo.tasks import make_generator

__all__ = [
    "IMAGE_SIZE",
    "LABELS",
    "Stamp",
    "StampedImage",
    "crop_to_square",
    "draw_background",
    "draw_stamp",
    "draw_stamp_pool",
    "fill_pixels",
    "make_examples",
    "paste_stamp",
]

LABELS = ("cat", "dog")
IMAGE_SIZE = 96
#: The largest a stamp can be, in rows and columns.
MAX_STAMP_SIZE = (48, 80)
LETTER_HEIGHTS = (17, 28)
MAX_TILT_DEGREES = 12.0
#: What is more transparent than this is not drawn, so that the box ends where the eye says it does.
MIN_OPACITY = 0.05
PATCH_SIZE = 8
FILL_MODES = ("mean", "blur")

Box = tuple[int, int, int, int]


@dataclass(frozen=True, eq=False)
class Stamp:
    """A drawn word: its pixels (red, green, blue, opacity), cut to the drawn part."""

    label: str
    pixels: np.ndarray


@dataclass(frozen=True, eq=False)
class StampedImage:
    """An image with a word on it.

    box: left, top, right, bottom of the pasted word (right and bottom are the first column and row after it)
    mask: the pixels of the word
    original_image: the image without the word
    source_index: index of the given image; None for a synthetic image
    """

    id: str
    image: np.ndarray
    label: str
    box: Box
    mask: np.ndarray
    original_image: np.ndarray
    source_index: int | None = None

    @property
    def box_mask(self) -> np.ndarray:
        """The pixels of the box."""
        inside = np.zeros(self.mask.shape, dtype=bool)
        left, top, right, bottom = self.box
        inside[top:bottom, left:right] = True
        return inside

    def sample_control_mask(self, rng: np.random.Generator) -> np.ndarray:
        """About as many pixels as the box has, elsewhere: whole patches that do not touch it, drawn at random."""
        cells = np.add.reduceat(
            np.add.reduceat(self.box_mask, range(0, IMAGE_SIZE, PATCH_SIZE), 0), range(0, IMAGE_SIZE, PATCH_SIZE), 1
        )
        free = np.flatnonzero(cells == 0)
        count = min(len(free), round(self.box_mask.sum() / PATCH_SIZE**2))
        chosen = np.zeros(cells.size, dtype=bool)
        chosen[rng.permutation(free)[:count]] = True
        return chosen.reshape(cells.shape).repeat(PATCH_SIZE, axis=0).repeat(PATCH_SIZE, axis=1)


def make_examples(
    count: int, seed: int, split: str = "held-out", images: Sequence[np.ndarray] | None = None
) -> list[StampedImage]:
    """The two words in turn, on images drawn without regard to them, each used once before any is used again."""
    rng = make_generator(seed, split)
    made: list[StampedImage] = []
    order: list[int] = []
    for number in range(count):
        source = None
        if images is None:
            bare = draw_background(rng)
        else:
            order = order or rng.permutation(len(images)).tolist()
            source = order.pop()
            bare = crop_to_square(images[source])
        drawn = draw_stamp(LABELS[number % 2], rng)
        made.append(paste_stamp(bare, drawn, rng, id=f"hans-{split}-{seed}-{number}", source_index=source))
    return made


def paste_stamp(
    image: np.ndarray, drawn_stamp: Stamp, rng: np.random.Generator, id: str = "hans", source_index: int | None = None
) -> StampedImage:
    """The word somewhere on the image, all of it inside. Any image: it is cut to a square of 96 pixels first."""
    bare = crop_to_square(image)
    height, width = drawn_stamp.pixels.shape[:2]
    top, left = int(rng.integers(IMAGE_SIZE - height + 1)), int(rng.integers(IMAGE_SIZE - width + 1))
    box = (left, top, left + width, top + height)
    opacity = drawn_stamp.pixels[..., 3:].astype(np.float32) / 255
    beneath = bare[top : top + height, left : left + width]
    pasted, mask = bare.copy(), np.zeros((IMAGE_SIZE, IMAGE_SIZE), dtype=bool)
    pasted[top : top + height, left : left + width] = np.round(
        opacity * drawn_stamp.pixels[..., :3] + (1 - opacity) * beneath
    ).astype(np.uint8)
    mask[top : top + height, left : left + width] = drawn_stamp.pixels[..., 3] > 0
    return StampedImage(
        id=id, image=pasted, label=drawn_stamp.label, box=box, mask=mask, original_image=bare, source_index=source_index
    )


def draw_stamp(label: str, rng: np.random.Generator) -> Stamp:
    """The word as "cat", "Cat" or "CAT", in one colour with an outline that stands out from it."""
    if label not in LABELS:
        raise ValueError(f"label={label!r} is not known; there are: {', '.join(LABELS)}")
    text = (label, label.title(), label.upper())[rng.integers(3)]
    font = _load_font(int(rng.integers(*LETTER_HEIGHTS)))
    outline, tilt = int(rng.integers(1, 3)), float(rng.uniform(-MAX_TILT_DEGREES, MAX_TILT_DEGREES))
    colour = rng.uniform(0, 255, size=3)
    other = 0 if colour @ (0.3, 0.6, 0.1) > 127 else 255
    # away from the outline's side: a medium grey would not stand out from either
    colour = 0.6 * colour + 0.4 * (255 - other)

    def drawn(stroke: int) -> np.ndarray:
        canvas = Image.new("L", MAX_STAMP_SIZE[::-1])
        middle = (MAX_STAMP_SIZE[1] // 2, MAX_STAMP_SIZE[0] // 2)
        ImageDraw.Draw(canvas).text(middle, text, fill=255, font=font, anchor="mm", stroke_width=stroke)
        return np.asarray(canvas.rotate(tilt, Image.Resampling.BICUBIC), dtype=np.float32) / 255

    inner, outer = drawn(0), drawn(outline)
    outer = np.where(outer < MIN_OPACITY, 0, outer)
    rows, columns = (np.flatnonzero((outer > 0).any(axis=axis)) for axis in (1, 0))
    cut = slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)
    ink = inner[cut][..., None]
    pixels = np.concatenate([ink * colour + (1 - ink) * other, 255 * outer[cut][..., None]], axis=-1)
    return Stamp(label, np.round(pixels).astype(np.uint8))


@cache
def _load_font(height: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(height)


def draw_stamp_pool(count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Many stamps, drawn once: pixels (filled up to the largest size with full transparency), sizes, label numbers."""
    pixels = np.zeros((count, *MAX_STAMP_SIZE, 4), dtype=np.uint8)
    sizes, labels = np.zeros((count, 2), dtype=np.int64), np.arange(count) % 2
    for number, label in enumerate(labels):
        drawn = draw_stamp(LABELS[label], rng).pixels
        sizes[number] = drawn.shape[:2]
        pixels[number, : drawn.shape[0], : drawn.shape[1]] = drawn
    return pixels, sizes, labels


def fill_pixels(image: np.ndarray, pixel_mask: np.ndarray, mode: str = "mean") -> np.ndarray:
    """The image with some of its pixels hidden, by its mean colour or by a blur that no letter survives."""
    if mode not in FILL_MODES:
        raise ValueError(f"how={mode!r} is not known; there are: {', '.join(FILL_MODES)}")
    if mode == "mean":
        by = np.broadcast_to(np.round(image.mean(axis=(0, 1))).astype(np.uint8), image.shape)
    else:
        by = np.asarray(Image.fromarray(image).filter(ImageFilter.GaussianBlur(IMAGE_SIZE / 8)))
    return np.where(pixel_mask[..., None], by, image)


def crop_to_square(image: np.ndarray) -> np.ndarray:
    """The middle square of an image (grey or colour, bytes or 0 … 1) as 96 × 96 × 3 bytes."""
    if image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[-1] not in (1, 3, 4)):
        raise ValueError(
            f"an image must have the shape (height, width) or (height, width, 1, 3 or 4), not {image.shape}"
        )
    if image.dtype != np.uint8:
        image = np.round(np.clip(image, 0, 1) * 255).astype(np.uint8)
    if image.ndim == 2:
        image = image[..., None]
    colour = np.repeat(image, 3, axis=-1) if image.shape[-1] == 1 else image[..., :3]
    height, width = colour.shape[:2]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    cut = np.ascontiguousarray(colour[top : top + side, left : left + side])
    return (
        cut
        if side == IMAGE_SIZE
        else np.asarray(Image.fromarray(cut).resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BILINEAR))
    )


def draw_background(rng: np.random.Generator) -> np.ndarray:
    """A made-up image: soft patches of colour, coarse and fine."""
    layers = []
    for cells in (3, 8, 24):
        noise = Image.fromarray(rng.integers(0, 256, size=(cells, cells, 3), dtype=np.uint8))
        layers.append(np.asarray(noise.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BICUBIC), dtype=np.float32))
    shares = rng.dirichlet((2.0, 1.0, 0.5))
    return np.round(sum(share * layer for share, layer in zip(shares, layers, strict=True))).astype(np.uint8)
