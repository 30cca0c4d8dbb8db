"""InterpretDL (PaddlePaddle): the `idl_*` profiles."""

from clearhead.profiles.base import Profile, Settings, register_profile
from clearhead.profiles.model_filters import PICTURES, TEXTS
from clearhead.profiles.postprocess import identity_kept, specials_dropped, with_identity

_IDL = "InterpretDL, github.com/PaddlePaddle/InterpretDL, commit 1068fc2 (its classes BTCV, BTNLP, GACV, GANLP)"

register_profile(
    Profile(
        name="idl_bt",
        fits=(
            PICTURES,
            TEXTS,
        ),
        source=_IDL,
        differs="Layers from the fourth on, head-wise and token-wise; head weights are those of the predicted class, "
        "whichever one is explained. Pictures: gradients are the probability's, and the class token is cut off. "
        "Texts: the last layer alone; the length of a token is taken where the layer's first norm reads it, which in "
        "models whose norms come last is after attention; padding is part of the maps that heads are weighed by.",
        methods={
            "beyond-intuition-head": Settings(
                {"steps": 20, "layers": (3, None), "of_predicted": True}, scale="probability", finish=specials_dropped
            ),
            "beyond-intuition-token": Settings(
                {"steps": 20, "layers": (3, None)}, scale="probability", finish=specials_dropped
            ),
        },
        kinds={
            TEXTS: {
                "beyond-intuition-head": Settings({"steps": 20, "layers": (-1, None), "of_predicted": True}),
                "beyond-intuition-token": Settings({"steps": 20, "layers": (-1, None), "normed": True}),
            }
        },
        padding=True,
    )
)

register_profile(
    Profile(
        name="idl_ga",
        fits=(
            PICTURES,
            TEXTS,
        ),
        source=_IDL,
        differs="Attention and its gradient are averaged over heads apart, then multiplied and clamped. Pictures: "
        "layers from the fourth on, the gradients are the probability's, and the class token is cut off. Texts: the "
        "last layer alone; the identity stays in the scores; the predicted class is explained, whichever one is asked "
        "for; padding stays, and gets nothing.",
        methods={
            "generic": Settings(
                {"fusion": "separate-means", "layers": (3, None)}, scale="probability", finish=with_identity
            )
        },
        kinds={
            TEXTS: {
                "generic": Settings(
                    {"fusion": "separate-means", "layers": (-1, None)}, finish=identity_kept, predicted=True
                )
            }
        },
        padding=True,
    )
)
