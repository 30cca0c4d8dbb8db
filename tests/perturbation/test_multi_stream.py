"""Masking units of several streams: two texts, a text and an image, a source and generated tokens."""

from functools import cache

import numpy as np
import pytest
import torch

import clearhead
from clearhead import Method
from clearhead.perturbation.hierarchy import Hierarchy, build_spatial_hierarchy, merge_hierarchies
from tests import dual_models, joint_models, models
from tests.adapters import test_encoder_decoder as encoder_decoder
from tests.adapters import test_similarity as similarity
from tests.adapters.test_cross_attention import logits_of

METHODS = ["occlusion", *(Method(name, evaluations=40) for name in ("shap", "kernel-shap", "lime", "calibrated"))]
TEXT, FOIL = "She hates the book", "I like the movie"


@cache
def clip_inputs():
    """Image and text inputs of CLIP, and the cosine of altered inputs."""
    ex, image = dual_models.explainer("clip"), dual_models.pictures()[0]
    inputs = dual_models.processor("clip")(text=[TEXT, FOIL], images=image, padding=True, return_tensors="pt")
    model = ex.adapter.model
    ids, pixels = inputs["input_ids"], inputs["pixel_values"].double()

    def cosine(row, pixel_values):
        with torch.no_grad():
            output = model(input_ids=row[None], pixel_values=pixel_values, attention_mask=(row != 1).long()[None])
            return float((output.text_embeds * output.image_embeds).sum())

    return ex, image, ids, pixels, cosine


def test_occlusion_of_text_and_image() -> None:
    """The score is the loss of the cosine if one token is the mask, or one patch the mean of the image."""
    ex, image, ids, pixels, cosine = clip_inputs()
    explanation = ex.explain(text=TEXT, image=image, method="occlusion")
    assert explanation.provenance["replacement"] == "mask, mean" and explanation.provenance["players"] == "token, patch"
    row = ids[0][: len(explanation["text"])]
    full, mask = cosine(row, pixels), models.tokenizer("bytes").mask_token_id
    for index, score in enumerate(explanation["text"].scores):
        masked = row.clone().index_fill(0, torch.tensor(index), mask)
        assert score == pytest.approx(
            0 if explanation["text"].units.special[index] else full - cosine(masked, pixels), abs=1e-6
        )
    mean = pixels.mean((2, 3), keepdim=True)[0]
    for index in (0, 5, 15):
        masked, (y, x) = pixels.clone(), (index // 4 * 4, index % 4 * 4)
        masked[0, :, y : y + 4, x : x + 4] = mean
        assert explanation["image"].scores[1 + index] == pytest.approx(full - cosine(row, masked), abs=1e-6)


@pytest.mark.parametrize("name", ["vilt", "blip", "bridge_tower"])
def test_occlusion_of_text_next_to_an_image(name) -> None:
    """In a model that attends to both jointly."""
    ex, raw = joint_models.explainer(name), joint_models.inputs(name)[0]
    explanation = ex.explain(**raw, method="occlusion", target=0)
    inputs = joint_models.model_inputs(name, raw)
    mask = ex.adapter.tokenizer_wrapper.tokenizer.mask_token_id

    def logit(**changes) -> float:
        with ex.adapter.forward_context(), torch.no_grad():
            return float(logits_of(ex.adapter.model(**{**inputs, **changes}))[0, 0])

    for index, score in enumerate(explanation["text"].scores):
        masked = inputs["input_ids"].clone().index_fill(1, torch.tensor(index), mask)
        expected = 0 if explanation["text"].units.special[index] else logit() - logit(input_ids=masked)
        assert score == pytest.approx(expected, abs=1e-6)
    pixels = inputs["pixel_values"]
    for index in (0, 5, 15):
        masked, (y, x) = pixels.clone(), (index // 4 * 8, index % 4 * 8)
        masked[0, :, y : y + 8, x : x + 8] = pixels.mean((2, 3), keepdim=True)[0]
        assert explanation["image"].scores[1 + index] == pytest.approx(logit() - logit(pixel_values=masked), abs=1e-6)
    assert np.abs(explanation["text"].scores).max() > 1e-3 and np.abs(explanation["image"].scores).max() > 1e-3


def test_embeddings_next_to_an_image_cannot_be_masked() -> None:
    ex = joint_models.explainer("vilt")
    inputs = joint_models.model_inputs("vilt", joint_models.inputs("vilt")[0])
    embeddings = ex.adapter.embeddings(inputs.pop("input_ids")).detach()
    embedded_inputs = {"inputs_embeds": embeddings, **inputs}
    assert ex.explain(embedded_inputs, method="generic").streams == ("text", "image")
    with pytest.raises(clearhead.InputError, match="input_ids, which was not given"):
        ex.explain(embedded_inputs, method="occlusion")


@pytest.mark.parametrize("method", [*METHODS[1:3], METHODS[4]], ids=str)
def test_scores_of_both_streams_are_complete(method) -> None:
    ex, image, *_ = clip_inputs()
    explanation = ex.explain(text=TEXT, image=image, method=method)
    total = sum(stream_explanation.scores.sum() for stream_explanation in explanation.by_stream.values())
    assert explanation["text"].base_value + total == pytest.approx(explanation.target["value"], abs=1e-6)
    assert explanation["text"].scores.any() and explanation["image"].scores.any()


def test_contrast_of_similarities() -> None:
    """The foil is unchanged, so the score is the loss of the cosine minus that of the foil's cosine."""
    ex, image, ids, pixels, cosine = clip_inputs()
    explanation = ex.explain(text=TEXT, image=image, method="occlusion", target=clearhead.Contrast(None, FOIL))
    masked = pixels.clone()
    masked[0, :, :4, :4] = pixels.mean((2, 3))[0][:, None, None]
    lost = [cosine(row[row != 1], pixels) - cosine(row[row != 1], masked) for row in ids]
    assert explanation["image"].scores[1] == pytest.approx(lost[0] - lost[1], abs=1e-6)


@pytest.mark.parametrize("name", ["clip", "siglip", "vision_text"])
def test_batch_equals_single(name: str) -> None:
    ex, images = dual_models.explainer(name), dual_models.pictures()
    texts, images = dual_models.TEXTS[:2], images[:2]
    batch = ex.explain(text=texts, image=images, method=METHODS)
    for index, (text, image) in enumerate(zip(texts, images, strict=True)):
        for method, explanation in ex.explain(text=text, image=image, method=METHODS).items():
            for stream in ("text", "image"):
                np.testing.assert_allclose(batch[method][index][stream].scores, explanation[stream].scores, atol=1e-6)


@pytest.mark.parametrize("name", ["vilt", "blip", "bridge_tower"])
def test_batch_equals_single_for_fused_streams(name: str) -> None:
    ex, raws = joint_models.explainer(name), joint_models.inputs(name)[:2]
    batch = ex.explain(**joint_models.together(raws), method=METHODS)
    for index, raw in enumerate(raws):
        for method, explanation in ex.explain(**raw, method=METHODS).items():
            for stream in ("text", "image"):
                np.testing.assert_allclose(batch[method][index][stream].scores, explanation[stream].scores, atol=1e-6)


def test_end_of_text_token_as_replacement_raises() -> None:
    """The end-of-text token is CLIP's read-out position, so it cannot replace a masked token."""
    ex, image, *_ = clip_inputs()
    tower = type(ex.adapter.text_tower.model).__name__
    with pytest.raises(clearhead.InputError, match=f"end-of-text token, which is the read-out position of {tower}"):
        ex.explain(text=TEXT, image=image, method=Method("occlusion", replacement="eos"))


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_source_and_generated_tokens_are_masked_together(family: str) -> None:
    ex, answer = encoder_decoder.explainer(family), (40, 50, 60)
    source = {"input_ids": torch.tensor([[5, 17, 45, 9]])}
    explanation = ex.explain(source, "occlusion", answer=answer)
    model, mask = ex.adapter.model, encoder_decoder.WORDS.mask_token_id

    def value(ids: torch.Tensor, decoder_ids: torch.Tensor) -> float:
        with torch.no_grad():
            return float(model(input_ids=ids, decoder_input_ids=decoder_ids).logits[0, -1, answer[2]])

    ids, decoder_ids = source["input_ids"], torch.tensor([[ex.adapter.decoder_start_token_id, *answer[:2]]])
    full = value(ids, decoder_ids)
    for index in range(4):
        loss = full - value(ids.clone().index_fill(1, torch.tensor(index), mask), decoder_ids)
        assert explanation["source"].matrix[2, index] == pytest.approx(loss, abs=1e-9)
    for index in (1, 2):
        loss = full - value(ids, decoder_ids.clone().index_fill(1, torch.tensor(index), mask))
        assert explanation["prefix"].matrix[2, index] == pytest.approx(loss, abs=1e-9)
    assert not explanation["prefix"].matrix[0].any(), "there is no token before the first generated one"


def test_sources_of_different_lengths_share_a_batch() -> None:
    ex = encoder_decoder.explainer("bart")
    sources, answers = encoder_decoder.SOURCES[:2], ["a", "on"]
    batch = ex.explain(sources, METHODS, answer=answers)
    for index, (source, answer) in enumerate(zip(sources, answers, strict=True)):
        for method, explanation in ex.explain(source, METHODS, answer=answer).items():
            for stream in encoder_decoder.STREAMS:
                np.testing.assert_allclose(batch[method][index][stream].scores, explanation[stream].scores, atol=1e-9)


def test_two_texts_are_symmetric_and_complete() -> None:
    ex = similarity.explainer("bert")
    explanation, swapped = (ex.explain(pair, Method("shap", evaluations=500)) for pair in ((TEXT, FOIL), (FOIL, TEXT)))
    np.testing.assert_allclose(explanation["text"].scores, swapped["other"].scores, atol=1e-9)
    total = explanation["text"].scores.sum() + explanation["other"].scores.sum()
    assert explanation["text"].base_value + total == pytest.approx(explanation.target["value"], abs=1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replacement": "delete"}, "would shift the tokens of one stream"),
        ({"replacement": "grey"}, "unknown replacement 'grey'"),
        ({"unit": "region"}, "unknown unit 'region'"),
    ],
)
def test_invalid_options_raise(options: dict, message: str) -> None:
    ex, image, *_ = clip_inputs()
    with pytest.raises(clearhead.InputError, match=message):
        ex.explain(text=TEXT, image=image, method=Method("occlusion", **options))


def test_options_apply_to_the_matching_stream() -> None:
    ex, image, *_ = clip_inputs()
    explanation = ex.explain(text=TEXT, image=image, method=Method("occlusion", unit="word", replacement="blur"))
    assert explanation.provenance["players"] == "word, patch" and explanation.provenance["replacement"] == "mask, blur"
    default = ex.explain(text=TEXT, image=image, method=Method("occlusion", unit="word"))
    np.testing.assert_array_equal(explanation["text"].scores, default["text"].scores)
    assert np.abs(explanation["image"].scores - default["image"].scores).max() > 1e-4


def test_merged_hierarchies_are_joined_at_the_root() -> None:
    first, second = Hierarchy((0, -1, 1), ((0, 1), (3, 2))), build_spatial_hierarchy(np.array([[0.0, 0.0], [0.0, 1.0]]))
    tree = merge_hierarchies([first, second], [2, 2])
    assert tree.player_of_leaf == (0, -1, 1, 2, 3)
    halves = [tree.list_leaves_by_node()[child] for child in tree.get_children(tree.root)]
    assert sorted(map(sorted, halves)) == [[0, 1, 2], [3, 4]]
    assert merge_hierarchies([first], [2]) == first
