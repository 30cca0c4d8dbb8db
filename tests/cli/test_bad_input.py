"""Invalid input on the command line: one-line error, exit code, no traceback, and no file is changed."""

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

from clearhead.__main__ import main
from tests.cli.conftest import DEVICE_NOTE_PATTERN, Clearhead, read_folder

RunFailing = Callable[..., str]
TEXT = "I like the movie"


@pytest.fixture
def work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, where files left behind by a failed command would be found."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize(
    ("arguments", "message"),
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
        ((TEXT, "--layers", "9:"), "selects none of the 3 layers"),
        ((TEXT, "--heads", "a"), "--heads 'a' is not a list of heads"),
        ((TEXT, "--heads", "4"), "the model has 4 heads"),
        ((TEXT, "--rows", "some"), "rows='some' is not valid"),
        ((TEXT, "--truncation-side", "up"), "truncation_side='up' is not valid"),
        ((TEXT, "--dtype", "float3"), "dtype='float3' is not recognised"),
        ((TEXT, "--dtype", "int8"), "dtype='int8' is not a supported floating-point dtype"),
        ((TEXT, "--device", "toaster"), "device='toaster' is not recognised: use auto, cpu"),
        ((TEXT, "--device", "cuda:99"), "device='cuda:99' cannot be used here"),
        ((TEXT, "--memory", "2 apples"), "memory='2 apples' is not an amount of memory"),
        ((TEXT, "--revision", "main"), "revision='main' is only for hub models"),
        ((TEXT * 40, "--no-truncation"), "tokens, but the model takes at most 64"),
        ((TEXT, "--words", "--sentences"), "--words and --sentences cannot be combined"),
        ((TEXT, "--save", "lost/why.safetensors"), "there is no folder"),
        ((TEXT, "--save", "why.txt"), "must end in .safetensors"),
        (
            (TEXT, "--methods", "generic,cat", "--save", "why.safetensors"),
            "names one file, but there are 2 explanations",
        ),
        ((TEXT, "--batch-size", "0"), "--batch-size"),
        ((TEXT, "--out", "results"), "--out needs data"),
        (("lost.jpg",), "there is no file 'lost.jpg'"),
        (("lost.csv", "--out", "results"), "there is no file 'lost.csv'"),
        ((TEXT, "--metod", "generic"), "No such option: --metod"),
    ],
)
def test_explain_rejects_invalid_options(
    run_failing: RunFailing, bert: Path, work_dir: Path, arguments: tuple[str, ...], message: str
) -> None:
    before = read_folder(bert)
    page = () if "--out" in arguments else ("--html", "why.html")
    assert message in run_failing("explain", *arguments, "--model", bert, *page)
    assert read_folder(work_dir) == {}
    assert read_folder(bert) == before


def test_failed_command_preserves_existing_output(run_failing: RunFailing, bert: Path, work_dir: Path) -> None:
    (work_dir / "why.html").write_text("earlier")
    run_failing("explain", TEXT, "--model", bert, "--target", "HAPPY", "--html", "why.html")
    assert read_folder(work_dir) == {"why.html": b"earlier"}


def test_invalid_images_are_rejected(run_failing: RunFailing, vit: Path, bert: Path, work_dir: Path) -> None:
    (work_dir / "letter.jpg").write_text("Dear Sir")
    Image.effect_noise((64, 64), 50).save(work_dir / "whole.jpg")
    jpeg_bytes = (work_dir / "whole.jpg").read_bytes()
    (work_dir / "half.jpg").write_bytes(jpeg_bytes[: len(jpeg_bytes) // 2])
    Image.effect_noise((64, 64), 50).convert("F").save(work_dir / "numbers.tiff")
    Image.fromarray(np.full((64, 64), 257 * 100, dtype=np.uint16)).save(work_dir / "deep.png")
    before = read_folder(work_dir)
    for name, mode in (("numbers.tiff", "F"), ("deep.png", "I")):
        error = run_failing("explain", name, "-m", vit, "--html", "x.html")
        assert f"'{name}': the image has pixel values" in error and f"(mode {mode}" in error
    for name in ("letter.jpg", "half.jpg"):
        assert f"'{name}' cannot be opened as an image" in run_failing("explain", name, "-m", vit, "--html", "x.html")
    assert "takes images" in run_failing("explain", TEXT, "-m", vit)
    assert "takes texts, but 'whole.jpg' is an image" in run_failing("explain", "whole.jpg", "-m", bert)
    assert read_folder(work_dir) == before


def test_unsupported_and_missing_models_are_rejected(run_failing: RunFailing, bert: Path, work_dir: Path) -> None:
    config = transformers.ConvNextConfig(hidden_sizes=[8] * 4, depths=[1] * 4, image_size=32)
    transformers.ConvNextForImageClassification(config).save_pretrained(work_dir / "convnext")
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(work_dir / "convnext")
    Image.new("RGB", (32, 32)).save(work_dir / "black.png")
    assert "without attention" in run_failing("explain", "black.png", "-m", "convnext", code=1)

    pickled = work_dir / "pickled"
    transformers.BertForSequenceClassification.from_pretrained(bert).config.save_pretrained(pickled)
    torch.save({"a": torch.zeros(1)}, pickled / "pytorch_model.bin")
    assert "Only safetensors files are loaded" in run_failing("explain", TEXT, "-m", pickled)

    assert "cannot open 'no-one/nothing' as a model" in run_failing("explain", TEXT, "-m", "no-one/nothing")
    (work_dir / "bare").mkdir()
    assert "cannot open 'bare' as a model" in run_failing("explain", TEXT, "-m", "bare")
    assert run_failing("explain", TEXT, "-m", "./lost").endswith(
        "cannot open './lost' as a model: there is no such folder"
    )
    assert "is a file: pass the folder" in run_failing("explain", TEXT, "-m", bert / "model.safetensors")


def test_nan_weight_is_reported_by_parameter_name(run_failing: RunFailing, bert: Path, work_dir: Path) -> None:
    """The error names the parameter instead of reporting that capture changes the logits."""
    model = transformers.BertForSequenceClassification.from_pretrained(bert)
    weight = "bert.encoder.layer.1.attention.self.value.weight"
    model.get_parameter(weight).data[0, 0] = torch.nan
    model.save_pretrained(work_dir / "broken")
    transformers.AutoTokenizer.from_pretrained(bert).save_pretrained(work_dir / "broken")
    for command in ("explain", "compare"):
        error = run_failing(command, TEXT, "-m", "broken", code=1)
        assert "NaN or infinite" in error and weight in error


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("a.csv", "", (), "'a.csv' is empty"),
        ("a.csv", "text,label\n", (), "'a.csv' is empty"),
        ("a.csv", "txt,label\nhello,1\n", ("--column", "text"), "did you mean 'txt'? Accepted: txt, label"),
        ("a.csv", "body,label\nhello,1\n", (), "unknown column 'text'. Accepted: body, label. Choose with --column"),
        ("a.csv", "text\nhello\n", ("--pair-column", "other"), "unknown column 'other'"),
        ("a.jsonl", '{"body": "hello", "n": 1}\n', (), "unknown column 'text'. Accepted: body, n"),
        ("a.csv", 'text,label\nhello,1\n"open,1\nend,2\n', (), "the row that begins on line 3 does not end properly"),
        ("a.csv", "text,text\nfirst,second\n", (), "2 columns are named 'text'"),
        ("a.tsv", "text,label\nso\tgood,1\n", ("--column", "text"), "Accepted: text,label"),
        ("a.csv", "text\nhello\n", ("--target", "HAPPY"), "unknown label 'HAPPY'"),
        ("a.csv", "text\nhello\n", ("--save", "b"), "--save applies only to single inputs"),
        ("a.csv", "text\nhello\n", ("--words",), "--words applies only to single inputs"),
        ("a.csv", "text\nhello\n", ("--sentences",), "--sentences applies only to single inputs"),
        ("a.csv", "text\nhello\n", ("--mask", "1"), "does not predict masked tokens"),
        ("notes.docx", "hello", (), "a file that cannot be read as an input"),
    ],
)
def test_invalid_data_files_are_rejected(
    run_failing: RunFailing, bert: Path, work_dir: Path, name: str, content: str, options: tuple[str, ...], message: str
) -> None:
    (work_dir / name).write_text(content)
    before = read_folder(work_dir)
    assert message in run_failing("explain", name, "--model", bert, "--out", "results", *options)
    assert read_folder(work_dir) == before and not (work_dir / "results").exists()


def test_invalid_unicode_is_rejected(run_failing: RunFailing, bert: Path, work_dir: Path) -> None:
    """Surrogate escapes, as Python receives them from a Latin-1 shell."""
    error = run_failing("explain", b"caf\xe9 is good".decode(errors="surrogateescape"), "-m", bert)
    assert "contains '\\udce9' at position 3, which is not a Unicode character" in error


def test_invalid_data_folders_are_rejected(run_failing: RunFailing, bert: Path, work_dir: Path) -> None:
    (work_dir / "latin.csv").write_bytes("text\ncafé\n".encode("latin-1"))
    assert "is not UTF-8" in run_failing("explain", "latin.csv", "-m", bert, "--out", "results")
    (work_dir / "folder").mkdir()
    assert "contains no texts (.txt) and no images" in run_failing("explain", "folder", "-m", bert, "--out", "results")
    (work_dir / "folder" / "one.txt").write_text(TEXT)
    assert "specify a folder for the results with --out" in run_failing("explain", "folder", "-m", bert)
    assert "must be the only input" in run_failing("explain", "folder", TEXT, "-m", bert, "--out", "results")
    assert "compare takes one input" in run_failing("compare", "folder", "-m", bert)
    before = read_folder(work_dir)
    assert "contains other files" in run_failing("explain", "folder", "-m", bert, "--out", "folder")
    assert read_folder(work_dir) == before


def test_show_rejects_files_that_are_not_explanations(
    run_failing: RunFailing, bert: Path, clearhead: Clearhead, work_dir: Path
) -> None:
    assert "there is no file 'lost.safetensors'" in run_failing("show", "lost.safetensors")
    assert "contains no explanations" in run_failing("show", ".")
    clearhead("explain", TEXT, "-m", bert, "--save", "why.safetensors")
    content = (work_dir / "why.safetensors").read_bytes()
    for name, damaged in {"cut": content[:-3], "torn": content[:40], "none": b"", "other": b"hello" * 9}.items():
        (work_dir / name).write_bytes(damaged)
        assert f"'{name}' is not an explanation saved by clearhead" in run_failing("show", name, "--html", "x.html")
    assert "is not an explanation" in run_failing("show", bert / "model.safetensors")
    assert not (work_dir / "x.html").exists()


def test_compare_needs_two_methods(run_failing: RunFailing, bert: Path) -> None:
    error = run_failing("compare", TEXT, "-m", bert, "--methods", "generic,generic")
    assert error.endswith("compare needs at least two methods, but got generic")


def test_internal_error_is_one_line_with_optional_traceback(
    run_failing: RunFailing, clearhead: Clearhead, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise RuntimeError("two\nlines \x1b[31m")

    monkeypatch.setattr("clearhead.zoo.zoo_models", broken)
    line = run_failing("models", code=70)
    assert "unexpected RuntimeError: two lines" in line and "--traceback" in line and "\x1b" not in line
    assert "in broken" in clearhead("--traceback", "models").err


def test_keyboard_interrupt_is_one_line(run_failing: RunFailing, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("clearhead.zoo.zoo_models", stopped)
    assert run_failing("models", code=130) == "clearhead: interrupted"


def test_keyboard_interrupt_during_import_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Starting:
        def __getattr__(self, name: str) -> None:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "clearhead.cli", Starting())  # type: ignore[arg-type]
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert (exit_info.value.code, capsys.readouterr().err) == (130, "clearhead: interrupted\n")


def test_unwritable_file_name_is_one_line_error(run_failing: RunFailing, bert: Path, work_dir: Path) -> None:
    file_name = "x" * 300 + ".html"
    assert "File name too long" in run_failing("explain", TEXT, "-m", bert, "--html", file_name)


def test_unwritable_output_is_rejected_before_loading_the_model(
    run_failing: RunFailing, work_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (work_dir / "locked").mkdir()
    # root may write anywhere, so permissions alone cannot be tested
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "locked")
    for command, option, output in [
        ("explain", "--html", "locked/why.html"),
        ("explain", "--save", "locked/why.safetensors"),
        ("explain", "--save", "locked"),
        ("attention", "--out", "locked"),
        ("attention", "--out", "locked/maps"),
        ("lecture", "--figure", "locked/lecture.png"),
    ]:
        error = run_failing(command, TEXT, "-m", "no-one/nothing", option, output)
        assert f"cannot write {output!r}: no permission to write to" in error


def test_output_to_dev_null_is_accepted(clearhead: Clearhead, bert: Path) -> None:
    assert clearhead("explain", TEXT, "-m", bert, "--html", os.devnull).code == 0


def test_misspelt_command_suggests_the_nearest(run_failing: RunFailing) -> None:
    assert run_failing("exlain", TEXT).endswith("Did you mean 'explain'? See clearhead --help")


def test_closed_pipe_exits_with_code_0() -> None:
    """As in `clearhead methods | head -1`: the reader may close the pipe early or late."""
    for arguments in (["methods"], ["models", "--json"], ["explain", "--help"]):
        read_end, write_end = os.pipe()
        os.close(read_end)
        command = [sys.executable, "-m", "clearhead", *arguments]
        completed = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, timeout=120, env=_environment())
        os.close(write_end)
        assert (completed.returncode, completed.stderr) == (0, b""), arguments


def test_error_in_subprocess_equals_in_process_error(bert: Path, work_dir: Path) -> None:
    """A shell receives the same output and exit code as the in-process calls above."""
    command = [sys.executable, "-m", "clearhead", "explain", TEXT, "--model", str(bert), "--target", "HAPPY"]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=120, env=_environment())
    assert (completed.returncode, completed.stdout) == (2, "")
    assert (
        DEVICE_NOTE_PATTERN.sub("", completed.stderr)
        == "clearhead: unknown label 'HAPPY'. Accepted: NEGATIVE, NEUTRAL, POSITIVE\n"
    )


def test_help_and_the_list_of_models_import_no_torch(work_dir: Path) -> None:
    program = (
        "import sys, clearhead.cli\nclearhead.zoo_models()\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env=_environment())


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
