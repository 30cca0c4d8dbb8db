"""Example inputs of a concept: read from a folder, texts that contain certain words, or generated textures."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

from clearhead.data.sources import IMAGE_SUFFIXES, TEXT_SUFFIX
from clearhead.errors import InputError, unknown_value_error

RGBImage = UInt8[np.ndarray, "height width 3"]
GreyImage = Float[np.ndarray, "height width"]


def read_concept_folder(folder: str | Path, prefix: str = "", max_inputs: int | None = None) -> list[Any]:
    """Read the images of a folder, or the lines of its text files, in the order of the file names.

    Args:
        folder: The folder; if it holds images, text files are ignored.
        prefix: Only files whose names begin with it, for folders that several concepts share.
        max_inputs: Maximum number of inputs; None for all.

    Returns:
        Paths of images, or lines of text.

    Raises:
        InputError: The folder does not exist, or holds no images and no text.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"there is no folder {str(folder)!r}")
    files = sorted(file for file in folder.iterdir() if file.name.startswith(prefix))
    images: list[Any] = [file for file in files if file.suffix.lower() in IMAGE_SUFFIXES]
    lines = [
        line for file in files if file.suffix == TEXT_SUFFIX for line in file.read_text(encoding="utf-8").splitlines()
    ]
    inputs = images or [line.strip() for line in lines if line.strip()]
    if not inputs:
        prefix_hint = f" whose names begin with {prefix!r}" if prefix else ""
        raise InputError(f"{str(folder)!r} holds no images and no {TEXT_SUFFIX} files{prefix_hint}")
    return inputs[:max_inputs]


def select_texts_with_words(words: Iterable[str], texts: Iterable[str], max_texts: int | None = None) -> list[str]:
    """Select the texts that contain one of the words as a whole word, ignoring case.

    Args:
        words: The words to search for.
        texts: The texts to search.
        max_texts: Stop after this many texts; None for all.

    Returns:
        The texts with a match, in their order.

    Raises:
        InputError: The word list is empty, or no text contains a word of it.

    Example:
        >>> select_texts_with_words(["good"], ["a good film", "goodness", "Good!"])
        ['a good film', 'Good!']
    """
    word_list = list(words)
    if not word_list:
        raise InputError("the word list is empty")
    pattern = re.compile(r"(?<!\w)(?:" + "|".join(map(re.escape, word_list)) + r")(?!\w)", re.IGNORECASE)
    matches: list[str] = []
    for text in texts:
        if pattern.search(text):
            matches.append(text)
            if max_texts is not None and len(matches) == max_texts:
                break
    if not matches:
        shown_words = ", ".join(word_list[:8]) + (" …" if len(word_list) > 8 else "")
        raise InputError(f"no text contains a word of the list ({shown_words}): use other words, or more texts")
    return matches


def draw_textures(texture: str, num_images: int, image_size: int = 128, seed: int = 0) -> list[RGBImage]:
    """Generate images of a texture, each with its own period, angle and pair of colours.

    Args:
        texture: "striped", "dotted", "bubbly" or "checkered".
        num_images: Number of images.
        image_size: Height and width in pixels.
        seed: Seed of the random numbers.

    Returns:
        The images as arrays (height × width × 3).

    Raises:
        InputError: An unknown texture, no images, or a size below 4 pixels.

    Example:
        >>> draw_textures("striped", 2, image_size=8)[0].shape
        (8, 8, 3)
    """
    if texture not in TEXTURE_GENERATORS:
        raise unknown_value_error("texture", texture, TEXTURE_GENERATORS)
    if num_images < 1 or image_size < 4:
        raise InputError(
            f"num_images={num_images}, image_size={image_size} are not valid: use at least one image of at least 4 "
            "pixels"
        )
    rng = np.random.default_rng([seed, list(TEXTURE_GENERATORS).index(texture)])
    return [_colourise(TEXTURE_GENERATORS[texture](rng, image_size), rng) for _ in range(num_images)]


def overlay_texture(images: Sequence[Any], texture_name: str, opacity: float = 0.35, seed: int = 0) -> list[RGBImage]:
    """Blend a generated texture into images, so that they differ from the originals in the concept only.

    Textures without a photograph differ from photographs in much more than their pattern, and a concept vector of them
    captures all these differences.

    Args:
        images: Arrays, PIL images or paths.
        texture_name: "striped", "dotted", "bubbly" or "checkered".
        opacity: Weight of the texture, above 0 and at most 1.
        seed: Seed of the random numbers.

    Returns:
        The blended images as arrays, each of the size of its original.

    Raises:
        InputError: The opacity is out of range, or the texture is unknown.

    Example:
        >>> overlay_texture([np.zeros((8, 12, 3), np.uint8)], "dotted")[0].shape
        (8, 12, 3)
    """
    if not 0 < opacity <= 1:
        raise InputError(f"opacity={opacity} is not valid: it must be above 0 and at most 1")
    arrays = [np.asarray(image if isinstance(image, np.ndarray) else _open_image(image)) for image in images]
    image_size = max(max(array.shape[:2]) for array in arrays)
    textures = draw_textures(texture_name, len(arrays), image_size, seed)
    blended = []
    for array, texture in zip(arrays, textures, strict=True):
        height, width = array.shape[:2]
        blended.append(((1 - opacity) * array + opacity * texture[:height, :width]).round().astype(np.uint8))
    return blended


def _open_image(image: Any) -> Any:
    """Open a path or file, or take a PIL image, and convert it to RGB."""
    from PIL import Image

    from clearhead.adapters.readers.image import convert_to_rgb

    if not isinstance(image, Image.Image):
        image = Image.open(image)
    return convert_to_rgb(image)


def _make_rotated_coordinates(rng: np.random.Generator, size: int) -> tuple[GreyImage, GreyImage, float]:
    """Randomly rotated and shifted coordinates in units of the texture's period, and the period in pixels."""
    angle = rng.uniform(0, np.pi)
    period = size * rng.uniform(0.08, 0.25)
    y, x = np.mgrid[:size, :size] / period
    shift = rng.uniform(0, 1, 2)
    return (
        x * np.cos(angle) + y * np.sin(angle) + shift[0],
        y * np.cos(angle) - x * np.sin(angle) + shift[1],
        float(period),
    )


def _draw_stripes(rng: np.random.Generator, size: int) -> GreyImage:
    """Stripes as a steep clipped cosine in a random direction; how wide the bright ones are is random."""
    u, _, _ = _make_rotated_coordinates(rng, size)
    return np.clip(0.5 + 4 * (np.cos(2 * np.pi * u) - rng.uniform(-0.4, 0.4)), 0, 1)


def _draw_checkerboard(rng: np.random.Generator, size: int) -> GreyImage:
    """Rotated squares of 0 and 1, one period wide."""
    u, v, _ = _make_rotated_coordinates(rng, size)
    return np.asarray((np.floor(u) + np.floor(v)) % 2, dtype=float)


def _draw_dots(rng: np.random.Generator, size: int) -> GreyImage:
    """Bright discs of one random size on a rotated grid; their edges fade over one pixel."""
    u, v, period = _make_rotated_coordinates(rng, size)
    distance = np.hypot(u % 1 - 0.5, v % 1 - 0.5)
    return np.clip((rng.uniform(0.2, 0.38) - distance) * period + 0.5, 0, 1)


def _draw_bubbles(rng: np.random.Generator, size: int) -> GreyImage:
    """Discs with bright rims, of random sizes and positions; later ones cover earlier ones."""
    y, x = np.mgrid[:size, :size]
    plane = np.zeros((size, size))
    for _ in range(int(rng.integers(15, 40))):
        radius = size * rng.uniform(0.03, 0.15)
        distance = np.hypot(x - rng.uniform(0, size), y - rng.uniform(0, size)) / radius
        plane = np.where(distance < 1, np.clip(distance**4 * 1.1, 0.1, 1), plane)
    return plane


TEXTURE_GENERATORS = {
    "striped": _draw_stripes,
    "dotted": _draw_dots,
    "bubbly": _draw_bubbles,
    "checkered": _draw_checkerboard,
}


def _colourise(plane: GreyImage, rng: np.random.Generator) -> RGBImage:
    """Interpolate between a random dark and a random light colour, and add a little noise."""
    dark = rng.uniform(0, 0.45, 3)
    light = rng.uniform(0.55, 1, 3)
    image = plane[..., None] * light + (1 - plane[..., None]) * dark
    return np.asarray((np.clip(image + rng.normal(0, 0.02, image.shape), 0, 1) * 255).round(), dtype=np.uint8)
