"""`scripts/compare_scores.py` detects a difference in the last bit."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "compare_scores.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare_scores", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_arrays_are_compared_to_the_last_bit(script: ModuleType) -> None:
    scores = np.array([0.1, np.nan, -0.0])
    assert script.compare_arrays(scores, scores.copy()) is None
    for changed in ([np.nextafter(0.1, 1), np.nan, -0.0], [0.1, np.nan, 0.0], [0.1, 0.0, -0.0]):
        assert script.compare_arrays(scores, np.array(changed)) is not None
    assert "float32[3]" in script.compare_arrays(scores, scores.astype(np.float32))


def test_missing_and_new_arrays_are_differences(script: ModuleType) -> None:
    old, new = {"a": np.ones(1), "b": np.ones(1)}, {"b": np.ones(1), "c": np.ones(1)}
    assert script.compare_scores(old, new) == {"a": "is gone", "c": "is new"}
    assert script.compare_passes({"a": {"forward": 1}}, {"a": {"forward": 2}}).keys() == {"a"}


def test_folder_without_golden_tests_is_an_error(tmp_path: Path) -> None:
    process = subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True, text=True, check=False)
    assert process.returncode == 2 and "has no tests/golden/write.py" in process.stderr
