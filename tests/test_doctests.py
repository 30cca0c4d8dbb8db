"""The examples in docstrings do what they say."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[1] / "src"


def modules_with_examples() -> list[str]:
    """Every module whose source has an example. Nothing is imported: that would slow every collection down."""
    paths = sorted(path for path in SOURCES.rglob("*.py") if ">>> " in path.read_text("utf-8"))
    names = [".".join(path.relative_to(SOURCES).with_suffix("").parts) for path in paths]
    return [name.removesuffix(".__init__") for name in names]


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples(name: str) -> None:
    module = import_module(name)
    assert any(test.examples for test in doctest.DocTestFinder().find(module)), "an example that is in no docstring"
    assert doctest.testmod(module).failed == 0
