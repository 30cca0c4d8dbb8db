"""transformerinterp (Chen et al., TMLR 2023): the `bi_*` profiles."""

from collections.abc import Sequence

from clearhead.profiles.base import Finish, Profile, Settings, register_profile
from clearhead.profiles.model_filters import PICTURES, TEXTS, TOWERS
from clearhead.profiles.postprocess import (
    clip_scaled,
    mm_clip_scores,
    own_entry_zero,
    rows_added,
    specials_dropped,
    specials_dropped_scaled,
    with_identity,
)

_BI = "transformerinterp (Beyond Intuition; Chen et al., TMLR 2023), github.com/jiaminchen-1031, commit a76854a"
#: Blocks are counted from 0 here; the authors' start_layer=s means block s − 1 and those after it.
_BI_LAYERS = (
    "Where layers= is not given, layers as in their scripts for ViT-B, whatever the depth of the model: head-wise from "
    "layer 3 on, token-wise from layer 6 on (start_layer 4 and 7, which they count from 1). Models without that layer "
    "are refused. For other models than ViT-B their repository names no start layer. "
)
_SCALED_LAYERS = (
    "The layers of {name}, scaled with the depth of the model: head-wise from a quarter of the depth on, token-wise "
    "from half of it on. With 12 layers these are the authors' layers; with any other number they are not, and so the "
    "scores are not the authors'. Otherwise as {name}."
)


def _head_wise(finish: Finish, depth_scaled: str) -> Settings:
    return Settings({"steps": 20, "layers": (3, None)}, finish=finish, depth_scaled=depth_scaled)


def _token_wise(finish: Finish, depth_scaled: str) -> Settings:
    return Settings({"steps": 20, "layers": (6, None)}, finish=finish, depth_scaled=depth_scaled)


def _register_depth_scaled(name: str, finish: Finish, methods: Sequence[str]) -> None:
    """Register the form of a profile whose first layer scales with the depth of the model.

    Its settings have no layers: the defaults of both methods scale with the depth.
    """
    register_profile(
        Profile(
            name=f"{name}_depth_scaled",
            fits=(PICTURES,),
            source=_BI,
            differs=_SCALED_LAYERS.format(name=name),
            methods={method: Settings({"steps": 20}, finish=finish) for method in methods},
        )
    )


#: What they compare with, on a model that reads its class token.
_VIT_OTHERS = {
    "transformer-attribution": Settings({"layers": (1, None)}, finish=specials_dropped),
    "partial-lrp": Settings({"rules": "ours"}, finish=specials_dropped),
    "rollout": Settings({"layers": (1, None)}, finish=specials_dropped),
    "attention": Settings(finish=specials_dropped_scaled),
    "attention-gradcam": Settings({"region": "row"}, finish=specials_dropped_scaled),
}
_VIT_DIFFERS = (
    "The class token is cut off. Transformer Attribution and rollout leave out the first layer; partial LRP is by the "
    "rules of Transformer Attribution; raw attention and GradCAM, which weighs heads by the gradients of the row that "
    "is read, are brought to 0…1."
)
_BERT_OTHERS = {
    "generic": Settings({"layers": (-1, None)}, finish=own_entry_zero),
    "transformer-attribution": Settings({"rules": "orig", "normalise": True, "mask": True}, finish=own_entry_zero),
    "partial-lrp": Settings({"mask": True}, finish=own_entry_zero),
    "attention": Settings(finish=own_entry_zero),
    "rollout": Settings(finish=own_entry_zero),
    "attention-gradcam": Settings({"scaled": True}, finish=own_entry_zero),
}
_BERT_DIFFERS = (
    "; padding is part of the maps; the score of [CLS] is set to zero. Generic Attention of the last layer alone; "
    "Transformer Attribution of all layers, by the rules that its authors compare with, rows divided by their sums; a "
    "mask is added to attention also where nothing is masked, and takes its 1e-9 of the relevance; GradCAM's whole map "
    "is brought to 0…1 before its row is read."
)

register_profile(
    Profile(
        name="bi_vit_h",
        fits=(PICTURES,),
        source=_BI,
        differs=_BI_LAYERS + _VIT_DIFFERS,
        methods={"beyond-intuition-head": _head_wise(specials_dropped, "bi_vit_h_depth_scaled"), **_VIT_OTHERS},
    )
)
_register_depth_scaled("bi_vit_h", specials_dropped, ["beyond-intuition-head"])

register_profile(
    Profile(
        name="bi_vit_c",
        fits=(PICTURES,),
        source=_BI,
        differs=_BI_LAYERS + _VIT_DIFFERS,
        methods={"beyond-intuition-token": _token_wise(specials_dropped, "bi_vit_c_depth_scaled"), **_VIT_OTHERS},
    )
)
_register_depth_scaled("bi_vit_c", specials_dropped, ["beyond-intuition-token"])

register_profile(
    Profile(
        name="bi_vit_mae",
        fits=(PICTURES,),
        source=_BI,
        differs=_BI_LAYERS + "For models that average their patches: the mean of the patches' rows; the class token is "
        "cut off. In Generic Attention heads are averaged before the clamp, and the identity stays in the scores. "
        "Rollout leaves out the first layer, and so does Transformer Attribution, where the identity stays in the "
        "scores; partial LRP is by the rules of Transformer Attribution; in both, all the relevance of the patches' "
        "mean is handed to each patch, as many times too much as there are patches (their figures are of a model that "
        "applies its last norm before it averages, theirs alone; the rules are the same). Raw attention and GradCAM "
        "are averaged along the wrong axis, over what a patch looks at, and brought to 0…1.",
        methods={
            "beyond-intuition-head": _head_wise(specials_dropped, "bi_vit_mae_depth_scaled"),
            "beyond-intuition-token": _token_wise(specials_dropped, "bi_vit_mae_depth_scaled"),
            "generic": Settings({"fusion": "mean-clamp"}, finish=with_identity),
            "transformer-attribution": Settings({"layers": (1, None), "repeated": True}, finish=with_identity),
            "partial-lrp": Settings({"rules": "ours", "repeated": True}, finish=specials_dropped),
            "rollout": Settings({"layers": (1, None)}, finish=specials_dropped),
            "attention": Settings({"by_query": True}, finish=specials_dropped_scaled),
            "attention-gradcam": Settings({"by_query": True}, finish=specials_dropped_scaled),
        },
    )
)
_register_depth_scaled("bi_vit_mae", specials_dropped, ["beyond-intuition-head", "beyond-intuition-token"])

register_profile(
    Profile(
        name="bi_vit_dino",
        fits=(PICTURES,),
        source=_BI,
        differs=_BI_LAYERS + "For models that read the class token beside the mean of the patches: the two rows are "
        "added, which is twice our mean of them; the class token is cut off.",
        methods={
            "beyond-intuition-head": _head_wise(rows_added, "bi_vit_dino_depth_scaled"),
            "beyond-intuition-token": _token_wise(rows_added, "bi_vit_dino_depth_scaled"),
        },
    )
)
_register_depth_scaled("bi_vit_dino", rows_added, ["beyond-intuition-head", "beyond-intuition-token"])

register_profile(
    Profile(
        name="bi_ga",
        fits=(
            PICTURES,
            TEXTS,
        ),
        source=_BI,
        differs="Generic Attention as their code for ViT has it: heads are averaged before the clamp, which is another "
        "explanation; all layers (their perturbation script leaves out the first: layers=(1, None)); the class token "
        "is cut off. For BERT: heads as published, the last layer alone; padding is part of the maps; the score of "
        "[CLS] is set to zero.",
        methods={"generic": Settings({"fusion": "mean-clamp"}, finish=specials_dropped)},
        kinds={TEXTS: {"generic": Settings({"layers": (-1, None)}, finish=own_entry_zero)}},
        padding=True,
    )
)

register_profile(
    Profile(
        name="bi_bert_h",
        fits=(TEXTS,),
        source=_BI,
        differs="The last layer alone" + _BERT_DIFFERS,
        methods={
            "beyond-intuition-head": Settings({"steps": 20, "layers": (-1, None)}, finish=own_entry_zero),
            **_BERT_OTHERS,
        },
        padding=True,
    )
)

register_profile(
    Profile(
        name="bi_bert_c",
        fits=(TEXTS,),
        source=_BI,
        differs="The last four layers" + _BERT_DIFFERS,
        methods={
            "beyond-intuition-token": Settings({"steps": 20, "layers": (-4, None)}, finish=own_entry_zero),
            **_BERT_OTHERS,
        },
        padding=True,
    )
)

_BI_CLIP = (
    "The last layer of each tower alone, as in their evaluation{more}; the logit with its scale instead of the cosine; "
    "words are scaled as they are looked up, before positions are added; special tokens are dropped, and the scores of "
    "a text are divided by their sum. (Their notebook forgets to scale the picture; this is their evaluation's code.) "
    "Raw attention, rollout and GradCAM they have of the picture alone; GradCAM weighs heads by the gradients of the "
    "row that is read, and is brought to 0…1 (theirs over all pictures of a batch together, here each by itself)."
)
_CLIP_OTHERS = {
    "generic": Settings({"layers": (-1, None)}, scale="logit", finish=mm_clip_scores),
    "attention": Settings(scale="logit", finish=mm_clip_scores),
    "rollout": Settings(scale="logit", finish=mm_clip_scores),
    "attention-gradcam": Settings({"region": "row"}, scale="logit", finish=clip_scaled),
}

register_profile(
    Profile(
        name="bi_clip_h",
        fits=(TOWERS,),
        source=_BI,
        differs=_BI_CLIP.format(more="")
        + " What follows the end of a text in given model inputs is part of the maps that heads are weighed by.",
        methods={
            "beyond-intuition-head": Settings(
                {"steps": 20, "layers": (-1, None), "lookups": True}, scale="logit", finish=mm_clip_scores
            ),
            **_CLIP_OTHERS,
        },
        padding=True,
    )
)

register_profile(
    Profile(
        name="bi_clip_c",
        fits=(TOWERS,),
        source=_BI,
        differs=_BI_CLIP.format(more=" (the function's own default is the last three: layers=(-3, None))")
        + " What attention takes from a token is computed from the token as it is after attention, while its length is "
        "that of before.",
        methods={
            "beyond-intuition-token": Settings(
                {"steps": 20, "layers": (-1, None), "lookups": True, "late": True}, scale="logit", finish=mm_clip_scores
            ),
            **_CLIP_OTHERS,
        },
    )
)
