"""transformerinterp (Chen et al., TMLR 2023): the `bi_*` profiles."""

from collections.abc import Sequence

from clearhead.profiles.base import MethodSettings, PostprocessFunction, Profile, register_profile
from clearhead.profiles.model_filters import DUAL_ENCODERS, IMAGE_CLASSIFIERS, TEXT_CLASSIFIERS
from clearhead.profiles.postprocess import (
    add_identity_and_drop_special,
    drop_outside_and_rescale,
    drop_special,
    drop_special_and_normalise_text,
    drop_special_and_rescale,
    sum_rows_and_drop_special,
    zero_readout_unit,
)

_BI_SOURCE = "transformerinterp (Beyond Intuition; Chen et al., TMLR 2023), github.com/jiaminchen-1031, commit a76854a"
#: Blocks are counted from 0 here; the authors' start_layer=s means block s − 1 and those after it.
_BI_LAYER_NOTE = (
    "Unless layers= is given, the layers are those of their scripts for ViT-B, whatever the depth of the model: "
    "head-wise from layer 3, token-wise from layer 6 (start_layer 4 and 7, which they count from 1). Models without "
    "that layer are refused. Their repository gives no start layer for models other than ViT-B. "
)
_SCALED_LAYERS = (
    "The layers of {name}, scaled with the depth of the model: head-wise from a quarter of the depth, token-wise from "
    "half of the depth. With 12 layers these are the authors' layers; with any other number they are not, and the "
    "scores are not the authors'. Otherwise as {name}."
)


def _head_wise(postprocess: PostprocessFunction, depth_scaled: str) -> MethodSettings:
    """Return the settings of the authors' head-wise script: 20 steps, from layer 3."""
    return MethodSettings({"steps": 20, "layers": (3, None)}, postprocess=postprocess, depth_scaled=depth_scaled)


def _token_wise(postprocess: PostprocessFunction, depth_scaled: str) -> MethodSettings:
    """Return the settings of the authors' token-wise script: 20 steps, from layer 6."""
    return MethodSettings({"steps": 20, "layers": (6, None)}, postprocess=postprocess, depth_scaled=depth_scaled)


def _register_depth_scaled(name: str, postprocess: PostprocessFunction, methods: Sequence[str]) -> None:
    """Register the variant of a profile whose first layer scales with the depth of the model.

    Its settings have no layers, since the default layers of both methods scale with the depth.
    """
    register_profile(
        Profile(
            name=f"{name}_depth_scaled",
            model_filters=(IMAGE_CLASSIFIERS,),
            source=_BI_SOURCE,
            differences=_SCALED_LAYERS.format(name=name),
            methods={method: MethodSettings({"steps": 20}, postprocess=postprocess) for method in methods},
        )
    )


#: Their comparison methods, on a model with a class token as read-out.
_VIT_COMPARISON_SETTINGS = {
    "transformer-attribution": MethodSettings({"layers": (1, None)}, postprocess=drop_special),
    "partial-lrp": MethodSettings({"rules": "ours"}, postprocess=drop_special),
    "rollout": MethodSettings({"layers": (1, None)}, postprocess=drop_special),
    "attention": MethodSettings(postprocess=drop_special_and_rescale),
    "attention-gradcam": MethodSettings({"region": "row"}, postprocess=drop_special_and_rescale),
}
_VIT_DIFFERENCES = (
    "The class token is dropped. Transformer Attribution and rollout leave out the first layer; partial LRP uses the "
    "rules of Transformer Attribution; raw attention and GradCAM, which weights heads by the gradients of the read-out "
    "row, are rescaled to 0…1."
)
_BERT_COMPARISON_SETTINGS = {
    "generic": MethodSettings({"layers": (-1, None)}, postprocess=zero_readout_unit),
    "transformer-attribution": MethodSettings(
        {"rules": "orig", "normalise": True, "mask": True}, postprocess=zero_readout_unit
    ),
    "partial-lrp": MethodSettings({"mask": True}, postprocess=zero_readout_unit),
    "attention": MethodSettings(postprocess=zero_readout_unit),
    "rollout": MethodSettings(postprocess=zero_readout_unit),
    "attention-gradcam": MethodSettings({"scaled": True}, postprocess=zero_readout_unit),
}
_BERT_DIFFERENCES = (
    "; padding is part of the maps; the score of [CLS] is set to zero. Generic Attention uses the last layer only; "
    "Transformer Attribution uses all layers, with the rules that its authors compare with, and rows divided by their "
    "sums; a mask is added to attention even if no token is masked, and absorbs 1e-9 of the relevance; the full map of "
    "GradCAM is rescaled to 0…1 before the read-out row is taken."
)

register_profile(
    Profile(
        name="bi_vit_h",
        model_filters=(IMAGE_CLASSIFIERS,),
        source=_BI_SOURCE,
        differences=_BI_LAYER_NOTE + _VIT_DIFFERENCES,
        methods={
            "beyond-intuition-head": _head_wise(drop_special, "bi_vit_h_depth_scaled"),
            **_VIT_COMPARISON_SETTINGS,
        },
    )
)
_register_depth_scaled("bi_vit_h", drop_special, ["beyond-intuition-head"])

register_profile(
    Profile(
        name="bi_vit_c",
        model_filters=(IMAGE_CLASSIFIERS,),
        source=_BI_SOURCE,
        differences=_BI_LAYER_NOTE + _VIT_DIFFERENCES,
        methods={
            "beyond-intuition-token": _token_wise(drop_special, "bi_vit_c_depth_scaled"),
            **_VIT_COMPARISON_SETTINGS,
        },
    )
)
_register_depth_scaled("bi_vit_c", drop_special, ["beyond-intuition-token"])

register_profile(
    Profile(
        name="bi_vit_mae",
        model_filters=(IMAGE_CLASSIFIERS,),
        source=_BI_SOURCE,
        differences=_BI_LAYER_NOTE
        + "For models with mean pooling: the mean of the rows of the patches; the class token is dropped. In Generic "
        "Attention heads are averaged before the clamp, and the identity stays in the scores. Rollout leaves out the "
        "first layer, and so does Transformer Attribution, where the identity stays in the scores; partial LRP uses "
        "the rules of Transformer Attribution; in both, each patch gets all the relevance of the patches' mean, too "
        "much by a factor of the number of patches (their figures are for their own model, which applies its last norm "
        "before averaging; the rules are the same). Raw attention and GradCAM are averaged along the wrong axis, over "
        "the keys of each patch, and rescaled to 0…1.",
        methods={
            "beyond-intuition-head": _head_wise(drop_special, "bi_vit_mae_depth_scaled"),
            "beyond-intuition-token": _token_wise(drop_special, "bi_vit_mae_depth_scaled"),
            "generic": MethodSettings({"fusion": "mean-clamp"}, postprocess=add_identity_and_drop_special),
            "transformer-attribution": MethodSettings(
                {"layers": (1, None), "repeated": True}, postprocess=add_identity_and_drop_special
            ),
            "partial-lrp": MethodSettings({"rules": "ours", "repeated": True}, postprocess=drop_special),
            "rollout": MethodSettings({"layers": (1, None)}, postprocess=drop_special),
            "attention": MethodSettings({"by_query": True}, postprocess=drop_special_and_rescale),
            "attention-gradcam": MethodSettings({"by_query": True}, postprocess=drop_special_and_rescale),
        },
    )
)
_register_depth_scaled("bi_vit_mae", drop_special, ["beyond-intuition-head", "beyond-intuition-token"])

register_profile(
    Profile(
        name="bi_vit_dino",
        model_filters=(IMAGE_CLASSIFIERS,),
        source=_BI_SOURCE,
        differences=_BI_LAYER_NOTE
        + "For models whose read-out is the class token and the mean of the patches: the two rows are added, which is "
        "twice our mean of them; the class token is dropped.",
        methods={
            "beyond-intuition-head": _head_wise(sum_rows_and_drop_special, "bi_vit_dino_depth_scaled"),
            "beyond-intuition-token": _token_wise(sum_rows_and_drop_special, "bi_vit_dino_depth_scaled"),
        },
    )
)
_register_depth_scaled("bi_vit_dino", sum_rows_and_drop_special, ["beyond-intuition-head", "beyond-intuition-token"])

register_profile(
    Profile(
        name="bi_ga",
        model_filters=(
            IMAGE_CLASSIFIERS,
            TEXT_CLASSIFIERS,
        ),
        source=_BI_SOURCE,
        differences="Generic Attention as in their code for ViT: heads are averaged before the clamp, which gives a "
        "different explanation; all layers (their perturbation script leaves out the first: layers=(1, None)); the "
        "class token is dropped. For BERT: heads as published, the last layer only; padding is part of the maps; the "
        "score of [CLS] is set to zero.",
        methods={"generic": MethodSettings({"fusion": "mean-clamp"}, postprocess=drop_special)},
        settings_by_model={
            TEXT_CLASSIFIERS: {"generic": MethodSettings({"layers": (-1, None)}, postprocess=zero_readout_unit)}
        },
        keeps_padding=True,
    )
)

register_profile(
    Profile(
        name="bi_bert_h",
        model_filters=(TEXT_CLASSIFIERS,),
        source=_BI_SOURCE,
        differences="The last layer only" + _BERT_DIFFERENCES,
        methods={
            "beyond-intuition-head": MethodSettings({"steps": 20, "layers": (-1, None)}, postprocess=zero_readout_unit),
            **_BERT_COMPARISON_SETTINGS,
        },
        keeps_padding=True,
    )
)

register_profile(
    Profile(
        name="bi_bert_c",
        model_filters=(TEXT_CLASSIFIERS,),
        source=_BI_SOURCE,
        differences="The last four layers" + _BERT_DIFFERENCES,
        methods={
            "beyond-intuition-token": MethodSettings(
                {"steps": 20, "layers": (-4, None)}, postprocess=zero_readout_unit
            ),
            **_BERT_COMPARISON_SETTINGS,
        },
        keeps_padding=True,
    )
)

_CLIP_DIFFERENCES = (
    "The last layer of each tower only, as in their evaluation{layer_note}; the logit with its scale instead of the "
    "cosine; token embeddings are scaled before positions are added; special tokens are dropped, and the scores of a "
    "text are divided by their sum. (Their notebook does not scale the image; this is the code of their evaluation.) "
    "They have raw attention, rollout and GradCAM for the image only; GradCAM weights heads by the gradients of the "
    "read-out row, and is rescaled to 0…1 (in their code over all images of a batch, here for each image)."
)
_CLIP_COMPARISON_SETTINGS = {
    "generic": MethodSettings({"layers": (-1, None)}, scale="logit", postprocess=drop_special_and_normalise_text),
    "attention": MethodSettings(scale="logit", postprocess=drop_special_and_normalise_text),
    "rollout": MethodSettings(scale="logit", postprocess=drop_special_and_normalise_text),
    "attention-gradcam": MethodSettings({"region": "row"}, scale="logit", postprocess=drop_outside_and_rescale),
}

register_profile(
    Profile(
        name="bi_clip_h",
        model_filters=(DUAL_ENCODERS,),
        source=_BI_SOURCE,
        differences=_CLIP_DIFFERENCES.format(layer_note="")
        + " Tokens after the end of a text in given model inputs are part of the maps that determine head weights.",
        methods={
            "beyond-intuition-head": MethodSettings(
                {"steps": 20, "layers": (-1, None), "lookups": True},
                scale="logit",
                postprocess=drop_special_and_normalise_text,
            ),
            **_CLIP_COMPARISON_SETTINGS,
        },
        keeps_padding=True,
    )
)

register_profile(
    Profile(
        name="bi_clip_c",
        model_filters=(DUAL_ENCODERS,),
        source=_BI_SOURCE,
        differences=_CLIP_DIFFERENCES.format(
            layer_note=" (the default of their function is the last three: layers=(-3, None))"
        )
        + " The values of a token are computed from its state after attention, but the norm they are divided by is "
        "that of the state before attention.",
        methods={
            "beyond-intuition-token": MethodSettings(
                {"steps": 20, "layers": (-1, None), "lookups": True, "late": True},
                scale="logit",
                postprocess=drop_special_and_normalise_text,
            ),
            **_CLIP_COMPARISON_SETTINGS,
        },
    )
)
