"""`clearhead concept` and `clearhead bias gender`: tables, JSON, pages, saved directions, and one-line errors."""

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


def save_textures(folder: Path, kind: str, count: int) -> Path:
    folder.mkdir()
    for i, texture in enumerate(draw_textures(kind, count, 20)):
        Image.fromarray(texture).save(folder / f"{i:02d}.png")
    return folder


def test_tcav_of_image_concepts(clearhead: Clearhead, vit: Path, tmp_path: Path) -> None:
    concept_images = save_textures(tmp_path / "own", "bubbly", 3)
    random_images = save_textures(tmp_path / "rest", "checkered", 18)
    page, vectors = tmp_path / "why.html", tmp_path / "vectors"
    result = clearhead(
        *("concept", "tcav", concept_images, "-m", vit, "--random", random_images),
        *("--concept", "dotted", "--concept", f"mine={concept_images}"),
        *("--examples", 3, "--runs", 4, "--layers", "0,-1", "--threshold", 0, "--target", 1),
        *("--html", page, "--save", vectors, "--json"),
    )
    assert result.code == 0 and f"wrote {page}" in result.err
    assert [(line["concept"], line["layer"]) for line in result.json["tests"]] == [
        (concept, layer) for layer in (0, 2) for concept in ("dotted", "mine")
    ]
    scores = {(relative["concept"], relative["layer"]): relative["score"] for relative in result.json["relative"]}
    assert all(scores["dotted", layer] == 1 - scores["mine", layer] for layer in (0, 2))
    assert list(Directions.load(vectors / "dotted.safetensors")) == [0, 2]
    assert "Concept against concept" in page.read_text("utf-8")


def test_tcav_of_text_concept_defined_by_words(clearhead: Clearhead, bert: Path, corpus: Path, tmp_path: Path) -> None:
    result = clearhead(
        *("concept", "tcav", corpus, "-m", bert, "--concept", "books:book", "--random", corpus, "--examples", 4),
        *("--runs", 3, "--layers", "1", "--pool", "mean", "--classifier", "ridge", "--html", tmp_path / "t.html"),
    )
    assert result.code == 0 and "books" in result.out and "signific" in result.out


def test_direction_is_fitted_explained_and_removed(
    clearhead: Clearhead, masked_lm: Path, corpus: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("he\nthe\n")
    (tmp_path / "b.txt").write_text("she\nit\n")
    saved = tmp_path / "axis.safetensors"
    result = clearhead(
        *("concept", "densray", tmp_path / "a.txt", tmp_path / "b.txt", "--text-file", corpus),
        *("-m", masked_lm, "--save", saved),
        *("--plain", "--names", "m,f", "--html", tmp_path / "d.html", "--json"),
    )
    assert result.code == 0 and [line["layer"] for line in result.json["layers"]] == [0, 1, 2]
    assert Directions.load(saved)[1].names == ("m", "f")
    page = tmp_path / "fires.html"
    result = clearhead(
        *("concept", "explain", "he like the book.", "--directions", saved, "-m", masked_lm),
        *("--layer", 1, "--at", "book"),
        *("--methods", "grad-sam", "--html", page, "--json"),
    )
    assert (
        result.code == 0
        and result.json["target"]["name"] == "m at layer 1"
        and page.exists()
        and "times" not in result.err
    )
    result = clearhead(
        *("concept", "explain", "the book, the movie", "--directions", saved, "-m", masked_lm),
        *("--layer", 1, "--at", "the"),
        *("--methods", "grad-sam", "--html", page, "--json"),
    )
    assert (
        result.code == 0 and result.err.count("'the' occurs 2 times in the text, and the first occurrence is used") == 1
    )
    result = clearhead("concept", "remove", saved, corpus, "-m", masked_lm, "--limit", 3, "--html", tmp_path / "r.html")
    assert result.code == 0 and "loss difference" in result.out and "note:" not in result.err


def test_directions_of_another_model_are_noted(
    clearhead: Clearhead, masked_lm: Path, corpus: Path, tmp_path: Path
) -> None:
    saved = tmp_path / "axis.safetensors"
    (tmp_path / "a.txt").write_text("he\nthe\n")
    (tmp_path / "b.txt").write_text("she\nit\n")
    options = ("--text-file", corpus, "-m", masked_lm, "--plain", "--save", saved, "--html", tmp_path / "d.html")
    clearhead("concept", "densray", tmp_path / "a.txt", tmp_path / "b.txt", *options)
    assert Directions.load(saved).model == str(masked_lm)
    Directions(Directions.load(saved), "another").save(saved)
    result = clearhead("concept", "remove", saved, corpus, "-m", masked_lm, "--limit", 3, "--html", tmp_path / "r.html")
    assert result.code == 0 and f"{saved} was computed with another, but is used with {masked_lm}" in result.err


def test_removal_from_classifier_measures_accuracy_with_labels(
    clearhead: Clearhead, bert: Path, tmp_path: Path
) -> None:
    (tmp_path / "good.txt").write_text("\n".join(TEXTS[:20]))
    (tmp_path / "bad.txt").write_text("\n".join(f"so boring {text}" for text in TEXTS[:20]))
    saved, table = tmp_path / "tone.safetensors", tmp_path / "rows.csv"
    result = clearhead(
        *("concept", "densray", tmp_path / "good.txt", tmp_path / "bad.txt", "-m", bert, "--save", saved),
        *("--layers", "-1", "--pool", "mean", "--html", tmp_path / "d.html"),
    )
    assert result.code == 0 and "accuracy" in result.out
    table.write_text("text,label\nI like it,POSITIVE\nso boring,NEGATIVE\nso long, so boring,NEGATIVE\n")
    result = clearhead(
        *("concept", "remove", saved, table, "-m", bert, "--label-column", "label"),
        *("--html", tmp_path / "r.html", "--json"),
    )
    assert result.code == 0 and result.json["layers"] == [2] and result.json["cost"]["accuracy_before"]["count"] == 2
    assert f"1 of 3 rows of '{table}' were skipped (row 000003: 3 instead of 2 cells" in result.err


def test_concept_table_with_invalid_row_is_rejected(clearhead: Clearhead, bert: Path, tmp_path: Path) -> None:
    (tmp_path / "good.csv").write_text("text\n" + "\n".join([*TEXTS[:20], "so long, so boring"]))
    (tmp_path / "bad.txt").write_text("\n".join(f"so boring {text}" for text in TEXTS[:20]))
    result = clearhead("concept", "densray", tmp_path / "good.csv", tmp_path / "bad.txt", "-m", bert)
    assert result.code == 2 and f"1 of 21 rows of '{tmp_path / 'good.csv'}' cannot be read" in result.err
    assert "row 000021: 2 instead of 1 cells" in result.err


def test_bias_gender_writes_page_and_directions(
    clearhead: Clearhead, masked_lm: Path, corpus: Path, pairs: Path, tmp_path: Path
) -> None:
    page, saved = tmp_path / "axis.html", tmp_path / "axis.safetensors"
    result = clearhead(
        *("bias", "gender", corpus, "-m", masked_lm, "--pairs", pairs, "--names", "m,f"),
        *("--sentence-set", "free", "--limit", 2),
        *("--plain", "--text", "he is here.", "--html", page, "--save", saved),
    )
    assert result.code == 0 and "accuracy" in result.out and "free" in result.out
    assert len(Directions.load(saved)) == 3 and "m and f, layer by layer" in page.read_text("utf-8")


def test_invalid_arguments_are_rejected(
    run_failing, masked_lm: Path, vit: Path, corpus: Path, pairs: Path, tmp_path: Path
) -> None:
    short_file = tmp_path / "few.txt"
    short_file.write_text("he is here.\n")
    unrelated_file = tmp_path / "none.txt"
    unrelated_file.write_text("nothing at all.\n")
    axis = ("bias", "gender", "-m", masked_lm, "--pairs", pairs)
    assert "no sentence contains a word of the list" in run_failing(*axis, unrelated_file)
    assert "vectors are too few for 32 dimensions" in run_failing(*axis, short_file)
    assert "does not take text" in run_failing("bias", "gender", unrelated_file, "-m", vit)
    assert "unknown set of sentences 'adjective'" in run_failing(*axis, corpus, "--sentence-set", "adjective")
    assert "needs a file: --sentence-set winobias=FILE" in run_failing(*axis, corpus, "--sentence-set", "winobias")
    assert "two words separated by a comma" in run_failing(*axis, corpus, "--compared-words", "he")
    tcav = ("concept", "tcav", corpus, "-m", masked_lm, "--random", corpus)
    assert "use a texture (striped" in run_failing(*tcav, "--concept", "stripy")
    assert "no text contains a word of the list" in run_failing(*tcav, "--concept", "x:zebra")
    assert f"--save {str(unrelated_file)!r} exists and is not a folder" in run_failing(
        *tcav, "--concept", "dotted", "--save", unrelated_file
    )
    assert "such as 2,4,-1" in run_failing(*tcav, "--concept", "dotted", "--layers", "last")
    empty_file = tmp_path / "empty.txt"
    empty_file.write_text("\n")
    assert "there is no text in" in run_failing("concept", "densray", corpus, empty_file, "-m", masked_lm)
