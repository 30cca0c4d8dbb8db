"""`clearhead explain`, `compare`, `show`: what a person sees, what a program reads."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import clearhead as ch
from tests.cli.conftest import Clearhead, contents

TEXT = "I like the movie"


def test_the_json_form_is_the_explanation(clearhead: Clearhead, bert: Path) -> None:
    said = clearhead("explain", TEXT, "--model", bert, "--json")
    assert said.code == 0 and said.err == ""
    expected = ch.load(bert).explain(TEXT)
    np.testing.assert_allclose(ch.from_dict(said.json).scores, expected.scores, rtol=1e-5)
    assert said.json["units"]["names"] == expected.tokens


def test_options_mean_what_the_arguments_mean(clearhead: Clearhead, bert: Path) -> None:
    said = clearhead(
        *("explain", TEXT, "-m", bert, "--json", "--methods", "generic,grad-sam(received=True)"),
        *(
            "--target",
            "positive",
            "--against",
            "NEGATIVE",
            "--scale",
            "probability",
            "--layers",
            "-2:",
            "--heads",
            "0,3",
        ),
    )
    expected = ch.load(bert).explain(
        TEXT,
        method=["generic", ch.Method("grad-sam", received=True)],
        target=ch.Contrast("POSITIVE", "NEGATIVE"),
        scale="probability",
        layers=(-2, None),
        heads=[0, 3],
    )
    assert [one["method"] for one in said.json] == [other.method for other in expected.values()]
    for one, other in zip(said.json, expected.values(), strict=True):
        np.testing.assert_allclose(one["scores"], other.scores, rtol=1e-4, atol=1e-7)
        assert one["target"]["name"] == other.target["name"] == "POSITIVE − NEGATIVE"


def test_several_inputs_and_methods_come_input_by_input(clearhead: Clearhead, bert: Path) -> None:
    said = clearhead("explain", TEXT, "So boring!", "-m", bert, "--methods", "generic,saliency", "--json")
    told = [(one["units"]["texts"][0], one["method"]) for one in said.json]
    assert told == [(TEXT, "generic"), (TEXT, "saliency"), ("So boring!", "generic"), ("So boring!", "saliency")]


def test_a_pair_of_texts(clearhead: Clearhead, bert: Path) -> None:
    said = clearhead("explain", TEXT, "--pair", "She hates the book", "-m", bert, "--json")
    assert said.json["units"]["texts"] == [TEXT, "She hates the book"]


def test_every_row_and_a_shorter_text(clearhead: Clearhead, bert: Path) -> None:
    options = ("--rows", "all", "--max-length", 4, "--truncation-side", "left")
    said = clearhead("explain", TEXT, "-m", bert, "--json", *options)
    assert np.shape(said.json["matrix"]) == (4, 4)
    assert said.json["certificate"]["truncated_tokens"] == len(ch.load(bert).explain(TEXT)) - 4 > 0


def test_a_person_reads_plain_words_when_the_output_is_piped(clearhead: Clearhead, bert: Path) -> None:
    said = clearhead("explain", TEXT, "-m", bert, "--words")
    assert said.code == 0
    assert "movie" in said.out and "\x1b" not in said.out


@pytest.mark.parametrize("merge", ["--words", "--sentences"])
def test_a_saved_explanation_is_shown_again_without_the_model(
    clearhead: Clearhead, bert: Path, tmp_path: Path, merge: str
) -> None:
    file, page = tmp_path / "why.safetensors", tmp_path / "why.html"
    first = clearhead("explain", TEXT, "-m", bert, "--save", file, "--html", page, merge)
    assert "<html" in page.read_text() and sorted(tmp_path.iterdir()) == [page, file]
    assert clearhead("show", file, merge).out == first.out
    assert clearhead("show", file, "--json").json["units"]["kind"] == "token"


def test_several_are_saved_into_a_folder_and_put_together(clearhead: Clearhead, bert: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    clearhead("explain", TEXT, "I like the book", "-m", bert, "--methods", "generic,attcat", "--save", folder)
    assert sorted(file.name for file in folder.iterdir()) == [
        "001.generic.safetensors",
        "002.attcat.safetensors",
        "003.generic.safetensors",
        "004.attcat.safetensors",
    ]
    told = clearhead("show", folder, "--by", "word", "--reduction", "mean", "--json").json
    assert set(told) == {"generic", "attcat"}
    assert {row["name"]: row["count"] for row in told["generic"]["rows"]}["like"] == 2
    assert "like" in clearhead("show", folder).out


def test_what_was_saved_before_stays(
    clearhead: Clearhead, refused: Callable[..., str], bert: Path, tmp_path: Path
) -> None:
    folder, data = tmp_path / "kept", tmp_path / "a.csv"
    for text in (TEXT, "I like the book"):
        clearhead("explain", text, "-m", bert, "--save", folder)
    files = sorted(folder.iterdir())
    assert [file.name for file in files] == ["001.generic.safetensors", "002.generic.safetensors"]
    assert [ch.load_explanation(file).units.texts for file in files] == [(TEXT,), ("I like the book",)]
    data.write_text(f"text\n{TEXT}\n")
    clearhead("explain", data, "-m", bert, "--out", tmp_path / "run")
    before = contents(tmp_path)
    assert "holds the results of a run with --out" in refused("explain", TEXT, "-m", bert, "--save", tmp_path / "run")
    assert contents(tmp_path) == before


def test_pictures_by_file_and_by_name(clearhead: Clearhead, vit: Path, tmp_path: Path) -> None:
    pytest.importorskip("skimage")
    Image.new("RGB", (20, 20), "red").save(tmp_path / "red.png")
    for named in (tmp_path / "red.png", "chelsea"):
        said = clearhead("explain", named, "-m", vit, "--json")
        assert said.json["stream"] == "image" and len(said.json["scores"]) == 17


def test_the_name_of_a_picture_is_a_word_for_a_model_of_texts(clearhead: Clearhead, bert: Path) -> None:
    assert clearhead("explain", "chelsea", "-m", bert, "--json").json["units"]["texts"] == ["chelsea"]


def test_a_text_file_is_read_and_text_takes_its_name_literally(
    clearhead: Clearhead, bert: Path, tmp_path: Path
) -> None:
    file = tmp_path / "review.txt"
    file.write_text(TEXT, encoding="utf-8")
    assert clearhead("explain", file, "-m", bert, "--json").json["units"]["texts"] == [TEXT]
    for name in ("lost.txt", str(file)):
        assert clearhead("explain", "--text", name, "-m", bert, "--json").json["units"]["texts"] == [name]


def test_compare(clearhead: Clearhead, bert: Path, tmp_path: Path) -> None:
    page = tmp_path / "compare.html"
    said = clearhead("compare", TEXT, "-m", bert, "--methods", "generic,attcat,random", "--json", "--html", page)
    assert said.json["methods"] == ["generic", "attcat", "random"] and "<html" in page.read_text()
    assert "attcat" in clearhead("compare", TEXT, "-m", bert).out


def test_methods_say_whether_they_apply(clearhead: Clearhead, bert: Path) -> None:
    every = clearhead("methods", "--json").json["methods"]
    assert {"generic", "rollout", "saliency"} <= {line["method"] for line in every}
    assert all(line["cost"] and line["taxonomy"] and line["citation"] and "asks" in line for line in every)
    assert " asks " in clearhead("methods").out.splitlines()[1]
    applied = clearhead("methods", "--model", bert, "--json").json["methods"]
    assert all(line["applies"] and line["why_not"] == "" for line in applied)
    assert "grad-sam" in clearhead("methods", "--model", bert).out


def test_models_work_without_the_zoo(clearhead: Clearhead, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clearhead.zoo.find_spec", lambda name: None)
    assert clearhead("models", "--json").json["models"] == {}
    said = clearhead("models")
    assert said.code == 0 and "pip install clearhead-zoo" in said.out


def test_models_of_an_empty_zoo(clearhead: Clearhead, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clearhead.zoo.is_zoo_installed", lambda: True)
    monkeypatch.setattr("clearhead.zoo.zoo_models", dict)
    said = clearhead("models")
    assert said.code == 0 and "is installed, but holds no models" in said.out and "pip install" not in said.out


def test_models_are_listed_from_their_cards(clearhead: Clearhead, monkeypatch: pytest.MonkeyPatch) -> None:
    card = {"task": "text-classification", "bytes": 21_000_000, "figures": {"accuracy": 0.91}, "summary": "Feelings."}
    monkeypatch.setattr("clearhead.zoo.zoo_models", lambda: {"sentiment": card})
    said = clearhead("models").out
    assert "zoo:sentiment" in said and "21.0 MB" in said and "accuracy 0.91" in said


def test_version(clearhead: Clearhead) -> None:
    assert clearhead("--version").out == f"clearhead {ch.__version__}\n"
    assert clearhead("version", "--json").json["clearhead"] == ch.__version__


@pytest.mark.parametrize("verb", ["explain", "compare", "show", "methods", "models", "verify", "version"])
def test_every_verb_helps_with_an_example(clearhead: Clearhead, verb: str) -> None:
    said = clearhead(verb, "--help")
    assert said.code == 0 and f"clearhead {verb}" in said.out.partition("Examples")[2]
    assert "--json" in said.out


def test_json_never_holds_what_json_has_no_word_for(capsys: pytest.CaptureFixture[str]) -> None:
    from clearhead.cli.output import print_json

    print_json({"scores": [1.0, float("nan")], "p": (float("inf"),)})
    assert json.loads(capsys.readouterr().out) == {"scores": [1.0, None], "p": [None]}


def test_masks_words_and_contrasts(clearhead: Clearhead, masked: Path) -> None:
    text = "I [MASK] the [MASK]"
    command = ("explain", text, "-m", masked, "--json", "--mask", 1)
    assert (
        clearhead(*command).json["target"] == ch.load(masked).explain(text, target=ch.MaskedToken(mask_index=1)).target
    )
    said = clearhead(*command, "--target", "book", "--against", "it").json
    expected = ch.load(masked).explain(text, target=ch.Contrast("book", "it", mask_index=1))
    assert said["target"]["name"] == "book − it" and said["target"]["mask"] == 1
    np.testing.assert_allclose(said["scores"], expected.scores, rtol=1e-4, atol=1e-7)
    assert "at mask 1" in clearhead("explain", text, "-m", masked, "--mask", 1).out


def test_a_measuring_model_is_shown(clearhead: Clearhead, measuring: Path, tmp_path: Path) -> None:
    said = clearhead("explain", TEXT, "-m", measuring, "--html", tmp_path / "why.html")
    assert said.code == 0 and "the predicted value" in said.out
    assert clearhead("compare", TEXT, "-m", measuring).code == 0


def test_a_folder_with_one_bad_file_is_shown_all_the_same(clearhead: Clearhead, bert: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    clearhead("explain", TEXT, "I like the book", "-m", bert, "--save", folder)
    good = clearhead("show", folder)
    (folder / "torn.safetensors").write_bytes(b"torn")
    said = clearhead("show", folder)
    assert said.code == 3 and said.out == good.out
    assert said.err.startswith("clearhead: left out: ") and "torn.safetensors" in said.err and said.err.count("\n") == 1
    assert set(clearhead("show", folder, "--json").json) == {"generic"}
    for file in folder.glob("0*"):
        file.unlink()
    assert clearhead("show", folder).code == 2


def test_a_budget_of_memory(clearhead: Clearhead, bert: Path, tmp_path: Path) -> None:
    inputs = ("explain", TEXT, "So boring!", "-m", bert, "--methods", "generic,saliency", "--json")
    free, kept = clearhead(*inputs), clearhead(*inputs, "--memory", "1MiB")
    for one, other in zip(free.json, kept.json, strict=True):
        np.testing.assert_allclose(one["scores"], other["scores"], rtol=1e-4, atol=1e-7)
    both = clearhead("compare", TEXT, "-m", bert, "--methods", "generic,saliency", "--json", "--memory", "1MiB")
    np.testing.assert_allclose(both.json["explanations"]["generic"]["scores"], free.json[0]["scores"], rtol=1e-4)
    (tmp_path / "texts.csv").write_text(f"text\n{TEXT}\n")
    out = tmp_path / "out"
    assert clearhead("explain", tmp_path / "texts.csv", "-m", bert, "--out", out, "--memory", "1MiB").code == 0
    assert json.loads((out / "settings.json").read_text())["settings"]["memory"] == "1MiB"
    small = clearhead(*inputs, "--memory", "1KiB")
    assert small.code == 2 and "is too small: one input of" in small.err and small.err.count("\n") == 1
    assert "not an amount of memory" in clearhead(*inputs, "--memory", "lots").err


def test_what_may_take_long_is_said(clearhead: Clearhead, bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("igraph")
    monkeypatch.setattr("clearhead.methods.flow.COST_WARNING_SECONDS", 0)
    said = clearhead("explain", TEXT, "-m", bert, "--methods", "flow", "--json")
    assert said.code == 0 and said.json["method"] == "flow"
    assert said.err.startswith("clearhead: flow: ") and "max-flow problems" in said.err and said.err.count("\n") == 1


def test_the_kernel(clearhead: Clearhead, bert: Path) -> None:
    whole, tiles = (clearhead("explain", TEXT, "-m", bert, "--json", "--kernel", k) for k in ("materialised", "tiles"))
    assert whole.json["certificate"]["kernel"] == "materialised"
    assert tiles.json["certificate"]["kernel"] == "streaming: torch tiles"
    np.testing.assert_allclose(ch.from_dict(tiles.json).scores, ch.from_dict(whole.json).scores, rtol=1e-4, atol=1e-7)
    wrong = clearhead("explain", TEXT, "-m", bert, "--kernel", "flash")
    assert wrong.code != 0 and "unknown kernel 'flash'" in wrong.err
