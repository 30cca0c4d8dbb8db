"""Text and image or regions as one sequence: VisualBERT compared with its authors' scores; VisualBERT and ViLT compared
with slow replicas and checked for the invariants."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import clearhead
from clearhead import InputError, UnsupportedError
from tests import joint_models
from tests.adapters.test_cross_attention import CASES, arrays, gap, list_applicable_methods, published
from tests.invariants import model_snapshot
from tests.invariants.cases import amplified
from tests.replicas import co_attention as replica

FAMILIES = pytest.mark.parametrize("name", ["visual_bert", "vilt"])
METHODS = {"ours": "generic", "raw_attn": "attention", "rollout": "rollout", "gradcam": "attention-gradcam"}


def concatenate_scores(e: clearhead.MultiStreamExplanation) -> np.ndarray:
    """Concatenate the scores of all streams in sequence order."""
    return np.concatenate([part.scores for part in e])


# -- VisualBERT compared with its authors' scores


def load_inputs(case: str) -> dict[str, torch.Tensor]:
    names = ("input_ids", "attention_mask", "visual_embeds", "visual_attention_mask", "visual_token_type_ids")
    return {name: torch.as_tensor(arrays("visual_bert")[f"{case}/{name}"]) for name in names}


@CASES
@pytest.mark.parametrize("theirs", METHODS)
def test_visual_bert_scores_equal_authors_scores(case: str, which: str, theirs: str) -> None:
    index = int(arrays("visual_bert")[f"{case}/{which}/target"])
    target = None if which == "pred" else index
    e = published("visual_bert").explain(load_inputs(case), METHODS[theirs], target=target, profile="mm_visualbert")
    assert e.target["index"] == index and e.certificate["readout_checked"]
    assert gap(concatenate_scores(e), arrays("visual_bert")[f"{case}/{which}/{theirs}"][0]) < 1e-10


def compute_authors_scores(calls: list[replica.Look], row: int) -> dict[str, np.ndarray]:
    """Compute the scores of the authors' SelfAttentionGenerator, read out at `row`."""
    size = calls[0].attention.shape[1]
    relevance, rolled = np.eye(size), np.eye(size)
    for call in calls:
        relevance = relevance + replica.fused(call) @ relevance
        rolled = (call.attention.mean(0) + np.eye(size)) @ rolled
    cam = replica.gradcam(calls[-1])
    with np.errstate(invalid="ignore"):
        cam = (cam - cam.min()) / (cam.max() - cam.min())
    maps = {"ours": relevance, "raw_attn": calls[-1].attention.mean(0), "rollout": rolled, "gradcam": cam}
    rows = {name: found[row].copy() for name, found in maps.items()}
    for found in rows.values():
        found[row] = 0
    return rows


@pytest.mark.parametrize("target", range(5))
def test_authors_profile_keeps_padding_positions(target: int) -> None:
    """The authors' GradCAM averages over all columns, including padding, which has gradients too."""
    inputs = load_inputs("case1")
    padded = {
        name: torch.nn.functional.pad(part, (0, 2) if part.dim() == 2 else (0, 0, 0, 2), value=int(name == "input_ids"))
        for name, part in inputs.items()
    }
    assert padded["attention_mask"].sum() == 7 and padded["input_ids"].shape == (1, 9)
    exact = {**padded, "visual_embeds": padded["visual_embeds"].double()}
    calls = replica.watch(published("visual_bert").adapter.model, exact, lambda output: output.logits[0, target])
    for theirs, expected in compute_authors_scores(calls, row=5).items():
        e = published("visual_bert").explain(padded, METHODS[theirs], target=target, profile="mm_visualbert")
        assert len(e["text"]) == 9 and len(e["regions"]) == 8
        assert gap(concatenate_scores(e), expected) < 1e-10, theirs
        without = published("visual_bert").explain(padded, METHODS[theirs], target=target)
        assert len(without["text"]) == 7 and len(without["regions"]) == 6


def test_all_negative_gradcam_is_nan_in_authors_profile_only() -> None:
    """The target decreases with the attention of every head. The authors set the score at the read-out row to zero."""
    ex, inputs = published("visual_bert"), load_inputs("case0")
    model_inputs = {**inputs, "visual_embeds": inputs["visual_embeds"].double()}
    passes = [replica.watch(ex.adapter.model, model_inputs, lambda output, k=k: output.logits[0, k]) for k in range(5)]
    weights = np.stack([calls[-1].gradient.mean((1, 2)) for calls in passes])  # class head
    mixture = torch.as_tensor(np.linalg.lstsq(weights.T, -np.ones(4), rcond=None)[0])
    options = {"method": "attention-gradcam", "target": lambda output: output.logits @ mixture}
    e = ex.explain(inputs, **options, profile="mm_visualbert")
    assert np.isnan(concatenate_scores(e)).sum() == len(e) - 1 and e["text"].scores[3] == 0
    assert not concatenate_scores(ex.explain(inputs, **options)).any()


# -- slow replicas


def with_ordered_patches(name: str, model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Replace pixel values by image_embeds: ViLT shuffles the patches of pixel values, but not those."""
    if name != "vilt":
        return inputs
    embeddings = joint_models.get_vilt_module(model).embeddings
    patches = embeddings.patch_embeddings(inputs["pixel_values"]).flatten(2).transpose(1, 2)
    embeds = torch.cat([embeddings.cls_token, patches], dim=1) + embeddings.position_embeddings
    rest = {key: part for key, part in inputs.items() if key != "pixel_values"}
    return {**rest, "image_embeds": embeds, "pixel_mask": torch.ones(embeds.shape[:2], dtype=torch.long)}


@FAMILIES
def test_methods_equal_slow_replicas(name: str) -> None:
    ex = joint_models.explainer(name)
    batch = ex.explain(**joint_models.together(joint_models.inputs(name)), method=list(METHODS.values()), target=1)
    for index, example in enumerate(joint_models.inputs(name)):
        inputs = with_ordered_patches(name, ex.adapter.model, joint_models.model_inputs(name, example))
        calls = replica.watch(ex.adapter.model, inputs, lambda output: output.logits[0, 1])
        steps = [[replica.Look(call.module, call.attention, call.gradient, "joint", "joint")] for call in calls]
        lengths = {"joint": calls[0].attention.shape[1]}
        row = inputs["input_ids"].shape[1] - 2 if name == "visual_bert" else 0
        expected = {
            "generic": replica.generic(steps, lengths)["joint", "joint"],
            "rollout": replica.rollout(steps, lengths)["joint", "joint"],
            "attention": calls[-1].attention.mean(0),
            "attention-gradcam": replica.gradcam(calls[-1]),
        }
        for method, matrix in expected.items():
            assert gap(concatenate_scores(batch[method][index]), matrix[row]) < 1e-9, method


@FAMILIES
def test_input_gradients_cover_text_and_visual_input(name: str) -> None:
    ex, example = joint_models.explainer(name), joint_models.inputs(name)[0]
    model, inputs = ex.adapter.model, joint_models.model_inputs(name, example)
    leaf = "visual_embeds" if name == "visual_bert" else "pixel_values"
    text_embeds = model.get_input_embeddings()(inputs["input_ids"]).detach().requires_grad_()
    visual = inputs[leaf].detach().requires_grad_()
    rest = {key: part for key, part in inputs.items() if key not in ("input_ids", leaf)}
    logit = model(inputs_embeds=text_embeds, **{leaf: visual}, **rest).logits[0, 2]
    text_gradient, visual_gradient = torch.autograd.grad(logit, [text_embeds, visual])
    e = ex.explain(**example, method="input-x-gradient", target=2)
    assert gap(e["text"].scores, (text_embeds * text_gradient)[0].sum(-1).detach()) < 1e-9
    products = (visual * visual_gradient)[0].detach()
    if name == "visual_bert":
        assert gap(e["regions"].scores, products.sum(-1)) < 1e-9
    else:
        cells = products.sum(0).reshape(4, 8, 4, 8).sum((1, 3)).flatten()
        assert gap(e["image"].scores, torch.cat([torch.zeros(1), cells])) < 1e-9


# -- invariants


@FAMILIES
def test_recorded_logits_equal_model_logits(name: str) -> None:
    ex = joint_models.explainer(name)
    for example in joint_models.inputs(name):
        with torch.no_grad():
            real = ex.adapter.model(**joint_models.model_inputs(name, example)).logits
        assert gap(ex.record(**example, requires="attention").logits, real) < 1e-9


@FAMILIES
def test_batch_equals_single_in_any_order(name: str) -> None:
    """Two texts have equal length, so that different numbers of regions share a batch."""
    ex, examples = joint_models.explainer(name), joint_models.inputs(name)
    examples.append({**examples[0], **({"regions": joint_models.regions(6, 9)} if name == "visual_bert" else {})})
    methods = list_applicable_methods(ex)
    rejected = {line.name for line in ex.methods() if not line.applies}
    assert rejected == {"value-zeroing", "beyond-intuition-token", "pa-lrp"}
    single = [ex.explain(**example, method=methods) for example in examples]
    for order in ([0, 1, 2, 3], [3, 2, 0, 1]):
        batch = ex.explain(**joint_models.together([examples[i] for i in order]), method=methods)
        for method in methods:
            for e, i in zip(batch[method], order, strict=True):
                alone = single[i][method]
                assert [part.tokens for part in e] == [part.tokens for part in alone]
                assert gap(concatenate_scores(e), concatenate_scores(alone)) < amplified(method, 1e-9), method


@FAMILIES
def test_masked_padding_does_not_change_scores(name: str) -> None:
    ex, example = joint_models.explainer(name), joint_models.inputs(name)[0]
    inputs = joint_models.model_inputs(name, example)
    if name == "visual_bert":
        inputs["visual_attention_mask"] = torch.ones(1, 4, dtype=torch.long)
    else:
        inputs["pixel_mask"] = torch.ones(1, 32, 32, dtype=torch.long)
    padded = {key: torch.nn.functional.pad(part, (0, 2)) if part.dim() == 2 else part for key, part in inputs.items()}
    if name == "visual_bert":
        padded["visual_embeds"] = torch.nn.functional.pad(inputs["visual_embeds"], (0, 0, 0, 2))
    else:
        for key in ("pixel_values", "pixel_mask"):
            padded[key] = torch.nn.functional.pad(inputs[key], (0, 8, 0, 16))
    with torch.no_grad():
        assert gap(ex.adapter.model(**padded).logits, ex.adapter.model(**inputs).logits) < 1e-9
    for method, e in ex.explain(padded, method=list_applicable_methods(ex)).items():
        unpadded = ex.explain(inputs, method=method)
        assert [part.tokens for part in e] == [part.tokens for part in unpadded]
        assert gap(concatenate_scores(e), concatenate_scores(unpadded)) < amplified(method, 1e-9), method


@FAMILIES
def test_model_is_unchanged(name: str) -> None:
    model, processor = joint_models.MAKERS[name]()
    model.train()
    before = model_snapshot.of_model(model)
    ex = clearhead.load(model, processor)
    ex.explain(**joint_models.inputs(name)[0], method=list_applicable_methods(ex))
    with pytest.raises(InputError, match="one number per sample"):
        ex.explain(**joint_models.inputs(name)[0], target=lambda output: output.logits, method="generic")
    assert model_snapshot.changes(before, model_snapshot.of_model(model)) == []


# -- VisualBERT


def test_visual_bert_readout_depends_on_the_head() -> None:
    example = joint_models.inputs("visual_bert")[0]
    for cls, readout in (("VisualBertForVisualReasoning", "first"), ("VisualBertForQuestionAnswering", "last word")):
        e = clearhead.load(joint_models.visual_bert(cls)).explain(**example, method="generic")
        assert e.certificate["readout"] == readout and e.certificate["readout_checked"]
    ex = clearhead.load(joint_models.visual_bert("VisualBertModel"))
    assert ex.explain(**example, target=lambda output: output.pooler_output[:, 0], method="generic").certificate[
        "readout_checked"
    ]
    with pytest.raises(UnsupportedError, match="depends on rows 3"):
        ex.explain(**example, target=lambda output: output.last_hidden_state[:, 3, 0], method="generic")
    with pytest.raises(InputError, match="no classes"):
        ex.explain(**example, method="generic")


def test_visual_bert_boxes_are_optional_and_do_not_change_scores() -> None:
    ex, (features, boxes) = joint_models.explainer("visual_bert"), joint_models.regions(3)
    without_boxes = ex.explain(text="So boring!", regions=(features, None), method="generic")
    with_boxes = ex.explain(
        text="So boring!", regions=(features, boxes), image=joint_models.make_image(), method="generic"
    )
    assert gap(concatenate_scores(without_boxes), concatenate_scores(with_boxes)) < 1e-12
    assert without_boxes["regions"].units.boxes is None and gap(with_boxes["regions"].units.boxes, boxes) < 1e-6
    assert without_boxes["regions"].image is None and with_boxes["regions"].image.shape == (32, 32, 3)


@pytest.mark.parametrize(
    ("cls", "why"),
    [
        ("VisualBertForMultipleChoice", "several texts at once"),
        ("VisualBertForRegionToPhraseAlignment", "themselves attention weights"),
        ("VisualBertForPreTraining", "two heads"),
    ],
)
def test_unsupported_visual_bert_heads_raise_with_reason(cls: str, why: str) -> None:
    with pytest.raises(UnsupportedError, match=why):
        clearhead.load(joint_models.visual_bert(cls))


def test_bypass_transformer_raises() -> None:
    with pytest.raises(UnsupportedError, match="bypass_transformer"):
        clearhead.load(joint_models.visual_bert(bypass_transformer=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"text": "So boring!", "image": joint_models.make_image()}, "detector"),
        ({"text": "So boring!", "regions": ([[1.0] * 4], None)}, "takes 6 features"),
        ({"inputs": {"input_ids": [[2]], "visual_embeds": torch.zeros(1, 2, 6)}}, "too short: use a longer text"),
        ({"inputs": {"input_ids": [[2, 8, 3]]}}, "must contain input_ids and visual_embeds"),
        (
            {
                "inputs": {
                    "input_ids": [[2, 3]],
                    "visual_embeds": torch.zeros(1, 2, 6),
                    "visual_attention_mask": [[0, 0]],
                }
            },
            "excludes every region",
        ),
    ],
)
def test_invalid_regions_raise(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        joint_models.explainer("visual_bert").explain(**arguments, method="generic")


def test_record_with_texts_of_different_lengths_raises() -> None:
    examples = joint_models.together(joint_models.inputs("visual_bert"))
    with pytest.raises(InputError, match="padding would be inside the sequence"):
        joint_models.explainer("visual_bert").record(**examples, requires="attention")


# -- ViLT


def test_vilt_patch_order_is_deterministic() -> None:
    """Scores do not depend on the random order in which ViLT arranges the patches."""
    ex = joint_models.explainer("vilt")
    image = joint_models.make_image(3, size=(32, 48))
    results = []
    for seed in range(3):
        torch.manual_seed(seed)
        results.append(ex.explain(text="So boring!", image=image, method=["generic", "attention"]))
    assert results[0]["generic"]["image"].units.grid == (4, 6)
    for method in ("generic", "attention"):
        for other in results[1:]:
            assert np.array_equal(concatenate_scores(results[0][method]), concatenate_scores(other[method]))


def test_forward_context_does_not_affect_other_threads() -> None:
    ex, positions = joint_models.explainer("vilt"), []
    inputs = joint_models.model_inputs("vilt", joint_models.inputs("vilt")[0])

    def embed_image() -> None:
        embeddings = ex.adapter.model.vilt.embeddings
        mask = torch.ones(1, 32, 32)
        positions.append(embeddings.visual_embed(inputs["pixel_values"], mask, -1)[2][0])

    with ex.adapter.forward_context():
        embed_image()
        thread = threading.Thread(target=embed_image)
        thread.start()
        thread.join()
    raster_order = torch.cartesian_prod(torch.arange(4), torch.arange(4))
    assert torch.equal(positions[0][0], raster_order) and not torch.equal(positions[1][0], raster_order)
    assert "visual_embed" not in ex.adapter.model.vilt.embeddings.__dict__


def test_random_patch_dropping_raises() -> None:
    ex = clearhead.load(joint_models.vilt(max_image_length=15))
    with pytest.raises(InputError, match="samples 15 of the 16 patches"):
        ex.explain(**joint_models.inputs("vilt")[0], method="generic")
    ex = clearhead.load(joint_models.vilt(max_image_length=16))
    assert len(ex.explain(**joint_models.inputs("vilt")[0], method="generic")["image"]) == 17


def test_vilt_probabilities_follow_problem_type() -> None:
    example = joint_models.inputs("vilt")[0]
    e = joint_models.explainer("vilt").explain(**example, method="generic")
    logit = e.prediction["top"][0]["logit"]
    assert e.prediction["probability"] == pytest.approx(1 / (1 + np.exp(-logit)))
    single = clearhead.load(joint_models.vilt(problem_type="single_label_classification")).explain(
        **example, method="generic"
    )
    assert sum(label["probability"] for label in single.prediction["top"]) == pytest.approx(1)
    match = clearhead.load(joint_models.vilt("ViltForImageAndTextRetrieval")).explain(**example, method="generic")
    assert match.target["name"] == "match" and match.certificate["readout_checked"]


@pytest.mark.parametrize(
    ("cls", "more", "why"),
    [
        ("ViltForImagesAndTextClassification", {"num_images": 2, "modality_type_vocab_size": 3}, "several images"),
        ("ViltForTokenClassification", {}, "token labels"),
    ],
)
def test_unsupported_vilt_heads_raise_with_reason(cls: str, more: dict[str, Any], why: str) -> None:
    with pytest.raises(UnsupportedError, match=why):
        clearhead.load(joint_models.vilt(cls, **more))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"text": "So boring!"}, "only a text"),
        ({"image": joint_models.make_image()}, "only image"),
        ({"text": "So boring!", "image": "nowhere.png"}, "there is no image"),
        ({"text": "So boring!", "regions": joint_models.regions(2)}, "takes text and image"),
        ({"inputs": {"input_ids": [[2, 3]], "pixel_values": torch.zeros(1, 1, 32, 32)}}, "batch × 3 × height"),
        (
            {"inputs": {"input_ids": [[2, 3]], "pixel_values": torch.zeros(1, 3, 4, 4)}},
            "cannot be divided into patches",
        ),
        (
            {
                "inputs": {
                    "input_ids": [[2, 3]],
                    "pixel_values": torch.zeros(1, 3, 32, 32),
                    "pixel_mask": torch.ones(1, 32, 32).triu(),
                }
            },
            "one rectangle",
        ),
    ],
)
def test_invalid_images_raise(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        joint_models.explainer("vilt").explain(**arguments, method="generic")


def test_missing_image_processor_or_tokenizer_raises() -> None:
    model, processor = joint_models.vilt()
    with pytest.raises(InputError, match="without an image processor"):
        clearhead.load(model, processor.tokenizer).explain(**joint_models.inputs("vilt")[0], method="generic")
    with pytest.raises(InputError, match="no tokenizer"):
        clearhead.load(model, processor.image_processor)


def test_load_from_folder_and_save_explanation(tmp_path: Path) -> None:
    model, processor = joint_models.vilt(dtype=torch.float32)
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    example = joint_models.inputs("vilt")[0]
    e = clearhead.load(str(tmp_path / "model")).explain(**example, method="generic")
    assert (
        gap(
            concatenate_scores(e),
            concatenate_scores(clearhead.load(model, processor).explain(**example, method="generic")),
        )
        < 1e-5
    )
    assert clearhead.load_explanation(e.save(tmp_path / "e.safetensors")) == e


# -- the zoo


@pytest.mark.parametrize("name", ["shapes-vqa", "shapes-vilt"])
def test_zoo_models_predict_the_label_with_finite_scores(name: str) -> None:
    zoo = pytest.importorskip("clearhead_zoo")
    if name not in zoo.names():
        pytest.skip(f"zoo:{name} is not trained yet")
    from clearhead_zoo.tasks import shapes

    example = shapes.make_example(seed=11, family="relation")
    regions = {"regions": (example.features, example.region_boxes)} if name == "shapes-vqa" else {}
    e = clearhead.load(f"zoo:{name}").explain(text=example.text, image=example.image, **regions, method="generic")
    assert e.prediction["label"] == example.label
    assert e.certificate["readout_checked"] and all(np.isfinite(part.scores).all() for part in e)
