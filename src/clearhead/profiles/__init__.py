"""Authors' settings by name; each file holds what one repository's released code computes."""

from clearhead.profiles import (  # noqa: F401  (importing a file registers its profiles)
    attcat,
    beyond_intuition,
    captum,
    generic_attention,
    interpretdl,
    lecture,
    tam,
    transformer_explainability,
)
from clearhead.profiles.base import PROFILES, Profile, Settings, profile_named, register_profile

__all__ = ["PROFILES", "Profile", "Settings", "profile_named", "register_profile"]
