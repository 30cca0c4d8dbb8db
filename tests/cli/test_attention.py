"""`clearhead attention`: all heads at a glance, and single maps."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.cli.conftest import Clearhead


def test_a_line_for_each_layer(clearhead: Clearhead, bert: Path) -> None:
    said = clearhead("attention", "I like the movie", "-m", bert)
    assert said.code == 0 and said.err == "" and "read-out row 0 ([CLS])" in said.out and "\x1b" not in said.out


def test_maps_figures_and_an_average_beside(clearhead: Clearhead, bert: Path, tmp_path: Path) -> None:
    table, out = tmp_path / "some.csv", tmp_path / "maps"
    table.write_text("text\nSo boring\nShe hates the book\n", encoding="utf-8")
    command = ("attention", "I like the movie", "-m", bert, "--head", "0.1", "--head", "2.3", "--out", out)
    said = clearhead(*command, "--average-over", table, "--json")
    assert said.code == 0 and said.json == json.loads((out / "attention.json").read_text("utf-8"))
    assert all("pattern on average" in line for line in said.json["heads"])
    maps = np.array(said.json["attention"])
    assert np.allclose(maps.sum(-1), 1, atol=1e-5)
    assert np.allclose(said.json["by_depth"]["raw"][2], maps[2, :, 0].mean(0), atol=1e-5)
    first = (maps[0, :, 0].mean(0) + np.eye(len(maps[0, 0]))[0]) / 2  # after one layer, rollout and flow are one
    for kind in ("rollout", "flow"):
        assert np.allclose(said.json["by_depth"][kind][0], first, atol=1e-5)
    for name in ("overview", "depth", "graph", "maps"):
        with Image.open(out / f"{name}.png") as picture:
            assert min(picture.size) > 100


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "no input: give a text"),
        (("So boring", "--head", "1"), "name the folder for them with --out"),
        (("So boring", "--head", "1", "--out", "x"), "such as 1.3"),
        (("So boring", "--limit", 3), "are for --average-over"),
    ],
)
def test_bad_requests(refused, bert: Path, arguments: tuple[object, ...], said: str) -> None:
    assert said in refused("attention", *arguments, "-m", bert)


def test_a_head_that_is_not_there(refused, bert: Path, tmp_path: Path) -> None:
    assert "there is no head 9 in layer 0" in refused("attention", "So", "-m", bert, "--head", "0.9", "--out", tmp_path)


def test_every_stream_of_a_model_with_several(clearhead: Clearhead, tmp_path: Path) -> None:
    pytest.importorskip("clearhead_zoo")
    out = tmp_path / "maps"
    said = clearhead("attention", "phone", "-m", "zoo:spell", "--out", out, "--json")
    assert said.code == 0, said.err
    assert list(said.json["maps"]) == ["source", "prefix", "prefix → source"]
    drawn = {path.relative_to(out).as_posix() for path in out.rglob("*.png")}
    every = {f"{name}/{kind}.png" for name in ("source", "prefix") for kind in ("overview", "depth", "graph")}
    assert drawn == every | {"prefix-to-source/overview.png", "prefix-to-source/depth.png"}
    assert "Who looks at whom" in (out / "attention.html").read_text("utf-8")


def test_one_stream_alone_is_the_same_map(clearhead: Clearhead, tmp_path: Path) -> None:
    pytest.importorskip("clearhead_zoo")
    every = clearhead("attention", "phone", "-m", "zoo:spell", "--json").json["maps"]
    out = tmp_path / "one"
    arguments = ("--stream", "prefix->source", "--head", "1.0", "--out", out, "--json")
    said = clearhead("attention", "phone", "-m", "zoo:spell", *arguments)
    assert said.json == every["prefix → source"] and said.json["keys"] == [*"phone", "</s>"]
    assert sorted(path.name for path in out.glob("*.png")) == ["depth.png", "maps.png", "overview.png"]


def test_words_and_regions_of_a_ready_example(clearhead: Clearhead) -> None:
    pytest.importorskip("clearhead_zoo")
    said = clearhead("attention", "-m", "zoo:shapes-vqa", "--example", "3", "--stream", "text → regions", "--json")
    assert said.code == 0, said.err
    assert np.allclose(np.array(said.json["attention"]).sum(-1), 1, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--stream", "nothing"), "prefix → source"),
        (("--head", "0.0", "--out", "x"), "choose the map with --stream"),
        (("--stream", "source", "--candidates", "a,b"), "leave out --stream"),
        (("--candidates", "a,b"), "models with one read-out token"),
        (("--example", "3"), "--example is an input itself"),
    ],
)
def test_bad_requests_of_several_streams(refused, arguments: tuple[object, ...], said: str) -> None:
    pytest.importorskip("clearhead_zoo")
    assert said in refused("attention", "phone", "-m", "zoo:spell", *arguments)
