"""`--device`, `--dtype` and `--revision`: every command that loads a model has them and prints their defaults."""

from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import clearhead as ch
from clearhead.cli import app
from clearhead.loader import MAX_FLOAT32_PARAMETERS, resolve_device, resolve_dtype
from tests.cli.conftest import Clearhead
from tests.models import text_model

#: Commands that load no model.
WITHOUT_MODEL = {"show", "models", "report", "convert", "version"}


def list_commands(command: Any, path: str = "") -> dict[str, set[str]]:
    """Return the options of every command by its name."""
    subcommands = getattr(command, "commands", {})
    if not subcommands:
        return {path: {name for parameter in command.params for name in parameter.opts}}
    options_by_command: dict[str, set[str]] = {}
    for name, subcommand in subcommands.items():
        options_by_command |= list_commands(subcommand, f"{path} {name}".strip())
    return options_by_command


COMMANDS = list_commands(typer.main.get_command(app))


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_commands_that_load_a_model_have_the_device_options(name: str) -> None:
    device_options = {"--device", "--dtype", "--revision"}
    assert COMMANDS[name] & device_options == (set() if name in WITHOUT_MODEL else device_options)


def test_options_have_one_spelling() -> None:
    all_options = set().union(*COMMANDS.values())
    assert not all_options & {"--method", "--batch", "--label", "--labels", "--beside", "--how"}
    assert COMMANDS["convert"] >= {"--class-names", "--head-file", "--num-heads"}
    for name in ("explain", "compare", "bench", "bias code", "concept explain"):
        assert "--methods" in COMMANDS[name]


def test_methods_are_separated_by_commas_and_repeated(clearhead: Clearhead, bert: Path) -> None:
    result = clearhead("explain", "So", "-m", bert, "--methods", "generic,rollout", "--methods", "attcat", "--json")
    assert [document["method"] for document in result.json] == ["generic", "rollout", "attcat"]


def test_auto_device_is_cuda_if_available_else_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == resolve_device(None) == resolve_device() == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto") == torch.device("cuda")
    assert resolve_device("cpu") == torch.device("cpu")


def test_half_precision_becomes_float32_below_a_billion_parameters() -> None:
    for half in (torch.float16, torch.bfloat16):
        assert resolve_dtype(None, half, MAX_FLOAT32_PARAMETERS - 1) == torch.float32
        assert resolve_dtype(None, half, MAX_FLOAT32_PARAMETERS) == half
        assert resolve_dtype("auto", half, 1) == half
        assert resolve_dtype("float64", half, MAX_FLOAT32_PARAMETERS) == torch.float64
    assert resolve_dtype(None, torch.float64, 1) == torch.float64, "float64 is kept"


def test_load_applies_the_dtype_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for component in text_model("bert", dtype=torch.float16):
        component.save_pretrained(tmp_path)
    assert ch.load(tmp_path).adapter.dtype == torch.float32
    monkeypatch.setattr("clearhead.loader._count_parameters", lambda model: 10**9)
    assert ch.load(tmp_path).adapter.dtype == torch.float16


def test_model_object_is_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model, tokenizer = text_model("bert", dtype=torch.float32)
    assert ch.load(model, tokenizer).adapter.model is model
    assert ch.load(model, tokenizer, device="auto").adapter.model is model


def test_device_note_is_printed_for_defaults_but_not_with_json(clearhead: Clearhead, bert: Path) -> None:
    command = ("explain", "I like the movie", "-m", bert)
    note = f"note: {bert}: device cpu, dtype float32 (see --device and --dtype)\n"
    assert clearhead(*command, "--device", "cpu").device_notes == (note,)
    assert clearhead(*command, "--device", "cpu", "--dtype", "float32").device_notes == ()
    assert clearhead(*command, "--json").device_notes == ()


def test_device_options_of_methods_need_a_model(run_failing: Any) -> None:
    assert "add --model" in run_failing("methods", "--dtype", "float64")
