"""Segmentation protocol: metrics equal the reference, threshold rules, and dataset metrics from sums."""

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


class _FakeExplainer:
    class adapter:
        processor = None


def explanation(heat: np.ndarray, side: int = 4) -> Explanation:
    height, width = heat.shape
    image = np.zeros((height * side, width * side, 3), dtype=np.uint8)
    return Explanation(build_patch_units((height, width)), heat.flatten(), "m", {}, {}, image=image)


def random_example(seed: int) -> tuple[np.ndarray, Example]:
    rng = np.random.default_rng(seed)
    inside = np.zeros((12, 16), dtype=bool)
    top, left = rng.integers(0, 6, size=2)
    inside[top : top + 5, left : left + 7] = True
    ignored = (rng.random((12, 16)) < 0.1) & ~inside
    return rng.normal(size=(3, 4)), Example(str(seed), None, 0, ((EvidenceMask(inside, ignored),),))


@pytest.mark.parametrize("seed", range(4))
def test_segmentation_metrics_equal_reference(seed: int) -> None:
    heat, example = random_example(seed)
    protocol = ObjectSegmentation(thresholds=THRESHOLD_RULES)
    (measurement,) = protocol.measure(_FakeExplainer(), [example], {"m": [explanation(heat)]})  # type: ignore[arg-type]
    mask = example.evidence[0][0]  # type: ignore[index]
    inside, counted = mask.pixels, ~mask.ignored_pixels  # the image has the mask's size, so nothing is resized
    upscaled = upscale_bilinear(heat, (12, 16))
    # of the raw map, with negative scores
    expected = replica.mask_metrics(upscaled, inside, counted, 0.25 * upscaled.max())
    assert {name: measurement.figures[f"{name}, raw-quarter"] for name in expected} == pytest.approx(expected)
    values = (upscaled - upscaled.min()) / (upscaled.max() - upscaled.min())
    levels = (values * 255).astype(np.uint8)
    for rule, threshold in (
        ("mean", values.mean()),
        ("quarter", 0.25),
        ("otsu", (replica.otsu(levels) + 1) / 255 - 1e-12),
    ):
        expected = replica.mask_metrics(values, inside, counted, threshold)
        actual = {name: measurement.figures[f"{name}, {rule}"] for name in expected}
        assert actual == pytest.approx(expected)
    assert measurement.figures["iou, best"] == pytest.approx(replica.best_iou(values, inside, counted))
    pair = (values[counted], inside[counted])
    assert measurement.figures["average precision"] == pytest.approx(replica.both_channels(*pair))
    assert measurement.figures["object average precision"] == pytest.approx(replica.average_precision(*pair))
    assert measurement.figures["roc auc"] == pytest.approx(replica.roc_auc(*pair))
    top = np.unravel_index(values.argmax(), values.shape)
    assert measurement.figures["pointing"] == float(inside[top])
    mass = total = 0.0
    for i in range(12):
        for j in range(16):
            if counted[i, j]:
                total += max(heat[i // 4, j // 4], 0)
                mass += max(heat[i // 4, j // 4], 0) * inside[i, j]
    assert measurement.figures["inside mass"] == pytest.approx(mass / total)


def test_dataset_metrics_are_computed_from_sums() -> None:
    """Two images, one with a small object: the mean of IoUs differs from the IoU of the sums."""
    protocol, measurements = ObjectSegmentation(thresholds=("mean",)), []
    for seed in range(2):
        heat, example = random_example(seed)
        measurements += protocol.measure(_FakeExplainer(), [example], {"m": [explanation(heat)]})  # type: ignore[arg-type]
    rows = [measurement.figures for measurement in measurements]
    intersection = {kind: sum(row[f"{kind} both, mean"] for row in rows) for kind in ("object", "ground")}
    union = {kind: sum(row[f"{kind} either, mean"] for row in rows) for kind in ("object", "ground")}
    metrics = summarise_segmentation(measurements)
    assert metrics["mIoU"] == pytest.approx(
        (intersection["object"] / union["object"] + intersection["ground"] / union["ground"]) / 2
    )
    assert metrics["pixel accuracy"] == pytest.approx(
        sum(row["right, mean"] for row in rows) / sum(row["counted, mean"] for row in rows)
    )
    assert metrics["F1"] == pytest.approx(np.mean([row["f1, mean"] for row in rows]))


def test_perfect_map_has_perfect_metrics() -> None:
    inside = np.zeros((4, 6), dtype=bool)
    inside[1:3, 2:5] = True
    counted = np.ones_like(inside)
    values = inside.astype(float)
    metrics = compute_mask_metrics(threshold_map(values, inside, counted, "best"), inside, counted)
    assert metrics["iou"] == metrics["f1"] == metrics["pixel accuracy"] == 1
    assert metrics["row f1"] == 0.5  # two of four rows
    assert compute_average_precision(values.flatten(), inside.flatten()) == 1
    assert compute_inside_mass(values, inside, counted) == 1 and np.isnan(compute_inside_mass(-values, inside, counted))
    assert find_best_threshold(values.flatten(), inside.flatten()) == 0


def test_interpretdl_pointing_threshold_is_a_quarter_of_maximum() -> None:
    """Four cells exceed a quarter of 8, two of them on the object; a fifth exceeds a quarter of the range (−1)."""
    heat = np.array([[8.0, 3.0, 2.5, 2.1], [1.9, -4.0, -4.0, -4.0]])
    inside = np.zeros((2, 4), dtype=bool)
    inside[0, :2] = inside[1, 3] = True
    metrics = compute_mask_metrics(
        threshold_map(heat, inside, np.ones_like(inside), "raw-quarter"), inside, np.ones_like(inside)
    )
    assert (metrics["precision"], metrics["recall"]) == (0.5, pytest.approx(2 / 3))
    assert metrics["f1"] == pytest.approx(2 * 0.5 * (2 / 3) / (0.5 + 2 / 3))
    assert threshold_map(heat, inside, np.ones_like(inside), "quarter").sum() == 5
    protocol = PROTOCOL_PRESETS["idl-pointing"]
    _, example = random_example(0)
    (measurement,) = protocol.measure(_FakeExplainer(), [example], {"m": [explanation(random_example(0)[0])]})  # type: ignore[arg-type]
    expected_names = {
        "precision, raw-quarter",
        "recall, raw-quarter",
        "f1, raw-quarter",
        "roc auc",
        "object average precision",
    }
    assert expected_names <= measurement.figures.keys() and "f1, raw-quarter" in protocol.headline_metrics


@pytest.mark.parametrize("inside", [np.ones((3, 4), dtype=bool), np.zeros((3, 4), dtype=bool)])
def test_roc_auc_with_one_class_is_nan(inside: np.ndarray) -> None:
    example = Example("x", None, 0, ((EvidenceMask(inside),),))
    (measurement,) = ObjectSegmentation().measure(
        _FakeExplainer(), [example], {"m": [explanation(random_example(0)[0])]}
    )  # type: ignore[arg-type]
    assert np.isnan(measurement.figures["roc auc"]) and measurement.figures["recall, mean"] < 1


def test_constant_map_has_no_overlap_and_nan_mass() -> None:
    _, example = random_example(0)
    (measurement,) = ObjectSegmentation().measure(_FakeExplainer(), [example], {"m": [explanation(np.zeros((3, 4)))]})  # type: ignore[arg-type]
    assert measurement.figures["object both, mean"] == 0 and np.isnan(measurement.figures["inside mass"])


def test_otsu_threshold_equals_reference() -> None:
    rng = np.random.default_rng(1)
    for _ in range(5):
        levels = np.concatenate([rng.integers(0, 90, 60), rng.integers(120, 256, 40)]).astype(np.uint8)
        assert threshold_otsu(levels) == replica.otsu(levels)


def test_mask_is_cropped_like_the_image() -> None:
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


def test_mosaic_evidence_covers_cells_of_the_label() -> None:
    colours = [(255, 0, 0), (0, 255, 0)]
    rows = [Example(str(i), Image.new("RGB", (6, 6), colours[i % 2]), i % 2) for i in range(6)]
    data = BenchmarkDataset("mine", "all", "CC0", ("red", "green"), lambda: rows, lambda row: row)
    for layout, cells in (("pair", 1), ("square", 2)):
        for example in make_mosaics(data, 6, seed=1, layout=layout, cell_size=8):
            assert example.evidence is not None and len(example.evidence[0]) == cells
            pixels = np.asarray(example.input)
            mask, _ = build_object_mask(example, pixels.shape[:2], (0.0, 0.0, 1.0, 1.0))
            colour = colours[example.label]  # type: ignore[index]
            assert (pixels[mask] == colour).all() and not (pixels[~mask] == colour).all(-1).any()
    repeated = [example.evidence for example in make_mosaics(data, 6, seed=1)]
    assert repeated == [example.evidence for example in make_mosaics(data, 6, seed=1)]
    with pytest.raises(InputError, match="two classes"):
        make_mosaics(data.select([0, 2]), 2)[0]
    with pytest.raises(InputError, match="square"):
        make_mosaics(data, 2, layout="row")


def test_invalid_threshold_and_missing_mask_raise() -> None:
    heat, example = random_example(0)
    with pytest.raises(InputError, match="otsu"):
        ObjectSegmentation(thresholds=("median",)).measure(_FakeExplainer(), [example], {})  # type: ignore[arg-type]
    with pytest.raises(InputError, match="no object mask"):
        ObjectSegmentation().measure(_FakeExplainer(), [Example("x", None, 0)], {"m": [explanation(heat)]})  # type: ignore[arg-type]


def test_box_evidence_gives_object_mask() -> None:
    full_view: Any = (0.0, 0.0, 1.0, 1.0)
    mask, _ = build_object_mask(Example("x", None, 0, ((ImageBox((0.0, 0.0, 0.5, 0.5)),),)), (4, 4), full_view)
    assert mask.sum() == 4 and mask[:2, :2].all()
