"""Every class of the installed transformers that can be built tiny is explained correctly or rejected.

The outcomes must equal docs/architectures.md. Slow: `make test-slow`.
"""

import re

import pytest
import transformers

from tests.architectures.table import PAGE, read_page, try_class
from tests.architectures.tiny_models import list_classes
from tests.architectures.trial import WORKS

MIN_WORKING_MODEL_TYPES = 120  # number of model types that must work

same_version = pytest.mark.skipif(
    f"transformers {transformers.__version__} " not in PAGE.read_text(encoding="utf-8"),
    reason="docs/architectures.md is about another version of transformers",
)


def test_enough_model_types_work_and_none_fails() -> None:
    outcomes = read_page()
    working = {model_type for (model_type, _), (status, _) in outcomes.items() if status in WORKS}
    assert len(working) >= MIN_WORKING_MODEL_TYPES
    assert [key for key, (status, _) in outcomes.items() if status == "fails"] == []


def test_page_counts_equal_the_table() -> None:
    page, outcomes = PAGE.read_text(encoding="utf-8"), read_page()
    count_rows = re.findall(r"^\| ([a-z ]+) \| (\d+) \| (\d+) \|", page, re.MULTILINE)
    assert len(count_rows) > len(WORKS)
    for status, class_count, type_count in count_rows:
        model_types = [model_type for (model_type, _), (outcome, _) in outcomes.items() if outcome == status]
        assert (len(model_types), len(set(model_types))) == (int(class_count), int(type_count))


@same_version
def test_every_class_is_in_the_table() -> None:
    assert len(read_page()) == len(list_classes())


@pytest.mark.slow
@same_version
@pytest.mark.parametrize(("name", "head"), list_classes(), ids=lambda parameter: parameter.replace(" ", "-"))
def test_outcome_equals_the_table(name: str, head: str) -> None:
    row = try_class(name, head)
    assert (row.status, row.reason) == read_page().get((row.model_type, row.head))
