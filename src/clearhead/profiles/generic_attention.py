"""Transformer-MM-Explainability (Chefer, Gur & Wolf, ICCV 2021): the `mm_*` profiles."""

from clearhead.profiles.base import MethodSettings, Profile, register_profile
from clearhead.profiles.model_filters import (
    CO_ATTENTION_MODELS,
    DUAL_ENCODERS,
    IMAGE_CLASSIFIERS,
    JOINT_SEQUENCE_MODELS,
    OBJECT_DETECTORS,
)
from clearhead.profiles.postprocess import drop_special, drop_special_and_normalise_text, zero_readout_unit

_MM_SOURCE = "Transformer-MM-Explainability (Chefer, Gur & Wolf, ICCV 2021), github.com/hila-chefer, commit 58eaea8"

register_profile(
    Profile(
        name="mm_vit",
        model_filters=(IMAGE_CLASSIFIERS,),
        source=_MM_SOURCE,
        differences="All layers and no normalisation, as in our default; the class token is dropped.",
        methods={"generic": MethodSettings(postprocess=drop_special)},
    )
)

register_profile(
    Profile(
        name="mm_lxmert",
        model_filters=(CO_ATTENTION_MODELS,),
        source=_MM_SOURCE,
        differences="A zero row of relevance becomes NaN when it is divided by its sum, and stays NaN; the full map of "
        "partial LRP, with negative values, is rescaled to 0…1 before the read-out row is taken; the score of the "
        "read-out token is set to zero.",
        methods={
            "generic": MethodSettings({"guard": "none"}, postprocess=zero_readout_unit),
            "attention": MethodSettings(postprocess=zero_readout_unit),
            "rollout": MethodSettings(postprocess=zero_readout_unit),
            "attention-gradcam": MethodSettings(postprocess=zero_readout_unit),
            "partial-lrp": MethodSettings({"rules": "ours", "scaled": True}, postprocess=zero_readout_unit),
            "transformer-attribution": MethodSettings(postprocess=zero_readout_unit),
        },
    )
)

register_profile(
    Profile(
        name="mm_visualbert",
        model_filters=(JOINT_SEQUENCE_MODELS,),
        source=_MM_SOURCE,
        differences="Rollout does not halve each layer; the full maps of GradCAM and partial LRP are rescaled to 0…1 "
        "before the read-out row is taken (NaN if the clamp leaves a map of zeros); a mask is added to attention even "
        "if no token is masked, and absorbs 1e-9 of the relevance; padding is part of the maps; the score of the "
        "read-out token is set to zero.",
        methods={
            "generic": MethodSettings(postprocess=zero_readout_unit),
            "attention": MethodSettings(postprocess=zero_readout_unit),
            "rollout": MethodSettings({"half": False}, postprocess=zero_readout_unit),
            "attention-gradcam": MethodSettings({"scaled": True}, postprocess=zero_readout_unit),
            "partial-lrp": MethodSettings(
                {"rules": "ours", "scaled": True, "mask": True}, postprocess=zero_readout_unit
            ),
            "transformer-attribution": MethodSettings({"mask": True}, postprocess=zero_readout_unit),
        },
        keeps_padding=True,
    )
)

register_profile(
    Profile(
        name="mm_detr",
        model_filters=(OBJECT_DETECTORS,),
        source=_MM_SOURCE,
        differences="A zero row of relevance becomes NaN when it is divided by its sum, and the values of a layer's "
        "update that are then NaN (usually all) are skipped; the full map of partial LRP, with negative values, is "
        "rescaled to 0…1 before the read-out row is taken.",
        methods={
            "generic": MethodSettings({"guard": "additions"}),
            "attention": MethodSettings(),
            "rollout": MethodSettings(),
            "attention-gradcam": MethodSettings(),
            "partial-lrp": MethodSettings({"rules": "ours", "scaled": True}),
            "transformer-attribution": MethodSettings(),
        },
    )
)

register_profile(
    Profile(
        name="mm_clip",
        model_filters=(DUAL_ENCODERS,),
        source=_MM_SOURCE,
        differences="The last layer of each tower only; the logit with its scale instead of the cosine; special tokens "
        "are dropped, and the scores of a text are divided by their sum.",
        methods={
            "generic": MethodSettings(
                {"layers": (-1, None)}, scale="logit", postprocess=drop_special_and_normalise_text
            )
        },
    )
)
