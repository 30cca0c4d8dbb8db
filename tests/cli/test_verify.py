"""`clearhead verify`: table, JSON, and an exit code that tells whether every check holds."""

from pathlib import Path

import pytest

from clearhead import AttributionMethod, Cost, MethodScores, register_method
from clearhead.methods import METHOD_REGISTRY
from tests.cli.conftest import Clearhead


def test_terminal_prints_table_of_checks(clearhead: Clearhead, bert: Path) -> None:
    result = clearhead("verify", "generic", "rollout", "-m", bert)
    assert result.code == 0 and result.err == "" and "\x1b" not in result.out
    assert "same scores when padded" in result.out and "0 failed" in result.out


def test_json_lists_measured_value_and_bound_of_each_check(clearhead: Clearhead, bert: Path) -> None:
    result = clearhead("verify", "generic,grad-sam", "-m", bert, "--text", "So boring", "--text", "I like it", "--json")
    assert result.json["schema"] == "clearhead/verification" and result.json["ok"] and result.json["inputs"] == 2
    rows = {(row["method"], row["property"]): row for row in result.json["results"]}
    row = rows["grad-sam", "same scores in a batch"]
    assert row["status"] == "passed" and row["measured"] <= row["bound"]


def test_failed_check_sets_exit_code_3(clearhead: Clearhead, bert: Path) -> None:
    @register_method("tilted", family="control", cost=Cost(forward=1), citation="–", signed=False, target="none")
    class Tilted(AttributionMethod):
        def compute_scores(self, tape: object) -> MethodScores:
            return MethodScores(-self.unit_context.valid_mask[:, None].double())

    try:
        result = clearhead("verify", "tilted", "-m", bert, "--json")
    finally:
        METHOD_REGISTRY.pop("tilted")
    assert result.code == 3 and result.err == "clearhead: failed: tilted: no score is negative\n"
    assert result.json["ok"] is False


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("genric",), 2, "did you mean 'generic'"),
        (("generic", "--image", "chelsea"), 2, "takes text: leave out --image"),
        (("all", "--example", "3"), 2, "--example applies only to models of the zoo"),
    ],
)
def test_invalid_arguments_are_rejected(
    run_failing, bert: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    assert message in run_failing("verify", *arguments, "-m", bert, code=code)
