"""LXT, the authors' code of AttnLRP: the profile `lxt`."""

from clearhead.profiles.base import MethodSettings, Profile, register_profile

register_profile(
    Profile(
        name="lxt",
        source="LXT (github.com/rachtibat/LRP-eXplains-Transformers), the efficient implementation of AttnLRP",
        differences="A softmax has its own Jacobian, which vanishes where attention is almost 0 or 1; clearhead "
        "averages it along the path from equal attention.",
        methods={"attn-lrp": MethodSettings({"softmax": "gradient"})},
    )
)
