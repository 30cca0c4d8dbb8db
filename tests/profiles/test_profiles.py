"""Profiles reproduce their authors' code, and are rejected for models that the code does not support."""

import copy
from functools import cache

import numpy as np
import pytest
import torch

import clearhead
from clearhead import Method
from tests import dual_models, joint_models, models
from tests.adapters import test_detection as detection
from tests.adapters import test_dual_encoder as clips
from tests.methods import replica_comparison, test_path_methods
from tests.methods import test_parity as parity


@pytest.mark.parametrize(
    ("subject", "profile", "method"),
    [
        ("bert/classify", "bi_clip_c", "beyond-intuition-token"),
        ("bert/classify", "te_vit_eval", "transformer-attribution"),
        ("bert/classify", "bi_vit_h", "beyond-intuition-head"),
        ("bert/classify", "gender_mlm", "attcat"),
        ("bert/mask", "bi_ga", "generic"),
        ("vit/image", "te_bert_eraser", "transformer-attribution"),
        ("vit/image", "mm_detr", "generic"),
        ("vit/image", "attcat_paper", "attcat"),
    ],
)
def test_profile_is_rejected_for_models_outside_its_code(subject: str, profile: str, method: str) -> None:
    with pytest.raises(
        clearhead.UnsupportedError, match=f"the profile {profile} reproduces its authors' code for models that"
    ):
        replica_comparison.explainer(subject).explain(models.inputs(subject)[0], method, profile=profile)


@pytest.mark.parametrize("name", ["lxmert", "vilt"])
def test_attcat_profile_is_rejected_for_image_text_models(name: str) -> None:
    with pytest.raises(clearhead.UnsupportedError, match="models that read only a text"):
        joint_models.explainer(name).explain(**joint_models.inputs(name)[0], method="attcat", profile="attcat_paper")


def test_detr_profile_is_rejected_for_yolos() -> None:
    with pytest.raises(clearhead.UnsupportedError, match="by queries that attend to it"):
        detection.explainer("yolos").explain(detection.pixels(high=32, wide=48), profile="mm_detr")


@pytest.mark.parametrize(("case", "which"), parity.CASES)
def test_bert_generic_with_bi_ga_equals_authors(case: str, which: str) -> None:
    e = parity.bert(case, which, "generic", profile="bi_ga")
    assert parity.gap(e.scores, parity.theirs("bert", "bert_beyond", case, which, "generate_genattr")[0]) < parity.BERT


@cache
def arrays() -> dict[str, np.ndarray]:
    with np.load(parity.DATA / "beyond.npz") as file:
        return {name: file[name] for name in file.files}


def test_copied_files_equal_original_fixtures() -> None:
    if not parity.ORIGINALS.is_dir():
        pytest.skip(f"{parity.ORIGINALS} is absent: only the copies are available")
    for key, copied in arrays().items():
        folder, file, inside = key.split("/", 2)
        np.testing.assert_array_equal(copied, np.load(parity.ORIGINALS / folder / f"{file}.npz")[inside], err_msg=key)


@pytest.mark.parametrize(("case", "which"), parity.CASES)
class TestBeyondIntuitionBaselines:
    def test_bert_baselines_equal_authors(self, case: str, which: str) -> None:
        array_names = {
            "attention": "generate_attn_last_layer",
            "rollout": "generate_rollout_start0",
            "attention-gradcam": "generate_attn_gradcam",
            "transformer-attribution": "generate_LRP_start0_origlrp",
            "partial-lrp": "generate_LRP_last_layer_orig",
            "transformer-attribution(rules='ours')": "generate_LRP_start0",
        }
        methods = [*list(array_names)[:-1], Method("transformer-attribution", rules="ours")]
        index = int(parity.theirs("bert", "bert_recorded", case, which, "target"))
        results = parity.explainer("bert").explain(parity.bert_inputs(case), methods, target=index, profile="bi_bert_h")
        all_arrays = arrays() | parity.arrays("bert")
        for method, name in array_names.items():
            theirs = all_arrays[f"bert_beyond/cases/{case}/{which}/{name}"][0]
            assert parity.gap(results[method].scores, theirs) < 1e-6, method

    @pytest.mark.parametrize("profile", ["bi_vit_h", "bi_vit_c"])
    def test_vit_baselines_equal_authors(self, case: str, which: str, profile: str) -> None:
        for method, name in (
            ("attention", "attn_last"),
            ("attention-gradcam", "cam_attn"),
            ("rollout", "rollout_start1"),
        ):
            e = parity.vit(case, which, method, profile=profile)
            theirs = parity.theirs("vit", "vit_beyond", case, which, name).reshape(-1)
            assert np.isnan(e.scores[0]) and parity.gap(e.scores[1:], theirs) < parity.VIT, method

    def test_mean_pooled_vit_rollout_equals_authors(self, case: str, which: str) -> None:
        pixels = torch.as_tensor(parity.theirs("vit", "vit_chefer", case, "pixel_values"))
        e = test_path_methods.load_mean_pooled_vit().explain({"pixel_values": pixels}, "rollout", profile="bi_vit_mae")
        theirs = parity.theirs("vit", "vit_beyond", case, which, "mae", "rollout_start1")[0]
        assert parity.gap(e.scores[1:], theirs) < parity.VIT


@pytest.mark.parametrize("case", ["case0", "case1"])
@pytest.mark.parametrize("profile", ["bi_clip_h", "bi_clip_c"])
def test_clip_baselines_equal_authors(case: str, profile: str) -> None:
    methods = ["attention", "rollout", "attention-gradcam"]
    results = clips.published().explain(clips.pairs(case), methods, profile=profile)
    for method, name in (("attention", "generate_raw_attention"), ("rollout", "generate_rollout_start0")):
        ours = clips.listed(results[method])[0]["image"].scores
        assert np.isnan(ours[0]) and parity.gap(ours[1:], clips.arrays()[f"{case}/beyond/{name}"][0]) < 1e-6
    theirs = arrays()[f"clip/cases_softmax32/{case}/beyond/generate_cam_attn"]
    for heat_map, e in zip(theirs, clips.listed(results["attention-gradcam"]), strict=True):
        scaled = (heat_map - heat_map.min()) / (heat_map.max() - heat_map.min())  # the authors scale all maps together
        assert parity.gap(e["image"].scores[1:], scaled.reshape(-1)) < 1e-6


def test_clip_head_weights_include_padding_after_the_text() -> None:
    """The authors' texts are padded with zeros, and head weights are computed over the full map."""
    ex, inputs = clips.published(), clips.pairs("case1")
    results = clips.listed(ex.explain(inputs, "beyond-intuition-head", profile="bi_clip_h"))
    eager = copy.deepcopy(ex.adapter.model)
    eager.set_attn_implementation("eager")
    attention_maps: list[torch.Tensor] = []
    # In transformers 5.0 CLIP does not return the attention of its layers; the layers do.
    eager.text_model.encoder.layers[-1].self_attn.register_forward_hook(
        lambda *call: attention_maps.append(call[-1][1])
    )
    output = eager(**inputs | {"pixel_values": inputs["pixel_values"].double()})
    (last,) = attention_maps
    (gradient,) = torch.autograd.grad(output.logits_per_image.diagonal().sum(), last)
    for e, ids, maps, gradients in zip(results, inputs["input_ids"], last.detach(), gradient, strict=True):
        end = int(ids.argmax())
        theta = (maps.mT @ gradients).abs().mean((1, 2))
        row = ((theta / theta.sum())[:, None] * maps[:, end]).sum(0)
        row[end] += 1
        assert len(e["text"]) == len(ids) and parity.gap(e["text"].factors[0], row) < parity.VIT
        assert np.isnan(e["text"].scores[[0, *range(end, len(ids))]]).all()
        assert np.nansum(e["text"].scores) == pytest.approx(1)
    without_profile = clips.listed(ex.explain(inputs, "beyond-intuition-head"))
    assert [len(e["text"]) for e in without_profile] == [int(ids.argmax()) + 1 for ids in inputs["input_ids"]]


def test_mm_clip_keeps_tokens_of_a_text_that_is_read_at_the_class_token() -> None:
    e = dual_models.explainer("chinese_clip").explain(
        text=dual_models.TEXTS[0], image=dual_models.pictures()[0], profile="mm_clip"
    )
    assert np.array_equal(np.isnan(e["text"].scores), e["text"].units.special)
    assert np.nansum(e["text"].scores) == pytest.approx(1)
