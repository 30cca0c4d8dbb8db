"""Zero-shot classification: a dual encoder with all captions equals the reference implementation."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clearhead.bench.chunk_explanations import explain_examples
from clearhead.bench.data import BenchmarkDataset, Example
from clearhead.bench.job import BenchmarkJob, get_protocol
from clearhead.bench.protocols.base import argsort_descending
from clearhead.bench.protocols.perturbation_modalities import ImagePerturbation
from clearhead.bench.protocols.presets import PROTOCOL_PRESETS
from clearhead.bench.runner import BenchmarkRun
from clearhead.bench.zero_shot import ZeroShotClasses, format_captions, make_zero_shot_classes
from clearhead.errors import InputError
from clearhead.methods.base import Method
from tests import dual_models
from tests.bench.replicas import perturbation as replica

NAMES = ("movie", "book", "apple")
TEMPLATE = "I like {name_with_article}"


def make_dataset() -> BenchmarkDataset:
    rows = [Example(str(i), image, i % 3) for i, image in enumerate(dual_models.pictures())]
    return BenchmarkDataset("mine", "all", "CC0", NAMES, lambda: rows, lambda row: row)


def make_classes() -> ZeroShotClasses:
    classes = make_zero_shot_classes(dual_models.explainer("clip"), make_dataset(), TEMPLATE)
    assert classes is not None
    return classes


def logits(ex: Any, pixels: np.ndarray, texts: tuple[str, ...]) -> list[float]:
    """The logit of the image for each caption, one pass each."""
    values = []
    for text in texts:
        ids = ex.adapter.processor.tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            output = ex.adapter.model(
                input_ids=ids["input_ids"],
                attention_mask=ids["attention_mask"],
                pixel_values=torch.tensor(pixels)[None],
            )
        values.append(float(output.logits_per_image))
    return values


@pytest.mark.parametrize("chosen", ["predicted", "gold", 2])
def test_zero_shot_perturbation_equals_reference(chosen: str | int) -> None:
    ex, classes = dual_models.explainer("clip"), make_classes()
    protocol = replace(PROTOCOL_PRESETS["bi-clip"], explained=chosen, ranked="patch", fractions=(0.3, 0.7, 1.0))
    examples = [classes.add_caption(example, protocol) for example in make_dataset()]
    assert {type(example.input["text"]) for example in examples} == {str}
    explanations = explain_examples(ex, examples, [Method("saliency")], protocol).by_method
    measurements = protocol.measure(ex, examples, explanations)
    assert len(measurements) == 3 * 2 and {measurement.part.split("/")[0] for measurement in measurements} == {"image"}
    for measurement in measurements:
        index = int(measurement.example)
        pixels = ex.adapter.processor.image_processor(make_dataset()[index].input, return_tensors="np")["pixel_values"][
            0
        ]
        clean = logits(ex, pixels, classes.captions)
        explained_class = {"predicted": int(np.argmax(clean)), "gold": make_dataset()[index].label}.get(chosen, chosen)  # type: ignore[call-overload]
        assert examples[index].input["text"] == classes.captions[explained_class]
        heat = explanations["saliency"][index]["image"].heat_map().flatten()
        counts = [int(len(heat) * fraction) for fraction in protocol.fractions]
        ties = argsort_descending(np.zeros(len(heat)), 0, measurement.example, "image").tolist()
        curve = [clean]
        for removed in replica.nested_removals(heat.tolist(), counts, measurement.part.split("/")[2], ties):
            kept = np.array([i not in removed for i in range(len(heat))]).reshape(4, 4)
            # zero is the mean colour
            curve.append(logits(ex, pixels * np.kron(kept, np.ones((4, 4))), classes.captions))
        expected = replica.figures(curve, protocol.fractions, make_dataset()[index].label)  # type: ignore[arg-type]
        assert {name: measurement.figures[name] for name in expected} == pytest.approx(expected, abs=1e-5)
        assert measurement.figures["correct"] == float(np.argmax(clean) == make_dataset()[index].label)


def test_run_adds_captions_and_hashes_template(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    job = BenchmarkJob(
        "a clip", "mine", ("saliency",), ("bi-clip", "subsets"), {"subsets": {"draws": 3}}, template=TEMPLATE
    )
    run = BenchmarkRun(job, tmp_path / "run", dual_models.explainer("clip"), make_dataset())
    run()
    assert not run.collect_failure_reasons()
    rows = list(run.store.iter_table_rows())
    assert {row.protocol for row in rows} == {"bi-clip", "subsets"} and {row.example for row in rows} == {"0", "1", "2"}
    other = BenchmarkRun(
        replace(job, template="a {name}"), tmp_path / "run", dual_models.explainer("clip"), make_dataset()
    )
    assert len(other.find_missing_tasks()) == len(run.chunk_plan)


def test_captions_need_image_only_inputs_and_valid_template() -> None:
    pairs = BenchmarkDataset(
        "mine", "all", "CC0", NAMES, lambda: [Example("0", {"text": "a", "image": 0})], lambda row: row
    )
    assert make_zero_shot_classes(dual_models.explainer("clip"), pairs, TEMPLATE) is None
    with pytest.raises(InputError, match="no caption of that class"):
        make_classes().add_caption(Example("x", dual_models.pictures()[0]), ImagePerturbation(explained="gold"))
    with pytest.raises(InputError, match="name"):
        format_captions("a photo of {}", ["pug"])


def test_bi_clip_preset_has_published_settings() -> None:
    protocol = get_protocol("bi-clip")
    assert (
        isinstance(protocol, ImagePerturbation)
        and protocol.fills == ("centre",)
        and protocol.fractions[-1] == 1.0
        and protocol.ranked == "pixel"
    )
