"""The `*_lecture` profiles: a lecture on explaining a sentiment classifier with Grad-SAM and SHAP."""

from clearhead.profiles.base import MethodSettings, Profile, register_profile
from clearhead.profiles.model_filters import TEXT_CLASSIFIERS

_LECTURE_SOURCE = "a lecture's notebook on Grad-SAM and SHAP for textattack/bert-base-uncased-SST-2, with shap 0.51"

register_profile(
    Profile(
        name="gradsam_lecture",
        model_filters=(TEXT_CLASSIFIERS,),
        source=_LECTURE_SOURCE,
        differences="Padding in the model inputs counts in the number of tokens that scores are divided by. Otherwise "
        "the default: the sum over the row of each token, as in the formula, for the logit of the predicted class. "
        "The lecture describes something else, tokens that receive attention: that is received=True.",
        methods={"grad-sam": MethodSettings({"received": False}, scale="logit")},
        keeps_padding=True,
    )
)

register_profile(
    Profile(
        name="shap_lecture",
        model_filters=(TEXT_CLASSIFIERS,),
        source=_LECTURE_SOURCE,
        differences="The logit of class 1, whatever the prediction, unless target= is given; each half of a group is "
        "evaluated only in the context where the other half is present (shap's fixed_context=1), and the interaction "
        "of the halves is spread over all units of the group: so units that never matter, and special tokens, which "
        "are never masked, get a score. The mask token is inserted into the text, which is tokenised again. Their "
        "code pads every row to the maximum length of the model; this changes no value and is not done here.",
        methods={
            "shap": MethodSettings({"replacement": "written-mask", "context": "present"}, scale="logit", target=1)
        },
    )
)
