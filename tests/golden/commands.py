"""The commands of `clearhead` with their arguments and options: names, types and defaults, but not their wording."""

from pathlib import Path
from typing import Any

import typer

from clearhead.cli import app

Commands = dict[str, dict[str, str]]


def describe_commands() -> Commands:
    """Return every command by its full name, with its options by name and its arguments by position."""
    described: Commands = {}
    _add_command(described, "clearhead", typer.main.get_command(app))
    return described


def _add_command(described: Commands, path: str, command: Any) -> None:
    described[path] = {}
    position = 0
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            name = f"argument {position}"
            position += 1
        else:
            name = ", ".join([*parameter.opts, *parameter.secondary_opts])
        described[path][name] = _describe_parameter(parameter)
    for name, inner in getattr(command, "commands", {}).items():
        _add_command(described, f"{path} {name}", inner)


def _describe_parameter(parameter: Any) -> str:
    annotation = parameter.type_descriptor.annotation
    facts = {
        "default": str(parameter.default) if isinstance(parameter.default, Path) else parameter.default,
        "min": getattr(parameter, "min", None),
        "max": getattr(parameter, "max", None),
        "environment": parameter.envvar,
    }
    flags = {
        "required": parameter.required,
        "repeated": parameter.nargs != 1 or getattr(parameter, "multiple", False),
        "hidden": getattr(parameter, "hidden", False),
    }
    return ", ".join(
        [
            annotation.__name__ if isinstance(annotation, type) else str(annotation),
            *(f"{name} {value!r}" for name, value in facts.items() if value is not None),
            *(name for name, holds in flags.items() if holds),
        ]
    )
