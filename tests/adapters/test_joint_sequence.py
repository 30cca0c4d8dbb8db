"""A text and what it is about as one sequence: VisualBERT against its authors' numbers, VisualBERT and ViLT against
slow twins, and the laws for both."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import clearhead
from clearhead import InputError, UnsupportedError
from tests import joint_models
from tests.adapters.test_cross_attention import CASES, applying, arrays, gap, published
from tests.invariants import model_snapshot
from tests.invariants.cases import amplified
from tests.replicas import co_attention as replica

FAMILIES = pytest.mark.parametrize("name", ["visual_bert", "vilt"])
METHODS = {"ours": "generic", "raw_attn": "attention", "rollout": "rollout", "gradcam": "attention-gradcam"}


def scores(e: clearhead.MultiStreamExplanation) -> np.ndarray:
    """Of the whole sequence."""
    return np.concatenate([part.scores for part in e])


# -- VisualBERT, as its authors have it


def given(case: str) -> dict[str, torch.Tensor]:
    names = ("input_ids", "attention_mask", "visual_embeds", "visual_attention_mask", "visual_token_type_ids")
    return {name: torch.as_tensor(arrays("visual_bert")[f"{case}/{name}"]) for name in names}


@CASES
@pytest.mark.parametrize("theirs", METHODS)
def test_visual_bert_gives_the_authors_scores(case: str, which: str, theirs: str) -> None:
    index = int(arrays("visual_bert")[f"{case}/{which}/target"])
    target = None if which == "pred" else index
    e = published("visual_bert").explain(given(case), METHODS[theirs], target=target, profile="mm_visualbert")
    assert e.target["index"] == index and e.certificate["readout_checked"]
    assert gap(scores(e), arrays("visual_bert")[f"{case}/{which}/{theirs}"][0]) < 1e-10


def as_the_authors(looks: list[replica.Look], row: int) -> dict[str, np.ndarray]:
    """SelfAttentionGenerator, on whatever it is given."""
    size = looks[0].attention.shape[1]
    relevance, rolled = np.eye(size), np.eye(size)
    for look in looks:
        relevance = relevance + replica.fused(look) @ relevance
        rolled = (look.attention.mean(0) + np.eye(size)) @ rolled
    cam = replica.gradcam(looks[-1])
    with np.errstate(invalid="ignore"):
        cam = (cam - cam.min()) / (cam.max() - cam.min())
    maps = {"ours": relevance, "raw_attn": looks[-1].attention.mean(0), "rollout": rolled, "gradcam": cam}
    rows = {name: found[row].copy() for name, found in maps.items()}
    for found in rows.values():
        found[row] = 0
    return rows


@pytest.mark.parametrize("target", range(5))
def test_padding_is_part_of_the_authors_maps(target: int) -> None:
    """Their GradCAM takes the mean over the whole map, and padded columns have gradients, too."""
    inputs = given("case1")
    padded = {
        name: torch.nn.functional.pad(part, (0, 2) if part.dim() == 2 else (0, 0, 0, 2), value=int(name == "input_ids"))
        for name, part in inputs.items()
    }
    assert padded["attention_mask"].sum() == 7 and padded["input_ids"].shape == (1, 9)
    exact = {**padded, "visual_embeds": padded["visual_embeds"].double()}
    looks = replica.watch(published("visual_bert").adapter.model, exact, lambda output: output.logits[0, target])
    for theirs, expected in as_the_authors(looks, row=5).items():
        e = published("visual_bert").explain(padded, METHODS[theirs], target=target, profile="mm_visualbert")
        assert len(e["text"]) == 9 and len(e["regions"]) == 8
        assert gap(scores(e), expected) < 1e-10, theirs
        without = published("visual_bert").explain(padded, METHODS[theirs], target=target)
        assert len(without["text"]) == 7 and len(without["regions"]) == 6


def test_a_map_that_the_clamp_leaves_nothing_of_is_nan_to_the_authors() -> None:
    """A target that every head should attend less for; the score of the token that is read they set to zero."""
    ex, inputs = published("visual_bert"), given("case0")
    exact = {**inputs, "visual_embeds": inputs["visual_embeds"].double()}
    passes = [replica.watch(ex.adapter.model, exact, lambda output, k=k: output.logits[0, k]) for k in range(5)]
    weights = np.stack([looks[-1].gradient.mean((1, 2)) for looks in passes])  # class head
    mixture = torch.as_tensor(np.linalg.lstsq(weights.T, -np.ones(4), rcond=None)[0])
    how = {"method": "attention-gradcam", "target": lambda output: output.logits @ mixture}
    e = ex.explain(inputs, **how, profile="mm_visualbert")
    assert np.isnan(scores(e)).sum() == len(e) - 1 and e["text"].scores[3] == 0
    assert not scores(ex.explain(inputs, **how)).any()


# -- slow twins


def in_order(name: str, model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """ViLT shuffles patches on its own way; image_embeds take another, on which they stay in order."""
    if name != "vilt":
        return inputs
    embeddings = joint_models.vilt_of(model).embeddings
    patches = embeddings.patch_embeddings(inputs["pixel_values"]).flatten(2).transpose(1, 2)
    embeds = torch.cat([embeddings.cls_token, patches], dim=1) + embeddings.position_embeddings
    rest = {key: part for key, part in inputs.items() if key != "pixel_values"}
    return {**rest, "image_embeds": embeds, "pixel_mask": torch.ones(embeds.shape[:2], dtype=torch.long)}


@FAMILIES
def test_methods_are_their_slow_twins(name: str) -> None:
    ex = joint_models.explainer(name)
    batch = ex.explain(**joint_models.together(joint_models.inputs(name)), method=list(METHODS.values()), target=1)
    for place, one in enumerate(joint_models.inputs(name)):
        inputs = in_order(name, ex.adapter.model, joint_models.model_inputs(name, one))
        looks = replica.watch(ex.adapter.model, inputs, lambda output: output.logits[0, 1])
        steps = [[replica.Look(one.module, one.attention, one.gradient, "joint", "joint")] for one in looks]
        lengths = {"joint": looks[0].attention.shape[1]}
        row = inputs["input_ids"].shape[1] - 2 if name == "visual_bert" else 0
        expected = {
            "generic": replica.generic(steps, lengths)["joint", "joint"],
            "rollout": replica.rollout(steps, lengths)["joint", "joint"],
            "attention": looks[-1].attention.mean(0),
            "attention-gradcam": replica.gradcam(looks[-1]),
        }
        for method, matrix in expected.items():
            assert gap(scores(batch[method][place]), matrix[row]) < 1e-9, method


@FAMILIES
def test_gradients_go_to_words_and_to_what_they_are_about(name: str) -> None:
    ex, one = joint_models.explainer(name), joint_models.inputs(name)[0]
    model, inputs = ex.adapter.model, joint_models.model_inputs(name, one)
    leaf = "visual_embeds" if name == "visual_bert" else "pixel_values"
    words = model.get_input_embeddings()(inputs["input_ids"]).detach().requires_grad_()
    shown = inputs[leaf].detach().requires_grad_()
    rest = {key: part for key, part in inputs.items() if key not in ("input_ids", leaf)}
    number = model(inputs_embeds=words, **{leaf: shown}, **rest).logits[0, 2]
    of_words, of_shown = torch.autograd.grad(number, [words, shown])
    e = ex.explain(**one, method="input-x-gradient", target=2)
    assert gap(e["text"].scores, (words * of_words)[0].sum(-1).detach()) < 1e-9
    products = (shown * of_shown)[0].detach()
    if name == "visual_bert":
        assert gap(e["regions"].scores, products.sum(-1)) < 1e-9
    else:
        cells = products.sum(0).reshape(4, 8, 4, 8).sum((1, 3)).flatten()
        assert gap(e["image"].scores, torch.cat([torch.zeros(1), cells])) < 1e-9


# -- the laws


@FAMILIES
def test_recorded_logits_are_the_models_own(name: str) -> None:
    ex = joint_models.explainer(name)
    for one in joint_models.inputs(name):
        with torch.no_grad():
            real = ex.adapter.model(**joint_models.model_inputs(name, one)).logits
        assert gap(ex.record(**one, requires="attention").logits, real) < 1e-9


@FAMILIES
def test_batched_is_single_in_any_order(name: str) -> None:
    """Two texts are of one length, so that two numbers of regions meet in one batch."""
    ex, many = joint_models.explainer(name), joint_models.inputs(name)
    many.append({**many[0], **({"regions": joint_models.regions(6, 9)} if name == "visual_bert" else {})})
    methods = applying(ex)
    refused = {line.name for line in ex.methods() if not line.applies}
    games = {"shap", "kernel-shap", "lime", "occlusion"} if name == "visual_bert" else set()  # regions stay
    assert refused == {"value-zeroing", "beyond-intuition-token"} | games
    single = [ex.explain(**one, method=methods) for one in many]
    for order in ([0, 1, 2, 3], [3, 2, 0, 1]):
        batch = ex.explain(**joint_models.together([many[i] for i in order]), method=methods)
        for method in methods:
            for e, i in zip(batch[method], order, strict=True):
                alone = single[i][method]
                assert [part.tokens for part in e] == [part.tokens for part in alone]
                assert gap(scores(e), scores(alone)) < amplified(method, 1e-9), method


@FAMILIES
def test_padding_that_was_given_changes_nothing(name: str) -> None:
    ex, one = joint_models.explainer(name), joint_models.inputs(name)[0]
    inputs = joint_models.model_inputs(name, one)
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
    for method, e in ex.explain(padded, method=applying(ex)).items():
        other = ex.explain(inputs, method=method)
        assert [part.tokens for part in e] == [part.tokens for part in other]
        assert gap(scores(e), scores(other)) < amplified(method, 1e-9), method


@FAMILIES
def test_the_users_model_is_untouched(name: str) -> None:
    model, processor = joint_models.MAKERS[name]()
    model.train()
    before = model_snapshot.of_model(model)
    ex = clearhead.load(model, processor)
    ex.explain(**joint_models.inputs(name)[0], method=applying(ex))
    with pytest.raises(InputError, match="one number per sample"):
        ex.explain(**joint_models.inputs(name)[0], target=lambda output: output.logits)
    assert model_snapshot.changes(before, model_snapshot.of_model(model)) == []


# -- VisualBERT


def test_reasoning_is_read_off_the_first_token_and_answers_off_the_last_word() -> None:
    one = joint_models.inputs("visual_bert")[0]
    for cls, readout in (("VisualBertForVisualReasoning", "first"), ("VisualBertForQuestionAnswering", "last word")):
        e = clearhead.load(joint_models.visual_bert(cls)).explain(**one)
        assert e.certificate["readout"] == readout and e.certificate["readout_checked"]
    ex = clearhead.load(joint_models.visual_bert("VisualBertModel"))
    assert ex.explain(**one, target=lambda output: output.pooler_output[:, 0]).certificate["readout_checked"]
    with pytest.raises(UnsupportedError, match="depends on rows 3"):
        ex.explain(**one, target=lambda output: output.last_hidden_state[:, 3, 0])
    with pytest.raises(InputError, match="no classes"):
        ex.explain(**one)


def test_visual_bert_needs_no_boxes_but_shows_them() -> None:
    ex, (features, boxes) = joint_models.explainer("visual_bert"), joint_models.regions(3)
    one = ex.explain(text="So boring!", regions=(features, None))
    other = ex.explain(text="So boring!", regions=(features, boxes), image=joint_models.picture())
    assert gap(scores(one), scores(other)) < 1e-12
    assert one["regions"].units.boxes is None and gap(other["regions"].units.boxes, boxes) < 1e-6
    assert one["regions"].image is None and other["regions"].image.shape == (32, 32, 3)


@pytest.mark.parametrize(
    ("cls", "why"),
    [
        ("VisualBertForMultipleChoice", "several texts at once"),
        ("VisualBertForRegionToPhraseAlignment", "attention themselves"),
        ("VisualBertForPreTraining", "two heads"),
    ],
)
def test_classes_that_are_not_explained_say_why(cls: str, why: str) -> None:
    with pytest.raises(UnsupportedError, match=why):
        clearhead.load(joint_models.visual_bert(cls))


def test_regions_that_come_in_late_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="bypass_transformer"):
        clearhead.load(joint_models.visual_bert(bypass_transformer=True))


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"text": "So boring!", "image": joint_models.picture()}, "detector"),
        ({"text": "So boring!", "regions": ([[1.0] * 4], None)}, "takes 6 features"),
        ({"inputs": {"input_ids": [[2]], "visual_embeds": torch.zeros(1, 2, 6)}}, "too short a text"),
        ({"inputs": {"input_ids": [[2, 8, 3]]}}, "need input_ids and visual_embeds"),
        (
            {
                "inputs": {
                    "input_ids": [[2, 3]],
                    "visual_embeds": torch.zeros(1, 2, 6),
                    "visual_attention_mask": [[0, 0]],
                }
            },
            "hides every region",
        ),
    ],
)
def test_bad_regions_give_one_clear_message(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        joint_models.explainer("visual_bert").explain(**given)


def test_texts_of_two_lengths_have_no_tape_in_common() -> None:
    many = joint_models.together(joint_models.inputs("visual_bert"))
    with pytest.raises(InputError, match="padding would stand inside the sequence"):
        joint_models.explainer("visual_bert").record(**many, requires="attention")


# -- ViLT


def test_patches_stay_in_order_though_vilt_shuffles_them() -> None:
    """One patch made to matter gets the same score every time, in its own place."""
    ex = joint_models.explainer("vilt")
    picture = joint_models.picture(3, size=(32, 48))
    results = []
    for seed in range(3):
        torch.manual_seed(seed)
        results.append(ex.explain(text="So boring!", image=picture, method=["generic", "attention"]))
    assert results[0]["generic"]["image"].units.grid == (4, 6)
    for method in ("generic", "attention"):
        for other in results[1:]:
            assert np.array_equal(scores(results[0][method]), scores(other[method]))


def test_somebody_elses_pass_is_left_alone() -> None:
    ex, seen = joint_models.explainer("vilt"), []
    inputs = joint_models.model_inputs("vilt", joint_models.inputs("vilt")[0])

    def elsewhere() -> None:
        embeddings = ex.adapter.model.vilt.embeddings
        mask = torch.ones(1, 32, 32)
        seen.append(embeddings.visual_embed(inputs["pixel_values"], mask, -1)[2][0])

    with ex.adapter.forward_context():
        elsewhere()
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    places = torch.cartesian_prod(torch.arange(4), torch.arange(4))
    assert torch.equal(seen[0][0], places) and not torch.equal(seen[1][0], places)
    assert "visual_embed" not in ex.adapter.model.vilt.embeddings.__dict__


def test_patches_that_are_dropped_at_random_are_refused() -> None:
    ex = clearhead.load(joint_models.vilt(max_image_length=15))
    with pytest.raises(InputError, match="keeps 15 of the 16 patches"):
        ex.explain(**joint_models.inputs("vilt")[0])
    ex = clearhead.load(joint_models.vilt(max_image_length=16))
    assert len(ex.explain(**joint_models.inputs("vilt")[0])["image"]) == 17


def test_answers_are_yes_or_no_each_and_a_match_is_measured() -> None:
    one = joint_models.inputs("vilt")[0]
    e = joint_models.explainer("vilt").explain(**one)
    logit = e.prediction["top"][0]["logit"]
    assert e.prediction["probability"] == pytest.approx(1 / (1 + np.exp(-logit)))
    single = clearhead.load(joint_models.vilt(problem_type="single_label_classification")).explain(**one)
    assert sum(label["probability"] for label in single.prediction["top"]) == pytest.approx(1)
    match = clearhead.load(joint_models.vilt("ViltForImageAndTextRetrieval")).explain(**one)
    assert match.target["name"] == "match" and match.certificate["readout_checked"]


@pytest.mark.parametrize(
    ("cls", "more", "why"),
    [
        ("ViltForImagesAndTextClassification", {"num_images": 2, "modality_type_vocab_size": 3}, "several pictures"),
        ("ViltForTokenClassification", {}, "labels of words"),
    ],
)
def test_other_heads_say_why_not(cls: str, more: dict[str, Any], why: str) -> None:
    with pytest.raises(UnsupportedError, match=why):
        clearhead.load(joint_models.vilt(cls, **more))


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"text": "So boring!"}, "a text alone"),
        ({"image": joint_models.picture()}, "only image"),
        ({"text": "So boring!", "image": "nowhere.png"}, "there is no picture"),
        ({"text": "So boring!", "regions": joint_models.regions(2)}, "takes text and image"),
        ({"inputs": {"input_ids": [[2, 3]], "pixel_values": torch.zeros(1, 1, 32, 32)}}, "batch × 3 × height"),
        ({"inputs": {"input_ids": [[2, 3]], "pixel_values": torch.zeros(1, 3, 4, 4)}}, "does not fall into patches"),
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
def test_bad_pictures_give_one_clear_message(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        joint_models.explainer("vilt").explain(**given)


def test_a_tokenizer_alone_shows_no_pictures() -> None:
    model, processor = joint_models.vilt()
    with pytest.raises(InputError, match="without an image processor"):
        clearhead.load(model, processor.tokenizer).explain(**joint_models.inputs("vilt")[0])
    with pytest.raises(InputError, match="no tokenizer"):
        clearhead.load(model, processor.image_processor)


def test_a_folder_is_opened_and_its_explanation_kept(tmp_path: Path) -> None:
    model, processor = joint_models.vilt(dtype=torch.float32)
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    one = joint_models.inputs("vilt")[0]
    e = clearhead.load(str(tmp_path / "model")).explain(**one)
    assert gap(scores(e), scores(clearhead.load(model, processor).explain(**one))) < 1e-5
    assert clearhead.load_explanation(e.save(tmp_path / "e.safetensors")) == e


# -- the zoo


@pytest.mark.parametrize("name", ["shapes-vqa", "shapes-vilt"])
def test_zoo_models_are_explained_with_one_call(name: str) -> None:
    zoo = pytest.importorskip("clearhead_zoo")
    if name not in zoo.names():
        pytest.skip(f"zoo:{name} is not trained yet")
    from clearhead_zoo.tasks import shapes

    one = shapes.make_example(seed=11, family="relation")
    regions = {"regions": (one.features, one.region_boxes)} if name == "shapes-vqa" else {}
    e = clearhead.load(f"zoo:{name}").explain(text=one.text, image=one.image, **regions)
    assert e.prediction["label"] == one.label
    assert e.certificate["readout_checked"] and all(np.isfinite(part.scores).all() for part in e)
