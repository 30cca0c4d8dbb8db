"""Small models as folders, and the command line called as a person calls it, without a new process each time."""

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
class Said:
    """What a command printed, and its exit code; the notes on the device and dtype of models are kept apart."""

    code: int
    out: str
    err: str
    device_notes: tuple[str, ...] = ()

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Clearhead = Callable[..., Said]


@pytest.fixture
def clearhead(capsys: pytest.CaptureFixture[str]) -> Clearhead:
    def call(*arguments: object) -> Said:
        capsys.readouterr()  # what making the models printed is not the command's
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        lines = captured.err.splitlines(keepends=True)
        notes = [line for line in lines if DEVICE_NOTE_PATTERN.match(line)]
        errors = [line for line in lines if line not in notes]
        return Said(ended.value.code, captured.out, "".join(errors), tuple(notes))

    return call


@pytest.fixture
def refused(clearhead: Clearhead) -> Callable[..., str]:
    """A command that must fail with one line, no output and no traceback; gives that line."""

    def call(*arguments: object, code: int = 2) -> str:
        said = clearhead(*arguments)
        assert said.out == ""
        assert said.err.startswith("clearhead: ") and said.err.count("\n") == 1 and said.err.endswith("\n"), said.err
        assert "Traceback" not in said.err
        assert said.code == code, said.err
        return said.err.strip()

    return call


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny text classifier in a folder."""
    folder = tmp_path_factory.mktemp("models") / "bert"
    model, tokenizer = text_model("bert", dtype=torch.float32)
    model.config.id2label = dict(enumerate(LABELS))
    model.config.label2id = {label: index for index, label in enumerate(LABELS)}
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _in_a_folder(tmp_path_factory: pytest.TempPathFactory, name: str, *given: Any, **settings: Any) -> Path:
    folder = tmp_path_factory.mktemp("models") / name
    for part in text_model(*given, dtype=torch.float32, **settings):
        part.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny masked language model in a folder."""
    return _in_a_folder(tmp_path_factory, "masked", "bert", "ForMaskedLM")


@pytest.fixture(scope="session")
def measuring(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that measures, in a folder."""
    return _in_a_folder(tmp_path_factory, "measuring", "bert", num_labels=1)


@pytest.fixture(scope="session")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny image classifier in a folder."""
    folder = tmp_path_factory.mktemp("models") / "vit"
    model, processor = image_model("vit", torch.float32)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, by name."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
