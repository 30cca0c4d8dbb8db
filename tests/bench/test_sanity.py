"""Randomised models are randomised block by block and put back; what knows no weights does not move with them."""

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


def made_for(kind: str, how: BenchmarkProtocol, methods: list[str], count: int = 2) -> tuple[Any, Any, Any, Any]:
    ex = explainer(kind)
    examples = [Example(str(i), raw) for i, raw in enumerate(inputs(kind)[:count])]
    explanations = explain_examples(ex, examples, add_controls(methods), how).by_method
    return ex, examples, explanations, how.measure(ex, examples, explanations)


@pytest.mark.parametrize("kind", ["bert/classify", "vit/image"])
def test_blocks_go_from_the_head_down_and_hold_every_parameter_once(kind: str) -> None:
    model = explainer(kind).adapter.model
    found = list_parameter_blocks(model)
    names = [name for name, _ in found]
    assert names[0] == "head" and names[-1] == "embeddings"
    layers = [name for name in names if name not in ("head", "embeddings")]
    assert layers == sorted(layers, key=lambda name: -int(name.split(".")[-1])) and len(layers) > 1
    own = [id(parameter) for _, parameters in found for parameter in parameters]
    assert sorted(own) == sorted(id(parameter) for parameter in model.parameters())


def test_weights_are_drawn_anew_and_put_back_also_after_an_error() -> None:
    model = explainer("bert/classify").adapter.model
    before = {name: part.clone() for name, part in model.state_dict().items()}
    head = dict(list_parameter_blocks(model))["head"]
    with reinitialised_parameters(model, head, 0):
        moved = [name for name, part in model.state_dict().items() if not torch.equal(part, before[name])]
        assert moved and all("encoder" not in name and "embeddings" not in name for name in moved)
        first = head[0].clone()
    with pytest.raises(ZeroDivisionError), reinitialised_parameters(model, head, 0):
        raise ZeroDivisionError
    assert all(torch.equal(before[name], part) for name, part in model.state_dict().items())
    with reinitialised_parameters(model, head, 0):
        assert torch.equal(first, head[0])  # the same seed, the same weights
    with reinitialised_parameters(model, head, 1):
        assert not torch.equal(first, head[0])


@pytest.mark.parametrize("cascade", [True, False])
def test_randomisation_equals_explaining_the_changed_model(cascade: bool) -> None:
    how = ParameterRandomisation(cascade=cascade, steps=2)
    ex, examples, explanations, made = made_for("bert/classify", how, ["saliency"])
    every = list_parameter_blocks(ex.adapter.model)
    for one in (one for one in made if one.method == "saliency"):
        place, expected = int(one.example), []
        part = explanations["saliency"][place]
        kept = part.units.content_indices()
        for step in range(2):
            changed = [p for _, own in (every[: step + 1] if cascade else every[step : step + 1]) for p in own]
            with reinitialised_parameters(ex.adapter.model, changed, _derive_seed(0, 0 if cascade else step)):
                again = ex.explain(examples[place].input, "saliency", int(part.target["index"]))
            expected.append(replica.rho(part.scores[kept].tolist(), again.scores[kept].tolist()))
        assert one.curves["rho"] == pytest.approx(expected, abs=1e-6)
        assert one.figures["rho"] == pytest.approx(np.mean(expected), abs=1e-6)
    for one in (one for one in made if one.method == "position"):
        assert one.figures["rho"] == pytest.approx(1.0)  # it knows no weights
    assert all(abs(one.figures["rho"]) < 0.999 for one in made if one.method == "random")  # drawn anew


def test_heat_maps_have_a_structural_similarity() -> None:
    how = ParameterRandomisation(steps=1)
    _, _, _, made = made_for("vit/image", how, ["saliency"], count=1)
    by_method = {one.method: one.figures["ssim"] for one in made}
    assert by_method["position"] == pytest.approx(1) and -1 <= by_method["saliency"] < 1


def test_structural_similarity_equals_scikit_images() -> None:
    skimage = pytest.importorskip("skimage.metrics")
    rng = np.random.default_rng(0)
    a, b = rng.random((12, 9)), rng.random((12, 9))
    a, b = ((part - part.min()) / np.ptp(part) for part in (a, b))
    expected = skimage.structural_similarity(a, b, win_size=5, data_range=1.0)
    assert compute_ssim(3 * a - 1, b) == pytest.approx(expected)


def test_a_shift_that_the_model_takes_back_changes_nothing_it_computes() -> None:
    ex, examples, _, made = made_for("vit/image", InputInvariance(), ["saliency", "input-x-gradient"])
    by_method = {one.method: one.figures["moved"] for one in made if one.example == "0"}
    assert by_method["saliency"] < 1e-5 and by_method["position"] == 0
    assert by_method["input-x-gradient"] > 1e-3  # it multiplies by the input, which did move
    (sample,) = ex.adapter.make_samples(examples[0].input, _how())
    pixels = sample.inputs["pixel_values"][None].to(ex.adapter.dtype)
    with torch.no_grad():
        before = ex.adapter.model(pixel_values=pixels).logits
        with shifted_input_bias(ex.adapter.model, 0.5):
            inside = ex.adapter.model(pixel_values=pixels + 0.5).logits
        after = ex.adapter.model(pixel_values=pixels).logits
    assert torch.allclose(before, inside, atol=1e-6) and torch.equal(before, after)


def _how() -> Any:
    from clearhead.adapters.base import InputOptions

    return InputOptions()


def test_a_text_has_no_pixels_to_shift() -> None:
    model = explainer("bert/classify").adapter.model
    with pytest.raises(InputError, match="image model"), shifted_input_bias(model, 0.5):
        pass


def test_label_randomisation_compares_with_the_other_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other model is named; here it is the same one with another head."""
    other = explainer("bert/classify")
    with reinitialised_parameters(other.adapter.model, dict(list_parameter_blocks(other.adapter.model))["head"], 5):
        monkeypatch.setattr("clearhead.load", lambda name: other)
        ex, examples, explanations, made = made_for("bert/classify", LabelRandomisation(other="permuted"), ["saliency"])
        for one in (one for one in made if one.method == "saliency"):
            part = explanations["saliency"][int(one.example)]
            again = other.explain(examples[int(one.example)].input, "saliency", int(part.target["index"]))
            kept = part.units.content_indices()
            expected = replica.rho(part.scores[kept].tolist(), again.scores[kept].tolist())
            assert one.figures["rho"] == pytest.approx(expected, abs=1e-6)
    assert all(one.figures["rho"] == pytest.approx(1) for one in made if one.method == "position")
    with pytest.raises(InputError, match="other=NAME"):
        LabelRandomisation().measure(ex, examples, explanations)


def test_whatever_seed_explanations_were_drawn_with_others_are_drawn_with_it() -> None:
    """Noise is no difference between two classes, and a control is drawn anew at every step."""
    ex, examples = explainer("bert/classify"), [Example("0", "you look extremely confused , she hates the book", 0)]
    for seed in (0, 1, 5):
        how = ClassSensitivity()
        own = explain_examples(ex, examples, [Method("random"), Method("position")], how, seed=seed).by_method
        assert all(one.figures["rho"] == pytest.approx(1.0) for one in how.measure(ex, examples, own))
        drawn = ParameterRandomisation(steps=2).measure(ex, examples, own)
        (control,) = (one.curves["rho"] for one in drawn if one.method == "random")
        assert max(control) < 0.99


def test_methods_with_options_of_their_own_are_explained_again_with_them() -> None:
    how = ParameterRandomisation(steps=1)
    ex = explainer("bert/classify")
    examples = [Example("0", inputs("bert/classify")[0])]
    own = explain_examples(ex, examples, [Method("grad-sam", received=True)], how).by_method
    (one,) = how.measure(ex, examples, own)
    assert one.method == "grad-sam(received=True)" and np.isfinite(one.figures["rho"])
