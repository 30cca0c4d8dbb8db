"""The one colour map: orange speaks for the target, blue against it, and zero is the colour of the paper.

Colours are made in OKLCH, where equal steps look equal: lightness falls evenly from the paper to both ends, so a score
and its opposite are equally dark, and hue alone (orange and blue, which every common colour blindness keeps apart)
says the sign. Scaling happens here and only here; the raw scores stay as they were.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import cos, radians, sin

import numpy as np
from jaxtyping import Float, Int, UInt8

from clearhead.explanation.explanation import Explanation

#: Steps on each side of zero. Twenty-four are more than an eye can tell apart, and few enough to be CSS classes.
LEVELS = 24
#: The level of a unit that has no score.
NO_SCORE = LEVELS + 1

_FOR, _AGAINST = 49.0, 250.0  # hues


@dataclass(frozen=True)
class Theme:
    """Where lightness starts (the paper) and ends, how much colour there is at the end, and grey for "no score"."""

    paper: float
    end: float
    chroma: float
    grey: float


LIGHT = Theme(paper=1.0, end=0.62, chroma=0.16, grey=0.86)
DARK = Theme(paper=0.235, end=0.74, chroma=0.15, grey=0.42)

Rgb = tuple[int, int, int]


def colour(value: float, theme: Theme = LIGHT) -> Rgb:
    """The colour of a scaled score, from −1 to 1; grey for NaN.

    >>> colour(0.0), colour(1.0), colour(-1.0)
    ((255, 255, 255), (208, 98, 18), (35, 137, 226))
    """
    if np.isnan(value):
        return oklch(theme.grey, 0.0, 0.0)
    strength = min(abs(value), 1.0)
    # Colour comes a little faster than darkness, so that weak scores have a hue at all.
    chroma = theme.chroma * strength**0.8
    return oklch(theme.paper + (theme.end - theme.paper) * strength, chroma, _FOR if value > 0 else _AGAINST)


def oklch(lightness: float, chroma: float, hue: float) -> Rgb:
    """sRGB of a colour in OKLCH (Ottosson 2020), clipped to what a screen can show."""
    a, b = chroma * cos(radians(hue)), chroma * sin(radians(hue))
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    middle = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (
        4.0767416621 * long - 3.3077115913 * middle + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * middle - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * middle + 1.7076147010 * short,
    )
    red, green, blue = (round(255 * min(1.0, max(0.0, _gamma(part)))) for part in linear)
    return red, green, blue


def _gamma(linear: float) -> float:
    return 12.92 * linear if linear <= 0.0031308 else 1.055 * linear ** (1 / 2.4) - 0.055


def luminance(rgb: Rgb) -> float:
    """Relative luminance as the Web Content Accessibility Guidelines define it."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (part / 255 for part in rgb)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: Rgb, other: Rgb) -> float:
    """The contrast ratio of two colours, from 1 to 21."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def ink(background: Rgb) -> Rgb:
    """Black or white, whichever reads better; at least 4.5 : 1 on any colour."""
    black, white = (0, 0, 0), (255, 255, 255)
    return max((black, white), key=lambda text: contrast(background, text))


def hexed(rgb: Rgb) -> str:
    """
    >>> hexed((176, 85, 0))
    '#b05500'
    """
    return "#{:02x}{:02x}{:02x}".format(*rgb)


def largest(explanation: Explanation, values: Float[np.ndarray, "*rows unit"] | None = None) -> float:
    """What full colour stands for: the largest |score| of a unit that is not special.

    Special tokens often hold most of the relevance and would leave everything else white; they are clipped instead.
    """
    values = explanation.scores if values is None else values
    kept = explanation.units.drop_special()
    found = np.abs(values[..., kept] if len(kept) else values)
    found = found[np.isfinite(found)]
    return float(found.max()) if found.size and found.max() > 0 else 1.0


def scaled(values: Float[np.ndarray, "..."], full: float) -> Float[np.ndarray, "..."]:
    """Scores from −1 to 1, what lies outside clipped, NaN left alone."""
    return np.clip(np.asarray(values, dtype=np.float64) / full, -1, 1)


def levels(values: Float[np.ndarray, "..."], full: float) -> Int[np.ndarray, "..."]:
    """The step of each score, from −LEVELS to LEVELS, or NO_SCORE."""
    steps = scaled(values, full) * LEVELS
    return np.where(np.isnan(steps), NO_SCORE, np.rint(np.nan_to_num(steps))).astype(int)


def every_level() -> Iterator[int]:
    yield from range(-LEVELS, NO_SCORE + 1)


@cache
def of_level(level: int, theme: Theme = LIGHT) -> Rgb:
    return colour(np.nan if level == NO_SCORE else level / LEVELS, theme)


def painted(values: Float[np.ndarray, "*shape"], full: float, theme: Theme = LIGHT) -> UInt8[np.ndarray, "*shape 3"]:
    """Scores as pixels."""
    table = np.array([of_level(level, theme) for level in every_level()], dtype=np.uint8)
    return table[levels(values, full) + LEVELS]
