"""`clearhead concept` and `clearhead bias gender`: tables, JSON, pages, directions, and one line for bad input."""

from pathlib import Path

import pytest
from PIL import Image

from clearhead.concepts.concept_data import draw_textures
from clearhead.concepts.directions import Directions
from tests.cli.conftest import Clearhead

TEXTS = [f"{w} {v} the {t}." for w in ("he", "she", "the", "it") for v in ("is", "like") for t in ("book", "mov", "on")]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("\n".join(TEXTS * 2))
    return file


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    file = tmp_path / "pairs.tsv"
    file.write_text("he\tshe\nthe\tit\n")
    return file


def pictures(folder: Path, kind: str, count: int) -> Path:
    folder.mkdir()
    for i, one in enumerate(draw_textures(kind, count, 20)):
        Image.fromarray(one).save(folder / f"{i:02d}.png")
    return folder


def test_tcav_of_pictures(clearhead: Clearhead, vit: Path, tmp_path: Path) -> None:
    own, rest = pictures(tmp_path / "own", "bubbly", 3), pictures(tmp_path / "rest", "checkered", 18)
    page, vectors = tmp_path / "why.html", tmp_path / "vectors"
    said = clearhead(
        *("concept", "tcav", own, "-m", vit, "--concept", "dotted", "--concept", f"mine={own}", "--random", rest),
        *("--examples", 3, "--runs", 4, "--layers", "0,-1", "--threshold", 0, "--target", 1),
        *("--html", page, "--save", vectors, "--json"),
    )
    assert said.code == 0 and f"wrote {page}" in said.err
    assert [(line["concept"], line["layer"]) for line in said.json["lines"]] == [
        (concept, layer) for layer in (0, 2) for concept in ("dotted", "mine")
    ]
    scores = {(one["concept"], one["layer"]): one["score"] for one in said.json["relative"]}
    assert all(scores["dotted", layer] == 1 - scores["mine", layer] for layer in (0, 2))
    assert list(Directions.load(vectors / "dotted.safetensors")) == [0, 2]
    assert "Concept against concept" in page.read_text("utf-8")


def test_tcav_of_texts_by_words(clearhead: Clearhead, bert: Path, corpus: Path, tmp_path: Path) -> None:
    said = clearhead(
        *("concept", "tcav", corpus, "-m", bert, "--concept", "books:book", "--random", corpus, "--examples", 4),
        *("--runs", 3, "--layers", "1", "--pool", "mean", "--classifier", "ridge", "--html", tmp_path / "t.html"),
    )
    assert said.code == 0 and "books" in said.out and "signific" in said.out


def test_a_direction_is_found_explained_and_removed(
    clearhead: Clearhead, masked: Path, corpus: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("he\nthe\n")
    (tmp_path / "b.txt").write_text("she\nit\n")
    kept = tmp_path / "axis.safetensors"
    said = clearhead(
        *(
            "concept",
            "densray",
            tmp_path / "a.txt",
            tmp_path / "b.txt",
            "--text-file",
            corpus,
            "-m",
            masked,
            "--save",
            kept,
        ),
        *("--plain", "--names", "m,f", "--html", tmp_path / "d.html", "--json"),
    )
    assert said.code == 0 and [line["layer"] for line in said.json["layers"]] == [0, 1, 2]
    assert Directions.load(kept)[1].names == ("m", "f")
    page = tmp_path / "fires.html"
    said = clearhead(
        *("concept", "explain", "he like the book.", "--directions", kept, "--layer", 1, "--at", "book", "-m", masked),
        *("--methods", "grad-sam", "--html", page, "--json"),
    )
    assert (
        said.code == 0 and said.json["target"]["name"] == "m at layer 1" and page.exists() and "times" not in said.err
    )
    said = clearhead(
        *("concept", "explain", "the book, the movie", "--directions", kept, "--layer", 1, "--at", "the", "-m", masked),
        *("--methods", "grad-sam", "--html", page, "--json"),
    )
    assert said.code == 0 and said.err.count("'the' occurs 2 times in the text, and the first occurrence is used") == 1
    said = clearhead("concept", "remove", kept, corpus, "-m", masked, "--limit", 3, "--html", tmp_path / "r.html")
    assert said.code == 0 and "loss difference" in said.out and "note:" not in said.err


def test_directions_of_another_model_are_pointed_out(
    clearhead: Clearhead, masked: Path, corpus: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "axis.safetensors"
    (tmp_path / "a.txt").write_text("he\nthe\n")
    (tmp_path / "b.txt").write_text("she\nit\n")
    how = ("--text-file", corpus, "-m", masked, "--plain", "--save", kept, "--html", tmp_path / "d.html")
    clearhead("concept", "densray", tmp_path / "a.txt", tmp_path / "b.txt", *how)
    assert Directions.load(kept).model == str(masked)
    Directions(Directions.load(kept), "another").save(kept)
    said = clearhead("concept", "remove", kept, corpus, "-m", masked, "--limit", 3, "--html", tmp_path / "r.html")
    assert said.code == 0 and f"{kept} was computed on another and is used on {masked}" in said.err


def test_removal_from_a_classifier_needs_labels(clearhead: Clearhead, bert: Path, tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("\n".join(TEXTS[:20]))
    (tmp_path / "bad.txt").write_text("\n".join(f"so boring {text}" for text in TEXTS[:20]))
    kept, table = tmp_path / "tone.safetensors", tmp_path / "rows.csv"
    said = clearhead(
        *("concept", "densray", tmp_path / "good.txt", tmp_path / "bad.txt", "-m", bert, "--save", kept),
        *("--layers", "-1", "--pool", "mean", "--html", tmp_path / "d.html"),
    )
    assert said.code == 0 and "accuracy" in said.out
    table.write_text("text,label\nI like it,POSITIVE\nso boring,NEGATIVE\nso long, so boring,NEGATIVE\n")
    said = clearhead(
        "concept", "remove", kept, table, "-m", bert, "--label-column", "label", "--html", tmp_path / "r.html", "--json"
    )
    assert said.code == 0 and said.json["layers"] == [2] and said.json["cost"]["accuracy before"]["count"] == 2
    assert f"1 of 3 rows of '{table}' are left out (row 000003: 3 instead of 2 cells" in said.err


def test_a_set_with_a_bad_row_is_no_set(clearhead: Clearhead, bert: Path, tmp_path: Path) -> None:
    (tmp_path / "good.csv").write_text("text\n" + "\n".join([*TEXTS[:20], "so long, so boring"]))
    (tmp_path / "bad.txt").write_text("\n".join(f"so boring {text}" for text in TEXTS[:20]))
    said = clearhead("concept", "densray", tmp_path / "good.csv", tmp_path / "bad.txt", "-m", bert)
    assert said.code == 2 and f"1 of 21 rows of '{tmp_path / 'good.csv'}' cannot be read" in said.err
    assert "row 000021: 2 instead of 1 cells" in said.err


def test_bias_ends_in_a_page(clearhead: Clearhead, masked: Path, corpus: Path, pairs: Path, tmp_path: Path) -> None:
    page, kept = tmp_path / "axis.html", tmp_path / "axis.safetensors"
    said = clearhead(
        *(
            "bias",
            "gender",
            corpus,
            "-m",
            masked,
            "--pairs",
            pairs,
            "--names",
            "m,f",
            "--sentence-set",
            "free",
            "--limit",
            2,
        ),
        *("--plain", "--text", "he is here.", "--html", page, "--save", kept),
    )
    assert said.code == 0 and "accuracy" in said.out and "free" in said.out
    assert len(Directions.load(kept)) == 3 and "m and f, layer by layer" in page.read_text("utf-8")


def test_bad_requests_are_one_line(refused, masked: Path, vit: Path, corpus: Path, pairs: Path, tmp_path: Path) -> None:
    few = tmp_path / "few.txt"
    few.write_text("he is here.\n")
    none = tmp_path / "none.txt"
    none.write_text("nothing at all.\n")
    axis = ("bias", "gender", "-m", masked, "--pairs", pairs)
    assert "no sentence contains a word of the list" in refused(*axis, none)
    assert "vectors are fewer than their 32 dimensions" in refused(*axis, few)
    assert "does not read text" in refused("bias", "gender", none, "-m", vit)
    assert "unknown set of sentences 'adjective'" in refused(*axis, corpus, "--sentence-set", "adjective")
    assert "needs a file: --sentence-set winobias=FILE" in refused(*axis, corpus, "--sentence-set", "winobias")
    assert "two words with a comma" in refused(*axis, corpus, "--compared-words", "he")
    tcav = ("concept", "tcav", corpus, "-m", masked, "--random", corpus)
    assert "give a texture (striped" in refused(*tcav, "--concept", "stripy")
    assert "no text contains a word of the list" in refused(*tcav, "--concept", "x:zebra")
    assert f"--save {str(none)!r} exists and is not a folder" in refused(*tcav, "--concept", "dotted", "--save", none)
    assert "such as 2,4,-1" in refused(*tcav, "--concept", "dotted", "--layers", "last")
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    assert "there is no text in" in refused("concept", "densray", corpus, empty, "-m", masked)
