"""The colour map of all renderers: orange supports the target, blue opposes it, and zero is the background colour.

Colours are computed in OKLCH, where equal steps look equal. Lightness falls evenly from the background to both ends, so
a score and its opposite are equally dark, and hue alone encodes the sign (orange and blue are distinguishable with
every common colour blindness). Scores are scaled for colours only; the raw scores are not changed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import cos, radians, sin

import numpy as np
from jaxtyping import Float, Int, UInt8

from clearhead.explanation.explanation import Explanation

#: Levels on each side of zero: more than the eye distinguishes, and few enough for CSS classes.
COLOUR_LEVELS_PER_SIGN = 24
#: The level of a unit that has no score.
NO_SCORE_LEVEL = COLOUR_LEVELS_PER_SIGN + 1

_POSITIVE_HUE = 49.0
_NEGATIVE_HUE = 250.0


@dataclass(frozen=True)
class ColourTheme:
    """Colours of scores on one background, in OKLCH.

    Attributes:
        zero_lightness: Lightness of the score zero, which is the background.
        max_score_lightness: Lightness of the largest score.
        max_score_chroma: Chroma of the largest score.
        no_score_lightness: Lightness of the grey for units without a score.
    """

    zero_lightness: float
    max_score_lightness: float
    max_score_chroma: float
    no_score_lightness: float


LIGHT_THEME = ColourTheme(zero_lightness=1.0, max_score_lightness=0.62, max_score_chroma=0.16, no_score_lightness=0.86)
DARK_THEME = ColourTheme(zero_lightness=0.235, max_score_lightness=0.74, max_score_chroma=0.15, no_score_lightness=0.42)

Rgb = tuple[int, int, int]


def map_score_to_colour(scaled_score: float, theme: ColourTheme = LIGHT_THEME) -> Rgb:
    """Return the colour of a scaled score.

    Args:
        scaled_score: A score from −1 to 1; values outside are clipped, NaN is grey.
        theme: The light or the dark theme.

    Example:
        >>> map_score_to_colour(0.0), map_score_to_colour(1.0), map_score_to_colour(-1.0)
        ((255, 255, 255), (208, 98, 18), (35, 137, 226))
    """
    if np.isnan(scaled_score):
        return convert_oklch_to_srgb(theme.no_score_lightness, 0.0, 0.0)
    strength = min(abs(scaled_score), 1.0)
    # Chroma grows a little faster than darkness, so that weak scores have a visible hue.
    chroma = theme.max_score_chroma * strength**0.8
    return convert_oklch_to_srgb(
        theme.zero_lightness + (theme.max_score_lightness - theme.zero_lightness) * strength,
        chroma,
        _POSITIVE_HUE if scaled_score > 0 else _NEGATIVE_HUE,
    )


def convert_oklch_to_srgb(lightness: float, chroma: float, hue: float) -> Rgb:
    """Convert a colour from OKLCH (Ottosson 2020) to sRGB, clipped to the gamut."""
    a = chroma * cos(radians(hue))
    b = chroma * sin(radians(hue))
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    middle = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (
        4.0767416621 * long - 3.3077115913 * middle + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * middle - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * middle + 1.7076147010 * short,
    )
    red, green, blue = (round(255 * min(1.0, max(0.0, _apply_srgb_gamma(channel)))) for channel in linear)
    return red, green, blue


def _apply_srgb_gamma(linear: float) -> float:
    """Convert a linear colour channel (0 to 1) to sRGB."""
    if linear <= 0.0031308:
        return 12.92 * linear
    return 1.055 * linear ** (1 / 2.4) - 0.055


def _remove_srgb_gamma(channel: float) -> float:
    """Convert an sRGB channel (0 to 1) to linear light."""
    if channel <= 0.04045:
        return channel / 12.92
    return ((channel + 0.055) / 1.055) ** 2.4


def compute_luminance(rgb: Rgb) -> float:
    """Return the relative luminance as the Web Content Accessibility Guidelines define it."""
    red, green, blue = (_remove_srgb_gamma(channel / 255) for channel in rgb)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def compute_contrast_ratio(first: Rgb, second: Rgb) -> float:
    """Return the contrast ratio of two colours, from 1 to 21."""
    light, dark = sorted((compute_luminance(first), compute_luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def choose_text_colour(background: Rgb) -> Rgb:
    """Return black or white, whichever has more contrast; at least 4.5 : 1 on any colour."""
    black = (0, 0, 0)
    white = (255, 255, 255)
    return max((black, white), key=lambda text: compute_contrast_ratio(background, text))


def format_hex_colour(rgb: Rgb) -> str:
    """Format a colour as a hexadecimal code.

    Args:
        rgb: Red, green and blue, from 0 to 255.

    Returns:
        The code, with the number sign.

    Example:
        >>> format_hex_colour((176, 85, 0))
        '#b05500'
    """
    return "#{:02x}{:02x}{:02x}".format(*rgb)


def compute_vmax(explanation: Explanation, values: Float[np.ndarray, "*rows unit"] | None = None) -> float:
    """Return the score of full colour: the largest |score| of a unit that is not special, or 1 if all are zero.

    Special tokens often have most of the relevance and would leave everything else white; they are clipped instead.

    Args:
        explanation: The explanation.
        values: Scores in the place of the explanation's own, such as a row of its matrix.
    """
    if values is None:
        values = explanation.scores
    content_indices = explanation.units.content_indices()
    if len(content_indices):
        values = values[..., content_indices]
    magnitudes = np.abs(values)
    magnitudes = magnitudes[np.isfinite(magnitudes)]
    if not magnitudes.size or magnitudes.max() <= 0:
        return 1.0
    return float(magnitudes.max())


def scale_by_vmax(values: Float[np.ndarray, "..."], vmax: float) -> Float[np.ndarray, "..."]:
    """Scale scores to −1 … 1; larger ones are clipped, NaN stays."""
    return np.clip(np.asarray(values, dtype=np.float64) / vmax, -1, 1)


def compute_colour_levels(values: Float[np.ndarray, "..."], vmax: float) -> Int[np.ndarray, "..."]:
    """Return the colour level of each score, from −COLOUR_LEVELS_PER_SIGN to COLOUR_LEVELS_PER_SIGN, or NO_SCORE_LEVEL.

    Args:
        values: The scores.
        vmax: The score of full colour (`compute_vmax`).
    """
    levels = scale_by_vmax(values, vmax) * COLOUR_LEVELS_PER_SIGN
    return np.where(np.isnan(levels), NO_SCORE_LEVEL, np.rint(np.nan_to_num(levels))).astype(int)


def iter_colour_levels() -> Iterator[int]:
    """Iterate over all colour levels, `NO_SCORE_LEVEL` last."""
    yield from range(-COLOUR_LEVELS_PER_SIGN, NO_SCORE_LEVEL + 1)


@cache
def get_level_colour(level: int, theme: ColourTheme = LIGHT_THEME) -> Rgb:
    """Return the colour of a level.

    Args:
        level: An integer level of a quantised score, or `NO_SCORE_LEVEL`.
        theme: The colours of the theme.

    Returns:
        Red, green and blue, from 0 to 255.
    """
    if level == NO_SCORE_LEVEL:
        return map_score_to_colour(np.nan, theme)
    return map_score_to_colour(level / COLOUR_LEVELS_PER_SIGN, theme)


def apply_colour_map(
    values: Float[np.ndarray, "*shape"], vmax: float, theme: ColourTheme = LIGHT_THEME
) -> UInt8[np.ndarray, "*shape 3"]:
    """Map scores to RGB pixels.

    Args:
        values: The scores.
        vmax: The score of full colour.
        theme: The light or the dark theme.
    """
    table = np.array([get_level_colour(level, theme) for level in iter_colour_levels()], dtype=np.uint8)
    return table[compute_colour_levels(values, vmax) + COLOUR_LEVELS_PER_SIGN]
