"""Merging of patches into image regions, and of scores by absolute value."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import clearhead
from clearhead import Explanation, InputError
from clearhead.render.reproduction import format_cli_command, format_python_snippet
from tests import dual_models, models


@cache
def image_explanation() -> Explanation:
    """4 × 4 patches of 4 × 4 pixels."""
    return models.explainer("vit/image").explain(models.inputs("vit/image")[0], "input-x-gradient")


def patch_scores() -> np.ndarray:
    return image_explanation().heat_map()


def test_regions_of_rows_and_columns_sum_patches() -> None:
    e = image_explanation().regions((2, 2))
    assert e.tokens == ["[CLS]", "0,0", "0,1", "1,0", "1,1"] and e.units.kind == "region"
    assert e.scores[1] == pytest.approx(patch_scores()[:2, :2].sum()) and e.scores[4] == pytest.approx(
        patch_scores()[2:, 2:].sum()
    )
    assert e.scores[0] == image_explanation().scores[0] and e.scores.sum() == pytest.approx(
        image_explanation().scores.sum()
    )
    assert e.units.boxes == (None, (0, 0, 0.5, 0.5), (0.5, 0, 1, 0.5), (0, 0.5, 0.5, 1), (0.5, 0.5, 1, 1))


@pytest.mark.parametrize("pixels", [False, True])
def test_named_boxes_split_patches_by_area(pixels: bool) -> None:
    """The left half, and a strip that cuts patches in two; the rest is another region."""
    size = 16 if pixels else 1
    boxes = {"left": (0, 0, 0.5 * size, size), "strip": (0.5 * size, 0, size, 0.375 * size)}
    e = image_explanation().regions(boxes)
    assert e.tokens == ["[CLS]", "left", "strip", "elsewhere"]
    right = patch_scores()[:, 2:]
    strip = right[0].sum() + right[1].sum() / 2
    assert e.scores[1:] == pytest.approx([patch_scores()[:, :2].sum(), strip, right.sum() - strip])


def test_overlapping_regions_count_shared_patches_twice() -> None:
    e = image_explanation().regions([(0, 0, 1, 0.5), (0, 0, 0.5, 0.5)])
    assert e.tokens[1:] == ["region 0", "region 1", "elsewhere"]
    assert e.scores[1:] == pytest.approx(
        [patch_scores()[:2].sum(), patch_scores()[:2, :2].sum(), patch_scores()[2:].sum()]
    )


@pytest.mark.parametrize("fine", [False, True])
def test_label_map_defines_regions(fine: bool) -> None:
    """A map over patches or pixels; negative labels belong to no region."""
    labels = np.array([[0, 0, 3, 3], [0, -1, -1, 3], [0, -1, -1, 3], [0, 0, 3, 3]])
    label_map = labels.repeat(4, 0).repeat(4, 1) if fine else labels
    e = image_explanation().regions(label_map)
    assert e.tokens[1:] == ["region 0", "region 3", "elsewhere"]
    assert e.scores[1:] == pytest.approx([patch_scores()[labels == number].sum() for number in (0, 3, -1)])
    assert e.units.boxes is not None and e.units.boxes[3] == (0.25, 0.25, 0.75, 0.75)


def test_regions_merge_per_layer_per_head_and_matrix() -> None:
    ex = models.explainer("vit/image")
    raw = models.inputs("vit/image")[0]
    e = ex.explain(raw, "generic", per="head").regions((2, 2))
    assert e.per_layer is not None and e.per_head is not None
    assert e.per_layer.sum(0) == pytest.approx(e.scores) and e.per_head.sum((0, 1)) == pytest.approx(e.scores)
    rolled = ex.explain(raw, "rollout", rows="all").regions((2, 2))
    assert rolled.matrix is not None and rolled.matrix.shape == (5, 5)
    assert rolled.matrix.sum(1) == pytest.approx(np.ones(5))


def test_absolute_merging_sums_absolute_values() -> None:
    e = image_explanation().regions((2, 2), absolute=True)
    assert e.scores[1] == pytest.approx(np.abs(patch_scores()[:2, :2]).sum())
    assert not e.signed and image_explanation().signed
    text = models.explainer("bert/classify").explain(models.TEXTS[1], "input-x-gradient")
    _, parents = text.units.merge("word")
    for absolute in (False, True):
        words = text.words(absolute=absolute)
        sizes = np.abs(text.scores) if absolute else text.scores
        assert words.scores == pytest.approx([sizes[parents == i].sum() for i in range(len(words))])
    assert text.words().scores.min() < 0 <= text.words(absolute=True).scores.min()
    sentences = text.sentences(absolute=True)
    assert sentences.scores[1] == pytest.approx(np.abs(text.scores[1:-1]).sum())
    assert text.words(absolute=True).sentences().scores == pytest.approx(sentences.scores)


def test_absolute_aggregation_sums_absolute_values() -> None:
    es = models.explainer("bert/classify").explain(models.TEXTS, "input-x-gradient")
    for by in ("word", "position", "label"):
        signed, sizes = (
            clearhead.aggregate(es, by=by, absolute=absolute)  # type: ignore[arg-type]
            for absolute in (False, True)
        )
        assert {row[0] for row in signed.rows} == {row[0] for row in sizes.rows}
        total = sum(float(np.abs(e.scores[e.units.content_indices()]).sum()) for e in es)
        assert sum(row[1] for row in sizes.rows) == pytest.approx(total)
        assert sum(row[1] for row in signed.rows) < total


def test_regions_merge_only_the_image_stream() -> None:
    e = dual_models.explainer("clip").explain(text="So boring!", image=dual_models.pictures()[0], method="generic")
    merged = e.regions((1, 2))
    assert merged["image"].units.kind == "region" and merged["text"] is e["text"]
    assert merged["image"].scores.sum() == pytest.approx(e["image"].scores.sum())
    assert merged.words(absolute=True)["text"].units.kind == "word"


def test_regions_can_be_saved_and_displayed(tmp_path: Path) -> None:
    e = image_explanation().regions({"left": (0, 0, 0.5, 1)}, absolute=True)
    assert clearhead.load_explanation(e.save(tmp_path / "e.safetensors")) == e
    assert "left" in e.html() and e.plot("regions")
    assert "e.regions(" in format_python_snippet(e) and format_cli_command(e) is None
    words = models.explainer("bert/classify").explain("So boring!", method="generic").words(absolute=True)
    assert ".words(absolute=True)" in format_python_snippet(words)


@pytest.mark.parametrize(
    ("regions", "message"),
    [
        ((0, 2), r"regions must be \(rows, columns\), boxes"),
        ("left", r"regions must be"),
        ([], r"regions must be"),
        ({"a": (0, 0, 1)}, r"regions must be"),
        ({"a": (0.5, 0, 0.2, 1)}, r"the box of 'a' is \(0.5, 0, 0.2, 1\).* 16 × 16 pixels"),
        ([(0, 0, 30, 10)], r"within the image"),
        (np.zeros((3, 3), dtype=int), r"16 × 16 pixels, or of its patches, \(4, 4\); not 3 × 3"),
        (np.full((4, 4), -1), r"assigns no pixel"),
        (np.zeros((4, 4)), r"regions must be"),
    ],
    ids=str,
)
def test_invalid_regions_raise(regions: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        image_explanation().regions(regions)  # type: ignore[arg-type]


def test_regions_of_units_without_patches_raise() -> None:
    text = models.explainer("bert/classify").explain("So boring!", method="generic")
    with pytest.raises(InputError, match=r"only patches of an image .* these units are tokens"):
        text.regions((2, 2))
    merged = image_explanation().regions((2, 2))
    with pytest.raises(InputError, match="these units are regions"):
        merged.regions((1, 1))


def test_regions_work_without_stored_image() -> None:
    e = replace(image_explanation(), image=None).regions([(0, 0, 1, 0.375)])
    assert e.scores[1] == pytest.approx(patch_scores()[0].sum() + patch_scores()[1].sum() / 2)
