"""Transition Attention Maps (Yuan et al., 2021): the profiles `tam` and `tam_depth_scaled`."""

from clearhead.profiles.base import MethodSettings, Profile, register_profile
from clearhead.profiles.model_filters import IMAGE_CLASSIFIERS
from clearhead.profiles.postprocess import drop_special

_TAM = "Transition Attention Maps (Yuan et al., NeurIPS 2021 workshop), github.com/XianrenYty"

register_profile(
    Profile(
        name="tam",
        model_filters=(IMAGE_CLASSIFIERS,),
        source=_TAM,
        differences="Unless layers= is given, layers from 4 (counted from 0), as in their scripts for ViT-B, at any "
        "depth of the model; models without that layer are refused. The class token is dropped.",
        methods={
            "tam": MethodSettings(
                {"steps": 20, "layers": (4, None)}, postprocess=drop_special, depth_scaled="tam_depth_scaled"
            )
        },
    )
)

register_profile(
    Profile(
        name="tam_depth_scaled",
        model_filters=(IMAGE_CLASSIFIERS,),
        source=_TAM,
        differences="The layers of tam, scaled with the depth of the model: from a third of the depth, which is the "
        "default of the method. With 12 layers these are the authors' layers; with any other number they are not, and "
        "the scores are not the authors'. The class token is dropped.",
        methods={"tam": MethodSettings({"steps": 20}, postprocess=drop_special)},
    )
)
