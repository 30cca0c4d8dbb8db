"""Profiles: the settings of authors by name, one module per repository, to reproduce its released code."""

from clearhead.profiles import (  # noqa: F401  (importing a module registers its profiles)
    attcat,
    beyond_intuition,
    captum,
    generic_attention,
    interpretdl,
    lecture,
    lxt,
    tam,
    transformer_explainability,
)
from clearhead.profiles.base import PROFILES, MethodSettings, Profile, get_profile, register_profile

__all__ = ["PROFILES", "MethodSettings", "Profile", "get_profile", "register_profile"]
