"""InterpretDL (PaddlePaddle): the `idl_*` profiles."""

from clearhead.profiles.base import MethodSettings, Profile, register_profile
from clearhead.profiles.model_filters import IMAGE_CLASSIFIERS, TEXT_CLASSIFIERS
from clearhead.profiles.postprocess import add_identity, add_identity_and_drop_special, drop_special

_IDL_SOURCE = "InterpretDL, github.com/PaddlePaddle/InterpretDL, commit 1068fc2 (its classes BTCV, BTNLP, GACV, GANLP)"

register_profile(
    Profile(
        name="idl_bt",
        model_filters=(
            IMAGE_CLASSIFIERS,
            TEXT_CLASSIFIERS,
        ),
        source=_IDL_SOURCE,
        differences="Layers from the fourth, head-wise and token-wise; head weights use the gradients of the predicted "
        "class, whatever the target. Images: gradients are those of the probability, and the class token is dropped. "
        "Texts: the last layer only; the norm of a token is that of the input of the layer's first norm, which in "
        "post-norm models is after attention; padding is part of the maps that determine head weights.",
        methods={
            "beyond-intuition-head": MethodSettings(
                {"steps": 20, "layers": (3, None), "of_predicted": True}, scale="probability", postprocess=drop_special
            ),
            "beyond-intuition-token": MethodSettings(
                {"steps": 20, "layers": (3, None)}, scale="probability", postprocess=drop_special
            ),
        },
        settings_by_model={
            TEXT_CLASSIFIERS: {
                "beyond-intuition-head": MethodSettings({"steps": 20, "layers": (-1, None), "of_predicted": True}),
                "beyond-intuition-token": MethodSettings({"steps": 20, "layers": (-1, None), "normed": True}),
            }
        },
        keeps_padding=True,
    )
)

register_profile(
    Profile(
        name="idl_ga",
        model_filters=(
            IMAGE_CLASSIFIERS,
            TEXT_CLASSIFIERS,
        ),
        source=_IDL_SOURCE,
        differences="Attention and its gradient are averaged over heads separately, then multiplied and clamped. "
        "Images: layers from the fourth, gradients are those of the probability, and the class token is dropped. "
        "Texts: the last layer only; the identity stays in the scores; the predicted class is explained, whatever "
        "target is given; padding is kept, and gets no score.",
        methods={
            "generic": MethodSettings(
                {"fusion": "separate-means", "layers": (3, None)},
                scale="probability",
                postprocess=add_identity_and_drop_special,
            )
        },
        settings_by_model={
            TEXT_CLASSIFIERS: {
                "generic": MethodSettings(
                    {"fusion": "separate-means", "layers": (-1, None)},
                    postprocess=add_identity,
                    explains_prediction=True,
                )
            }
        },
        keeps_padding=True,
    )
)
