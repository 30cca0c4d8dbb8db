"""Profiles: what an author's released code computes, quirks included, beside the corrected default.

A profile is a table from method to settings. Asked for a method that it does not name, it refuses; arguments given
beside it win. What an author drops or zeroes stays a unit, with the author's value (NaN for dropped).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from clearhead.errors import InputError, unknown
from clearhead.methods.base import Method
from clearhead.units import Units

if TYPE_CHECKING:
    from clearhead.subjects.base import Sample, Subject
    from clearhead.targets import Target

#: The scores of one stream's units, the units, and the rows that were read (with their weights) → the author's scores.
Finish = Callable[[Float[np.ndarray, "*row unit"], Units, Mapping[int, float]], Float[np.ndarray, "*row unit"]]
#: What an author does to an input, and to what is explained of it, before anything is computed.
Prepare = Callable[["Subject", "Sample", "Target"], "tuple[Sample, Target]"]


@dataclass(frozen=True)
class Settings:
    """One method as an author computes it: options of the method, the scale of the target, and what is done last."""

    options: Mapping[str, Any] = field(default_factory=dict)
    scale: str | None = None
    finish: Finish | None = None


@dataclass(frozen=True)
class Profile:
    """An author's settings. `differs` says what differs from the defaults, and why."""

    name: str
    source: str
    differs: str
    methods: Mapping[str, Settings]
    #: Whether padding in given model inputs stays, since the author's code does not cut it off.
    padding: bool = False
    prepare: Prepare | None = None

    def settings(self, method: str) -> Settings:
        if method not in self.methods:
            named = ", ".join(sorted(self.methods))
            raise InputError(f"the profile {self.name} says nothing about {method}: it has settings for {named}")
        return self.methods[method]

    def applied(self, method: Method) -> Method:
        """The method with the author's options, where it was not given others."""
        return method.defaults(**self.settings(method.name).options)


PROFILES: dict[str, Profile] = {}


def register_profile(profile: Profile) -> Profile:
    """Add a profile, from inside or outside the package."""
    PROFILES[profile.name] = profile
    return profile


def profile_named(name: str | None) -> Profile | None:
    if name is None:
        return None
    if name not in PROFILES:
        raise unknown("profile", name, sorted(PROFILES))
    return PROFILES[name]
