"""Transformer-Explainability (Chefer, Gur & Wolf, CVPR 2021): the `te_*` profiles."""

from clearhead.profiles.base import MethodSettings, Profile, register_profile
from clearhead.profiles.model_filters import IMAGE_CLASSIFIERS, TEXT_CLASSIFIERS
from clearhead.profiles.postprocess import (
    drop_special,
    drop_special_and_rescale,
    set_readout_unit_to_minimum,
    set_readout_unit_to_minimum_and_rescale,
    zero_readout_unit,
)

_TE_SOURCE = "Transformer-Explainability (Chefer, Gur & Wolf, CVPR 2021), github.com/hila-chefer, commit c3e578f"

register_profile(
    Profile(
        name="te_vit_eval",
        model_filters=(IMAGE_CLASSIFIERS,),
        source=_TE_SOURCE,
        differences="Transformer Attribution and rollout leave out the first layer, as in the scripts for the "
        "published figures; LRP uses the rules that the authors compare with (relevance doubles at every linear "
        "layer), and position embeddings take a part of the relevance; GradCAM weights heads by the gradients of the "
        "read-out row, and is rescaled to 0…1; the class token is dropped.",
        methods={
            "transformer-attribution": MethodSettings({"layers": (1, None)}, postprocess=drop_special),
            "rollout": MethodSettings({"layers": (1, None)}, postprocess=drop_special),
            "partial-lrp": MethodSettings(postprocess=drop_special),
            "lrp": MethodSettings({"rules": "orig", "positions": True}, postprocess=drop_special),
            "attention": MethodSettings(postprocess=drop_special),
            "attention-gradcam": MethodSettings({"region": "row"}, postprocess=drop_special_and_rescale),
        },
    )
)

register_profile(
    Profile(
        name="te_vit_notebook",
        model_filters=(IMAGE_CLASSIFIERS,),
        source=_TE_SOURCE,
        differences="All layers, as in our default; the class token is dropped.",
        methods={"transformer-attribution": MethodSettings(postprocess=drop_special)},
    )
)

_TE_BERT_DIFFERENCES = (
    "Rows of Transformer Attribution are divided by their sums, and [CLS] gets the minimum of the scores{rescaling}; a "
    "mask is added to attention even if no token is masked, and absorbs 1e-9 of the relevance; padding is part of the "
    "maps"
)

register_profile(
    Profile(
        name="te_bert_eraser",
        model_filters=(TEXT_CLASSIFIERS,),
        source=_TE_SOURCE,
        differences="Transformer Attribution uses the last layer only. "
        + _TE_BERT_DIFFERENCES.format(rescaling="")
        + "; LRP uses the rules that the authors compare with (relevance doubles at every linear layer); the other "
        "methods set the score of [CLS] to zero; the full map of GradCAM is rescaled to 0…1 before the read-out row is "
        "taken.",
        methods={
            "transformer-attribution": MethodSettings(
                {"layers": (-1, None), "normalise": True, "mask": True}, postprocess=set_readout_unit_to_minimum
            ),
            "partial-lrp": MethodSettings({"mask": True}, postprocess=zero_readout_unit),
            "lrp": MethodSettings({"rules": "orig", "mask": True}, postprocess=zero_readout_unit),
            "attention": MethodSettings(postprocess=zero_readout_unit),
            "rollout": MethodSettings(postprocess=zero_readout_unit),
            "attention-gradcam": MethodSettings({"scaled": True}, postprocess=zero_readout_unit),
        },
        keeps_padding=True,
    )
)

register_profile(
    Profile(
        name="te_bert_notebook",
        model_filters=(TEXT_CLASSIFIERS,),
        source=_TE_SOURCE,
        differences="All layers (two of its cells use the last only, layers=(-1, None)). "
        + _TE_BERT_DIFFERENCES.format(rescaling=", which are all rescaled to 0…1")
        + ".",
        methods={
            "transformer-attribution": MethodSettings(
                {"normalise": True, "mask": True}, postprocess=set_readout_unit_to_minimum_and_rescale
            )
        },
        keeps_padding=True,
    )
)
