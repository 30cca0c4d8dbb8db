"""Detection masks: masks equal the authors' thresholding, and dataset metrics equal COCO evaluation."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clearhead
from clearhead.bench.chunk_explanations import explain_examples
from clearhead.bench.data import EvidenceMask, Example, load_benchmark_dataset
from clearhead.bench.job import BenchmarkJob, align_label
from clearhead.bench.protocols.coco_eval import (
    WIDE_IOU_THRESHOLDS,
    ObjectInstance,
    compute_coco_metrics,
    compute_low_res_mask,
)
from clearhead.bench.protocols.detection_masks import DetectionMasks
from clearhead.bench.rle import decode_rle, encode_rle
from clearhead.bench.runner import BenchmarkRun
from clearhead.errors import InputError
from clearhead.methods.base import Method
from clearhead.targets import DetectionQuery

pytest.importorskip("pycocotools")
pytest.importorskip("clearhead_zoo")


@pytest.fixture(scope="module")
def detector_examples() -> tuple[Any, list[Example], Any]:
    ex = clearhead.load("zoo:shapes-detr")
    data = load_benchmark_dataset("known", task="shapes-scenes", count=2)
    return ex, [align_label(example, data, ex) for example in data], data


def test_detection_masks_and_coco_metrics_equal_reference(detector_examples: tuple[Any, list[Example], Any]) -> None:
    ex, examples, _ = detector_examples
    protocol = DetectionMasks()
    measurements = protocol.measure(
        ex, examples, explain_examples(ex, examples, [Method("saliency")], protocol).by_method
    )
    truth, masks = [], []
    for image_index, (measurement, example) in enumerate(zip(measurements, examples, strict=True)):
        objects = [annotated for (annotated,) in example.evidence or () if isinstance(annotated, EvidenceMask)]
        truth += [ObjectInstance(image_index, annotated.label or 0, annotated.pixels) for annotated in objects]
        logits = _class_logits(ex, example.input)
        predicted = []
        for query, row in enumerate(logits):
            p = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
            if p[:-1].max() > 0.5:
                explanation = ex.explain(example.input, method="saliency", target=DetectionQuery(query))["image"]
                label = int(p[:-1].argmax())
                mask = compute_low_res_mask(explanation.heat_map(), objects[0].pixels.shape)
                masks.append(ObjectInstance(image_index, label, mask, float(p[label])))
                predicted.append((label, mask))
        overlaps = [
            max(
                [
                    (m & annotated.pixels).sum() / (m | annotated.pixels).sum()
                    for kind, m in predicted
                    if kind == annotated.label
                ]
                or [0]
            )
            for annotated in objects
        ]
        assert measurement.figures["overlap"] == pytest.approx(np.mean(overlaps), abs=1e-6)
        assert (measurement.figures["objects"], measurement.figures["found"]) == (len(objects), len(predicted))
    expected = compute_coco_metrics(truth, masks), compute_coco_metrics(truth, masks, WIDE_IOU_THRESHOLDS)
    metrics = protocol.compute_dataset_metrics(measurements)
    assert metrics["AP"] == pytest.approx(expected[0]["AP"]) and metrics["AR"] == pytest.approx(expected[0]["AR"])
    assert metrics["the authors' AP"] == pytest.approx(expected[1]["AP"])
    assert protocol.measure(
        ex, examples, explain_examples(ex, examples, [Method("saliency")], DetectionMasks(cut="after")).by_method
    )


def _class_logits(ex: Any, image: Any) -> np.ndarray:
    import torch

    with torch.no_grad():
        logits = ex.adapter.model(**ex.adapter.processor(image, return_tensors="pt")).logits[0]
    return np.asarray(logits.double())


def test_run_reports_average_precision(detector_examples: tuple[Any, list[Example], Any], tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    ex, _, data = detector_examples
    run = BenchmarkRun(
        BenchmarkJob("detr", "known:shapes-scenes", ("attention",), ("detections",)), tmp_path / "run", ex, data
    )
    run()
    assert not run.collect_failure_reasons()
    (settings,) = run.protocols
    measurements = [measurement for measurement in run.load_measurements(settings) if measurement.method == "attention"]
    figures = run.protocols[settings].compute_dataset_metrics(measurements)
    assert set(figures) >= {"AP", "AR large", "the authors' AP medium"} and len(measurements) == len(data)


def test_missing_object_masks_and_unknown_cut_raise(detector_examples: tuple[Any, list[Example], Any]) -> None:
    ex, examples, _ = detector_examples
    explanations = explain_examples(ex, examples[:1], [Method("random")], DetectionMasks()).by_method
    with pytest.raises(InputError, match="shapes-scenes"):
        DetectionMasks().measure(ex, [Example("x", examples[0].input, 0)], explanations)
    with pytest.raises(InputError, match="after"):
        DetectionMasks(cut="best").measure(ex, examples[:1], explanations)


@pytest.mark.parametrize("seed", range(3))
def test_rle_round_trip(seed: int) -> None:
    mask = np.random.default_rng(seed).random((5, 7)) < 0.5
    assert np.array_equal(decode_rle(encode_rle(mask)), mask)
    for full in (True, False):
        assert np.array_equal(decode_rle(encode_rle(np.full((2, 3), full))), np.full((2, 3), full))
