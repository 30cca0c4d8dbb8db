"""The scores of every method and profile equal the golden scores (`make golden`)."""

from functools import cache

import numpy as np
import pytest

from clearhead.methods import METHOD_REGISTRY
from clearhead.profiles import PROFILES as REGISTERED_PROFILES
from tests.golden import scores
from tests.golden.models import GOLDEN_MODELS
from tests.golden.storage import GOLDEN_FOLDER, load_arrays

CASES = [(model_name, case_name) for model_name in GOLDEN_MODELS for case_name in scores.list_cases(model_name)]
#: Arrays that are compared on the scale of the largest score of their case.
SCORES = ("scores", "matrix", "per_layer", "per_head")


@cache
def load_golden(model_name: str) -> dict[str, dict[str, np.ndarray]]:
    """Return the committed arrays of one model, by case."""
    arrays = load_arrays(GOLDEN_FOLDER, model_name)
    by_case: dict[str, dict[str, np.ndarray]] = {key.split("/")[0]: {} for key in arrays}
    for key, array in arrays.items():
        by_case[key.split("/")[0]][key] = array
    return by_case


def assert_close(key: str, computed: np.ndarray, golden: np.ndarray, tolerance: float) -> None:
    """Compare two arrays entry by entry; NaN must be at the same positions, and integers must be equal."""
    assert computed.shape == golden.shape and computed.dtype == golden.dtype, key
    if not np.issubdtype(golden.dtype, np.floating):
        tolerance = 0.0
    difference = np.abs(computed.astype(np.float64) - golden.astype(np.float64))
    assert np.array_equal(np.isnan(computed), np.isnan(golden)), f"{key}: NaN at different positions"
    largest = np.nanmax(difference, initial=0.0)
    assert largest <= tolerance, f"{key} differs by {largest:.1e}, allowed {tolerance:.1e}"


@pytest.mark.usefixtures("same_transformers")
@pytest.mark.parametrize(("model_name", "case_name"), CASES, ids=[f"{model}-{case}" for model, case in CASES])
def test_scores_equal_golden_scores(model_name: str, case_name: str) -> None:
    golden = load_golden(model_name)[case_name]
    computed = scores.compute_case(model_name, case_name)
    assert computed.keys() == golden.keys()
    tolerance = scores.compute_tolerance(model_name, case_name)
    largest = max(
        (np.nanmax(np.abs(array), initial=0.0) for key, array in golden.items() if key.rsplit("/", 1)[1] in SCORES),
        default=0.0,
    )
    for key, array in golden.items():
        name = key.rsplit("/", 1)[1]
        scale = largest if name in SCORES else max(1.0, float(np.nanmax(np.abs(array), initial=0.0)))
        assert_close(key, computed[key], array, tolerance * scale)


@pytest.mark.parametrize("model_name", GOLDEN_MODELS)
def test_every_golden_array_belongs_to_a_case(model_name: str) -> None:
    assert load_golden(model_name).keys() == scores.list_cases(model_name).keys()


def test_every_registered_method_has_golden_scores() -> None:
    registered = {name for name, method in METHOD_REGISTRY.items() if method.__module__.startswith("clearhead.")}
    assert set(scores.METHODS) == registered


def test_every_method_of_every_profile_has_golden_scores() -> None:
    golden_profiles: dict[str, set[str]] = {}
    for profiles in scores.PROFILES.values():
        for profile, methods in profiles.items():
            golden_profiles.setdefault(profile, set()).update(methods)
    assert golden_profiles == {name: set(profile.methods) for name, profile in REGISTERED_PROFILES.items()}


def test_changed_score_is_detected() -> None:
    golden = load_golden("bert-classifier")["generic"]["generic/0/text/scores"]
    with pytest.raises(AssertionError, match="differs by"):
        assert_close("scores", golden * (1 + 1e-6), golden, 1e-9 * float(np.abs(golden).max()))
