"""Masking of regions, of detectors' images and of custom models, compared with runs of the model on altered inputs."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import clearhead
from clearhead import Method
from clearhead.adapters import InputOptions
from clearhead.adapters.base import NamedInputs
from clearhead.perturbation.multi_stream import make_players
from tests import custom_models, joint_models
from tests.adapters import test_detection as detectors

PERTURBATION_METHODS = ("occlusion", "shap", "kernel-shap", "lime")


def run_joint_model(name: str, given: dict) -> torch.Tensor:
    """The logits of LXMERT or VisualBERT for the given text and regions."""
    ex = joint_models.explainer(name)
    with torch.no_grad():
        output = ex.adapter.model(**joint_models.model_inputs(name, given))
    return output.question_answering_score[0] if name == "lxmert" else output.logits[0]


@pytest.mark.parametrize("name", joint_models.REGIONS)
def test_occlusion_of_a_region_is_the_change_without_it(name: str) -> None:
    given = joint_models.inputs(name)[0]
    e = joint_models.explainer(name).explain(**given, method="occlusion", target=1, scale="logit")
    features, boxes = given["regions"]
    whole = run_joint_model(name, given)[1]
    for index in range(len(features)):
        rest = {**given, "regions": (np.delete(features, index, 0), np.delete(boxes, index, 0))}
        assert e["regions"].scores[index] == pytest.approx(float(whole - run_joint_model(name, rest)[1]), abs=1e-9)
    assert e["regions"].provenance["replacement"] == "mask, remove"


@pytest.mark.parametrize("name", joint_models.REGIONS)
def test_shapley_values_of_text_and_regions_share_the_change_of_the_output(name: str) -> None:
    given = joint_models.inputs(name)[1]
    ex = joint_models.explainer(name)
    e = ex.explain(**given, method="kernel-shap", target=1, scale="logit")
    sample = ex.adapter.make_samples(NamedInputs(**given), InputOptions())[0]
    players = make_players(ex.adapter, sample)
    empty = players.keep_only(torch.zeros(players.num_players, dtype=torch.bool))
    with torch.no_grad():
        output = ex.adapter.model(**ex.adapter.collate([empty]))
    logits = output.question_answering_score if name == "lxmert" else output.logits
    change = float(run_joint_model(name, given)[1] - logits[0, 1])
    assert e["text"].scores.sum() + e["regions"].scores.sum() == pytest.approx(change, abs=1e-9)


def test_without_any_region_one_of_zeros_is_left_and_masked_out() -> None:
    ex = joint_models.explainer("lxmert")
    sample = ex.adapter.make_samples(NamedInputs(**joint_models.inputs("lxmert")[0]), InputOptions())[0]
    players = make_players(ex.adapter, sample)
    empty = players.keep_only(torch.zeros(players.num_players, dtype=torch.bool)).inputs
    assert empty["visual_feats"].shape[0] == 1 and not empty["visual_feats"].any()
    assert empty["visual_attention_mask"].tolist() == [0]


def test_regions_can_be_replaced_by_their_mean() -> None:
    given = joint_models.inputs("lxmert")[0]
    e = joint_models.explainer("lxmert").explain(
        **given, method=Method("occlusion", replacement="mean"), target=1, scale="logit"
    )
    features, boxes = given["regions"]
    changed = features.copy()
    changed[0] = features.mean(0)
    change = run_joint_model("lxmert", given)[1] - run_joint_model("lxmert", {**given, "regions": (changed, boxes)})[1]
    assert e["regions"].scores[0] == pytest.approx(float(change), abs=1e-9)


@pytest.mark.parametrize("family", ["detr", "yolos", "rt"])
def test_occlusion_of_a_cell_is_the_change_of_the_query_without_its_pixels(family: str) -> None:
    ex = detectors.explainer(family)
    pixels = detectors.make_image(high=32, wide=48) if family == "yolos" else detectors.make_image()
    target = clearhead.DetectionQuery(1, 0)
    image = ex.explain({"pixel_values": pixels}, "occlusion", target=target, scale="logit")["image"]
    rows, columns = image.units.grid
    height, width = pixels.shape[2] // rows, pixels.shape[3] // columns
    with torch.no_grad():
        whole = ex.adapter.model(pixel_values=pixels).logits[0, 1, 0]
        for row, column in [(0, 0), (rows - 1, columns - 1)]:
            masked = pixels.clone()
            cell = (..., slice(row * height, (row + 1) * height), slice(column * width, (column + 1) * width))
            masked[cell] = pixels.mean((2, 3), keepdim=True)
            change = float(whole - ex.adapter.model(pixel_values=masked).logits[0, 1, 0])
            index = image.units.names.index(f"{row},{column}")
            assert image.scores[index] == pytest.approx(change, abs=1e-9)


@pytest.mark.parametrize("method", PERTURBATION_METHODS)
def test_perturbation_methods_apply_to_custom_tokens_with_a_mask_id(method: str) -> None:
    reader = custom_models.textbook_reader()
    reader.mask_id = 0
    ex = clearhead.load(custom_models.made("textbook, fixed positions"), reader)
    text = custom_models.TEXTS[0]
    e = ex.explain(text, method, target=1, scale="logit")
    assert len(e.scores) == 5 and np.abs(e.scores).max() > 0
    if method == "occlusion":
        ids = torch.tensor([reader.read(text)])
        for index in range(5):
            masked = ids.clone()
            masked[0, index] = 0
            change = ex.adapter.model(ids)[0, 1] - ex.adapter.model(masked)[0, 1]
            assert e.scores[index] == pytest.approx(change.item(), abs=1e-9)


def test_custom_tokens_without_mask_id_are_refused_with_what_to_do() -> None:
    ex = custom_models.explainer("textbook, fixed positions")
    (line,) = [line for line in ex.methods() if line.name == "occlusion"]
    assert not line.applies and "mask_id" in line.why_not


@pytest.mark.parametrize("name", ["vit, class token", "vit, mean", "nn.TransformerEncoder, length first", "bilstm"])
def test_occlusion_finds_the_largest_change_on_custom_models(name: str) -> None:
    ex = custom_models.explainer(name)
    e = ex.explain(custom_models.inputs(name)[0], "occlusion", target=0, scale="logit")
    stream = e["text" if "vit" not in name else "image"]
    assert np.isfinite(stream.scores).all() and np.abs(stream.scores).max() > 0


class SeriesModel(nn.Module):
    """An encoder of a time series."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(4, 2)

    def forward(self, steps: Tensor) -> Tensor:
        return self.head(self.encoder(steps).mean(1))


def test_steps_of_a_time_series_are_replaced_by_their_mean() -> None:
    torch.manual_seed(0)
    model = SeriesModel().double().eval()
    ex = clearhead.load(model, clearhead.TokenReader(vector_size=4), readout="mean")
    steps = torch.randn(6, 4, dtype=torch.float64)
    e = ex.explain(steps, "occlusion", target=1, scale="logit")
    masked = steps.clone()
    masked[2] = steps.mean(0)
    assert e.scores[2] == pytest.approx(float(model(steps[None])[0, 1] - model(masked[None])[0, 1]), abs=1e-9)
    assert e.provenance["replacement"] == "mean"
    with pytest.raises(clearhead.InputError, match="replacement"):
        ex.explain(steps, Method("occlusion", replacement="remove"))
