"""Every class of the installed transformers that can be built tiny: explained rightly, or refused – never wrongly.

What docs/architectures.md says is what happens. Slow: `make test-slow`.
"""

import re

import pytest
import transformers

from tests.architectures.table import PAGE, committed, row_of
from tests.architectures.tiny_models import classes
from tests.architectures.trial import WORKS

LEAST = 120  # model types that must work

same_version = pytest.mark.skipif(
    f"transformers {transformers.__version__} " not in PAGE.read_text(encoding="utf-8"),
    reason="docs/architectures.md speaks of another version of transformers",
)


def test_enough_model_types_work_and_none_fails() -> None:
    outcomes = committed()
    working = {kind for (kind, _), (how, _) in outcomes.items() if how in WORKS}
    assert len(working) >= LEAST
    assert [place for place, (how, _) in outcomes.items() if how == "fails"] == []


def test_counts_are_those_of_the_table() -> None:
    page, outcomes = PAGE.read_text(encoding="utf-8"), committed()
    said = re.findall(r"^\| ([a-z ]+) \| (\d+) \| (\d+) \|", page, re.MULTILINE)
    assert len(said) > len(WORKS)
    for how, heads, kinds in said:
        own = [kind for (kind, _), (outcome, _) in outcomes.items() if outcome == how]
        assert (len(own), len(set(own))) == (int(heads), int(kinds))


@same_version
def test_every_class_is_in_the_table() -> None:
    assert len(committed()) == len(classes())


@pytest.mark.slow
@same_version
@pytest.mark.parametrize(("name", "head"), classes(), ids=lambda part: part.replace(" ", "-"))
def test_outcome_is_that_of_the_table(name: str, head: str) -> None:
    row = row_of(name, head)
    assert (row.how, row.why) == committed().get((row.kind, row.head))
