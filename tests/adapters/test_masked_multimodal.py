"""Masked words beside a picture (ViLT, BridgeTower), and of a model that sees pictures, too, but was given a text."""

import re
from functools import cache
from typing import Any

import pytest
import torch
import transformers

import clearhead
from clearhead import InputError, MaskedToken
from tests import joint_models
from tests.adapters.test_cross_attention import applying, gap, steps_of
from tests.architectures.tiny_models import MASK, build
from tests.invariants.cases import amplified
from tests.replicas import co_attention as replica

NAMES = {"vilt": "ViltForMaskedLM", "bridge_tower": "BridgeTowerForMaskedLM"}
TEXTS = {"vilt": "I like the [MASK].", "bridge_tower": "I like the<mask>."}
FAMILIES = pytest.mark.parametrize("name", NAMES)


@cache
def explainer(name: str) -> clearhead.Explainer:
    return clearhead.load(getattr(joint_models, name)(NAMES[name]))


def given(name: str, text: str | None = None) -> dict[str, Any]:
    return {"text": text or TEXTS[name], "image": joint_models.picture()}


def real(name: str, text: str | None = None) -> tuple[torch.Tensor, int]:
    """What the untouched model says at the first masked place, and the place."""
    inputs = joint_models.model_inputs(name, given(name, text))
    mask = explainer(name).adapter.tokenizer_wrapper.tokenizer.mask_token_id
    place = int((inputs["input_ids"][0] == mask).nonzero()[0])
    with torch.no_grad():
        return explainer(name).adapter.model(**inputs).logits[0, place], place


@FAMILIES
def test_the_masked_word_is_explained_by_words_and_patches(name: str) -> None:
    logits, place = real(name)
    e = explainer(name).explain(**given(name))
    assert e.target["index"] == int(logits.argmax())
    assert e.target["value"] == pytest.approx(float(logits.max()), abs=1e-9)
    assert e.certificate["readout"] == "mask" and e.certificate["readout_checked"]
    assert e["text"].tokens[place] in ("[MASK]", "<mask>")
    assert e["text"].scores.max() > 0 and e["image"].scores.max() > 0


@FAMILIES
def test_one_word_of_several_masks(name: str) -> None:
    ex, mask = explainer(name), "[MASK]" if name == "vilt" else "<mask>"
    two = given(name, f"{mask} like the {mask}.")
    with pytest.raises(InputError, match="2 masked positions"):
        ex.explain(**two)
    first, last = (ex.explain(**two, target=MaskedToken(7, mask_index=which)) for which in (0, 1))
    logits, _ = real(name, two["text"])
    assert first.target["value"] == pytest.approx(float(logits[7]), abs=1e-9)
    assert gap(first["text"].scores, last["text"].scores) > 0.01
    with pytest.raises(InputError, match=re.escape(f"no masked position: put {mask} where")):
        ex.explain(**given(name, "I like it"))


def test_generic_on_bridge_tower_reads_the_masked_row() -> None:
    name = "bridge_tower"
    _, place = real(name)
    looks = replica.watch(
        explainer(name).adapter.model,
        joint_models.model_inputs(name, given(name)),
        lambda output: output.logits[0, place, 7],
    )
    steps = steps_of(name, looks)
    matrices = replica.generic(steps, {look.looks: len(look.attention[0]) for step in steps for look in step})
    e = explainer(name).explain(**given(name), target=MaskedToken(7))
    for stream in ("text", "image"):
        assert gap(e[stream].scores, matrices["text", stream][place]) < 1e-9


@FAMILIES
def test_batched_is_single(name: str) -> None:
    """Texts of two lengths, where the model takes them in one batch."""
    ex, mask = explainer(name), "[MASK]" if name == "vilt" else "<mask>"
    many = [given(name), {"text": f"She hates the {mask} because it isn't good", "image": joint_models.picture(1)}]
    methods = applying(ex)
    assert {"generic", "rollout", "attention", "transformer-attribution", "saliency", "occlusion"} <= set(methods)
    together = ex.explain(**joint_models.together(many), method=methods)
    for i, one in enumerate(many):
        for method, alone in ex.explain(**one, method=methods).items():
            for stream in alone.streams:
                assert gap(together[method][i][stream].scores, alone[stream].scores) < amplified(method, 1e-9), (
                    method,
                    stream,
                )


def test_a_mask_that_only_the_whole_configuration_knows() -> None:
    """ModernVBERT has a configuration for its texts, and here no tokenizer."""
    if not hasattr(transformers, "ModernVBertForMaskedLM"):
        pytest.skip("this transformers has no ModernVBert")
    ex = clearhead.load(build("ModernVBertForMaskedLM"))
    e = ex.explain({"input_ids": torch.tensor([[7, 8, MASK, 9]])})
    assert e.certificate["readout"] == "mask" and e.certificate["readout_checked"]
    with pytest.raises(InputError, match=f"put id {MASK} where"):
        ex.explain({"input_ids": torch.tensor([[7, 8, 9]])})
