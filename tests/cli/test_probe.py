"""`clearhead probe`: a table, figures, JSON, and one line for what cannot be done."""

import json
from pathlib import Path

import pytest
from PIL import Image

from tests.cli.conftest import Clearhead
from tests.render.static_html import Page


def test_a_table_and_what_follows(clearhead: Clearhead, bert: Path) -> None:
    said = clearhead("probe", "permutation", "I like the movie", "So boring", "-m", bert, "--draws", 3)
    assert said.code == 0 and said.err == "" and "\x1b" not in said.out
    assert "median TVD" in said.out and "2 inputs" in said.out and "says nothing about" in " ".join(said.out.split())


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("permutation", ("--draws", 2, "--scope", "S3", "--layer", 1, "--heads", "0,1", "--keep", "--by-head")),
        ("adversary", ("--steps", 2, "--tolerance", 0.5)),
        ("uniform", ("--frozen", "--candidates", "NEGATIVE, POSITIVE")),
        ("correlation", ("--unit", "token")),
        ("heads", ()),
        ("skips", ()),
    ],
)
def test_every_probe_writes_its_figure_table_and_data(
    clearhead: Clearhead, bert: Path, tmp_path: Path, kind: str, options: tuple[object, ...]
) -> None:
    table = tmp_path / "some.csv"
    table.write_text("text\nI like the movie\nSo boring\nnever read\n", encoding="utf-8")
    out = tmp_path / "trial"
    said = clearhead("probe", kind, table, "-m", bert, "--limit", 2, "--out", out, "--json", *options)
    assert said.code == 0 and said.err == f"wrote {out}\n"
    assert said.json["probe"] == kind and said.json == json.loads((out / "result.json").read_text("utf-8"))
    assert max(found["count"] for found in said.json["findings"]) == 2
    with Image.open(out / "figure.png") as picture:
        assert min(picture.size) > 150
    shown = Page((out / "page.html").read_text("utf-8")).document["parts"][0]
    assert shown["view"] == "probe" and bool(shown["plots"]) == (kind != "uniform")
    report = (out / "report.md").read_text("utf-8")
    assert said.json["says"] in report and all(found["name"] in report for found in said.json["findings"])


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("seeds", ("--seeds", 2, "--fresh", 1)),
        ("frontier", ("--strengths", "0,0.1", "--seeds", 1)),
        ("diagnostic", ("--guides", "uniform,base,generic")),
        ("uniform", ()),
    ],
)
def test_probes_that_learn_from_labels(
    clearhead: Clearhead, bert: Path, tmp_path: Path, kind: str, options: tuple[object, ...]
) -> None:
    table, out, runs = tmp_path / "some.csv", tmp_path / "trial", tmp_path / "runs"
    table.write_text("text,label\nI like the movie,1\nSo boring,0\nI like it,POSITIVE\nboring,NEGATIVE\n", "utf-8")
    how = () if kind == "uniform" else ("--steps", 2, "--batch-size", 2, "--held-out", 0.5, "--checkpoint-dir", runs)
    said = clearhead(
        "probe", kind, table, "-m", bert, "--label-column", "label", "--out", out, "--json", *how, *options
    )
    assert said.code == 0 and said.err == f"wrote {out}\n" and said.json["probe"] == kind
    assert kind == "uniform" or (said.json["settings"]["labels"] == "given" and any(runs.iterdir()))
    with Image.open(out / "figure.png") as picture:
        assert min(picture.size) > 150
    assert said.json["says"] in (out / "report.md").read_text("utf-8")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("permutaton", "So boring"), "did you mean 'permutation'?"),
        (
            ("uniform", "So boring", "--draws", 3),
            "--draws is not an option of uniform, which takes --frozen, --candidates",
        ),
        (("seeds", "So boring", "--label-column", "label"), "--label-column is for data"),
        (("frontier", "So boring", "--strengths", "a"), "--strengths 'a' must be numbers"),
        (("seeds", "So boring", "--fresh", "most"), "leaves none to learn from"),
        (("permutation", "So boring", "--heads", "a"), "must be numbers with commas"),
        (("permutation", "So boring", "--heads", "9"), "has 4 heads"),
        (("permutation", "So boring", "--limit", 3), "are for data"),
        (("permutation", "So boring", "--scope", "S3"), "give it with layer="),
        (("permutation",), "nothing to explain"),
    ],
)
def test_bad_requests(refused, bert: Path, arguments: tuple[object, ...], said: str) -> None:
    assert said in refused("probe", *arguments, "-m", bert)


def test_data_are_probed_whole_or_not_at_all(clearhead: Clearhead, refused, bert: Path, tmp_path: Path) -> None:
    table = tmp_path / "some.csv"
    table.write_text("text,label\nI like it,1\nso long, so boring,0\nSo boring,\n", encoding="utf-8")
    probed, labels = ("probe", "uniform", table, "-m", bert), ("--label-column", "label")
    said = refused(*probed)
    assert f"1 of 3 rows of '{table}' cannot be read" in said and "row 000002: 3 instead of 2 cells" in said
    assert clearhead(*probed, *labels, "--limit", 1).code == 0, "rows that are not probed need not be right"
    table.write_text("text,label\nI like it,1\nSo boring,\n", encoding="utf-8")
    assert "row 000002: it has no label: give every row a value" in refused(*probed, *labels)
    assert "did you mean 'label'? Accepted: text, label" in refused(*probed, "--label-column", "labl")


def test_help_has_examples(clearhead: Clearhead) -> None:
    said = clearhead("probe", "--help")
    assert said.code == 0 and "clearhead probe" in said.out.partition("Examples")[2]
