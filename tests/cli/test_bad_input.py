"""Bad input on the command line: one clear line, an exit code, no traceback, and nothing is changed."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from clearhead.__main__ import main as start
from tests.cli.conftest import DEVICE_NOTE_PATTERN, Clearhead, contents

Refused = Callable[..., str]
TEXT = "I like the movie"


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in: whatever a refused command left would lie there."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("",), "the text is empty"),
        (("  \n ",), "the text is empty"),
        ((TEXT, "--target", "HAPPY"), "unknown label 'HAPPY'. Accepted: NEGATIVE, NEUTRAL, POSITIVE"),
        ((TEXT, "--target", "7"), "label 7 does not exist"),
        ((TEXT, "--against", "POSITIV"), "did you mean 'POSITIVE'?"),
        ((TEXT, "--methods", "grad-sm"), "did you mean 'grad-sam'?"),
        ((TEXT, "--methods", "generic(layer=3)"), "did you mean 'layers'?"),
        ((TEXT, "--methods", "generic(3"), "cannot parse the method 'generic(3'"),
        ((TEXT, "--methods", ","), "no method was given"),
        ((TEXT, "--scale", "odds"), "did you mean 'log-odds'?"),
        ((TEXT, "--layers", "last"), "--layers 'last' is not a range"),
        ((TEXT, "--layers", "9:"), "leaves none of the 3 layers"),
        ((TEXT, "--heads", "a"), "--heads 'a' is not a list of heads"),
        ((TEXT, "--heads", "4"), "the model has 4 heads"),
        ((TEXT, "--rows", "some"), "rows='some' is not known"),
        ((TEXT, "--truncation-side", "up"), "truncation_side='up' is not known"),
        ((TEXT, "--dtype", "float3"), "dtype='float3' is not known"),
        ((TEXT, "--dtype", "int8"), "dtype='int8' does not support gradients"),
        ((TEXT, "--device", "toaster"), "device='toaster' is not known: say auto, cpu"),
        ((TEXT, "--device", "cuda:99"), "device='cuda:99' cannot be used here"),
        ((TEXT, "--memory", "2 apples"), "memory='2 apples' is not an amount of memory"),
        ((TEXT, "--revision", "main"), "revision='main' is for models of the hub"),
        ((TEXT * 40, "--no-truncation"), "tokens long and the model takes 64"),
        ((TEXT, "--words", "--sentences"), "--words and --sentences cannot be combined"),
        ((TEXT, "--save", "lost/why.safetensors"), "there is no folder"),
        ((TEXT, "--save", "why.txt"), "must end in .safetensors"),
        ((TEXT, "--methods", "generic,cat", "--save", "why.safetensors"), "one file for 2 explanations"),
        ((TEXT, "--batch-size", "0"), "--batch-size"),
        ((TEXT, "--out", "results"), "--out is for data"),
        (("lost.jpg",), "there is no file 'lost.jpg'"),
        (("lost.csv", "--out", "results"), "there is no file 'lost.csv'"),
        ((TEXT, "--metod", "generic"), "No such option: --metod"),
    ],
)
def test_explain_refuses(refused: Refused, bert: Path, empty: Path, arguments: tuple[str, ...], says: str) -> None:
    before = contents(bert)
    page = () if "--out" in arguments else ("--html", "why.html")
    assert says in refused("explain", *arguments, "--model", bert, *page)
    assert contents(empty) == {}
    assert contents(bert) == before


def test_a_refused_command_leaves_earlier_output_as_it_was(refused: Refused, bert: Path, empty: Path) -> None:
    (empty / "why.html").write_text("earlier")
    refused("explain", TEXT, "--model", bert, "--target", "HAPPY", "--html", "why.html")
    assert contents(empty) == {"why.html": b"earlier"}


def test_pictures_that_are_none(refused: Refused, vit: Path, bert: Path, empty: Path) -> None:
    (empty / "letter.jpg").write_text("Dear Sir")
    Image.effect_noise((64, 64), 50).save(empty / "whole.jpg")
    whole = (empty / "whole.jpg").read_bytes()
    (empty / "half.jpg").write_bytes(whole[: len(whole) // 2])
    Image.effect_noise((64, 64), 50).convert("F").save(empty / "numbers.tiff")
    Image.fromarray(np.full((64, 64), 257 * 100, dtype=np.uint16)).save(empty / "deep.png")
    before = contents(empty)
    for name, mode in (("numbers.tiff", "F"), ("deep.png", "I")):
        said = refused("explain", name, "-m", vit, "--html", "x.html")
        assert f"'{name}': the picture's pixels are numbers" in said and f"(mode {mode}" in said
    for name in ("letter.jpg", "half.jpg"):
        assert f"'{name}' is not a picture that can be opened" in refused(
            "explain", name, "-m", vit, "--html", "x.html"
        )
    assert "takes images" in refused("explain", TEXT, "-m", vit)
    assert "takes texts, but 'whole.jpg' is an image" in refused("explain", "whole.jpg", "-m", bert)
    assert contents(empty) == before


def test_models_that_cannot_be_explained(refused: Refused, bert: Path, empty: Path) -> None:
    config = transformers.ConvNextConfig(hidden_sizes=[8] * 4, depths=[1] * 4, image_size=32)
    transformers.ConvNextForImageClassification(config).save_pretrained(empty / "convnext")
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(empty / "convnext")
    Image.new("RGB", (32, 32)).save(empty / "black.png")
    assert "without attention" in refused("explain", "black.png", "-m", "convnext", code=1)

    pickled = empty / "pickled"
    transformers.BertForSequenceClassification.from_pretrained(bert).config.save_pretrained(pickled)
    torch.save({"a": torch.zeros(1)}, pickled / "pytorch_model.bin")
    assert "Only safetensors are opened" in refused("explain", TEXT, "-m", pickled)

    assert "cannot open 'no-one/nothing' as a model" in refused("explain", TEXT, "-m", "no-one/nothing")
    (empty / "bare").mkdir()
    assert "cannot open 'bare' as a model" in refused("explain", TEXT, "-m", "bare")
    assert refused("explain", TEXT, "-m", "./lost").endswith("cannot open './lost' as a model: there is no such folder")
    assert "is a file: give the folder" in refused("explain", TEXT, "-m", bert / "model.safetensors")


def test_weights_that_are_no_numbers(refused: Refused, bert: Path, empty: Path) -> None:
    """The model is to blame, and the line says which part of it, not that recording changes its answers."""
    model = transformers.BertForSequenceClassification.from_pretrained(bert)
    weight = "bert.encoder.layer.1.attention.self.value.weight"
    model.get_parameter(weight).data[0, 0] = torch.nan
    model.save_pretrained(empty / "broken")
    transformers.AutoTokenizer.from_pretrained(bert).save_pretrained(empty / "broken")
    for verb in ("explain", "compare"):
        said = refused(verb, TEXT, "-m", "broken", code=1)
        assert "NaN or infinite" in said and weight in said


@pytest.mark.parametrize(
    ("name", "content", "options", "says"),
    [
        ("a.csv", "", (), "'a.csv' is empty"),
        ("a.csv", "text,label\n", (), "'a.csv' is empty"),
        ("a.csv", "txt,label\nhello,1\n", ("--column", "text"), "did you mean 'txt'? Accepted: txt, label"),
        ("a.csv", "body,label\nhello,1\n", (), "unknown column 'text'. Accepted: body, label. Choose with --column"),
        ("a.csv", "text\nhello\n", ("--pair-column", "other"), "unknown column 'other'"),
        ("a.jsonl", '{"body": "hello", "n": 1}\n', (), "unknown column 'text'. Accepted: body, n"),
        ("a.csv", 'text,label\nhello,1\n"open,1\nend,2\n', (), "the row that begins in line 3 does not end properly"),
        ("a.csv", "text,text\nfirst,second\n", (), "2 columns are called 'text'"),
        ("a.tsv", "text,label\nso\tgood,1\n", ("--column", "text"), "Accepted: text,label"),
        ("a.csv", "text\nhello\n", ("--target", "HAPPY"), "unknown label 'HAPPY'"),
        ("a.csv", "text\nhello\n", ("--save", "b"), "--save is for single inputs"),
        ("a.csv", "text\nhello\n", ("--words",), "--words is for single inputs"),
        ("a.csv", "text\nhello\n", ("--sentences",), "--sentences is for single inputs"),
        ("a.csv", "text\nhello\n", ("--mask", "1"), "no masked word"),
        ("notes.docx", "hello", (), "a file that explain cannot read"),
    ],
)
def test_data_that_cannot_be_read(
    refused: Refused, bert: Path, empty: Path, name: str, content: str, options: tuple[str, ...], says: str
) -> None:
    (empty / name).write_text(content)
    before = contents(empty)
    assert says in refused("explain", name, "--model", bert, "--out", "results", *options)
    assert contents(empty) == before and not (empty / "results").exists()


def test_bytes_that_are_no_text(refused: Refused, bert: Path, empty: Path) -> None:
    """As Python has them of a shell that speaks Latin-1."""
    said = refused("explain", b"caf\xe9 is good".decode(errors="surrogateescape"), "-m", bert)
    assert "holds what is no Unicode character, '\\udce9' at 3" in said


def test_data_in_the_wrong_place(refused: Refused, bert: Path, empty: Path) -> None:
    (empty / "latin.csv").write_bytes("text\ncafé\n".encode("latin-1"))
    assert "is not UTF-8" in refused("explain", "latin.csv", "-m", bert, "--out", "results")
    (empty / "folder").mkdir()
    assert "holds no texts (.txt) and no images" in refused("explain", "folder", "-m", bert, "--out", "results")
    (empty / "folder" / "one.txt").write_text(TEXT)
    assert "name the folder for the results with --out" in refused("explain", "folder", "-m", bert)
    assert "must be the only input" in refused("explain", "folder", TEXT, "-m", bert, "--out", "results")
    assert "compare takes one input" in refused("compare", "folder", "-m", bert)
    before = contents(empty)
    assert "holds other files" in refused("explain", "folder", "-m", bert, "--out", "folder")
    assert contents(empty) == before


def test_show_refuses_what_it_did_not_save(refused: Refused, bert: Path, clearhead: Clearhead, empty: Path) -> None:
    assert "there is no file 'lost.safetensors'" in refused("show", "lost.safetensors")
    assert "holds no explanations" in refused("show", ".")
    clearhead("explain", TEXT, "-m", bert, "--save", "why.safetensors")
    content = (empty / "why.safetensors").read_bytes()
    for name, part in {"cut": content[:-3], "torn": content[:40], "none": b"", "other": b"hello" * 9}.items():
        (empty / name).write_bytes(part)
        assert f"'{name}' is not an explanation that clearhead saved" in refused("show", name, "--html", "x.html")
    assert "is not an explanation" in refused("show", bert / "model.safetensors")
    assert not (empty / "x.html").exists()


def test_compare_needs_two_methods(refused: Refused, bert: Path) -> None:
    said = refused("compare", TEXT, "-m", bert, "--methods", "generic,generic")
    assert said.endswith("compare needs at least two methods, but got generic")


def test_a_fault_of_our_own_is_one_line_too(
    refused: Refused, clearhead: Clearhead, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise RuntimeError("two\nlines \x1b[31m")

    monkeypatch.setattr("clearhead.zoo.zoo_models", broken)
    line = refused("models", code=70)
    assert "unexpected RuntimeError: two lines" in line and "--traceback" in line and "\x1b" not in line
    assert "in broken" in clearhead("--traceback", "models").err


def test_an_interrupt_is_one_line(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("clearhead.zoo.zoo_models", stopped)
    assert refused("models", code=130) == "clearhead: interrupted"


def test_an_interrupt_while_it_starts_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Starting:
        def __getattr__(self, name: str) -> None:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "clearhead.cli", Starting())  # type: ignore[arg-type]
    with pytest.raises(SystemExit) as ended:
        start()
    assert (ended.value.code, capsys.readouterr().err) == (130, "clearhead: interrupted\n")


def test_a_file_that_cannot_be_written_is_one_line(refused: Refused, bert: Path, empty: Path) -> None:
    long = "x" * 300 + ".html"
    assert "File name too long" in refused("explain", TEXT, "-m", bert, "--html", long)


def test_places_that_may_not_be_written_to_are_told_before_anything_is_loaded(
    refused: Refused, empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (empty / "locked").mkdir()
    # whoever runs the tests as root may write anywhere
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "locked")
    for verb, option, place in [
        ("explain", "--html", "locked/why.html"),
        ("explain", "--save", "locked/why.safetensors"),
        ("explain", "--save", "locked"),
        ("attention", "--out", "locked"),
        ("attention", "--out", "locked/maps"),
        ("lecture", "--figure", "locked/lecture.png"),
    ]:
        said = refused(verb, TEXT, "-m", "no-one/nothing", option, place)
        assert f"cannot write {place!r}: no permission to write to" in said


def test_a_device_is_a_place(clearhead: Clearhead, bert: Path) -> None:
    assert clearhead("explain", TEXT, "-m", bert, "--html", os.devnull).code == 0


def test_a_misspelt_verb(refused: Refused) -> None:
    assert refused("exlain", TEXT).endswith("Did you mean 'explain'? See clearhead --help")


def test_a_pipe_that_is_closed_is_no_failure() -> None:
    """As in clearhead methods | head -1: the reader has seen enough, whether it closed the pipe early or late."""
    for verb in (["methods"], ["models", "--json"], ["explain", "--help"]):
        reading, writing = os.pipe()
        os.close(reading)
        command = [sys.executable, "-m", "clearhead", *verb]
        ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, timeout=120, env=_environment())
        os.close(writing)
        assert (ended.returncode, ended.stderr) == (0, b""), verb


def test_in_a_real_process(bert: Path, empty: Path) -> None:
    """What the tests above see from inside is what a shell sees."""
    command = [sys.executable, "-m", "clearhead", "explain", TEXT, "--model", str(bert), "--target", "HAPPY"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=_environment())
    assert (ended.returncode, ended.stdout) == (2, "")
    assert (
        DEVICE_NOTE_PATTERN.sub("", ended.stderr)
        == "clearhead: unknown label 'HAPPY'. Accepted: NEGATIVE, NEUTRAL, POSITIVE\n"
    )


def test_help_and_the_list_of_models_import_no_torch(empty: Path) -> None:
    program = (
        "import sys, clearhead.cli\nclearhead.zoo_models()\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env=_environment())


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
