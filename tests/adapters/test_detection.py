"""Detectors: object queries as targets, cells of the feature map as units."""

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

import clearhead
from clearhead import Contrast, DetectionQuery, InputError, MaskedToken, Method, UnsupportedError
from clearhead.adapters import InputOptions
from clearhead.adapters.detection import NO_OBJECT_LABEL, get_detections, group_pixels_by_cell
from clearhead.explanation.otsu_mask import threshold_otsu
from clearhead.render import text_labels
from tests.adapters.test_decoder import Wide
from tests.invariants import model_snapshot
from tests.invariants.cases import amplified, with_few
from tests.replicas import detection as replica

DATA = Path(__file__).parents[1] / "data" / "parity" / "detr"
ORIGINAL = Path(__file__).parents[3] / "shared" / "fixtures" / "detr"
LABELS = {"id2label": {0: "circle", 1: "square", 2: "star"}}

_SETTINGS = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "num_queries": 5,
    "init_xavier_std": 2.0,
    "init_std": 0.3,
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
    **LABELS,
}
_RT_SETTINGS = {
    **_SETTINGS,
    "encoder_hidden_dim": 32,
    "encoder_in_channels": [16, 16, 16],
    "encoder_layers": 1,
    "decoder_in_channels": [32, 32, 32],
    "decoder_n_points": 2,
    "num_denoising": 0,
}


def make_backbone_config(kind: str, *stages: str) -> Any:
    cls = getattr(transformers, f"{kind}Config")
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1], "layer_type": "basic"}
    return cls(**sizes, out_features=list(stages))


def make_detr(
    family: str, head: str = "ForObjectDetection", stages: tuple[str, ...] = ("stage4",), **overrides: Any
) -> Any:
    config = getattr(transformers, f"{family}Config")
    settings = {**_SETTINGS, "backbone_config": make_backbone_config("ResNet", *stages), **overrides}
    return getattr(transformers, family + head)(config(**settings))


def make_rt_detr(family: str) -> Any:
    settings = {**_RT_SETTINGS, "backbone_config": make_backbone_config("RTDetrResNet", "stage2", "stage3", "stage4")}
    config = getattr(transformers, f"{family}Config")(**settings)
    return getattr(transformers, f"{family}ForObjectDetection")(config)


def make_yolos() -> Any:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    shape = {"image_size": [32, 48], "patch_size": 8, "num_detection_tokens": 5}
    return transformers.YolosForObjectDetection(transformers.YolosConfig(**sizes, **shape, **LABELS))


#: Detectors whose attention covers the whole image, and those that sample points of it.
DENSE_ATTENTION: dict[str, Callable[[], Any]] = {
    "detr": lambda: make_detr("Detr"),
    "detr-masks": lambda: make_detr(
        "Detr",
        "ForSegmentation",
        ("stage1", "stage2", "stage3", "stage4"),
        d_model=64,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
    ),
    "conditional": lambda: make_detr("ConditionalDetr"),
    "dab": lambda: make_detr("DabDetr", hidden_size=32),
    "table": lambda: make_detr("TableTransformer"),
    "yolos": make_yolos,
}
SAMPLED_ATTENTION: dict[str, Callable[[], Any]] = {
    "deformable": lambda: make_detr("DeformableDetr", stages=("stage2", "stage3", "stage4"), num_feature_levels=3),
    "rt": lambda: make_rt_detr("RTDetr"),
    "rt2": lambda: make_rt_detr("RTDetrV2"),
}
FAMILIES = {**DENSE_ATTENTION, **SAMPLED_ATTENTION}
#: DAB-DETR computes its positions in float32, so that it cannot run in float64.
FLOAT32_ONLY = ("dab",)
CROSS_ATTENTION_METHODS = ("generic", "attention", "rollout", "attention-gradcam")
GRADIENT_METHODS = ("saliency", "input-x-gradient", "integrated-gradients", "gradient-shap", "smoothgrad")


@cache
def model(family: str) -> Any:
    torch.manual_seed(7)
    detector = FAMILIES[family]().to(torch.float32 if family in FLOAT32_ONLY else torch.float64).eval()
    with torch.no_grad():  # otherwise learned tokens are zero and attention is uniform
        for name, parameter in detector.named_parameters():
            if name.endswith(("cls_token", "detection_tokens", "position_embeddings")) or "query" in name:
                parameter.normal_(std=1.0)
            elif family == "yolos" and parameter.dim() > 1:
                parameter.normal_(std=0.3)
            elif (
                family in SAMPLED_ATTENTION and parameter.dim() > 1
            ):  # default weights: equal queries, points between pixels
                parameter.normal_(std=parameter[0].numel() ** -0.5)
            elif family in SAMPLED_ATTENTION and name.endswith("weight"):
                parameter.fill_(1.0)
    return detector


@cache
def explainer(family: str) -> clearhead.Explainer:
    return clearhead.load(model(family))


def make_image(seed: int = 3, high: int = 96, wide: int = 128) -> Tensor:
    return torch.randn(1, 3, high, wide, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pixels(seed: int = 3, high: int = 96, wide: int = 128) -> dict[str, Tensor]:
    return {"pixel_values": make_image(seed, high, wide)}


def gap(ours: Any, theirs: Any) -> float:
    ours, theirs = np.asarray(ours, dtype=float), np.asarray(theirs, dtype=float)
    assert ours.shape == theirs.shape
    return float(np.abs(ours - theirs).max() / max(np.abs(theirs).max(), 1e-300))


def get_tolerance(family: str) -> float:
    """YOLOS computes its softmax in float32; rounding in models of float32 reaches DeepLIFT's scores a thousandfold."""
    return 2e-3 if family in FLOAT32_ONLY else 1e-5 if family == "yolos" else 1e-9


def list_applicable_methods(family: str) -> list[str]:
    return [line.name for line in explainer(family).methods() if line.applies]


class TestAuthors:
    """Scores of the authors' DETR code on a tiny model (see the README of the fixture)."""

    CASES = tuple((case, which) for case in ("case0", "case1") for which in ("q0_pred", "q3_pred", "q5_c2"))
    METHODS: ClassVar = {
        "ours": Method("generic"),
        "ours_nonorm": Method("generic", normalise=False),
        "ours_noself10": Method("generic", within=False),
        "no_agg": Method("generic", aggregate=False, normalise=False),
        "no_agg_noself10": Method("generic", aggregate=False, normalise=False, within=False),
        "raw_attn": Method("attention"),
        "rollout": Method("rollout"),
        "gradcam": Method("attention-gradcam"),
    }

    @staticmethod
    @cache
    def arrays() -> dict[str, np.ndarray]:
        with np.load(DATA / "arrays.npz") as file:
            return {name.removeprefix("detr/cases/"): file[name] for name in file.files}

    @staticmethod
    @cache
    def explainer() -> clearhead.Explainer:
        settings = json.loads((DATA / "config.json").read_text())
        # transformers 5.22 saved the config without these settings; 5.0 assumes timm by default.
        settings |= {"use_timm_backbone": False, "use_pretrained_backbone": False}
        cls = getattr(transformers, settings["hf_class"])
        made = cls.from_pretrained(
            None,
            config=cls.config_class.from_dict(settings),
            state_dict=load_file(DATA / "weights.safetensors"),
            dtype=torch.float64,
        )
        return clearhead.load(made.eval())

    def explain_case(self, case: str, which: str, profile: str | None) -> dict[str, Any]:
        arrays = self.arrays()
        query, label = (int(arrays[f"{case}/{which}/target_{key}"]) for key in ("index", "class"))
        target = DetectionQuery(query) if which.endswith("pred") else DetectionQuery(query, label)
        raw_input = {"pixel_values": torch.as_tensor(arrays[f"{case}/pixel_values"])}
        with Wide():  # transformers 5.0 computes positions in float32
            results = self.explainer().explain(raw_input, list(self.METHODS.values()), target, profile=profile)
        assert all(e.target["index"] == label and e.target["position"] == query for e in results.values())
        return dict(zip(self.METHODS, results.values(), strict=True))

    @pytest.mark.parametrize(("case", "which"), CASES)
    def test_scores_equal_authors_scores(self, case: str, which: str) -> None:
        for name, e in self.explain_case(case, which, "mm_detr").items():
            theirs = self.arrays()[f"{case}/{which}/{name}/scores"]
            if theirs.any():
                assert gap(e["image"].scores, theirs) < 1e-12, name
            else:
                assert np.abs(e["image"].scores).max() < 1e-15, name

    def test_zero_row_lowers_scores_in_authors_profile_only(self) -> None:
        # without the profile, a row of zeros affects only itself; with it, the whole layer is lost
        ours, theirs = (self.explain_case("case0", "q0_pred", p)["ours"]["image"].scores for p in (None, "mm_detr"))
        assert (ours >= theirs - 1e-12).all()

    def test_recorded_logits_equal_authors_logits(self) -> None:
        for case in ("case0", "case1"):
            raw_input = {"pixel_values": torch.as_tensor(self.arrays()[f"{case}/pixel_values"])}
            with Wide():
                tape = self.explainer().record(raw_input, "attention", DetectionQuery(4))
            assert gap(tape.logits, self.arrays()[f"{case}/logits"][:, 4]) < 1e-12

    def test_stored_fixtures_equal_the_originals(self) -> None:
        if not ORIGINAL.is_dir():
            pytest.skip(f"{ORIGINAL} is absent: only the copies can be used")
        for name in ("config.json", "weights.safetensors"):
            assert (DATA / name).read_bytes() == (ORIGINAL / name).read_bytes()
        originals = np.load(ORIGINAL / "cases.npz")
        for key, copied in self.arrays().items():
            np.testing.assert_array_equal(copied, originals[key], err_msg=key)


@pytest.mark.parametrize("family", ["detr", "conditional", "table", "dab", "detr-masks"])
class TestReplicas:
    def test_cross_attention_methods_equal_replica(self, family: str) -> None:
        query, label = 3, 1
        pass_record = replica.watch(model(family), make_image(), query, label)
        results = explainer(family).explain(pixels(), list(CROSS_ATTENTION_METHODS), DetectionQuery(query, label))
        image, queries = replica.generic(pass_record, query)
        assert gap(results["generic"]["image"].scores, image) < get_tolerance(family)
        assert gap(results["generic"]["queries"].scores, queries) < get_tolerance(family)
        assert results["generic"]["queries"].scores.max() > 0
        for name in CROSS_ATTENTION_METHODS[1:]:
            theirs = getattr(replica, name.replace("-", "_"))(pass_record, query)
            assert gap(results[name]["image"].scores, theirs) < get_tolerance(family), name

    def test_saliency_sums_pixel_gradients_per_cell(self, family: str) -> None:
        pass_record = replica.watch(model(family), make_image(high=40, wide=70), 2, 0)
        e = explainer(family).explain(pixels(high=40, wide=70), Method("saliency", reduce="abs"), DetectionQuery(2, 0))[
            "image"
        ]
        rows, columns = e.units.grid
        sums = np.zeros((rows, columns))
        _, high, wide = pass_record.pixel_gradient.shape
        for y in range(high):
            for x in range(wide):
                sums[y * rows // high, x * columns // wide] += np.abs(pass_record.pixel_gradient[:, y, x]).sum()
        assert gap(e.heat_map(), sums) < get_tolerance(family)


@pytest.mark.parametrize("family", SAMPLED_ATTENTION)
class TestSampledPoints:
    def test_attention_methods_raise(self, family: str) -> None:
        perturbation = {"occlusion", "shap", "kernel-shap", "calibrated", "lime"}
        assert set(list_applicable_methods(family)) == {
            *GRADIENT_METHODS,
            *perturbation,
            "ensemble",
            "position",
            "random",
        }
        for name in ("generic", "attention", "grad-sam", "attcat"):
            with pytest.raises(UnsupportedError, match="sampled points of the image"):
                explainer(family).explain(pixels(), name)

    def test_saliency_norm_equals_pixel_gradient_norm(self, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
        # RT-DETR detaches the boxes that its decoder layers start from, although its output depends on them
        monkeypatch.setattr(torch.Tensor, "detach", lambda tensor: tensor)
        # two images: torch computes a wrong batch-norm gradient for one (see `register_contiguous_batchnorm_hooks`)
        leaf = torch.cat([make_image(), make_image(4)]).requires_grad_()
        output = model(family)(pixel_values=leaf)
        label = int(output.logits[0, 1].argmax())
        (gradient,) = torch.autograd.grad(output.logits[0, 1, label], leaf)
        monkeypatch.undo()
        e = explainer(family).explain(pixels(), "saliency", DetectionQuery(1))
        assert e.target["index"] == label
        assert gap((e["image"].scores ** 2).sum(), (gradient**2).sum()) < 1e-9


@pytest.mark.parametrize("method", ["lrp", "partial-lrp", "transformer-attribution"])
def test_float32_relevance_equals_float64_relevance(method: str) -> None:
    """A decoder starts from zeros, which do not depend on the image: they must have the dtype of what does."""
    single = clearhead.load(deepcopy(model("detr")).float())
    double = clearhead.load(deepcopy(single.adapter.model).double())
    raw_input = {"pixel_values": make_image().float()}
    scores, exact = (
        ex.explain(raw_input, method, DetectionQuery(1, "circle"))["image"].scores for ex in (single, double)
    )
    assert gap(scores, exact) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
class TestInvariants:
    def test_recorded_logits_equal_model_logits(self, family: str) -> None:
        real = model(family)(pixel_values=make_image().to(model(family).dtype)).logits[0]
        for query in (0, 4):
            tape = explainer(family).record(pixels(), "input_gradient", DetectionQuery(query))
            assert gap(tape.logits[0], real[query].detach()) < get_tolerance(family)

    def test_batch_equals_single(self, family: str) -> None:
        batch = [pixels(seed) for seed in (3, 4, 5)]
        targets = [DetectionQuery(1, "circle"), DetectionQuery(4, "star"), DetectionQuery(2, "square")]
        ex, names = explainer(family), with_few(list_applicable_methods(family))
        together, backwards = ex.explain(batch, names, targets), ex.explain(batch[::-1], names, targets[::-1])
        for i, (raw_input, target) in enumerate(zip(batch, targets, strict=True)):
            for name, alone in ex.explain(raw_input, names, target).items():
                for part in alone:
                    within = amplified(part.provenance["method"], get_tolerance(family))
                    assert gap(together[name][i][part.stream].scores, part.scores) < within, name
                    assert gap(backwards[name][2 - i][part.stream].scores, part.scores) < within, name

    def test_batched_queries_equal_single_queries(self, family: str) -> None:
        ex = explainer(family)
        (sample,) = ex.adapter.make_samples(pixels(), InputOptions())
        detection_count = int((get_detections(sample).probabilities.max(-1).values > 0.5).sum())
        names = sorted(
            set(list_applicable_methods(family)) & {"generic", "rollout", "saliency", "input-x-gradient", "attcat"}
        )
        results = ex.explain(pixels(), names)
        steps = results[names[0]].target.get("steps", [results[names[0]].target])
        assert len(steps) == max(detection_count, 1)
        for k, step in enumerate(steps):
            for name, alone in ex.explain(pixels(), names, DetectionQuery(step["position"])).items():
                e = results[name]["image"]
                assert gap(e.scores if e.matrix is None else e.matrix[k], alone["image"].scores) < get_tolerance(
                    family
                ), name
                assert e.matrix is None or gap(e.matrix.sum(0), e.scores) < 1e-6

    def test_model_is_unchanged(self, family: str) -> None:
        detector, ex = model(family), explainer(family)
        before = model_snapshot.of_model(detector)
        ex.explain(pixels(), list_applicable_methods(family))
        with pytest.raises(InputError):
            ex.explain(pixels(), "saliency", DetectionQuery(77))
        assert model_snapshot.changes(before, model_snapshot.of_model(detector)) == []


class TestTargets:
    def test_default_targets_are_detections_by_descending_probability(self) -> None:
        ex = explainer("conditional")
        e = ex.explain(pixels(), "saliency")
        with torch.no_grad():
            output = model("conditional")(pixel_values=make_image())
        probabilities, label_index = output.logits[0].sigmoid().max(-1)
        order = [int(q) for q in probabilities.argsort(descending=True) if probabilities[q] > 0.5]
        assert len(order) > 1
        assert [step["position"] for step in e.target["steps"]] == order
        for step, query in zip(e.target["steps"], order, strict=True):
            x, y, wide, high = output.pred_boxes[0, query].tolist()
            assert step["box"] == pytest.approx([x - wide / 2, y - high / 2, x + wide / 2, y + high / 2])
            assert step["label"] == step["name"] == LABELS["id2label"][int(label_index[query])]
            assert step["probability"] == pytest.approx(float(probabilities[query])) and step["found"] is True
            assert step["kind"] == "detection" and step["value"] == pytest.approx(float(output.logits[0, query].max()))

    def test_without_detections_most_probable_query_is_explained(self) -> None:
        ex = clearhead.load(model("detr"))
        ex.adapter.threshold = 1.0
        e = ex.explain(pixels(), "saliency")
        p = model("detr")(pixel_values=make_image()).logits[0].softmax(-1)[:, :3].detach()
        assert e.steps is None and e.target["found"] is False
        assert e.target["position"] == int(p.max(-1).values.argmax())
        assert e.target["probability"] == pytest.approx(float(p.max()))
        (note,) = text_labels.list_notes(e)
        assert note.startswith(f"query {e.target['position']} does not detect {e.target['label']}") and note in e.html()

    def test_no_object_class_is_never_the_default_target(self) -> None:
        ex = clearhead.load(model("detr"))
        bias = model("detr").class_labels_classifier.bias.detach()
        bias[3] += 50  # "no object" is by far the most probable class
        try:
            e = ex.explain(pixels(), "saliency", DetectionQuery(2))
            logits = model("detr")(pixel_values=make_image()).logits[0, 2].detach()
        finally:
            bias[3] -= 50
        assert e.target["index"] == int(logits[:3].argmax())
        assert e.target["value"] == pytest.approx(float(logits[:3].max()))
        assert e.prediction["label"] == NO_OBJECT_LABEL and e.target["probability"] < 1e-9

    def test_no_object_class_is_accepted_as_target(self) -> None:
        e = explainer("detr").explain(pixels(), "saliency", DetectionQuery(2, NO_OBJECT_LABEL))
        assert e.target["name"] == NO_OBJECT_LABEL and e.target["found"] is False

    def test_label_names_set_after_loading_are_used(self) -> None:
        copied_model = deepcopy(model("detr"))
        ex = clearhead.load(copied_model)
        copied_model.config.id2label = {0: "ring", 1: "box", 2: "comet"}
        assert ex.labels == {0: "ring", 1: "box", 2: "comet", 3: NO_OBJECT_LABEL}
        assert ex.explain(pixels(), "saliency", DetectionQuery(1, "comet")).target["index"] == 2

    def test_label_target_selects_all_detections_of_that_label(self) -> None:
        ex = explainer("conditional")
        everything = ex.explain(pixels(), "saliency").target["steps"]
        for name in {step["label"] for step in everything}:
            places = [step["position"] for step in everything if step["label"] == name]
            target = ex.explain(pixels(), "saliency", name).target
            assert [step["position"] for step in target.get("steps", [target])] == places

    def test_contrast_and_probability_scale_equal_model_output(self) -> None:
        logits = model("detr")(pixel_values=make_image()).logits[0, 1].detach()
        e = explainer("detr").explain(pixels(), "input-x-gradient", DetectionQuery(1, "star", "circle"))
        assert e.target["kind"] == "contrast" and e.target["value"] == pytest.approx(float(logits[2] - logits[0]))
        a, b = (
            explainer("detr").explain(pixels(), "input-x-gradient", DetectionQuery(1, label))["image"].scores
            for label in ("star", "circle")
        )
        assert gap(e["image"].scores, a - b) < 1e-9
        p = (
            explainer("detr")
            .explain(pixels(), "saliency", DetectionQuery(1, "star"), scale="probability")
            .target["value"]
        )
        assert p == pytest.approx(float(logits.softmax(-1)[2]))
        assert explainer("detr").explain(pixels(), "saliency", Contrast("star", "circle")).target

    def test_target_function_requires_readout_query(self) -> None:
        def box_width(output: Any) -> Tensor:
            return output.pred_boxes[:, 3, 2]

        with pytest.raises(UnsupportedError, match="depends on rows 3 of the last layer"):
            explainer("detr").explain(pixels(), target=box_width, method="generic")
        e = clearhead.load(model("detr"), readout=3).explain(pixels(), target=box_width, method="generic")
        assert e["image"].scores.max() > 0 and e.target["kind"] == "callable"

    @pytest.mark.parametrize(
        ("target", "message"),
        [
            (DetectionQuery(5), "query 5 does not exist: the model has 5 queries"),
            (DetectionQuery("star"), "query 'star' does not exist"),
            (DetectionQuery(1, "hexagon"), "label 'hexagon'"),
            ("hexagon", "label 'hexagon'"),
            (NO_OBJECT_LABEL, "the prediction of most queries"),
            (MaskedToken("star"), "not a target of a detector"),
            (clearhead.GeneratedToken(2), "not a target of a detector"),
        ],
    )
    def test_invalid_targets_raise(self, target: Any, message: str) -> None:
        with pytest.raises(InputError, match=message):
            explainer("detr").explain(pixels(), target=target, method="generic")

    def test_negative_queries_count_from_the_end(self) -> None:
        assert explainer("detr").explain(pixels(), "saliency", DetectionQuery(-1)).target["position"] == 4


class TestInputs:
    def test_detection_and_explanation_take_one_pass_each(self) -> None:
        ex = explainer("conditional")
        ex.explain(pixels(), method="generic")
        calls = []
        hook = model("conditional").register_forward_hook(lambda *_: calls.append(1))
        try:
            e = ex.explain(pixels(), list(CROSS_ATTENTION_METHODS))
        finally:
            hook.remove()
        assert len(calls) == 2 and len(e["generic"]["image"].matrix) > 1

    def test_unit_grid_equals_feature_map_size(self) -> None:
        for high, wide, grid in ((64, 64, (2, 2)), (65, 97, (3, 4)), (40, 200, (2, 7))):
            e = explainer("detr").explain(pixels(high=high, wide=wide), "generic", DetectionQuery(0))["image"]
            assert e.units.grid == grid and e.image.shape == (high, wide, 3)
            assert e.units.boxes[0] == (0, 0, 1 / grid[1], 1 / grid[0])
        e = explainer("yolos").explain(pixels(high=35, wide=50), "generic", DetectionQuery(0))["image"]
        assert e.units.grid == (4, 6) and e.image.shape == (32, 48, 3) and e.tokens[0] == "[CLS]"

    def test_images_of_different_sizes_equal_single_images(self) -> None:
        batch = [pixels(high=64, wide=96), pixels(high=60, wide=96), pixels(high=64, wide=128)]
        explanations = explainer("detr").explain(batch, "generic", DetectionQuery(0))
        for e, raw_input in zip(explanations, batch, strict=True):
            assert (
                gap(
                    e["image"].scores,
                    explainer("detr").explain(raw_input, "generic", DetectionQuery(0))["image"].scores,
                )
                < 1e-9
            )

    def test_masked_padding_is_removed(self) -> None:
        image = make_image(high=64, wide=96)
        padded = torch.nn.functional.pad(image, (0, 32, 0, 16), value=0.3)
        mask = torch.zeros(1, 80, 128, dtype=torch.long)
        mask[:, :64, :96] = 1
        logits = [model("detr")(pixel_values=p, pixel_mask=m).logits for p, m in ((image, None), (padded, mask))]
        assert gap(logits[0].detach(), logits[1].detach()) > 1e-6  # the output of the model depends on padding
        e = explainer("detr").explain({"pixel_values": padded, "pixel_mask": mask}, method="generic")
        assert e == explainer("detr").explain({"pixel_values": image}, method="generic")

    def test_processor_prepares_image_arrays(self) -> None:
        pytest.importorskip("PIL")
        processor = transformers.DetrImageProcessor(size={"height": 64, "width": 96})
        pixel_array = np.random.default_rng(0).integers(0, 255, (48, 72, 3), dtype=np.uint8)
        e = clearhead.load(model("detr"), processor).explain(pixel_array, method="generic")
        named = clearhead.load((model("detr"), processor)).explain(image=pixel_array, method="generic")
        assert e == named and e["image"].units.grid == (2, 3)
        assert abs(e["image"].image.mean() - pixel_array.mean()) < 3

    @pytest.mark.parametrize(
        ("raw_input", "message"),
        [
            ({"pixel_values": torch.zeros(1, 1, 64, 64)}, "must be batch × 3 × height × width"),
            ({"pixel_values": torch.zeros(1, 3, 64, 64, dtype=torch.long)}, "real numbers"),
            ({"pixel_values": torch.zeros(1, 3, 64, 64), "pixel_mask": torch.ones(1, 32, 32)}, "the size of the image"),
            ({"pixel_values": torch.zeros(1, 3, 64, 64), "pixel_mask": torch.eye(64)[None]}, "upper left corner"),
            (
                {"pixel_values": torch.zeros(1, 3, 64, 64), "decoder_inputs_embeds": torch.zeros(1, 5, 32)},
                "leave out decoder_inputs_embeds",
            ),
            ({"pixel_mask": torch.ones(1, 64, 64)}, "must contain pixel_values"),
            ("cat.png", "without an image processor"),
        ],
    )
    def test_invalid_inputs_raise(self, raw_input: Any, message: str) -> None:
        with pytest.raises(InputError, match=message):
            explainer("detr").explain(raw_input, method="generic")

    def test_unsupported_image_size_raises(self) -> None:
        with pytest.raises(InputError, match="RTDetrForObjectDetection cannot process an image of 80 × 112 pixels"):
            explainer("rt").explain(pixels(high=80, wide=112), "saliency")

    def test_text_conditioned_detectors_raise(self) -> None:
        tiny = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        config = transformers.OwlViTConfig(
            text_config={**tiny, "vocab_size": 20}, vision_config={**tiny, "image_size": 32, "patch_size": 16}
        )
        with pytest.raises(UnsupportedError, match="detects the objects named in a text"):
            clearhead.load(transformers.OwlViTForObjectDetection(config))

    def test_quadrangle_boxes_raise(self) -> None:
        """PP-DocLayout V4 gives corners of quadrangles."""

        def double_boxes(module: Any, args: Any, output: Any) -> Any:
            output["pred_boxes"] = torch.cat([output.pred_boxes, output.pred_boxes], dim=-1)
            return output

        handle = model("detr").register_forward_hook(double_boxes)
        try:
            with pytest.raises(UnsupportedError, match="returns no classes and boxes"):
                clearhead.load(model("detr")).explain(pixels(), method="generic")
        finally:
            handle.remove()


class TestCells:
    def test_every_pixel_lies_in_one_cell(self) -> None:
        images = torch.arange(2 * 3 * 7 * 10, dtype=torch.float64).reshape(2, 3, 7, 10) + 1
        cells = group_pixels_by_cell(images, (3, 4))
        assert cells.shape[:2] == (2, 12)
        for cell_values, image_values in zip(cells, images, strict=True):
            assert sorted(cell_values[cell_values != 0].tolist()) == sorted(image_values.flatten().tolist())
        first_cell = cells[0, 0].reshape(3, -1)[0]
        assert sorted(first_cell[first_cell != 0].tolist()) == sorted(images[0, 0, :3, :3].flatten().tolist())


class TestMasks:
    def test_mask_covers_the_highest_scoring_cell(self) -> None:
        e = explainer("detr").explain(pixels(high=128, wide=128), "generic", DetectionQuery(0))["image"]
        scores = np.zeros(16)
        scores[5] = 1.0
        mask = replace(e, scores=scores).mask()
        assert mask.shape == (128, 128) and mask[48, 48] and not mask[100:].any() and 0.02 < mask.mean() < 0.15
        assert not replace(e, scores=np.ones(16)).mask().any()

    def test_otsu_threshold_maximises_between_class_variance(self) -> None:
        values = np.random.default_rng(2).integers(0, 255, 200, dtype=np.uint8)

        def compute_between_class_variance(t: int) -> float:
            low, high = values[values <= t].astype(float), values[values > t].astype(float)
            if not len(low) or not len(high):
                return 0.0
            return len(low) * len(high) * (low.mean() - high.mean()) ** 2

        variances = [compute_between_class_variance(t) for t in range(256)]
        assert compute_between_class_variance(threshold_otsu(values)) == pytest.approx(max(variances))


class TestZoo:
    def test_masks_overlap_the_objects(self) -> None:
        if "shapes-detr" not in clearhead.zoo_models():
            pytest.skip("the zoo has no shapes-detr here")
        from clearhead_zoo.tasks import shapes

        scenes = shapes.sample_scenes(np.random.default_rng(5), 4, 96)
        rendered, masks = shapes.render(scenes)
        ex = clearhead.load("zoo:shapes-detr")
        overlaps = []
        for image, object_masks in zip(np.asarray(rendered), np.asarray(masks), strict=True):
            e = ex.explain(image.transpose(1, 2, 0).astype(np.uint8), method="generic")["image"]
            for step in [e.step(k) for k in range(len(e.steps))] if e.steps else [e]:
                mask = step.mask()
                overlaps.append(max((mask & object_).sum() / (mask | object_).sum() for object_ in object_masks))
        assert len(overlaps) > 8 and np.median(overlaps) > 0.3, overlaps
