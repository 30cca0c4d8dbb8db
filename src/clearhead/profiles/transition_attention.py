"""Transition Attention Maps (Yuan et al., 2021): the profile `tam`."""

from clearhead.profiles.base import Profile, Settings, register_profile
from clearhead.profiles.finishes import specials_dropped
from clearhead.profiles.kinds import PICTURES

register_profile(
    Profile(
        name="tam",
        fits=(PICTURES,),
        source="Transition Attention Maps (Yuan et al., NeurIPS 2021 workshop), github.com/XianrenYty",
        differs="The layers are those of their scripts for ViT-B (4 on, of 12) where layers= is not given; the class "
        "token is cut off.",
        methods={"tam": Settings({"steps": 20}, finish=specials_dropped)},
    )
)
