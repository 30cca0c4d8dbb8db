"""`clearhead verify`: a table, JSON, and an exit code that says whether all of it holds."""

from pathlib import Path

import pytest

from clearhead import AttributionMethod, MethodScores, register_method
from clearhead.methods import METHOD_REGISTRY
from tests.cli.conftest import Clearhead


def test_a_table(clearhead: Clearhead, bert: Path) -> None:
    said = clearhead("verify", "generic", "rollout", "-m", bert)
    assert said.code == 0 and said.err == "" and "\x1b" not in said.out
    assert "same scores when padded" in said.out and "0 do not" in said.out


def test_the_json_form(clearhead: Clearhead, bert: Path) -> None:
    said = clearhead("verify", "generic,grad-sam", "-m", bert, "--text", "So boring", "--text", "I like it", "--json")
    assert said.json["schema"] == "clearhead/verification" and said.json["ok"] and said.json["inputs"] == 2
    rows = {(row["method"], row["what"]): row for row in said.json["rows"]}
    row = rows["grad-sam", "same scores in a batch"]
    assert row["says"] == "holds" and row["measured"] <= row["bound"]


def test_what_does_not_hold_is_an_exit_code(clearhead: Clearhead, bert: Path) -> None:
    @register_method("tilted", family="control", cost="–", citation="–", signed=False, target="none")
    class Tilted(AttributionMethod):
        def compute_scores(self, tape: object) -> MethodScores:
            return MethodScores(-self.unit_context.valid_mask[:, None].double())

    try:
        said = clearhead("verify", "tilted", "-m", bert, "--json")
    finally:
        METHOD_REGISTRY.pop("tilted")
    assert said.code == 3 and said.err == "clearhead: does not hold: tilted: no score is negative\n"
    assert said.json["ok"] is False


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("genric",), 2, "did you mean 'generic'"),
        (("generic", "--image", "chelsea"), 2, "takes text: leave out --image"),
        (("all", "--example", "3"), 2, "--example is for models of the zoo"),
    ],
)
def test_what_cannot_be_done(refused, bert: Path, arguments: tuple[str, ...], code: int, words: str) -> None:
    assert words in refused("verify", *arguments, "-m", bert, code=code)
