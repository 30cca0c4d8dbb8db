"""Golden files are those of one version of transformers."""

import pytest
import transformers

from tests.golden.storage import GOLDEN_FOLDER, load_json


@pytest.fixture
def same_transformers() -> None:
    """Skip a test whose golden figures are those of another transformers: its models may compute otherwise."""
    written = load_json(GOLDEN_FOLDER, "versions")["transformers"]
    if transformers.__version__.split(".")[:2] != written.split(".")[:2]:
        pytest.skip(f"the golden files are those of transformers {written}, and this is {transformers.__version__}")
