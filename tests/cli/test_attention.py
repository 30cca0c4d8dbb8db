"""`clearhead attention`: overview of all heads, and single maps."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.cli.conftest import Clearhead


def test_terminal_output_names_the_read_out_row(clearhead: Clearhead, bert: Path) -> None:
    result = clearhead("attention", "I like the movie", "-m", bert)
    assert result.code == 0 and result.err == "" and "read-out row 0 ([CLS])" in result.out and "\x1b" not in result.out


def test_out_folder_has_maps_figures_and_average_patterns(clearhead: Clearhead, bert: Path, tmp_path: Path) -> None:
    table, out = tmp_path / "some.csv", tmp_path / "maps"
    table.write_text("text\nSo boring\nShe hates the book\n", encoding="utf-8")
    command = ("attention", "I like the movie", "-m", bert, "--head", "0.1", "--head", "2.3", "--out", out)
    result = clearhead(*command, "--average-over", table, "--json")
    assert result.code == 0 and result.json == json.loads((out / "attention.json").read_text("utf-8"))
    assert all("mean_pattern" in line for line in result.json["heads"])
    maps = np.array(result.json["attention"])
    assert np.allclose(maps.sum(-1), 1, atol=1e-5)
    assert np.allclose(result.json["by_depth"]["raw"][2], maps[2, :, 0].mean(0), atol=1e-5)
    first = (maps[0, :, 0].mean(0) + np.eye(len(maps[0, 0]))[0]) / 2  # after one layer, rollout equals flow
    for kind in ("rollout", "flow"):
        assert np.allclose(result.json["by_depth"][kind][0], first, atol=1e-5)
    for name in ("overview", "depth", "graph", "maps"):
        with Image.open(out / f"{name}.png") as figure:
            assert min(figure.size) > 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no input: pass a text"),
        (("So boring", "--head", "1"), "specify the folder for them with --out"),
        (("So boring", "--head", "1", "--out", "x"), "such as 1.3"),
        (("So boring", "--limit", 3), "need --average-over"),
    ],
)
def test_invalid_arguments_are_rejected(run_failing, bert: Path, arguments: tuple[object, ...], message: str) -> None:
    assert message in run_failing("attention", *arguments, "-m", bert)


def test_missing_head_is_rejected(run_failing, bert: Path, tmp_path: Path) -> None:
    assert "there is no head 9 in layer 0" in run_failing(
        "attention", "So", "-m", bert, "--head", "0.9", "--out", tmp_path
    )


def test_encoder_decoder_writes_maps_of_every_stream(clearhead: Clearhead, tmp_path: Path) -> None:
    pytest.importorskip("clearhead_zoo")
    out = tmp_path / "maps"
    result = clearhead("attention", "phone", "-m", "zoo:spell", "--out", out, "--json")
    assert result.code == 0, result.err
    assert list(result.json["maps"]) == ["source", "prefix", "prefix → source"]
    figures = {path.relative_to(out).as_posix() for path in out.rglob("*.png")}
    expected = {f"{name}/{kind}.png" for name in ("source", "prefix") for kind in ("overview", "depth", "graph")}
    assert figures == expected | {"prefix-to-source/overview.png", "prefix-to-source/depth.png"}
    assert "Direction of attention" in (out / "attention.html").read_text("utf-8")


def test_stream_option_equals_map_of_full_output(clearhead: Clearhead, tmp_path: Path) -> None:
    pytest.importorskip("clearhead_zoo")
    all_maps = clearhead("attention", "phone", "-m", "zoo:spell", "--json").json["maps"]
    out = tmp_path / "one"
    arguments = ("--stream", "prefix->source", "--head", "1.0", "--out", out, "--json")
    result = clearhead("attention", "phone", "-m", "zoo:spell", *arguments)
    assert result.json == all_maps["prefix → source"] and result.json["keys"] == [*"phone", "</s>"]
    assert sorted(path.name for path in out.glob("*.png")) == ["depth.png", "maps.png", "overview.png"]


def test_text_to_region_attention_of_zoo_example_sums_to_one(clearhead: Clearhead) -> None:
    pytest.importorskip("clearhead_zoo")
    result = clearhead("attention", "-m", "zoo:shapes-vqa", "--example", "3", "--stream", "text → regions", "--json")
    assert result.code == 0, result.err
    assert np.allclose(np.array(result.json["attention"]).sum(-1), 1, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--stream", "nothing"), "prefix → source"),
        (("--head", "0.0", "--out", "x"), "choose with --stream"),
        (("--stream", "source", "--candidates", "a,b"), "leave out --stream"),
        (("--candidates", "a,b"), "models with one read-out token"),
        (("--example", "3"), "--example already selects the input"),
    ],
)
def test_invalid_multi_stream_arguments_are_rejected(run_failing, arguments: tuple[object, ...], message: str) -> None:
    pytest.importorskip("clearhead_zoo")
    assert message in run_failing("attention", "phone", "-m", "zoo:spell", *arguments)
