"""The examples in docstrings run and give the printed results."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[1] / "src"


def list_modules_with_examples() -> list[str]:
    """List the modules whose source has an example, without importing them, which would slow down collection."""
    paths = sorted(path for path in SOURCES.rglob("*.py") if ">>> " in path.read_text("utf-8"))
    names = [".".join(path.relative_to(SOURCES).with_suffix("").parts) for path in paths]
    return [name.removesuffix(".__init__") for name in names]


@pytest.mark.parametrize("name", list_modules_with_examples())
def test_docstring_examples_pass(name: str) -> None:
    module = import_module(name)
    assert any(test.examples for test in doctest.DocTestFinder().find(module)), "an example outside of any docstring"
    assert doctest.testmod(module).failed == 0
