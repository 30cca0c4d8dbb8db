import numpy as np
import pytest

from clearhead.render.colours import (
    COLOUR_LEVELS_PER_SIGN,
    DARK_THEME,
    LIGHT_THEME,
    NO_SCORE_LEVEL,
    ColourTheme,
    apply_colour_map,
    choose_text_colour,
    compute_colour_levels,
    compute_contrast_ratio,
    compute_luminance,
    compute_vmax,
    get_level_colour,
    iter_colour_levels,
    map_score_to_colour,
    scale_by_vmax,
)
from tests.render.conftest import make_explanation

themes = pytest.mark.parametrize("theme", [LIGHT_THEME, DARK_THEME], ids=["light", "dark"])


def test_zero_is_white() -> None:
    assert map_score_to_colour(0.0) == (255, 255, 255)


@themes
def test_opposite_scores_have_equal_luminance_and_different_hue(theme: ColourTheme) -> None:
    for value in np.linspace(0.05, 1, 20):
        positive, negative = map_score_to_colour(value, theme), map_score_to_colour(-value, theme)
        assert compute_luminance(positive) == pytest.approx(compute_luminance(negative), rel=0.08)
        # Only the hue differs: more red than blue is positive, more blue than red is negative.
        assert positive[0] > positive[2] and negative[2] > negative[0]


@themes
@pytest.mark.parametrize("sign", [1, -1])
def test_luminance_is_monotone_on_each_side(theme: ColourTheme, sign: int) -> None:
    shades = [
        compute_luminance(map_score_to_colour(sign * value, theme))
        for value in np.linspace(0, 1, COLOUR_LEVELS_PER_SIGN + 1)
    ]
    steps = np.diff(shades)
    assert (steps < 0).all() if theme is LIGHT_THEME else (steps > 0).all()


@themes
def test_text_is_readable_on_every_colour(theme: ColourTheme) -> None:
    for level in iter_colour_levels():
        background = get_level_colour(level, theme)
        assert compute_contrast_ratio(background, choose_text_colour(background)) >= 4.5


@themes
def test_missing_score_is_grey_and_not_in_the_colour_scale(theme: ColourTheme) -> None:
    red, green, blue = get_level_colour(NO_SCORE_LEVEL, theme)
    assert red == green == blue
    assert (red, green, blue) not in [
        get_level_colour(level, theme) for level in range(-COLOUR_LEVELS_PER_SIGN, COLOUR_LEVELS_PER_SIGN + 1)
    ]


@pytest.mark.parametrize("matrix", [
    [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],  # protanopia
    [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],  # deuteranopia
    [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],  # tritanopia
])  # fmt: skip
@themes
def test_sign_is_distinguishable_under_colour_blindness(theme: ColourTheme, matrix: list[list[float]]) -> None:
    """Machado, Oliveira & Fernandes (2009), severity 1, on linear RGB."""

    def simulate(value: float) -> np.ndarray:
        linear = (np.asarray(map_score_to_colour(value, theme)) / 255) ** 2.2
        return np.clip(np.asarray(matrix) @ linear, 0, 1) ** (1 / 2.2) * 255

    for value in (0.3, 0.6, 1.0):
        assert np.linalg.norm(simulate(value) - simulate(-value)) > 40


def test_special_units_do_not_set_the_scale_and_are_clipped() -> None:
    explanation = make_explanation(["[CLS]", "a", "b"], [100.0, 2.0, -1.0], [True, False, False])
    assert compute_vmax(explanation) == 2.0
    assert compute_colour_levels(explanation.scores, compute_vmax(explanation)).tolist() == [
        COLOUR_LEVELS_PER_SIGN,
        COLOUR_LEVELS_PER_SIGN,
        -COLOUR_LEVELS_PER_SIGN // 2,
    ]


def test_scaling_does_not_modify_scores() -> None:
    explanation = make_explanation(["a", "b"], [4.0, -8.0])
    before = explanation.scores.copy()
    assert scale_by_vmax(explanation.scores, compute_vmax(explanation)).tolist() == [0.5, -1.0]
    assert (explanation.scores == before).all()


@pytest.mark.parametrize("scores", [[0.0, 0.0], [np.nan, np.nan], [np.inf, -np.inf]])
def test_vmax_is_one_for_zero_or_non_finite_scores(scores: list[float]) -> None:
    assert compute_vmax(make_explanation(["a", "b"], scores)) == 1.0


def test_vmax_of_special_units_only_is_their_maximum() -> None:
    assert compute_vmax(make_explanation(["[CLS]"], [3.0], [True])) == 3.0


def test_colour_map_pixels_equal_level_colours() -> None:
    pixels = apply_colour_map(np.array([[0.0, 1.0, np.nan]]), 1.0)
    assert [tuple(map(int, pixel)) for pixel in pixels[0]] == [
        get_level_colour(0),
        get_level_colour(COLOUR_LEVELS_PER_SIGN),
        get_level_colour(NO_SCORE_LEVEL),
    ]
