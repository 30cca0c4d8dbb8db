"""Curve areas and removed counts equal the published ones, with the authors' float arithmetic."""

import numpy as np
import pytest

from clearhead.bench.protocols.curves import compute_curve_area, compute_removed_counts
from clearhead.bench.protocols.presets import PROTOCOL_PRESETS
from clearhead.errors import InputError

CURVE = (0.81432, 0.79922, 0.7817, 0.75598, 0.71788, 0.65886, 0.57622, 0.46286, 0.31408, 0.13184)
TENTHS = tuple(tenth / 10 for tenth in range(10))


def test_curve_areas_equal_published_values() -> None:
    te, bi = (100 * compute_curve_area(TENTHS, CURVE, convention) for convention in ("te", "bi"))
    assert round(te, 2) == 55.40 and round(bi, 2) == 56.06
    assert bi - te == pytest.approx(100 * 0.05 * CURVE[-1])
    assert round(100 * float(np.mean(CURVE[1:])), 2) == 57.76
    assert round(100 * float(np.trapezoid(CURVE[1:], TENTHS[1:])), 2) == 47.33


def test_value_at_fraction_one_counts_by_convention() -> None:
    x, y = (*TENTHS, 1.0), (*CURVE, 0.1)
    assert compute_curve_area(x, y, "te") == compute_curve_area(TENTHS, CURVE, "te") and compute_curve_area(
        x, y, "bi"
    ) == compute_curve_area(TENTHS, CURVE, "bi")
    assert compute_curve_area(x, y, "clearhead") == pytest.approx(
        compute_curve_area(TENTHS, CURVE, "te") + 0.1 * (CURVE[-1] + 0.1) / 2
    )
    assert compute_curve_area(TENTHS, CURVE, "clearhead") == pytest.approx(
        compute_curve_area(TENTHS, CURVE, "te") / 0.9
    )
    assert compute_curve_area(x, y, "idl") == pytest.approx(float(np.mean(y)))
    assert compute_curve_area((0.0, 0.3, 1.0), (0.4, 0.4, 0.4), "clearhead") == pytest.approx(0.4)


def test_removed_counts_equal_published_arithmetic() -> None:
    nine = [5017, 10035, 15052, 20070, 25088, 30105, 35123, 40140, 45158]
    assert compute_removed_counts(PROTOCOL_PRESETS["te-images"].fractions, 224 * 224) == nine
    boxes = PROTOCOL_PRESETS["lxmert-regions"]
    assert [36 - removed for removed in compute_removed_counts((0.0, *boxes.fractions), 36, boxes.rounding)] == [
        *(36, 27, 18, 9, 7, 5, 3, 1, 0)
    ]
    regions = PROTOCOL_PRESETS["visualbert-regions"]
    assert [100 - removed for removed in compute_removed_counts((0.0, *regions.fractions), 100, regions.rounding)] == [
        *(100, 50, 25, 5, 4, 3, 2, 1, 0)
    ]
    news = PROTOCOL_PRESETS["bi-newsgroups"]
    assert compute_removed_counts((0.0, *news.fractions), 512, news.rounding) == [
        *(0, 51, 102, 153, 204, 256, 307, 358, 409, 460, 512)
    ]
    attcat = PROTOCOL_PRESETS["attcat"]
    assert compute_removed_counts(attcat.fractions, 18, attcat.rounding) == [2, 4, 6, 8, 10, 12, 14, 16, 18]
    assert compute_removed_counts((0.01, 0.5), 30, "up") == [1, 15]
    movies = PROTOCOL_PRESETS["bi-movies"].fractions
    assert (movies[0], movies[-1], len(movies)) == (0.52, 0.68, 9)


def test_invalid_curves_and_counts_raise() -> None:
    with pytest.raises(InputError, match="the first at 0"):
        compute_curve_area((0.1, 0.2), (1.0, 0.5))
    with pytest.raises(InputError, match="clearhead"):
        compute_curve_area((0.0, 1.0), (1.0, 0.5), "trapezoid")
    with pytest.raises(InputError, match="between 0 and 1"):
        compute_removed_counts((1.2,), 4)
    with pytest.raises(InputError, match="nearest"):
        compute_removed_counts((0.2,), 4, "near")
