"""Transition Attention Maps (Yuan et al., 2021): the profiles `tam` and `tam_depth_scaled`."""

from clearhead.profiles.base import Profile, Settings, register_profile
from clearhead.profiles.model_filters import PICTURES
from clearhead.profiles.postprocess import specials_dropped

_TAM = "Transition Attention Maps (Yuan et al., NeurIPS 2021 workshop), github.com/XianrenYty"

register_profile(
    Profile(
        name="tam",
        fits=(PICTURES,),
        source=_TAM,
        differs="Where layers= is not given, layers from 4 on (counted from 0), as in their scripts for ViT-B, at any "
        "depth of the model; models without that layer are refused. The class token is cut off.",
        methods={
            "tam": Settings(
                {"steps": 20, "layers": (4, None)}, finish=specials_dropped, depth_scaled="tam_depth_scaled"
            )
        },
    )
)

register_profile(
    Profile(
        name="tam_depth_scaled",
        fits=(PICTURES,),
        source=_TAM,
        differs="The layers of tam, scaled with the depth of the model: from a third of the depth on, which is the "
        "default of the method. With 12 layers these are the authors' layers; with any other number they are not, and "
        "so the scores are not the authors'. The class token is cut off.",
        methods={"tam": Settings({"steps": 20}, finish=specials_dropped)},
    )
)
