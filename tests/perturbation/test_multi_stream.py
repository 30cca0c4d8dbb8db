"""Units of several streams are taken away together: two texts, a text and a picture, a source and what was said."""

from functools import cache

import numpy as np
import pytest
import torch

import clearhead
from clearhead import Method
from clearhead.perturbation.hierarchy import Hierarchy, build_spatial_hierarchy, merge_hierarchies
from tests import dual_models, joint_models, models
from tests.adapters import test_encoder_decoder as translating
from tests.adapters import test_similarity as alike
from tests.adapters.test_cross_attention import logits_of

METHODS = ["occlusion", *(Method(name, evaluations=40) for name in ("shap", "kernel-shap", "lime"))]
TEXT, FOIL = "She hates the book", "I like the movie"


@cache
def seen():
    """A picture and a text as CLIP takes them, and the cosine of altered ones."""
    ex, picture = dual_models.explainer("clip"), dual_models.pictures()[0]
    made = dual_models.processor("clip")(text=[TEXT, FOIL], images=picture, padding=True, return_tensors="pt")
    model = ex.adapter.model
    ids, pixels = made["input_ids"], made["pixel_values"].double()

    def cosine(row, shown):
        with torch.no_grad():
            found = model(input_ids=row[None], pixel_values=shown, attention_mask=(row != 1).long()[None])
            return float((found.text_embeds * found.image_embeds).sum())

    return ex, picture, ids, pixels, cosine


def test_occlusion_of_text_and_image() -> None:
    """One token is the mask, or one patch the mean of the picture: the cosine loses so much."""
    ex, picture, ids, pixels, cosine = seen()
    e = ex.explain(text=TEXT, image=picture, method="occlusion")
    assert e.provenance["replacement"] == "mask, mean" and e.provenance["players"] == "token, patch"
    row = ids[0][: len(e["text"])]
    whole, mask = cosine(row, pixels), models.tokenizer("bytes").mask_token_id
    for place, score in enumerate(e["text"].scores):
        hidden = row.clone().index_fill(0, torch.tensor(place), mask)
        assert score == pytest.approx(0 if e["text"].units.special[place] else whole - cosine(hidden, pixels), abs=1e-6)
    mean = pixels.mean((2, 3), keepdim=True)[0]
    for place in (0, 5, 15):
        hidden, (y, x) = pixels.clone(), (place // 4 * 4, place % 4 * 4)
        hidden[0, :, y : y + 4, x : x + 4] = mean
        assert e["image"].scores[1 + place] == pytest.approx(whole - cosine(row, hidden), abs=1e-6)


@pytest.mark.parametrize("name", ["vilt", "blip", "bridge_tower"])
def test_occlusion_of_text_next_to_an_image(name) -> None:
    """In a model that looks at both together."""
    ex, one = joint_models.explainer(name), joint_models.inputs(name)[0]
    e = ex.explain(**one, method="occlusion", target=0)
    inputs = joint_models.model_inputs(name, one)
    mask = ex.adapter.tokenizer_wrapper.tokenizer.mask_token_id

    def logit(**changed) -> float:
        with ex.adapter.forward_context(), torch.no_grad():
            return float(logits_of(ex.adapter.model(**{**inputs, **changed}))[0, 0])

    for place, score in enumerate(e["text"].scores):
        hidden = inputs["input_ids"].clone().index_fill(1, torch.tensor(place), mask)
        expected = 0 if e["text"].units.special[place] else logit() - logit(input_ids=hidden)
        assert score == pytest.approx(expected, abs=1e-6)
    pixels = inputs["pixel_values"]
    for place in (0, 5, 15):
        hidden, (y, x) = pixels.clone(), (place // 4 * 8, place % 4 * 8)
        hidden[0, :, y : y + 8, x : x + 8] = pixels.mean((2, 3), keepdim=True)[0]
        assert e["image"].scores[1 + place] == pytest.approx(logit() - logit(pixel_values=hidden), abs=1e-6)
    assert np.abs(e["text"].scores).max() > 1e-3 and np.abs(e["image"].scores).max() > 1e-3


def test_embeddings_next_to_an_image_cannot_be_masked() -> None:
    ex = joint_models.explainer("vilt")
    inputs = joint_models.model_inputs("vilt", joint_models.inputs("vilt")[0])
    vectors = ex.adapter.embeddings(inputs.pop("input_ids")).detach()
    given = {"inputs_embeds": vectors, **inputs}
    assert ex.explain(given).streams == ("text", "image")
    with pytest.raises(clearhead.InputError, match="input_ids, which was not given"):
        ex.explain(given, method="occlusion")


@pytest.mark.parametrize("method", METHODS[1:3], ids=str)
def test_scores_of_both_streams_are_complete(method) -> None:
    ex, picture, *_ = seen()
    e = ex.explain(text=TEXT, image=picture, method=method)
    total = sum(part.scores.sum() for part in e.by_stream.values())
    assert e["text"].base_value + total == pytest.approx(e.target["value"], abs=1e-6)
    assert e["text"].scores.any() and e["image"].scores.any()


def test_contrast_of_similarities() -> None:
    """The other text stays as it is, so that the loss is that of the cosine less that of the foil's."""
    ex, picture, ids, pixels, cosine = seen()
    e = ex.explain(text=TEXT, image=picture, method="occlusion", target=clearhead.Contrast(None, FOIL))
    hidden = pixels.clone()
    hidden[0, :, :4, :4] = pixels.mean((2, 3))[0][:, None, None]
    lost = [cosine(row[row != 1], pixels) - cosine(row[row != 1], hidden) for row in ids]
    assert e["image"].scores[1] == pytest.approx(lost[0] - lost[1], abs=1e-6)


@pytest.mark.parametrize("name", ["clip", "siglip", "vision_text"])
def test_batch_equals_single(name: str) -> None:
    ex, pictures = dual_models.explainer(name), dual_models.pictures()
    texts, pictures = dual_models.TEXTS[:2], pictures[:2]
    batch = ex.explain(text=texts, image=pictures, method=METHODS)
    for place, (text, picture) in enumerate(zip(texts, pictures, strict=True)):
        for method, e in ex.explain(text=text, image=picture, method=METHODS).items():
            for stream in ("text", "image"):
                np.testing.assert_allclose(batch[method][place][stream].scores, e[stream].scores, atol=1e-6)


@pytest.mark.parametrize("name", ["vilt", "blip", "bridge_tower"])
def test_batch_equals_single_for_fused_streams(name: str) -> None:
    ex, many = joint_models.explainer(name), joint_models.inputs(name)[:2]
    batch = ex.explain(**joint_models.together(many), method=METHODS)
    for place, one in enumerate(many):
        for method, e in ex.explain(**one, method=METHODS).items():
            for stream in ("text", "image"):
                np.testing.assert_allclose(batch[method][place][stream].scores, e[stream].scores, atol=1e-6)


def test_end_of_text_token_is_refused_as_replacement() -> None:
    """CLIP reads a text at the token that ends it: that cannot stand for an absent word."""
    ex, picture, *_ = seen()
    tower = type(ex.adapter.text_tower.model).__name__
    with pytest.raises(clearhead.InputError, match=f"end-of-text token, at which {tower} is read"):
        ex.explain(text=TEXT, image=picture, method=Method("occlusion", replacement="eos"))


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_source_and_generated_tokens_are_masked_together(family: str) -> None:
    ex, answer = translating.explainer(family), (40, 50, 60)
    source = {"input_ids": torch.tensor([[5, 17, 45, 9]])}
    e = ex.explain(source, "occlusion", answer=answer)
    model, mask = ex.adapter.model, translating.WORDS.mask_token_id

    def value(ids: torch.Tensor, said: torch.Tensor) -> float:
        with torch.no_grad():
            return float(model(input_ids=ids, decoder_input_ids=said).logits[0, -1, answer[2]])

    ids, said = source["input_ids"], torch.tensor([[ex.adapter.decoder_start_token_id, *answer[:2]]])
    whole = value(ids, said)
    for place in range(4):
        lost = whole - value(ids.clone().index_fill(1, torch.tensor(place), mask), said)
        assert e["source"].matrix[2, place] == pytest.approx(lost, abs=1e-9)
    for place in (1, 2):
        lost = whole - value(ids, said.clone().index_fill(1, torch.tensor(place), mask))
        assert e["prefix"].matrix[2, place] == pytest.approx(lost, abs=1e-9)
    assert not e["prefix"].matrix[0].any(), "nothing was said before the first word"


def test_sources_of_different_lengths_share_a_batch() -> None:
    ex = translating.explainer("bart")
    sources, answers = translating.SOURCES[:2], ["a", "on"]
    batch = ex.explain(sources, METHODS, answer=answers)
    for place, (source, answer) in enumerate(zip(sources, answers, strict=True)):
        for method, e in ex.explain(source, METHODS, answer=answer).items():
            for stream in translating.STREAMS:
                np.testing.assert_allclose(batch[method][place][stream].scores, e[stream].scores, atol=1e-9)


def test_two_texts() -> None:
    ex = alike.explainer("bert")
    e, turned = (ex.explain(pair, Method("shap", evaluations=500)) for pair in ((TEXT, FOIL), (FOIL, TEXT)))
    np.testing.assert_allclose(e["text"].scores, turned["other"].scores, atol=1e-9)
    total = e["text"].scores.sum() + e["other"].scores.sum()
    assert e["text"].base_value + total == pytest.approx(e.target["value"], abs=1e-9)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"replacement": "delete"}, "would shift the tokens of one stream"),
        ({"replacement": "grey"}, "unknown replacement 'grey'"),
        ({"unit": "region"}, "unknown unit 'region'"),
    ],
)
def test_bad_settings(options: dict, said: str) -> None:
    ex, picture, *_ = seen()
    with pytest.raises(clearhead.InputError, match=said):
        ex.explain(text=TEXT, image=picture, method=Method("occlusion", **options))


def test_options_apply_to_the_matching_stream() -> None:
    ex, picture, *_ = seen()
    e = ex.explain(text=TEXT, image=picture, method=Method("occlusion", unit="word", replacement="blur"))
    assert e.provenance["players"] == "word, patch" and e.provenance["replacement"] == "mask, blur"
    usual = ex.explain(text=TEXT, image=picture, method=Method("occlusion", unit="word"))
    np.testing.assert_array_equal(e["text"].scores, usual["text"].scores)
    assert np.abs(e["image"].scores - usual["image"].scores).max() > 1e-4


def test_merged_hierarchies_are_joined_at_the_root() -> None:
    one, other = Hierarchy((0, -1, 1), ((0, 1), (3, 2))), build_spatial_hierarchy(np.array([[0.0, 0.0], [0.0, 1.0]]))
    tree = merge_hierarchies([one, other], [2, 2])
    assert tree.player_of_leaf == (0, -1, 1, 2, 3)
    halves = [tree.list_leaves_by_node()[child] for child in tree.get_children(tree.root)]
    assert sorted(map(sorted, halves)) == [[0, 1, 2], [3, 4]]
    assert merge_hierarchies([one], [2]) == one
