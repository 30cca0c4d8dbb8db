"""Metrics compared with independent implementations: ERASER's scorer, shap's benchmark, Quantus."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clearhead.bench.chunk_explanations import explain_examples
from clearhead.bench.data import EvidenceMask, Example, load_benchmark_dataset
from clearhead.bench.protocols.perturbation_modalities import ImagePerturbation, TextPerturbation
from clearhead.bench.protocols.presets import PROTOCOL_PRESETS
from clearhead.bench.protocols.rationales import RationaleAgreement, compute_word_scores, find_words
from clearhead.bench.protocols.segmentation import ObjectSegmentation
from clearhead.methods.base import Method
from tests.bench.replicas import eraser_scorer
from tests.models import explainer, inputs

DOCUMENTS = {
    "a.txt": "I like the movie . so so good it is a wonderful film\nyou look extremely confused",
    "b.txt": "so boring ! she hates the book because it isn't good , the movie is the book",
    "c.txt": "the film is good",
}
#: Groups of token spans; one span is in two groups, and one overlaps another.
EVIDENCES = {
    "a.txt": [[(1, 4)], [(5, 8), (10, 13)], [(1, 4)]],
    "b.txt": [[(0, 2), (3, 5)], [(4, 7)]],
    "c.txt": [[(3, 4)]],
}


def write_movies(folder: Path) -> list[dict[str, Any]]:
    (folder / "movies" / "docs").mkdir(parents=True)
    rows = []
    for name, text in DOCUMENTS.items():
        (folder / "movies" / "docs" / name).write_text(text)
        groups = [
            [{"docid": name, "start_token": a, "end_token": b, "text": ""} for a, b in group]
            for group in EVIDENCES[name]
        ]
        rows.append({"annotation_id": name, "classification": "POS", "evidences": groups})
    (folder / "movies" / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def test_rationale_metrics_equal_eraser_scorer(tmp_path: Path) -> None:
    annotations = write_movies(tmp_path)
    ex, examples = explainer("bert/classify"), list(load_benchmark_dataset("eraser-movies", "test", root=tmp_path))
    protocol = RationaleAgreement(counts=(1, 2, 4, 6), explained="predicted")
    explanations = explain_examples(ex, examples, [Method("saliency")], protocol).by_method
    measurements = protocol.measure(ex, examples, explanations)
    gold = [eraser_scorer.spans_of(row) for row in annotations]
    soft_scores = []
    for example, explanation in zip(examples, explanations["saliency"], strict=True):
        words = find_words(explanation.units)
        assert [example.input[a:b] for _, (a, b) in words] == DOCUMENTS[example.id].split()
        soft_scores.append(compute_word_scores(explanation.units, explanation.scores, words).tolist())

    def mean(figure: str) -> float:
        return float(np.mean([measurement.figures[figure] for measurement in measurements]))

    for count in protocol.counts:
        predicted = []
        for name, scores in zip(DOCUMENTS, soft_scores, strict=True):
            top = sorted(range(len(scores)), key=lambda token: -scores[token])[:count]
            spans, start = set(), None
            for token in range(len(scores) + 1):  # adjacent tokens form one span
                if token in top and start is None:
                    start = token
                elif token not in top and start is not None:
                    spans.add((name, start, token))
                    start = None
            predicted.append(spans)
        assert mean(f"token f1 @{count}") == pytest.approx(eraser_scorer.token_f1(gold, predicted), abs=1e-6)
        assert mean(f"iou f1 @{count}") == pytest.approx(eraser_scorer.iou_f1(gold, predicted), abs=1e-6)
    assert mean("auprc") == pytest.approx(eraser_scorer.auprc(gold, soft_scores), abs=1e-6)


def test_comprehensiveness_and_sufficiency_equal_eraser_scorer(tmp_path: Path) -> None:
    write_movies(tmp_path)
    ex, examples = explainer("bert/classify"), list(load_benchmark_dataset("eraser-movies", "test", root=tmp_path))
    protocol = PROTOCOL_PRESETS["eraser"]
    explanations = explain_examples(ex, examples, [Method("saliency")], protocol).by_method
    measurements = protocol.measure(ex, examples, explanations)
    model, tokenizer = ex.adapter.model, ex.adapter.processor

    def probability(ids: list[int], label: int | None) -> tuple[int, float]:
        with torch.no_grad():
            p = model(input_ids=torch.tensor([ids])).logits[0].softmax(-1)
        label = int(p.argmax()) if label is None else label
        return label, float(p[label])

    clean, removed, kept = [], [], []
    for example, explanation in zip(examples, explanations["saliency"], strict=True):
        ids = tokenizer(example.input)["input_ids"]
        inner = list(range(1, len(ids) - 1))
        order = sorted(inner, key=lambda index: -explanation.scores[index])
        label, p = probability(ids, None)
        chosen = [set(order[: math.ceil(share * len(inner) - 1e-9)]) for share in (0.01, 0.05, 0.1, 0.2, 0.5)]
        clean.append(p)
        removed.append([probability([t for i, t in enumerate(ids) if i not in top], label)[1] for top in chosen])
        specials = {0, len(ids) - 1}
        kept.append([probability([t for i, t in enumerate(ids) if i in top | specials], label)[1] for top in chosen])
    for direction, altered in (("positive", removed), ("keep", kept)):
        mean = np.mean(
            [measurement.figures["aopc"] for measurement in measurements if measurement.part.endswith(direction)]
        )
        assert mean == pytest.approx(eraser_scorer.aopc(clean, altered), abs=1e-6)


def test_perturbation_curve_equals_shap_benchmark() -> None:
    """Sequential masking from the highest score on; shap stops at the first score that is not positive."""
    sequential = pytest.importorskip("shap.benchmark._sequential", exc_type=ImportError)
    ex, text = explainer("bert/classify"), inputs("bert/classify")[1]
    tokenizer, model = ex.adapter.processor, ex.adapter.model
    ids = np.array(tokenizer(text)["input_ids"])
    inner = np.arange(1, len(ids) - 1)
    steps = tuple((k + 1) / len(inner) for k in range(len(inner)))
    protocol = TextPerturbation(fills=("mask",), fractions=steps, rounding="nearest", directions=("positive",))
    with torch.no_grad():
        label = int(model(input_ids=torch.tensor(ids)[None]).logits[0].argmax())

    def logits(rows: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return model(input_ids=torch.tensor(rows)).logits[:, label].numpy()

    class Masker:
        shape = (1, len(inner))

        def __call__(self, mask: np.ndarray, row: np.ndarray) -> tuple[np.ndarray]:
            altered = row.copy()
            altered[inner[~mask]] = tokenizer.mask_token_id
            return (altered[None],)

    signed = 0
    for method in ("saliency", "input-x-gradient"):
        examples = [Example("0", text)]
        explanations = explain_examples(ex, examples, [Method(method)], protocol).by_method
        (measurement,) = protocol.measure(ex, examples, explanations)
        scores = explanations[method][0].scores[inner]
        masker = sequential.SequentialMasker("remove", "positive", Masker(), logits, ids[None])
        masker(scores[None], "theirs")
        expected = masker.inner.score_values[0][0]
        positive = int((scores > 0).sum())
        assert measurement.curves["logit"][: positive + 1] == pytest.approx(expected[: positive + 1].tolist(), abs=1e-6)
        assert np.ptp(expected[positive:]) < 1e-9  # after that shap's curve is constant
        signed += positive < len(inner)
    assert signed == 1  # saliency has no negative score


def test_perturbation_curve_and_inside_mass_equal_quantus() -> None:
    """PixelFlipping counts each channel of a pixel as a feature, so a patch of 4 × 4 pixels takes three steps of 16."""
    quantus = pytest.importorskip("quantus", reason="Quantus 0.6.0 is not installed (pip install quantus)")
    ex = explainer("vit/image", torch.float32)
    examples = [Example(str(i), image) for i, image in enumerate(inputs("vit/image"))]
    (sample,) = ex.adapter.make_samples(examples[0].input, _input_options())
    channels, height, width = sample.inputs["pixel_values"].shape
    explanations = explain_examples(ex, examples, [Method("saliency")], ImagePerturbation()).by_method
    rows, columns = explanations["saliency"][0].units.grid or (0, 0)
    side, count = height // rows, rows * columns
    protocol = ImagePerturbation(
        fills=("centre",), fractions=tuple((k + 1) / count for k in range(count)), directions=("positive",)
    )
    measurements = protocol.measure(ex, examples, explanations)
    pixels = np.stack(
        [ex.adapter.make_samples(e.input, _input_options())[0].inputs["pixel_values"].numpy() for e in examples]
    )
    heat = np.stack([np.kron(e.heat_map(), np.ones((side, side)))[None] for e in explanations["saliency"]])

    class Logits(torch.nn.Module):
        def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
            return ex.adapter.model(pixel_values=pixel_values).logits

    predicted = Logits()(torch.tensor(pixels)).argmax(-1).numpy()
    flipping = quantus.PixelFlipping(
        features_in_step=side * side,
        perturb_baseline=0.0,
        normalise=False,
        disable_warnings=True,
        return_aggregate=False,
    )
    options = {"x_batch": pixels, "y_batch": predicted, "a_batch": heat, "softmax": True, "device": "cpu"}
    expected_curves = flipping(model=Logits().eval(), **options)
    for measurement, curve in zip(measurements, expected_curves, strict=True):
        assert measurement.curves["probability"][1:] == pytest.approx(list(curve)[channels - 1 :: channels], abs=1e-6)

    inside = np.zeros((height, width), dtype=bool)
    inside[2 : height // 2, 3 : width - 1] = True
    with_masks = [Example(e.id, e.input, None, ((EvidenceMask(inside),),)) for e in examples]
    masses = [
        measurement.figures["inside mass"] for measurement in ObjectSegmentation().measure(ex, with_masks, explanations)
    ]
    mass = quantus.RelevanceMassAccuracy(abs=False, normalise=False, disable_warnings=True, return_aggregate=False)
    segments = np.broadcast_to(inside, (len(examples), 1, height, width))
    expected_masses = mass(model=Logits().eval(), s_batch=segments, **options)
    assert masses == pytest.approx(list(expected_masses), abs=1e-6)


def _input_options() -> Any:
    from clearhead.adapters.base import InputOptions

    return InputOptions()
