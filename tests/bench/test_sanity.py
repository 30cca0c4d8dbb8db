"""Sanity checks: blockwise parameter randomisation with restored weights, input invariance, label randomisation."""

from typing import Any

import numpy as np
import pytest
import torch

from clearhead.bench.chunk_explanations import add_controls, explain_examples
from clearhead.bench.data import Example
from clearhead.bench.protocols.agreement import ClassSensitivity
from clearhead.bench.protocols.base import BenchmarkProtocol
from clearhead.bench.protocols.sanity import (
    InputInvariance,
    LabelRandomisation,
    ParameterRandomisation,
    _derive_seed,
    compute_ssim,
    list_parameter_blocks,
    reinitialised_parameters,
    shifted_input_bias,
)
from clearhead.errors import InputError
from clearhead.methods.base import Method
from tests.bench.replicas import agreement as replica
from tests.models import explainer, inputs


def measure_inputs(
    kind: str, protocol: BenchmarkProtocol, methods: list[str], count: int = 2
) -> tuple[Any, Any, Any, Any]:
    ex = explainer(kind)
    examples = [Example(str(i), raw) for i, raw in enumerate(inputs(kind)[:count])]
    explanations = explain_examples(ex, examples, add_controls(methods), protocol).by_method
    return ex, examples, explanations, protocol.measure(ex, examples, explanations)


@pytest.mark.parametrize("kind", ["bert/classify", "vit/image"])
def test_parameter_blocks_go_from_head_down_and_partition_parameters(kind: str) -> None:
    model = explainer(kind).adapter.model
    blocks = list_parameter_blocks(model)
    names = [name for name, _ in blocks]
    assert names[0] == "head" and names[-1] == "embeddings"
    layers = [name for name in names if name not in ("head", "embeddings")]
    assert layers == sorted(layers, key=lambda name: -int(name.split(".")[-1])) and len(layers) > 1
    parameter_ids = [id(parameter) for _, parameters in blocks for parameter in parameters]
    assert sorted(parameter_ids) == sorted(id(parameter) for parameter in model.parameters())


def test_reinitialised_weights_are_seeded_and_restored_also_on_error() -> None:
    model = explainer("bert/classify").adapter.model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    head = dict(list_parameter_blocks(model))["head"]
    with reinitialised_parameters(model, head, 0):
        changed = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])]
        assert changed and all("encoder" not in name and "embeddings" not in name for name in changed)
        first = head[0].clone()
    with pytest.raises(ZeroDivisionError), reinitialised_parameters(model, head, 0):
        raise ZeroDivisionError
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    with reinitialised_parameters(model, head, 0):
        assert torch.equal(first, head[0])  # the same seed, the same weights
    with reinitialised_parameters(model, head, 1):
        assert not torch.equal(first, head[0])


@pytest.mark.parametrize("cascade", [True, False])
def test_parameter_randomisation_equals_explaining_randomised_model(cascade: bool) -> None:
    protocol = ParameterRandomisation(cascade=cascade, steps=2)
    ex, examples, explanations, measurements = measure_inputs("bert/classify", protocol, ["saliency"])
    blocks = list_parameter_blocks(ex.adapter.model)
    for measurement in (measurement for measurement in measurements if measurement.method == "saliency"):
        index, expected = int(measurement.example), []
        explanation = explanations["saliency"][index]
        kept = explanation.units.content_indices()
        for step in range(2):
            changed = [
                p for _, parameters in (blocks[: step + 1] if cascade else blocks[step : step + 1]) for p in parameters
            ]
            with reinitialised_parameters(ex.adapter.model, changed, _derive_seed(0, 0 if cascade else step)):
                randomised = ex.explain(examples[index].input, "saliency", int(explanation.target["index"]))
            expected.append(replica.rho(explanation.scores[kept].tolist(), randomised.scores[kept].tolist()))
        assert measurement.curves["rho"] == pytest.approx(expected, abs=1e-6)
        assert measurement.figures["rho"] == pytest.approx(np.mean(expected), abs=1e-6)
    for measurement in (measurement for measurement in measurements if measurement.method == "position"):
        assert measurement.figures["rho"] == pytest.approx(1.0)  # it does not depend on weights
    assert all(
        abs(measurement.figures["rho"]) < 0.999 for measurement in measurements if measurement.method == "random"
    )  # a new draw at each step


def test_randomisation_of_images_reports_ssim() -> None:
    protocol = ParameterRandomisation(steps=1)
    _, _, _, measurements = measure_inputs("vit/image", protocol, ["saliency"], count=1)
    by_method = {measurement.method: measurement.figures["ssim"] for measurement in measurements}
    assert by_method["position"] == pytest.approx(1) and -1 <= by_method["saliency"] < 1


def test_ssim_equals_scikit_image() -> None:
    skimage = pytest.importorskip("skimage.metrics")
    rng = np.random.default_rng(0)
    a, b = rng.random((12, 9)), rng.random((12, 9))
    a, b = ((image - image.min()) / np.ptp(image) for image in (a, b))
    expected = skimage.structural_similarity(a, b, win_size=5, data_range=1.0)
    assert compute_ssim(3 * a - 1, b) == pytest.approx(expected)


def test_shifted_input_bias_preserves_logits_and_saliency() -> None:
    ex, examples, _, measurements = measure_inputs("vit/image", InputInvariance(), ["saliency", "input-x-gradient"])
    by_method = {
        measurement.method: measurement.figures["moved"] for measurement in measurements if measurement.example == "0"
    }
    assert by_method["saliency"] < 1e-5 and by_method["position"] == 0
    assert by_method["input-x-gradient"] > 1e-3  # it multiplies by the input, which was shifted
    (sample,) = ex.adapter.make_samples(examples[0].input, _input_options())
    pixels = sample.inputs["pixel_values"][None].to(ex.adapter.dtype)
    with torch.no_grad():
        before = ex.adapter.model(pixel_values=pixels).logits
        with shifted_input_bias(ex.adapter.model, 0.5):
            shifted = ex.adapter.model(pixel_values=pixels + 0.5).logits
        after = ex.adapter.model(pixel_values=pixels).logits
    assert torch.allclose(before, shifted, atol=1e-6) and torch.equal(before, after)


def _input_options() -> Any:
    from clearhead.adapters.base import InputOptions

    return InputOptions()


def test_input_shift_of_text_model_raises() -> None:
    model = explainer("bert/classify").adapter.model
    with pytest.raises(InputError, match="image model"), shifted_input_bias(model, 0.5):
        pass


def test_label_randomisation_compares_with_other_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other model is loaded by name; here it is the same model with another head."""
    other = explainer("bert/classify")
    with reinitialised_parameters(other.adapter.model, dict(list_parameter_blocks(other.adapter.model))["head"], 5):
        monkeypatch.setattr("clearhead.load", lambda name: other)
        ex, examples, explanations, measurements = measure_inputs(
            "bert/classify", LabelRandomisation(other="permuted"), ["saliency"]
        )
        for measurement in (measurement for measurement in measurements if measurement.method == "saliency"):
            explanation = explanations["saliency"][int(measurement.example)]
            other_explanation = other.explain(
                examples[int(measurement.example)].input, "saliency", int(explanation.target["index"])
            )
            kept = explanation.units.content_indices()
            expected = replica.rho(explanation.scores[kept].tolist(), other_explanation.scores[kept].tolist())
            assert measurement.figures["rho"] == pytest.approx(expected, abs=1e-6)
    assert all(
        measurement.figures["rho"] == pytest.approx(1)
        for measurement in measurements
        if measurement.method == "position"
    )
    with pytest.raises(InputError, match="other=NAME"):
        LabelRandomisation().measure(ex, examples, explanations)


def test_protocols_reuse_seed_of_explanations() -> None:
    """Two classes get the same noise, and the random control is redrawn at every step."""
    ex, examples = explainer("bert/classify"), [Example("0", "you look extremely confused , she hates the book", 0)]
    for seed in (0, 1, 5):
        protocol = ClassSensitivity()
        explanations = explain_examples(
            ex, examples, [Method("random"), Method("position")], protocol, seed=seed
        ).by_method
        assert all(
            measurement.figures["rho"] == pytest.approx(1.0)
            for measurement in protocol.measure(ex, examples, explanations)
        )
        randomised = ParameterRandomisation(steps=2).measure(ex, examples, explanations)
        (control,) = (measurement.curves["rho"] for measurement in randomised if measurement.method == "random")
        assert max(control) < 0.99


def test_randomisation_keeps_method_options() -> None:
    protocol = ParameterRandomisation(steps=1)
    ex = explainer("bert/classify")
    examples = [Example("0", inputs("bert/classify")[0])]
    explanations = explain_examples(ex, examples, [Method("grad-sam", received=True)], protocol).by_method
    (measurement,) = protocol.measure(ex, examples, explanations)
    assert measurement.method == "grad-sam(received=True)" and np.isfinite(measurement.figures["rho"])
