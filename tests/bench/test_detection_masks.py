"""Masks of a detector's objects: each mask as the authors cut it, and COCO's scores over all pictures."""

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
def found() -> tuple[Any, list[Example], Any]:
    ex = clearhead.load("zoo:shapes-detr")
    data = load_benchmark_dataset("known", task="shapes-scenes", count=2)
    return ex, [align_label(example, data, ex) for example in data], data


def test_every_object_found_is_a_mask_and_scores_are_cocos(found: tuple[Any, list[Example], Any]) -> None:
    ex, examples, _ = found
    how = DetectionMasks()
    made = how.measure(ex, examples, explain_examples(ex, examples, [Method("saliency")], how).by_method)
    truth, masks = [], []
    for number, (one, example) in enumerate(zip(made, examples, strict=True)):
        own = [piece for (piece,) in example.evidence or () if isinstance(piece, EvidenceMask)]
        truth += [ObjectInstance(number, piece.label or 0, piece.pixels) for piece in own]
        logits = _output(ex, example.input)
        best = []
        for query, row in enumerate(logits):
            p = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
            if p[:-1].max() > 0.5:
                part = ex.explain(example.input, method="saliency", target=DetectionQuery(query))["image"]
                label = int(p[:-1].argmax())
                mask = compute_low_res_mask(part.heat_map(), own[0].pixels.shape)
                masks.append(ObjectInstance(number, label, mask, float(p[label])))
                best.append((label, mask))
        overlaps = [
            max([(m & piece.pixels).sum() / (m | piece.pixels).sum() for kind, m in best if kind == piece.label] or [0])
            for piece in own
        ]
        assert one.figures["overlap"] == pytest.approx(np.mean(overlaps), abs=1e-6)
        assert (one.figures["objects"], one.figures["found"]) == (len(own), len(best))
    expected = compute_coco_metrics(truth, masks), compute_coco_metrics(truth, masks, WIDE_IOU_THRESHOLDS)
    said = how.compute_dataset_metrics(made)
    assert said["AP"] == pytest.approx(expected[0]["AP"]) and said["AR"] == pytest.approx(expected[0]["AR"])
    assert said["the authors' AP"] == pytest.approx(expected[1]["AP"])
    assert how.measure(
        ex, examples, explain_examples(ex, examples, [Method("saliency")], DetectionMasks(cut="after")).by_method
    )


def _output(ex: Any, picture: Any) -> np.ndarray:
    import torch

    with torch.no_grad():
        logits = ex.adapter.model(**ex.adapter.processor(picture, return_tensors="pt")).logits[0]
    return np.asarray(logits.double())


def test_a_run_tells_average_precision(found: tuple[Any, list[Example], Any], tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    ex, _, data = found
    run = BenchmarkRun(
        BenchmarkJob("detr", "known:shapes-scenes", ("attention",), ("detections",)), tmp_path / "run", ex, data
    )
    run()
    assert not run.collect_failure_reasons()
    (settings,) = run.protocols
    own = [one for one in run.load_measurements(settings) if one.method == "attention"]
    figures = run.protocols[settings].compute_dataset_metrics(own)
    assert set(figures) >= {"AP", "AR large", "the authors' AP medium"} and len(own) == len(data)


def test_masks_need_classes_and_known_cuts(found: tuple[Any, list[Example], Any]) -> None:
    ex, examples, _ = found
    own = explain_examples(ex, examples[:1], [Method("random")], DetectionMasks()).by_method
    with pytest.raises(InputError, match="shapes-scenes"):
        DetectionMasks().measure(ex, [Example("x", examples[0].input, 0)], own)
    with pytest.raises(InputError, match="after"):
        DetectionMasks(cut="best").measure(ex, examples[:1], own)


@pytest.mark.parametrize("seed", range(3))
def test_runs_come_back_as_the_mask(seed: int) -> None:
    mask = np.random.default_rng(seed).random((5, 7)) < 0.5
    assert np.array_equal(decode_rle(encode_rle(mask)), mask)
    for full in (True, False):
        assert np.array_equal(decode_rle(encode_rle(np.full((2, 3), full))), np.full((2, 3), full))
