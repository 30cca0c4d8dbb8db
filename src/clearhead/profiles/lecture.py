"""A lecture on explaining a sentiment classifier (Grad-SAM beside SHAP): the `*_lecture` profiles."""

from clearhead.profiles.base import Profile, Settings, register_profile
from clearhead.profiles.model_filters import TEXTS

_LECTURE = "a lecture's notebook on Grad-SAM and SHAP for textattack/bert-base-uncased-SST-2, with shap 0.51"

register_profile(
    Profile(
        name="gradsam_lecture",
        fits=(TEXTS,),
        source=_LECTURE,
        differs="Padding that model inputs come with counts among the tokens that are divided by. Otherwise nothing: "
        "the sum over each token's own row, as the formula has it, of the logit of the predicted class. What the "
        "lecture says about it (tokens that receive attention) is received=True.",
        methods={"grad-sam": Settings({"received": False}, scale="logit")},
        padding=True,
    )
)

register_profile(
    Profile(
        name="shap_lecture",
        fits=(TEXTS,),
        source=_LECTURE,
        differs="The logit of class 1 whatever is predicted, unless target= is given; each half of a group is met with "
        "the other half present alone (shap's fixed_context=1), and what a group has beyond its halves is spread over "
        "all its units: so units that never matter, and special tokens, which are never absent, get a score. The mask "
        "is written into the text, which is read anew. Every row is padded to the model's maximum there, which changes "
        "no value and is not done here.",
        methods={"shap": Settings({"replacement": "written-mask", "context": "present"}, scale="logit", target=1)},
    )
)
