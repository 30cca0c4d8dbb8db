"""Transformer-MM-Explainability (Chefer, Gur & Wolf, ICCV 2021): the `mm_*` profiles."""

from clearhead.profiles.base import Profile, Settings, register_profile
from clearhead.profiles.model_filters import CO_ATTENTION, DETECTORS, ONE_SEQUENCE, PICTURES, TOWERS
from clearhead.profiles.postprocess import mm_clip_scores, own_entry_zero, specials_dropped

_MM = "Transformer-MM-Explainability (Chefer, Gur & Wolf, ICCV 2021), github.com/hila-chefer, commit 58eaea8"

register_profile(
    Profile(
        name="mm_vit",
        fits=(PICTURES,),
        source=_MM,
        differs="As our default, all layers and no normalisation; the class token is cut off.",
        methods={"generic": Settings(finish=specials_dropped)},
    )
)

register_profile(
    Profile(
        name="mm_lxmert",
        fits=(CO_ATTENTION,),
        source=_MM,
        differs="A row of relevance that is zero becomes NaN when it is divided by its sum, and stays so; partial "
        "LRP's whole map, negative or not, is brought to 0…1 before its row is read; the score of the token that is "
        "read is set to zero.",
        methods={
            "generic": Settings({"guard": "none"}, finish=own_entry_zero),
            "attention": Settings(finish=own_entry_zero),
            "rollout": Settings(finish=own_entry_zero),
            "attention-gradcam": Settings(finish=own_entry_zero),
            "partial-lrp": Settings({"rules": "ours", "scaled": True}, finish=own_entry_zero),
            "transformer-attribution": Settings(finish=own_entry_zero),
        },
    )
)

register_profile(
    Profile(
        name="mm_visualbert",
        fits=(ONE_SEQUENCE,),
        source=_MM,
        differs="Rollout is not halved layer by layer; the whole map of GradCAM and of partial LRP is brought to 0…1 "
        "before its row is read (NaN where a clamp leaves nothing of it); a mask is added to attention also where "
        "nothing is masked, and takes its 1e-9 of the relevance; padding is part of the maps; the score of the token "
        "that is read is set to zero.",
        methods={
            "generic": Settings(finish=own_entry_zero),
            "attention": Settings(finish=own_entry_zero),
            "rollout": Settings({"half": False}, finish=own_entry_zero),
            "attention-gradcam": Settings({"scaled": True}, finish=own_entry_zero),
            "partial-lrp": Settings({"rules": "ours", "scaled": True, "mask": True}, finish=own_entry_zero),
            "transformer-attribution": Settings({"mask": True}, finish=own_entry_zero),
        },
        padding=True,
    )
)

register_profile(
    Profile(
        name="mm_detr",
        fits=(DETECTORS,),
        source=_MM,
        differs="A row of relevance that is zero becomes NaN when it is divided by its sum, and what is then NaN of a "
        "layer's addition (all of it, as a rule) is left out; partial LRP's whole map, negative or not, is brought to "
        "0…1 before its row is read.",
        methods={
            "generic": Settings({"guard": "additions"}),
            "attention": Settings(),
            "rollout": Settings(),
            "attention-gradcam": Settings(),
            "partial-lrp": Settings({"rules": "ours", "scaled": True}),
            "transformer-attribution": Settings(),
        },
    )
)

register_profile(
    Profile(
        name="mm_clip",
        fits=(TOWERS,),
        source=_MM,
        differs="The last layer of each tower alone; the logit with its scale instead of the cosine; special tokens "
        "are dropped, and the scores of a text are divided by their sum.",
        methods={"generic": Settings({"layers": (-1, None)}, scale="logit", finish=mm_clip_scores)},
    )
)
