"""`clearhead explain`, `compare` and `show`: terminal output and JSON."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import clearhead as ch
from tests.cli.conftest import Clearhead, read_folder

TEXT = "I like the movie"


def test_json_equals_python_explanation(clearhead: Clearhead, bert: Path) -> None:
    result = clearhead("explain", TEXT, "--model", bert, "--json")
    assert result.code == 0 and result.err == ""
    expected = ch.load(bert).explain(TEXT)
    np.testing.assert_allclose(ch.from_dict(result.json).scores, expected.scores, rtol=1e-5)
    assert result.json["units"]["names"] == expected.tokens


def test_options_equal_python_arguments(clearhead: Clearhead, bert: Path) -> None:
    result = clearhead(
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
    assert [document["method"] for document in result.json] == [explanation.method for explanation in expected.values()]
    for document, explanation in zip(result.json, expected.values(), strict=True):
        np.testing.assert_allclose(document["scores"], explanation.scores, rtol=1e-4, atol=1e-7)
        assert document["target"]["name"] == explanation.target["name"] == "POSITIVE − NEGATIVE"


def test_several_inputs_and_methods_are_ordered_by_input(clearhead: Clearhead, bert: Path) -> None:
    result = clearhead("explain", TEXT, "So boring!", "-m", bert, "--methods", "generic,saliency", "--json")
    order = [(document["units"]["texts"][0], document["method"]) for document in result.json]
    assert order == [(TEXT, "generic"), (TEXT, "saliency"), ("So boring!", "generic"), ("So boring!", "saliency")]


def test_pair_option_adds_the_second_text(clearhead: Clearhead, bert: Path) -> None:
    result = clearhead("explain", TEXT, "--pair", "She hates the book", "-m", bert, "--json")
    assert result.json["units"]["texts"] == [TEXT, "She hates the book"]


def test_rows_all_gives_a_matrix_of_the_truncated_text(clearhead: Clearhead, bert: Path) -> None:
    options = ("--rows", "all", "--max-length", 4, "--truncation-side", "left")
    result = clearhead("explain", TEXT, "-m", bert, "--json", *options)
    assert np.shape(result.json["matrix"]) == (4, 4)
    assert result.json["certificate"]["truncated_tokens"] == len(ch.load(bert).explain(TEXT)) - 4 > 0


def test_piped_output_has_no_escape_codes(clearhead: Clearhead, bert: Path) -> None:
    result = clearhead("explain", TEXT, "-m", bert, "--words")
    assert result.code == 0
    assert "movie" in result.out and "\x1b" not in result.out


@pytest.mark.parametrize("merge", ["--words", "--sentences"])
def test_show_of_saved_file_equals_explain_output(clearhead: Clearhead, bert: Path, tmp_path: Path, merge: str) -> None:
    file, page = tmp_path / "why.safetensors", tmp_path / "why.html"
    first = clearhead("explain", TEXT, "-m", bert, "--save", file, "--html", page, merge)
    assert "<html" in page.read_text() and sorted(tmp_path.iterdir()) == [page, file]
    assert clearhead("show", file, merge).out == first.out
    assert clearhead("show", file, "--json").json["units"]["kind"] == "token"


def test_several_explanations_are_saved_to_a_folder_and_aggregated(
    clearhead: Clearhead, bert: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "kept"
    clearhead("explain", TEXT, "I like the book", "-m", bert, "--methods", "generic,attcat", "--save", folder)
    assert sorted(file.name for file in folder.iterdir()) == [
        "001.generic.safetensors",
        "002.attcat.safetensors",
        "003.generic.safetensors",
        "004.attcat.safetensors",
    ]
    aggregated = clearhead("show", folder, "--by", "word", "--reduction", "mean", "--json").json
    assert set(aggregated) == {"generic", "attcat"}
    assert {row["name"]: row["count"] for row in aggregated["generic"]["rows"]}["like"] == 2
    assert "like" in clearhead("show", folder).out


def test_save_does_not_overwrite_earlier_results(
    clearhead: Clearhead, run_failing: Callable[..., str], bert: Path, tmp_path: Path
) -> None:
    folder, data = tmp_path / "kept", tmp_path / "a.csv"
    for text in (TEXT, "I like the book"):
        clearhead("explain", text, "-m", bert, "--save", folder)
    files = sorted(folder.iterdir())
    assert [file.name for file in files] == ["001.ensemble.safetensors", "002.ensemble.safetensors"]
    assert [ch.load_explanation(file).units.texts for file in files] == [(TEXT,), ("I like the book",)]
    data.write_text(f"text\n{TEXT}\n")
    clearhead("explain", data, "-m", bert, "--out", tmp_path / "run")
    before = read_folder(tmp_path)
    assert "contains the results of a run with --out" in run_failing(
        "explain", TEXT, "-m", bert, "--save", tmp_path / "run"
    )
    assert read_folder(tmp_path) == before


def test_images_by_file_and_by_sample_name(clearhead: Clearhead, vit: Path, tmp_path: Path) -> None:
    pytest.importorskip("skimage")
    Image.new("RGB", (20, 20), "red").save(tmp_path / "red.png")
    for image in (tmp_path / "red.png", "chelsea"):
        result = clearhead("explain", image, "-m", vit, "--json")
        assert result.json["stream"] == "image" and len(result.json["scores"]) == 17


def test_sample_image_name_is_plain_text_for_a_text_model(clearhead: Clearhead, bert: Path) -> None:
    assert clearhead("explain", "chelsea", "-m", bert, "--json").json["units"]["texts"] == ["chelsea"]


def test_text_file_is_read_but_text_option_is_literal(clearhead: Clearhead, bert: Path, tmp_path: Path) -> None:
    file = tmp_path / "review.txt"
    file.write_text(TEXT, encoding="utf-8")
    assert clearhead("explain", file, "-m", bert, "--json").json["units"]["texts"] == [TEXT]
    for name in ("lost.txt", str(file)):
        assert clearhead("explain", "--text", name, "-m", bert, "--json").json["units"]["texts"] == [name]


def test_compare_writes_json_and_page(clearhead: Clearhead, bert: Path, tmp_path: Path) -> None:
    page = tmp_path / "compare.html"
    result = clearhead("compare", TEXT, "-m", bert, "--methods", "generic,attcat,random", "--json", "--html", page)
    assert result.json["methods"] == ["generic", "attcat", "random"] and "<html" in page.read_text()
    assert "ensemble" in clearhead("compare", TEXT, "-m", bert).out


def test_methods_lists_cost_taxonomy_and_applicability(clearhead: Clearhead, bert: Path) -> None:
    all_methods = clearhead("methods", "--json").json["methods"]
    assert {"generic", "rollout", "saliency"} <= {line["method"] for line in all_methods}
    assert all(line["cost"] and line["taxonomy"] and line["citation"] and "requires" in line for line in all_methods)
    assert " requires " in clearhead("methods").out.splitlines()[1]
    applied = clearhead("methods", "--model", bert, "--json").json["methods"]
    assert all(line["applies"] and line["why_not"] == "" for line in applied)
    assert "grad-sam" in clearhead("methods", "--model", bert).out


def test_models_without_the_zoo_suggests_installation(clearhead: Clearhead, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clearhead.zoo.find_spec", lambda name: None)
    assert clearhead("models", "--json").json["models"] == {}
    result = clearhead("models")
    assert result.code == 0 and "pip install clearhead-zoo" in result.out


def test_models_reports_an_empty_zoo(clearhead: Clearhead, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clearhead.zoo.is_zoo_installed", lambda: True)
    monkeypatch.setattr("clearhead.zoo.zoo_models", dict)
    result = clearhead("models")
    assert result.code == 0 and "is installed, but contains no models" in result.out and "pip install" not in result.out


def test_models_are_listed_from_their_cards(clearhead: Clearhead, monkeypatch: pytest.MonkeyPatch) -> None:
    card = {"task": "text-classification", "bytes": 21_000_000, "figures": {"accuracy": 0.91}, "summary": "Feelings."}
    monkeypatch.setattr("clearhead.zoo.zoo_models", lambda: {"sentiment": card})
    output = clearhead("models").out
    assert "zoo:sentiment" in output and "21.0 MB" in output and "accuracy 0.91" in output


def test_version_option_and_command(clearhead: Clearhead) -> None:
    assert clearhead("--version").out == f"clearhead {ch.__version__}\n"
    assert clearhead("version", "--json").json["clearhead"] == ch.__version__


@pytest.mark.parametrize("command", ["explain", "compare", "show", "methods", "models", "verify", "version"])
def test_help_of_every_command_has_examples(clearhead: Clearhead, command: str) -> None:
    result = clearhead(command, "--help")
    assert result.code == 0 and f"clearhead {command}" in result.out.partition("Examples")[2]
    assert "--json" in result.out


def test_print_json_replaces_nan_and_inf_by_null(capsys: pytest.CaptureFixture[str]) -> None:
    from clearhead.cli.output import print_json

    print_json({"scores": [1.0, float("nan")], "p": (float("inf"),)})
    assert json.loads(capsys.readouterr().out) == {"scores": [1.0, None], "p": [None]}


def test_mask_option_and_word_contrast_equal_python_api(clearhead: Clearhead, masked_lm: Path) -> None:
    text = "I [MASK] the [MASK]"
    command = ("explain", text, "-m", masked_lm, "--json", "--mask", 1)
    assert (
        clearhead(*command).json["target"]
        == ch.load(masked_lm).explain(text, target=ch.MaskedToken(mask_index=1)).target
    )
    document = clearhead(*command, "--target", "book", "--against", "it").json
    expected = ch.load(masked_lm).explain(text, target=ch.Contrast("book", "it", mask_index=1))
    assert document["target"]["name"] == "book − it" and document["target"]["mask"] == 1
    np.testing.assert_allclose(document["scores"], expected.scores, rtol=1e-4, atol=1e-7)
    assert "at mask 1" in clearhead("explain", text, "-m", masked_lm, "--mask", 1).out


def test_regression_model_is_explained_and_compared(clearhead: Clearhead, regressor: Path, tmp_path: Path) -> None:
    result = clearhead("explain", TEXT, "-m", regressor, "--html", tmp_path / "why.html")
    assert result.code == 0 and "the predicted value" in result.out
    assert clearhead("compare", TEXT, "-m", regressor).code == 0


def test_show_skips_a_damaged_file_of_a_folder(clearhead: Clearhead, bert: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    clearhead("explain", TEXT, "I like the book", "-m", bert, "--save", folder)
    complete = clearhead("show", folder)
    (folder / "torn.safetensors").write_bytes(b"torn")
    result = clearhead("show", folder)
    assert result.code == 3 and result.out == complete.out
    assert (
        result.err.startswith("clearhead: skipped: ")
        and "torn.safetensors" in result.err
        and result.err.count("\n") == 1
    )
    assert set(clearhead("show", folder, "--json").json) == {"ensemble"}
    for file in folder.glob("0*"):
        file.unlink()
    assert clearhead("show", folder).code == 2


def test_memory_limit_preserves_scores_and_rejects_too_small(clearhead: Clearhead, bert: Path, tmp_path: Path) -> None:
    inputs = ("explain", TEXT, "So boring!", "-m", bert, "--methods", "generic,saliency", "--json")
    unlimited, limited = clearhead(*inputs), clearhead(*inputs, "--memory", "1MiB")
    for expected, actual in zip(unlimited.json, limited.json, strict=True):
        np.testing.assert_allclose(expected["scores"], actual["scores"], rtol=1e-4, atol=1e-7)
    both = clearhead("compare", TEXT, "-m", bert, "--methods", "generic,saliency", "--json", "--memory", "1MiB")
    np.testing.assert_allclose(both.json["explanations"]["generic"]["scores"], unlimited.json[0]["scores"], rtol=1e-4)
    (tmp_path / "texts.csv").write_text(f"text\n{TEXT}\n")
    out = tmp_path / "out"
    assert clearhead("explain", tmp_path / "texts.csv", "-m", bert, "--out", out, "--memory", "1MiB").code == 0
    assert json.loads((out / "settings.json").read_text())["settings"]["memory"] == "1MiB"
    too_small = clearhead(*inputs, "--memory", "1KiB")
    assert too_small.code == 2 and "is too small: one input of" in too_small.err and too_small.err.count("\n") == 1
    assert "not an amount of memory" in clearhead(*inputs, "--memory", "lots").err


def test_expensive_method_prints_a_cost_warning(
    clearhead: Clearhead, bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("igraph")
    monkeypatch.setattr("clearhead.methods.flow.COST_WARNING_SECONDS", 0)
    result = clearhead("explain", TEXT, "-m", bert, "--methods", "flow", "--json")
    assert result.code == 0 and result.json["method"] == "flow"
    assert (
        result.err.startswith("clearhead: flow: ") and "max-flow problems" in result.err and result.err.count("\n") == 1
    )


def test_tiles_kernel_equals_materialised_kernel(clearhead: Clearhead, bert: Path) -> None:
    materialised, tiled = (
        clearhead("explain", TEXT, "-m", bert, "--json", "--kernel", k) for k in ("materialised", "tiles")
    )
    assert materialised.json["certificate"]["kernel"] == "materialised"
    assert tiled.json["certificate"]["kernel"] == "streaming: torch tiles"
    np.testing.assert_allclose(
        ch.from_dict(tiled.json).scores, ch.from_dict(materialised.json).scores, rtol=1e-4, atol=1e-7
    )
    unknown = clearhead("explain", TEXT, "-m", bert, "--kernel", "flash")
    assert unknown.code != 0 and "unknown kernel 'flash'" in unknown.err
