"""Fixtures: small saved models, and in-process calls of the command line."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from clearhead.cli import main
from tests.models import image_model, text_model

DEVICE_NOTE_PATTERN = re.compile(r"note: \S+: device \S+, dtype \S+ \(see --device and --dtype\)\n")
LABELS = ("NEGATIVE", "NEUTRAL", "POSITIVE")


@dataclass(frozen=True)
class CommandResult:
    """Output and exit code of a command; notes on device and dtype have their own field."""

    code: int
    out: str
    err: str
    device_notes: tuple[str, ...] = ()

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Clearhead = Callable[..., CommandResult]


@pytest.fixture
def clearhead(capsys: pytest.CaptureFixture[str]) -> Clearhead:
    def call(*arguments: object) -> CommandResult:
        capsys.readouterr()  # drop what building the models printed
        with pytest.raises(SystemExit) as exit_info:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert isinstance(exit_info.value.code, int)
        lines = captured.err.splitlines(keepends=True)
        notes = [line for line in lines if DEVICE_NOTE_PATTERN.match(line)]
        errors = [line for line in lines if line not in notes]
        return CommandResult(exit_info.value.code, captured.out, "".join(errors), tuple(notes))

    return call


@pytest.fixture
def run_failing(clearhead: Clearhead) -> Callable[..., str]:
    """Run a command that must fail with a one-line error, no output and no traceback; return that line."""

    def call(*arguments: object, code: int = 2) -> str:
        result = clearhead(*arguments)
        assert result.out == ""
        assert result.err.startswith("clearhead: ") and result.err.count("\n") == 1 and result.err.endswith("\n"), (
            result.err
        )
        assert "Traceback" not in result.err
        assert result.code == code, result.err
        return result.err.strip()

    return call


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny text classifier."""
    folder = tmp_path_factory.mktemp("models") / "bert"
    model, tokenizer = text_model("bert", dtype=torch.float32)
    model.config.id2label = dict(enumerate(LABELS))
    model.config.label2id = {label: index for index, label in enumerate(LABELS)}
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_text_model(tmp_path_factory: pytest.TempPathFactory, name: str, *arguments: Any, **settings: Any) -> Path:
    folder = tmp_path_factory.mktemp("models") / name
    for component in text_model(*arguments, dtype=torch.float32, **settings):
        component.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def masked_lm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny masked language model."""
    return save_text_model(tmp_path_factory, "masked_lm", "bert", "ForMaskedLM")


@pytest.fixture(scope="session")
def regressor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny regression model."""
    return save_text_model(tmp_path_factory, "regressor", "bert", num_labels=1)


@pytest.fixture(scope="session")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny image classifier."""
    folder = tmp_path_factory.mktemp("models") / "vit"
    model, processor = image_model("vit", torch.float32)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def read_folder(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file of a folder by relative path."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
