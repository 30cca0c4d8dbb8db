"""Masked language models with an image (ViLT, BridgeTower), and one that can read images but gets a text alone."""

import re
from functools import cache
from typing import Any

import pytest
import torch
import transformers

import clearhead
from clearhead import InputError, MaskedToken
from tests import joint_models
from tests.adapters.test_cross_attention import gap, group_calls_by_step, list_applicable_methods
from tests.architectures.tiny_models import MASK, build
from tests.invariants.cases import amplified
from tests.replicas import co_attention as replica

NAMES = {"vilt": "ViltForMaskedLM", "bridge_tower": "BridgeTowerForMaskedLM"}
TEXTS = {"vilt": "I like the [MASK].", "bridge_tower": "I like the<mask>."}
FAMILIES = pytest.mark.parametrize("name", NAMES)


@cache
def explainer(name: str) -> clearhead.Explainer:
    return clearhead.load(getattr(joint_models, name)(NAMES[name]))


def make_inputs(name: str, text: str | None = None) -> dict[str, Any]:
    return {"text": text or TEXTS[name], "image": joint_models.make_image()}


def compute_masked_logits(name: str, text: str | None = None) -> tuple[torch.Tensor, int]:
    """Return the logits of the model at its first masked position, and the position."""
    inputs = joint_models.model_inputs(name, make_inputs(name, text))
    mask = explainer(name).adapter.tokenizer_wrapper.tokenizer.mask_token_id
    position = int((inputs["input_ids"][0] == mask).nonzero()[0])
    with torch.no_grad():
        return explainer(name).adapter.model(**inputs).logits[0, position], position


@FAMILIES
def test_masked_token_has_text_and_image_scores(name: str) -> None:
    logits, position = compute_masked_logits(name)
    e = explainer(name).explain(**make_inputs(name), method="generic")
    assert e.target["index"] == int(logits.argmax())
    assert e.target["value"] == pytest.approx(float(logits.max()), abs=1e-9)
    assert e.certificate["readout"] == "mask" and e.certificate["readout_checked"]
    assert e["text"].tokens[position] in ("[MASK]", "<mask>")
    assert e["text"].scores.max() > 0 and e["image"].scores.max() > 0


@FAMILIES
def test_mask_index_selects_one_of_several_masks(name: str) -> None:
    ex, mask = explainer(name), "[MASK]" if name == "vilt" else "<mask>"
    two_masks = make_inputs(name, f"{mask} like the {mask}.")
    with pytest.raises(InputError, match="2 masked positions"):
        ex.explain(**two_masks, method="generic")
    first, last = (
        ex.explain(**two_masks, target=MaskedToken(7, mask_index=which), method="generic") for which in (0, 1)
    )
    logits, _ = compute_masked_logits(name, two_masks["text"])
    assert first.target["value"] == pytest.approx(float(logits[7]), abs=1e-9)
    assert gap(first["text"].scores, last["text"].scores) > 0.01
    with pytest.raises(InputError, match=re.escape(f"no masked position: write {mask} where")):
        ex.explain(**make_inputs(name, "I like it"), method="generic")


def test_bridge_tower_generic_reads_out_at_the_mask() -> None:
    name = "bridge_tower"
    _, position = compute_masked_logits(name)
    calls = replica.watch(
        explainer(name).adapter.model,
        joint_models.model_inputs(name, make_inputs(name)),
        lambda output: output.logits[0, position, 7],
    )
    steps = group_calls_by_step(name, calls)
    matrices = replica.generic(steps, {call.looks: len(call.attention[0]) for step in steps for call in step})
    e = explainer(name).explain(**make_inputs(name), target=MaskedToken(7), method="generic")
    for stream in ("text", "image"):
        assert gap(e[stream].scores, matrices["text", stream][position]) < 1e-9


@FAMILIES
def test_batch_equals_single(name: str) -> None:
    """Texts of two lengths share a batch where the model supports it."""
    ex, mask = explainer(name), "[MASK]" if name == "vilt" else "<mask>"
    examples = [
        make_inputs(name),
        {"text": f"She hates the {mask} because it isn't good", "image": joint_models.make_image(1)},
    ]
    methods = list_applicable_methods(ex)
    assert {"generic", "rollout", "attention", "transformer-attribution", "saliency", "occlusion"} <= set(methods)
    together = ex.explain(**joint_models.together(examples), method=methods)
    for i, example in enumerate(examples):
        for method, alone in ex.explain(**example, method=methods).items():
            for stream in alone.streams:
                assert gap(together[method][i][stream].scores, alone[stream].scores) < amplified(method, 1e-9), (
                    method,
                    stream,
                )


def test_mask_token_id_is_read_from_the_top_level_config() -> None:
    """ModernVBERT has a text config without the mask token, and no tokenizer is given here."""
    if not hasattr(transformers, "ModernVBertForMaskedLM"):
        pytest.skip("this transformers has no ModernVBert")
    ex = clearhead.load(build("ModernVBertForMaskedLM"))
    e = ex.explain({"input_ids": torch.tensor([[7, 8, MASK, 9]])}, method="generic")
    assert e.certificate["readout"] == "mask" and e.certificate["readout_checked"]
    with pytest.raises(InputError, match=f"write id {MASK} where"):
        ex.explain({"input_ids": torch.tensor([[7, 8, 9]])}, method="generic")
