"""Golden files are valid for one version of transformers."""

import pytest
import transformers

from tests.golden.storage import GOLDEN_FOLDER, load_json


@pytest.fixture
def same_transformers() -> None:
    """Skip a test if the golden files were written with another version of transformers, whose models may differ."""
    written = load_json(GOLDEN_FOLDER, "versions")["transformers"]
    if transformers.__version__.split(".")[:2] != written.split(".")[:2]:
        pytest.skip(f"the golden files were written with transformers {written}; installed: {transformers.__version__}")
