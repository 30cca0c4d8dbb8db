"""AttCAT (Qiang et al., NeurIPS 2022), and what a project on gender in masked language models made of it."""

from dataclasses import replace

import torch

from clearhead.adapters.base import Sample, Subject
from clearhead.adapters.token_heads import QuestionAnswering, Reading
from clearhead.capture.session import at_rest, lock_of
from clearhead.engine.target_batch import Plan
from clearhead.errors import InputError
from clearhead.profiles.base import Profile, Settings, register_profile
from clearhead.profiles.model_filters import MASKED, TEXTS_ALONE
from clearhead.profiles.postprocess import specials_dropped
from clearhead.targets import Pinned, Target
from clearhead.units import Axis


def specials_hidden(subject: Subject, sample: Sample, target: Target) -> tuple[Sample, Target]:
    """[CLS] and [SEP] leave the attention mask, so that nobody looks at them."""
    ids, words = sample.inputs.get("input_ids"), getattr(subject, "words", None)
    if ids is None or words is None:
        raise InputError(f"this profile hides [CLS] and [SEP] of a text, and what {subject.name} was given has none")
    mask = sample.inputs.get("attention_mask", torch.ones_like(ids)).clone()
    special = torch.tensor(sample.units.special)
    if words.tokenizer is None:  # what stands first and last is taken for them
        inside = ~torch.isin(ids, torch.tensor(sorted(words.pads)).to(ids)) | (mask != 0)
        special = torch.isin(ids, ids[inside.nonzero().flatten()[[0, -1]]]) | (mask == 0)
    special[list(sample.masks)] = False
    mask[special] = 0
    if not mask.any():
        raise InputError("this profile hides [CLS] and [SEP], and then nothing of the text is left")
    units = replace(sample.units, special=tuple(special.tolist()))
    axes = {units.stream: Axis.of(units)}
    return replace(sample, inputs={**sample.inputs, "attention_mask": mask}, axes=axes), target


def as_in_the_notebooks(subject: Subject, sample: Sample, target: Target) -> tuple[Sample, Target]:
    """The class is that of the text with all its tokens; of an answer, the likeliest start and the likeliest end."""
    hidden, _ = specials_hidden(subject, sample, target)
    if isinstance(subject, QuestionAnswering) and isinstance(hidden, Reading):
        output = subject.look(hidden)
        return replace(hidden, span=(int(output.start_logits[0].argmax()), int(output.end_logits[0].argmax()))), target
    if target.custom is not None:
        return hidden, target
    (one,) = subject.steps(sample, target)
    plan = Plan(subject, [sample], [[one]])
    with lock_of(subject.model), at_rest(subject.model), torch.no_grad(), subject.scope():
        plan.value(subject.model(**plan.batch))
    assert plan.scores is not None
    return hidden, Pinned(target.wanted, target.scale, one.classes(plan.scores[0], subject))


register_profile(
    Profile(
        name="attcat_paper",
        fits=(TEXTS_ALONE,),
        source="AttCAT (Qiang et al., NeurIPS 2022), github.com/qiangyao1988/AttCAT, its notebooks",
        differs="[CLS] and [SEP] are hidden from attention, while the class is explained that the model finds with "
        "them: their scores are zero, and those of the others are of another computation. Padding is part of the maps "
        "(the attention received is a mean over it, too). Of an answer in a text, the likeliest start and the "
        "likeliest end are added, each found by itself (for SQuAD 2 their absolute values: absolute=True). For a "
        "masked word, tokens are weighted by the attention that the mask pays them.",
        methods={"attcat": Settings()},
        kinds={MASKED: {"attcat": Settings({"weights": "row"})}},
        padding=True,
        prepare=as_in_the_notebooks,
    )
)

register_profile(
    Profile(
        name="gender_mlm",
        fits=(MASKED,),
        source="a student project on gender in bert-base-uncased, after AttCAT (no repository; by its description)",
        differs="For a masked word: [CLS] and [SEP] are hidden from attention and dropped from the result; the word is "
        "the likeliest of the whole vocabulary in that computation; tokens are weighted by the attention that the mask "
        "pays them. Their code takes the mask to come first, here it is found. Raw attention is that of all layers.",
        methods={
            "attcat": Settings({"weights": "row"}, finish=specials_dropped),
            "cat": Settings(finish=specials_dropped),
            "attention": Settings({"layers": (None, None)}, finish=specials_dropped),
        },
        prepare=specials_hidden,
    )
)
