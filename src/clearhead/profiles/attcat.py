"""AttCAT (Qiang et al., NeurIPS 2022), and its variant in a project on gender in masked language models."""

from dataclasses import replace

import torch

from clearhead.adapters.base import ModelAdapter
from clearhead.adapters.token_heads import QASample, QuestionAnsweringAdapter
from clearhead.engine.target_batch import TargetBatch
from clearhead.errors import InputError
from clearhead.profiles.base import MethodSettings, Profile, register_profile
from clearhead.profiles.model_filters import MASKED_LANGUAGE_MODELS, TEXT_ONLY_MODELS
from clearhead.profiles.postprocess import drop_special
from clearhead.sample import Sample
from clearhead.targets import FixedClassTarget, Target
from clearhead.units import UnitAxis


def mask_special_tokens(adapter: ModelAdapter, sample: Sample, target: Target) -> tuple[Sample, Target]:
    """Remove [CLS] and [SEP] from the attention mask, so that no token attends to them."""
    ids = sample.inputs.get("input_ids")
    tokenizer_wrapper = getattr(adapter, "tokenizer_wrapper", None)
    if ids is None or tokenizer_wrapper is None:
        raise InputError(
            f"this profile masks [CLS] and [SEP] of a text, but the input of {adapter.name} has no token ids: pass a "
            "text"
        )
    mask = sample.inputs.get("attention_mask", torch.ones_like(ids)).clone()
    special = torch.tensor(sample.units.special)
    if tokenizer_wrapper.tokenizer is None:  # the first and the last token are assumed to be [CLS] and [SEP]
        content = ~torch.isin(ids, torch.tensor(sorted(tokenizer_wrapper.pad_ids)).to(ids)) | (mask != 0)
        special = torch.isin(ids, ids[content.nonzero().flatten()[[0, -1]]]) | (mask == 0)
    special[list(sample.mask_positions)] = False
    mask[special] = 0
    if not mask.any():
        raise InputError("this profile masks [CLS] and [SEP], but the text has no other tokens: use a longer text")
    units = replace(sample.units, special=tuple(special.tolist()))
    axes = {units.stream: UnitAxis.concat(units)}
    return replace(sample, inputs={**sample.inputs, "attention_mask": mask}, axes=axes), target


def prepare_as_in_notebooks(adapter: ModelAdapter, sample: Sample, target: Target) -> tuple[Sample, Target]:
    """Hide [CLS] and [SEP], and fix the target as the authors' notebooks do.

    The class is the one predicted with all tokens visible. An answer span consists of the most probable start and the
    most probable end, chosen independently.
    """
    masked, _ = mask_special_tokens(adapter, sample, target)
    if isinstance(adapter, QuestionAnsweringAdapter) and isinstance(masked, QASample):
        output = adapter.session.forward(adapter.collate([masked]))
        span = (int(output.start_logits[0].argmax()), int(output.end_logits[0].argmax()))
        return replace(masked, answer_span=span), target
    if target.function is not None:
        return masked, target
    (single_target,) = adapter.expand_target(sample, target)
    batch = TargetBatch(adapter, [sample], [[single_target]])
    with adapter.session.running():
        _, class_scores = batch.compute_values(adapter.session.forward(batch.model_inputs))
    assert class_scores is not None
    classes = single_target.find_classes(class_scores[0], adapter)
    return masked, FixedClassTarget(target.spec, target.scale, classes)


register_profile(
    Profile(
        name="attcat_paper",
        model_filters=(TEXT_ONLY_MODELS,),
        source="AttCAT (Qiang et al., NeurIPS 2022), github.com/qiangyao1988/AttCAT, its notebooks",
        differences="[CLS] and [SEP] are masked in attention, but the explained class is the one predicted without "
        "this mask: their scores are zero, and the other scores belong to a different forward pass. Padding is part "
        "of the maps (the received attention is a mean over padding, too). For an answer span, the scores of the most "
        "probable start and the most probable end, chosen independently, are added (for SQuAD 2 their absolute "
        "values: absolute=True). For a masked token, tokens are weighted by the attention of the [MASK] token.",
        methods={"attcat": MethodSettings()},
        settings_by_model={MASKED_LANGUAGE_MODELS: {"attcat": MethodSettings({"weights": "row"})}},
        keeps_padding=True,
        prepare_sample=prepare_as_in_notebooks,
    )
)

register_profile(
    Profile(
        name="gender_mlm",
        model_filters=(MASKED_LANGUAGE_MODELS,),
        source="a student project on gender in bert-base-uncased, based on AttCAT (no repository; from its "
        "description)",
        differences="For a masked token: [CLS] and [SEP] are masked in attention and dropped from the result; the "
        "target is the most probable token of the whole vocabulary in that forward pass; tokens are weighted by the "
        "attention of the [MASK] token. Their code assumes that it is the first token; here its position is looked "
        "up. Raw attention uses all layers.",
        methods={
            "attcat": MethodSettings({"weights": "row"}, postprocess=drop_special),
            "cat": MethodSettings(postprocess=drop_special),
            "attention": MethodSettings({"layers": (None, None)}, postprocess=drop_special),
        },
        prepare_sample=mask_special_tokens,
    )
)
