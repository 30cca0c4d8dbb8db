"""Transformer-Explainability (Chefer, Gur & Wolf, CVPR 2021): the `te_*` profiles."""

from clearhead.profiles.base import Profile, Settings, register_profile
from clearhead.profiles.model_filters import PICTURES, TEXTS
from clearhead.profiles.postprocess import (
    own_entry_least,
    own_entry_least_scaled,
    own_entry_zero,
    specials_dropped,
    specials_dropped_scaled,
)

_TE = "Transformer-Explainability (Chefer, Gur & Wolf, CVPR 2021), github.com/hila-chefer, commit c3e578f"

register_profile(
    Profile(
        name="te_vit_eval",
        fits=(PICTURES,),
        source=_TE,
        differs="The first layer is left out of Transformer Attribution and of rollout, as in the scripts that gave "
        "the published figures; LRP by the rules that the authors compare with (relevance doubles at every linear "
        "map), positions taking their share; GradCAM weighs heads by the gradients of the row that is read, and is "
        "brought to 0…1; the class token is cut off.",
        methods={
            "transformer-attribution": Settings({"layers": (1, None)}, finish=specials_dropped),
            "rollout": Settings({"layers": (1, None)}, finish=specials_dropped),
            "partial-lrp": Settings(finish=specials_dropped),
            "lrp": Settings({"rules": "orig", "positions": True}, finish=specials_dropped),
            "attention": Settings(finish=specials_dropped),
            "attention-gradcam": Settings({"region": "row"}, finish=specials_dropped_scaled),
        },
    )
)

register_profile(
    Profile(
        name="te_vit_notebook",
        fits=(PICTURES,),
        source=_TE,
        differs="All layers, as is our default; the class token is cut off.",
        methods={"transformer-attribution": Settings(finish=specials_dropped)},
    )
)

_TE_BERT = (
    "Rows of Transformer Attribution are divided by their sums, and [CLS] gets the least score of all{scaled}; a mask "
    "is added to attention also where nothing is masked, and takes its 1e-9 of the relevance; padding is part of the "
    "maps"
)

register_profile(
    Profile(
        name="te_bert_eraser",
        fits=(TEXTS,),
        source=_TE,
        differs="Transformer Attribution of the last layer alone. "
        + _TE_BERT.format(scaled="")
        + "; LRP by the rules that the authors compare with (relevance doubles at every linear map); elsewhere the "
        "score of [CLS] is set to zero; GradCAM's whole map is brought to 0…1 before its row is read.",
        methods={
            "transformer-attribution": Settings(
                {"layers": (-1, None), "normalise": True, "mask": True}, finish=own_entry_least
            ),
            "partial-lrp": Settings({"mask": True}, finish=own_entry_zero),
            "lrp": Settings({"rules": "orig", "mask": True}, finish=own_entry_zero),
            "attention": Settings(finish=own_entry_zero),
            "rollout": Settings(finish=own_entry_zero),
            "attention-gradcam": Settings({"scaled": True}, finish=own_entry_zero),
        },
        padding=True,
    )
)

register_profile(
    Profile(
        name="te_bert_notebook",
        fits=(TEXTS,),
        source=_TE,
        differs="All layers (two of its cells: the last alone, layers=(-1, None)). "
        + _TE_BERT.format(scaled=", all being brought to 0…1")
        + ".",
        methods={"transformer-attribution": Settings({"normalise": True, "mask": True}, finish=own_entry_least_scaled)},
        padding=True,
    )
)
