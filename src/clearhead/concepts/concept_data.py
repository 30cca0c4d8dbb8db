"""Inputs that show a concept: from a folder, from texts with certain words, or textures that are drawn here."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

from clearhead.data.sources import PICTURES, TEXT
from clearhead.errors import InputError, unknown

Picture = UInt8[np.ndarray, "height width 3"]
Plane = Float[np.ndarray, "height width"]


def from_folder(folder: str | Path, prefix: str = "", count: int | None = None) -> list[Any]:
    """The pictures of a folder, or the lines of its text files, in the order of their names.

    prefix: only files whose names begin so, as where several concepts share a folder
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"there is no folder {str(folder)!r}")
    files = sorted(file for file in folder.iterdir() if file.name.startswith(prefix))
    pictures: list[Any] = [file for file in files if file.suffix.lower() in PICTURES]
    lines = [line for file in files if file.suffix == TEXT for line in file.read_text(encoding="utf-8").splitlines()]
    found = pictures or [line.strip() for line in lines if line.strip()]
    if not found:
        wanted = f" whose names begin with {prefix!r}" if prefix else ""
        raise InputError(f"{str(folder)!r} holds no pictures and no {TEXT} files{wanted}")
    return found[:count]


def with_words(words: Iterable[str], texts: Iterable[str], count: int | None = None) -> list[str]:
    """The texts in which one of these words stands as a word of its own, whatever its case.

    >>> with_words(["good"], ["a good film", "goodness", "Good!"])
    ['a good film', 'Good!']
    """
    wanted = list(words)
    if not wanted:
        raise InputError("the word list is empty")
    pattern = re.compile(r"(?<!\w)(?:" + "|".join(map(re.escape, wanted)) + r")(?!\w)", re.IGNORECASE)
    found: list[str] = []
    for text in texts:
        if pattern.search(text):
            found.append(text)
            if count is not None and len(found) == count:
                break
    if not found:
        some = ", ".join(wanted[:8]) + (" …" if len(wanted) > 8 else "")
        raise InputError(f"no text holds a word of the list ({some}): give other words, or more texts")
    return found


def textures(kind: str, count: int, size: int = 128, seed: int = 0) -> list[Picture]:
    """Drawn textures, each with its own period, angle and pair of colours.

    >>> textures("striped", 2, size=8)[0].shape
    (8, 8, 3)
    """
    if kind not in TEXTURES:
        raise unknown("texture", kind, TEXTURES)
    if count < 1 or size < 4:
        raise InputError(f"count={count}, size={size}: give at least one picture of at least 4 pixels")
    rng = np.random.default_rng([seed, list(TEXTURES).index(kind)])
    return [_coloured(TEXTURES[kind](rng, size), rng) for _ in range(count)]


def laid_over(pictures: Sequence[Any], kind: str, share: float = 0.35, seed: int = 0) -> list[Picture]:
    """Pictures with a texture over them, `share` of each: they show the concept and are otherwise what they were.

    Drawn textures alone differ from photographs in much more than their pattern, and a concept vector takes it all.

    >>> laid_over([np.zeros((8, 12, 3), np.uint8)], "dotted")[0].shape
    (8, 12, 3)
    """
    if not 0 < share <= 1:
        raise InputError(f"share={share}: it must be above 0 and at most 1")
    arrays = [np.asarray(one if isinstance(one, np.ndarray) else _opened(one)) for one in pictures]
    drawn = textures(kind, len(arrays), max(max(one.shape[:2]) for one in arrays), seed)
    mixed = []
    for one, texture in zip(arrays, drawn, strict=True):
        high, wide = one.shape[:2]
        mixed.append(((1 - share) * one + share * texture[:high, :wide]).round().astype(np.uint8))
    return mixed


def _opened(picture: Any) -> Any:
    from PIL import Image

    from clearhead.adapters.readers.image import in_colour

    return in_colour(picture if isinstance(picture, Image.Image) else Image.open(picture))


def _turned(rng: np.random.Generator, size: int) -> tuple[Plane, Plane, float]:
    """Coordinates in periods of the texture, turned by some angle and shifted; and the period in pixels."""
    angle, period = rng.uniform(0, np.pi), size * rng.uniform(0.08, 0.25)
    y, x = np.mgrid[:size, :size] / period
    shift = rng.uniform(0, 1, 2)
    return (
        x * np.cos(angle) + y * np.sin(angle) + shift[0],
        y * np.cos(angle) - x * np.sin(angle) + shift[1],
        float(period),
    )


def _striped(rng: np.random.Generator, size: int) -> Plane:
    along, _, _ = _turned(rng, size)
    return np.clip(0.5 + 4 * (np.cos(2 * np.pi * along) - rng.uniform(-0.4, 0.4)), 0, 1)


def _checkered(rng: np.random.Generator, size: int) -> Plane:
    along, across, _ = _turned(rng, size)
    return np.asarray((np.floor(along) + np.floor(across)) % 2, dtype=float)


def _dotted(rng: np.random.Generator, size: int) -> Plane:
    along, across, period = _turned(rng, size)
    away = np.hypot(along % 1 - 0.5, across % 1 - 0.5)
    return np.clip((rng.uniform(0.2, 0.38) - away) * period + 0.5, 0, 1)


def _bubbly(rng: np.random.Generator, size: int) -> Plane:
    """Rings of all sizes, thrown at random; a bubble hides what lies behind it."""
    y, x = np.mgrid[:size, :size]
    plane = np.zeros((size, size))
    for _ in range(int(rng.integers(15, 40))):
        radius = size * rng.uniform(0.03, 0.15)
        away = np.hypot(x - rng.uniform(0, size), y - rng.uniform(0, size)) / radius
        plane = np.where(away < 1, np.clip(away**4 * 1.1, 0.1, 1), plane)
    return plane


TEXTURES = {"striped": _striped, "dotted": _dotted, "bubbly": _bubbly, "checkered": _checkered}


def _coloured(plane: Plane, rng: np.random.Generator) -> Picture:
    """Between a dark and a light colour, with a little noise."""
    dark, light = rng.uniform(0, 0.45, 3), rng.uniform(0.55, 1, 3)
    picture = plane[..., None] * light + (1 - plane[..., None]) * dark
    return np.asarray((np.clip(picture + rng.normal(0, 0.02, picture.shape), 0, 1) * 255).round(), dtype=np.uint8)
