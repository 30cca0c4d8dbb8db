"""Masks: figures equal their replica, thresholds are what they say, data-set figures sum before they divide."""

from typing import Any

import numpy as np
import pytest
from PIL import Image

from clearhead.bench.data import BenchmarkDataset, EvidenceMask, Example, ImageBox
from clearhead.bench.data.mosaic import make_mosaics
from clearhead.bench.protocols.perturbation_modalities import upscale_bilinear
from clearhead.bench.protocols.presets import PROTOCOL_PRESETS
from clearhead.bench.protocols.segmentation import (
    THRESHOLD_RULES,
    ObjectSegmentation,
    build_object_mask,
    compute_average_precision,
    compute_inside_mass,
    compute_mask_metrics,
    compute_view_box,
    find_best_threshold,
    summarise_segmentation,
    threshold_map,
)
from clearhead.errors import InputError
from clearhead.explanation.explanation import Explanation
from clearhead.explanation.otsu_mask import threshold_otsu
from clearhead.units import build_patch_units
from tests.bench.replicas import segmentation as replica


class _Ex:
    class adapter:
        processor = None


def explanation(heat: np.ndarray, side: int = 4) -> Explanation:
    high, wide = heat.shape
    picture = np.zeros((high * side, wide * side, 3), dtype=np.uint8)
    return Explanation(build_patch_units((high, wide)), heat.flatten(), "m", {}, {}, image=picture)


def drawn(seed: int) -> tuple[np.ndarray, Example]:
    rng = np.random.default_rng(seed)
    inside = np.zeros((12, 16), dtype=bool)
    top, left = rng.integers(0, 6, size=2)
    inside[top : top + 5, left : left + 7] = True
    ignored = (rng.random((12, 16)) < 0.1) & ~inside
    return rng.normal(size=(3, 4)), Example(str(seed), None, 0, ((EvidenceMask(inside, ignored),),))


@pytest.mark.parametrize("seed", range(4))
def test_figures_equal_the_replica(seed: int) -> None:
    heat, example = drawn(seed)
    how = ObjectSegmentation(thresholds=THRESHOLD_RULES)
    (one,) = how.measure(_Ex(), [example], {"m": [explanation(heat)]})  # type: ignore[arg-type]
    mask = example.evidence[0][0]  # type: ignore[index]
    inside, counted = mask.pixels, ~mask.ignored_pixels  # the picture has the mask's size, so no pixel moves
    raw = upscale_bilinear(heat, (12, 16))
    expected = replica.cut(raw, inside, counted, 0.25 * raw.max())  # of the map as it is, negative scores and all
    assert {name: one.figures[f"{name}, raw-quarter"] for name in expected} == pytest.approx(expected)
    values = (raw - raw.min()) / (raw.max() - raw.min())
    levels = (values * 255).astype(np.uint8)
    for rule, threshold in (
        ("mean", values.mean()),
        ("quarter", 0.25),
        ("otsu", (replica.otsu(levels) + 1) / 255 - 1e-12),
    ):
        expected = replica.cut(values, inside, counted, threshold)
        found = {name: one.figures[f"{name}, {rule}"] for name in expected}
        assert found == pytest.approx(expected)
    assert one.figures["iou, best"] == pytest.approx(replica.best_iou(values, inside, counted))
    pair = (values[counted], inside[counted])
    assert one.figures["average precision"] == pytest.approx(replica.both_channels(*pair))
    assert one.figures["object average precision"] == pytest.approx(replica.average_precision(*pair))
    assert one.figures["roc auc"] == pytest.approx(replica.roc_auc(*pair))
    top = np.unravel_index(values.argmax(), values.shape)
    assert one.figures["pointing"] == float(inside[top])
    mass = total = 0.0
    for i in range(12):
        for j in range(16):
            if counted[i, j]:
                total += max(heat[i // 4, j // 4], 0)
                mass += max(heat[i // 4, j // 4], 0) * inside[i, j]
    assert one.figures["inside mass"] == pytest.approx(mass / total)


def test_a_data_set_sums_before_it_divides() -> None:
    """Two pictures, one with a small object: the mean of IoUs is not the IoU of the sums."""
    how, made = ObjectSegmentation(thresholds=("mean",)), []
    for seed in range(2):
        heat, example = drawn(seed)
        made += how.measure(_Ex(), [example], {"m": [explanation(heat)]})  # type: ignore[arg-type]
    rows = [one.figures for one in made]
    both = {kind: sum(row[f"{kind} both, mean"] for row in rows) for kind in ("object", "ground")}
    either = {kind: sum(row[f"{kind} either, mean"] for row in rows) for kind in ("object", "ground")}
    found = summarise_segmentation(made)
    assert found["mIoU"] == pytest.approx((both["object"] / either["object"] + both["ground"] / either["ground"]) / 2)
    assert found["pixel accuracy"] == pytest.approx(
        sum(row["right, mean"] for row in rows) / sum(row["counted, mean"] for row in rows)
    )
    assert found["F1"] == pytest.approx(np.mean([row["f1, mean"] for row in rows]))


def test_a_perfect_map_is_perfect() -> None:
    inside = np.zeros((4, 6), dtype=bool)
    inside[1:3, 2:5] = True
    counted = np.ones_like(inside)
    values = inside.astype(float)
    found = compute_mask_metrics(threshold_map(values, inside, counted, "best"), inside, counted)
    assert found["iou"] == found["f1"] == found["pixel accuracy"] == 1 and found["row f1"] == 0.5  # two of four rows
    assert compute_average_precision(values.flatten(), inside.flatten()) == 1
    assert compute_inside_mass(values, inside, counted) == 1 and np.isnan(compute_inside_mass(-values, inside, counted))
    assert find_best_threshold(values.flatten(), inside.flatten()) == 0


def test_interpretdls_pointing_game_cuts_at_a_quarter_of_the_largest_value() -> None:
    """Four cells lie above a quarter of 8, two of them on the object; a quarter of the range (−1) lets a fifth in."""
    heat = np.array([[8.0, 3.0, 2.5, 2.1], [1.9, -4.0, -4.0, -4.0]])
    inside = np.zeros((2, 4), dtype=bool)
    inside[0, :2] = inside[1, 3] = True
    found = compute_mask_metrics(
        threshold_map(heat, inside, np.ones_like(inside), "raw-quarter"), inside, np.ones_like(inside)
    )
    assert (found["precision"], found["recall"]) == (0.5, pytest.approx(2 / 3))
    assert found["f1"] == pytest.approx(2 * 0.5 * (2 / 3) / (0.5 + 2 / 3))
    assert threshold_map(heat, inside, np.ones_like(inside), "quarter").sum() == 5
    how = PROTOCOL_PRESETS["idl-pointing"]
    _, example = drawn(0)
    (one,) = how.measure(_Ex(), [example], {"m": [explanation(drawn(0)[0])]})  # type: ignore[arg-type]
    named = {"precision, raw-quarter", "recall, raw-quarter", "f1, raw-quarter", "roc auc", "object average precision"}
    assert named <= one.figures.keys() and "f1, raw-quarter" in how.headline_metrics


@pytest.mark.parametrize("inside", [np.ones((3, 4), dtype=bool), np.zeros((3, 4), dtype=bool)])
def test_one_class_alone_cannot_be_told_apart(inside: np.ndarray) -> None:
    example = Example("x", None, 0, ((EvidenceMask(inside),),))
    (one,) = ObjectSegmentation().measure(_Ex(), [example], {"m": [explanation(drawn(0)[0])]})  # type: ignore[arg-type]
    assert np.isnan(one.figures["roc auc"]) and one.figures["recall, mean"] < 1


def test_a_flat_map_says_nothing() -> None:
    _, example = drawn(0)
    (one,) = ObjectSegmentation().measure(_Ex(), [example], {"m": [explanation(np.zeros((3, 4)))]})  # type: ignore[arg-type]
    assert one.figures["object both, mean"] == 0 and np.isnan(one.figures["inside mass"])


def test_otsu_is_otsus() -> None:
    rng = np.random.default_rng(1)
    for _ in range(5):
        levels = np.concatenate([rng.integers(0, 90, 60), rng.integers(120, 256, 40)]).astype(np.uint8)
        assert threshold_otsu(levels) == replica.otsu(levels)


def test_the_mask_is_cut_as_the_processor_cuts_the_picture() -> None:
    class Cropping:
        do_center_crop, do_resize = True, True
        size, crop_size = {"shortest_edge": 256}, {"height": 224, "width": 224}

    view = compute_view_box(Cropping(), Image.new("RGB", (512, 256)))
    assert view == pytest.approx((0.5 - 0.21875, 0.0625, 0.5 + 0.21875, 0.9375))
    assert compute_view_box(None, Image.new("RGB", (512, 256))) == (0.0, 0.0, 1.0, 1.0)
    inside = np.zeros((256, 512), dtype=bool)
    inside[:, :256] = True
    mask, counted = build_object_mask(Example("x", None, 0, ((EvidenceMask(inside),),)), (8, 8), view)
    assert mask[:, :4].all() and not mask[:, 4:].any() and counted.all()


def test_mosaics_ask_for_the_part_of_the_explained_class() -> None:
    colours = [(255, 0, 0), (0, 255, 0)]
    one = [Example(str(i), Image.new("RGB", (6, 6), colours[i % 2]), i % 2) for i in range(6)]
    data = BenchmarkDataset("mine", "all", "CC0", ("red", "green"), lambda: one, lambda row: row)
    for layout, cells in (("pair", 1), ("square", 2)):
        for example in make_mosaics(data, 6, seed=1, layout=layout, cell_size=8):
            assert example.evidence is not None and len(example.evidence[0]) == cells
            pixels = np.asarray(example.input)
            mask, _ = build_object_mask(example, pixels.shape[:2], (0.0, 0.0, 1.0, 1.0))
            own = colours[example.label]  # type: ignore[index]
            assert (pixels[mask] == own).all() and not (pixels[~mask] == own).all(-1).any()
    again = [example.evidence for example in make_mosaics(data, 6, seed=1)]
    assert again == [example.evidence for example in make_mosaics(data, 6, seed=1)]
    with pytest.raises(InputError, match="two classes"):
        make_mosaics(data.select([0, 2]), 2)[0]
    with pytest.raises(InputError, match="square"):
        make_mosaics(data, 2, layout="row")


def test_bad_settings_and_missing_masks_are_told() -> None:
    heat, example = drawn(0)
    with pytest.raises(InputError, match="otsu"):
        ObjectSegmentation(thresholds=("median",)).measure(_Ex(), [example], {})  # type: ignore[arg-type]
    with pytest.raises(InputError, match="no mask"):
        ObjectSegmentation().measure(_Ex(), [Example("x", None, 0)], {"m": [explanation(heat)]})  # type: ignore[arg-type]


def test_boxes_are_masks_too() -> None:
    whole: Any = (0.0, 0.0, 1.0, 1.0)
    mask, _ = build_object_mask(Example("x", None, 0, ((ImageBox((0.0, 0.0, 0.5, 0.5)),),)), (4, 4), whole)
    assert mask.sum() == 4 and mask[:2, :2].all()
