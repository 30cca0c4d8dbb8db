"""Commands, options, defaults and JSON output equal the golden files (`make golden`)."""

from typing import Any

import pytest

from tests.golden.commands import describe_commands
from tests.golden.outputs import INVOCATIONS, Invocation, Workspace, flatten
from tests.golden.storage import GOLDEN_FOLDER, load_json

_ABSENT = object()


def list_changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return a line for each entry that is missing, new or different; floats may differ by rounding."""
    changes = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key, _ABSENT), new.get(key, _ABSENT)
        if before is _ABSENT:
            changes.append(f"+ {key}: {after!r}")
        elif after is _ABSENT:
            changes.append(f"- {key}: {before!r}")
        elif not is_same(before, after):
            changes.append(f"! {key}: {before!r} became {after!r}")
    return changes


def is_same(old: Any, new: Any) -> bool:
    if isinstance(old, float) and isinstance(new, float):
        return abs(old - new) <= 1e-5 + 1e-4 * abs(old)
    return type(old) is type(new) and bool(old == new)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace(tmp_path_factory.mktemp("commands"))


def test_commands_and_options_equal_golden_commands() -> None:
    old, new = (
        {
            f"{command} {option}": description
            for command, options in table.items()
            for option, description in options.items()
        }
        | dict.fromkeys(table, "command")
        for table in (load_json(GOLDEN_FOLDER, "commands"), describe_commands())
    )
    changes = list_changes(old, new)
    assert not changes, "\n".join(["commands changed:", *changes])


@pytest.mark.usefixtures("same_transformers")
@pytest.mark.parametrize("name", INVOCATIONS)
def test_json_output_equals_golden_output(name: str, workspace: Workspace) -> None:
    if "zoo:" in INVOCATIONS[name].arguments or name == "models":
        pytest.importorskip("clearhead_zoo")
    changes = list_changes(load_json(GOLDEN_FOLDER, "outputs")[name], workspace.run(name))
    assert not changes, "\n".join([f"clearhead {INVOCATIONS[name].arguments} --json changed:", *changes])


def test_every_command_with_json_has_golden_output() -> None:
    printing = {command for command, options in describe_commands().items() if "--json" in options}
    called = {f"clearhead {' '.join(invocation.arguments.split()[:2])}" for invocation in INVOCATIONS.values()}
    called |= {f"clearhead {invocation.arguments.split()[0]}" for invocation in INVOCATIONS.values()}
    assert printing <= called
    assert load_json(GOLDEN_FOLDER, "outputs").keys() == INVOCATIONS.keys()


def test_changed_output_is_detected() -> None:
    output = {"a": [0.1] * 9, "b": {"c": "x", "d": "more than three words"}, "versions": {"e": 1}}
    flat = flatten(output, Invocation(""))
    assert flat == {
        "a/shape": "(9,)",
        "a/sum": 0.9,
        "a/weighted sum": pytest.approx(flat["a/weighted sum"]),
        "b/c": "x",
        "b/d": "<text>",
        "versions": "<dict>",
    }
    changed = {**flat, "a/sum": 0.91, "b/c": "y", "f": None}
    del changed["b/d"]
    assert list_changes(flat, changed) == [
        "! a/sum: 0.9 became 0.91",
        "! b/c: 'x' became 'y'",
        "- b/d: '<text>'",
        "+ f: None",
    ]
