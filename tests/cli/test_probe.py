"""`clearhead probe`: table, figures, JSON, and one-line errors."""

import json
from pathlib import Path

import pytest
from PIL import Image

from tests.cli.conftest import Clearhead
from tests.render.static_html import Page


def test_terminal_prints_table_and_conclusion(clearhead: Clearhead, bert: Path) -> None:
    result = clearhead("probe", "permutation", "I like the movie", "So boring", "-m", bert, "--draws", 3)
    assert result.code == 0 and result.err == "" and "\x1b" not in result.out
    assert "median TVD" in result.out and "2 inputs" in result.out and "does not show" in " ".join(result.out.split())


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
def test_every_probe_writes_figure_page_report_and_data(
    clearhead: Clearhead, bert: Path, tmp_path: Path, kind: str, options: tuple[object, ...]
) -> None:
    table = tmp_path / "some.csv"
    table.write_text("text\nI like the movie\nSo boring\nnever read\n", encoding="utf-8")
    out = tmp_path / "trial"
    result = clearhead("probe", kind, table, "-m", bert, "--limit", 2, "--out", out, "--json", *options)
    assert result.code == 0 and result.err == f"wrote {out}\n"
    assert result.json["probe"] == kind and result.json == json.loads((out / "result.json").read_text("utf-8"))
    assert max(finding["count"] for finding in result.json["estimates"]) == 2
    with Image.open(out / "figure.png") as figure:
        assert min(figure.size) > 150
    view = Page((out / "page.html").read_text("utf-8")).document["children"][0]
    assert view["view"] == "probe" and bool(view["charts"]) == (kind != "uniform")
    report = (out / "report.md").read_text("utf-8")
    assert result.json["conclusion"] in report and all(
        finding["name"] in report for finding in result.json["estimates"]
    )


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("seeds", ("--seeds", 2, "--fresh", 1)),
        ("frontier", ("--strengths", "0,0.1", "--seeds", 1)),
        ("diagnostic", ("--guides", "uniform,base,generic")),
        ("uniform", ()),
    ],
)
def test_probes_use_the_label_column(
    clearhead: Clearhead, bert: Path, tmp_path: Path, kind: str, options: tuple[object, ...]
) -> None:
    table, out, runs = tmp_path / "some.csv", tmp_path / "trial", tmp_path / "runs"
    table.write_text("text,label\nI like the movie,1\nSo boring,0\nI like it,POSITIVE\nboring,NEGATIVE\n", "utf-8")
    training_options = (
        ()
        if kind == "uniform"
        else ("--steps", 2, "--train-batch-size", 2, "--held-out", 0.5, "--checkpoint-dir", runs)
    )
    result = clearhead(
        "probe", kind, table, "-m", bert, "--label-column", "label", "--out", out, "--json", *training_options, *options
    )
    assert result.code == 0 and result.err == f"wrote {out}\n" and result.json["probe"] == kind
    assert kind == "uniform" or (result.json["settings"]["labels"] == "given" and any(runs.iterdir()))
    with Image.open(out / "figure.png") as figure:
        assert min(figure.size) > 150
    assert result.json["conclusion"] in (out / "report.md").read_text("utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("permutaton", "So boring"), "did you mean 'permutation'?"),
        (
            ("uniform", "So boring", "--draws", 3),
            "--draws is not an option of the probe uniform, which takes --frozen, --candidates",
        ),
        (("seeds", "So boring", "--label-column", "label"), "--label-column needs data"),
        (("frontier", "So boring", "--strengths", "a"), "--strengths 'a' must be numbers"),
        (("seeds", "So boring", "--fresh", "most"), "leaves no inputs for training"),
        (("permutation", "So boring", "--heads", "a"), "must be numbers separated by commas"),
        (("permutation", "So boring", "--heads", "9"), "has 4 heads"),
        (("permutation", "So boring", "--limit", 3), "need data"),
        (("permutation", "So boring", "--scope", "S3"), "specify it with layer="),
        (("permutation",), "nothing to explain"),
    ],
)
def test_invalid_arguments_are_rejected(run_failing, bert: Path, arguments: tuple[object, ...], message: str) -> None:
    assert message in run_failing("probe", *arguments, "-m", bert)


def test_data_with_an_invalid_row_are_rejected(clearhead: Clearhead, run_failing, bert: Path, tmp_path: Path) -> None:
    table = tmp_path / "some.csv"
    table.write_text("text,label\nI like it,1\nso long, so boring,0\nSo boring,\n", encoding="utf-8")
    command, labels = ("probe", "uniform", table, "-m", bert), ("--label-column", "label")
    error = run_failing(*command)
    assert f"1 of 3 rows of '{table}' cannot be read" in error and "row 000002: 3 instead of 2 cells" in error
    assert clearhead(*command, *labels, "--limit", 1).code == 0, "rows beyond the limit are not checked"
    table.write_text("text,label\nI like it,1\nSo boring,\n", encoding="utf-8")
    assert "row 000002: it has no label: give every row a value" in run_failing(*command, *labels)
    assert "did you mean 'label'? Accepted: text, label" in run_failing(*command, "--label-column", "labl")


def test_help_has_examples(clearhead: Clearhead) -> None:
    result = clearhead("probe", "--help")
    assert result.code == 0 and "clearhead probe" in result.out.partition("Examples")[2]
