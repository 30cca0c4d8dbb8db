"""Zero-shot classes: a dual encoder judged by all captions equals its slow replica."""

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
TEMPLATE = "I like {one}"


def data() -> BenchmarkDataset:
    rows = [Example(str(i), picture, i % 3) for i, picture in enumerate(dual_models.pictures())]
    return BenchmarkDataset("mine", "all", "CC0", NAMES, lambda: rows, lambda row: row)


def captions() -> ZeroShotClasses:
    found = make_zero_shot_classes(dual_models.explainer("clip"), data(), TEMPLATE)
    assert found is not None
    return found


def logits(ex: Any, pixels: np.ndarray, texts: tuple[str, ...]) -> list[float]:
    """The picture with each caption alone, one pass each."""
    found = []
    for text in texts:
        ids = ex.adapter.processor.tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            output = ex.adapter.model(
                input_ids=ids["input_ids"],
                attention_mask=ids["attention_mask"],
                pixel_values=torch.tensor(pixels)[None],
            )
        found.append(float(output.logits_per_image))
    return found


@pytest.mark.parametrize("chosen", ["predicted", "gold", 2])
def test_zero_shot_perturbation_equals_the_replica(chosen: str | int) -> None:
    ex, among = dual_models.explainer("clip"), captions()
    how = replace(PROTOCOL_PRESETS["bi-clip"], explained=chosen, ranked="patch", fractions=(0.3, 0.7, 1.0))
    examples = [among.add_caption(example, how) for example in data()]
    assert {type(example.input["text"]) for example in examples} == {str}
    own = explain_examples(ex, examples, [Method("saliency")], how).by_method
    made = how.measure(ex, examples, own)
    assert len(made) == 3 * 2 and {one.part.split("/")[0] for one in made} == {"image"}
    for one in made:
        place = int(one.example)
        pixels = ex.adapter.processor.image_processor(data()[place].input, return_tensors="np")["pixel_values"][0]
        clean = logits(ex, pixels, among.captions)
        said = {"predicted": int(np.argmax(clean)), "gold": data()[place].label}.get(chosen, chosen)  # type: ignore[call-overload]
        assert examples[place].input["text"] == among.captions[said]
        heat = own["saliency"][place]["image"].heat_map().flatten()
        counts = [int(len(heat) * fraction) for fraction in how.fractions]
        ties = argsort_descending(np.zeros(len(heat)), 0, one.example, "image").tolist()
        curve = [clean]
        for gone in replica.nested_removals(heat.tolist(), counts, one.part.split("/")[2], ties):
            kept = np.array([i not in gone for i in range(len(heat))]).reshape(4, 4)
            curve.append(logits(ex, pixels * np.kron(kept, np.ones((4, 4))), among.captions))  # zero is the mean colour
        expected = replica.figures(curve, how.fractions, data()[place].label)  # type: ignore[arg-type]
        assert {name: one.figures[name] for name in expected} == pytest.approx(expected, abs=1e-5)
        assert one.figures["correct"] == float(np.argmax(clean) == data()[place].label)


def test_a_run_poses_pictures_with_captions(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    job = BenchmarkJob(
        "a clip", "mine", ("saliency",), ("bi-clip", "subsets"), {"subsets": {"draws": 3}}, template=TEMPLATE
    )
    run = BenchmarkRun(job, tmp_path / "run", dual_models.explainer("clip"), data())
    run()
    assert not run.collect_failure_reasons()
    rows = list(run.store.iter_table_rows())
    assert {row.protocol for row in rows} == {"bi-clip", "subsets"} and {row.example for row in rows} == {"0", "1", "2"}
    other = BenchmarkRun(replace(job, template="a {name}"), tmp_path / "run", dual_models.explainer("clip"), data())
    assert len(other.find_missing_tasks()) == len(run.chunk_plan)


def test_only_pictures_for_dual_encoders_get_captions() -> None:
    pairs = BenchmarkDataset(
        "mine", "all", "CC0", NAMES, lambda: [Example("0", {"text": "a", "image": 0})], lambda row: row
    )
    assert make_zero_shot_classes(dual_models.explainer("clip"), pairs, TEMPLATE) is None
    with pytest.raises(InputError, match="no caption of that class"):
        captions().add_caption(Example("x", dual_models.pictures()[0]), ImagePerturbation(explained="gold"))
    with pytest.raises(InputError, match="name"):
        format_captions("a photo of {}", ["pug"])


def test_beyond_intuitions_settings() -> None:
    how = get_protocol("bi-clip")
    assert (
        isinstance(how, ImagePerturbation)
        and how.fills == ("centre",)
        and how.fractions[-1] == 1.0
        and how.ranked == "pixel"
    )
