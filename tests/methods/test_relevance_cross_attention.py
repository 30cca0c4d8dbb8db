"""Partial LRP, Transformer Attribution and Generic Attention with relevance on models with cross-attention: the
authors' scores of LXMERT, VisualBERT and DETR, and invariants."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import clearhead
from clearhead import Method
from tests import dual_models, joint_models
from tests.adapters.test_cross_attention import CASES, DATA, ORIGINALS, gap, given, published
from tests.adapters.test_cross_attention import arrays as inputs_of
from tests.adapters.test_decoder import Wide
from tests.adapters.test_detection import TestAuthors as Detection

LXMERT = {
    "transformer_attr": "transformer-attribution",
    "partial_lrp": "partial-lrp",
    "ours_lrp": Method("generic", lrp=True),
    "ours_nonorm_lrp": Method("generic", lrp=True, normalise=False),
    "ours_noself10_lrp": Method("generic", lrp=True, within=False),
}
VISUAL_BERT = {
    "transformer_att_ours": "transformer-attribution",
    "transformer_att_orig": Method("transformer-attribution", rules="orig"),
    "partial_lrp_ours": "partial-lrp",
    "partial_lrp_orig": Method("partial-lrp", rules="orig"),
}


@cache
def arrays(model: str) -> dict[str, np.ndarray]:
    with np.load(DATA / model / "relevance.npz") as file:
        return dict(file)


@pytest.mark.parametrize("model", ["lxmert", "visual_bert", "detr"])
def test_copied_files_equal_original_fixtures(model: str) -> None:
    if not ORIGINALS.is_dir():
        pytest.skip(f"{ORIGINALS} is absent: only the copies are available")
    with np.load(ORIGINALS / model / "cases.npz") as file:
        for key, copied in arrays(model).items():
            np.testing.assert_array_equal(copied, file[key], err_msg=key)


@CASES
@pytest.mark.parametrize("theirs", LXMERT)
def test_lxmert_scores_equal_authors(case: str, which: str, theirs: str) -> None:
    target = int(arrays("lxmert")[f"{case}/{which}/target"])
    e = published("lxmert").explain(given(case), LXMERT[theirs], target=target, profile="mm_lxmert")
    for stream, matrix in (("text", "R_t_t"), ("regions", "R_t_i")):
        assert gap(e[stream].scores, arrays("lxmert")[f"{case}/{which}/{theirs}/{matrix}"][0]) < 1e-6


@CASES
@pytest.mark.parametrize("theirs", VISUAL_BERT)
def test_visual_bert_scores_equal_authors(case: str, which: str, theirs: str) -> None:
    names = ("input_ids", "attention_mask", "visual_embeds", "visual_attention_mask", "visual_token_type_ids")
    inputs = {name: torch.as_tensor(inputs_of("visual_bert")[f"{case}/{name}"]) for name in names}
    target = int(arrays("visual_bert")[f"{case}/{which}/target"])
    e = published("visual_bert").explain(inputs, VISUAL_BERT[theirs], target=target, profile="mm_visualbert")
    ours = np.concatenate([e["text"].scores, e["regions"].scores])
    assert gap(ours, arrays("visual_bert")[f"{case}/{which}/{theirs}"][0]) < 1e-9


@pytest.mark.parametrize("case", ["case0", "case1"])
@pytest.mark.parametrize("query", ["q0_pred", "q3_pred", "q5_c2"])
def test_detr_scores_equal_authors(case: str, query: str) -> None:
    """The scores are those of the last cross-attention layer."""
    pixels = {"pixel_values": torch.as_tensor(Detection.arrays()[f"{case}/pixel_values"])}
    index, label = (int(arrays("detr")[f"{case}/{query}/target_{field}"]) for field in ("index", "class"))
    array_names = {"transformer-attribution": "transformer_att", "partial-lrp": "partial_lrp"}
    target = clearhead.DetectionQuery(index, label)
    with Wide():
        results = Detection.explainer().explain(pixels, list(array_names), target=target, profile="mm_detr")
    for method, theirs in array_names.items():
        assert gap(results[method]["image"].scores, arrays("detr")[f"{case}/{query}/{theirs}/scores"]) < 1e-6


@pytest.mark.parametrize("case", ["case0", "case1"])
@pytest.mark.parametrize("query", ["q0_pred", "q3_pred", "q5_c2"])
@pytest.mark.parametrize(
    ("theirs", "options"),
    [("ours_lrp", {}), ("ours_nonorm_lrp", {"normalise": False}), ("ours_noself10_lrp", {"within": False})],
)
def test_detr_generic_with_relevance_equals_authors(
    case: str, query: str, theirs: str, options: dict[str, bool]
) -> None:
    pixels = {"pixel_values": torch.as_tensor(Detection.arrays()[f"{case}/pixel_values"])}
    with np.load(DATA / "detr" / "relevance.npz") as file:
        expected = file[f"{case}/{query}/{theirs}/scores"]
        index, label = (int(file[f"{case}/{query}/target_{field}"]) for field in ("index", "class"))
    method = Method("generic", lrp=True, **options)
    with Wide():
        e = Detection.explainer().explain(
            pixels, method, target=clearhead.DetectionQuery(index, label), profile="mm_detr"
        )
    assert gap(e["image"].scores, expected) < 1e-6


METHODS: list[Any] = ["partial-lrp", "transformer-attribution", "lrp", "attn-lrp", Method("generic", lrp=True)]


@pytest.mark.parametrize("name", ["lxmert", "blip", "bridge_tower"])
def test_padded_batch_equals_single(name: str) -> None:
    """Texts of different lengths and different numbers of regions, in one padded batch."""
    ex, inputs = joint_models.explainer(name), joint_models.inputs(name)
    batch = ex.explain(**joint_models.together(inputs), method=METHODS)
    for i, single_input in enumerate(inputs):
        for method, single in ex.explain(**single_input, method=METHODS).items():
            for stream in single.streams:
                assert np.abs(single[stream].scores).max() > 1e-9
                assert gap(batch[method][i][stream].scores, single[stream].scores) < 1e-7, (method, stream)


def test_relevance_reaches_both_streams() -> None:
    """Relevance starts with one; all of it arrives, except for the part of the box coordinates of the regions."""
    e = joint_models.explainer("lxmert").explain(**joint_models.inputs("lxmert")[0], method="lrp")
    text, regions = (e[stream].scores.sum() for stream in ("text", "regions"))
    assert 0.9 < text + regions < 1.1
    assert min(text, regions) > 0.1


def test_cosine_target_splits_relevance_equally() -> None:
    """The cosine is a product of two embeddings: text and image get one half each."""
    e = dual_models.explainer("siglip").explain(text="I like the movie.", image=dual_models.pictures()[0], method="lrp")
    assert e["text"].scores.sum() == pytest.approx(0.5, abs=1e-6)
    assert e["image"].scores.sum() == pytest.approx(0.5, abs=1e-6)
