"""Profiles: what an author's released code computes, quirks included, beside the corrected default.

A profile is a table from method to settings. Asked for a method that it does not name, it refuses; arguments given
beside it win. What an author drops or zeroes stays a unit, with the author's value (NaN for dropped).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float

from clearhead.errors import InputError, unknown
from clearhead.methods.base import Method
from clearhead.units import Units

#: The scores of one stream's units, the units, and the rows that were read (with their weights) → the author's scores.
Finish = Callable[[Float[np.ndarray, "*row unit"], Units, Mapping[int, float]], Float[np.ndarray, "*row unit"]]


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


def own_entry_zero(scores: np.ndarray, units: Units, rows: Mapping[int, float]) -> np.ndarray:
    """The unit whose row is read gets nothing."""
    changed = scores.copy()
    changed[..., list(rows)] = 0
    return changed


def mm_clip_scores(scores: np.ndarray, units: Units, rows: Mapping[int, float]) -> np.ndarray:
    """Special tokens are dropped; what is left of a text is divided by its sum."""
    changed = np.where(units.special, np.nan, scores)
    if units.boxes is None:
        for row in rows:  # the end of the text: what follows is dropped, and so is the start
            changed[..., [0, *range(row, len(units))]] = np.nan
        with np.errstate(invalid="ignore"):
            changed /= np.nansum(changed, axis=-1, keepdims=True)
    return changed


_MM = "Transformer-MM-Explainability (Chefer, Gur & Wolf, ICCV 2021), github.com/hila-chefer, commit 58eaea8"

register_profile(
    Profile(
        name="mm_lxmert",
        source=_MM,
        differs="A row of relevance that is zero becomes NaN when it is divided by its sum, and stays so; the score of "
        "the token that is read is set to zero.",
        methods={
            "generic": Settings({"guard": "none"}, finish=own_entry_zero),
            "attention": Settings(finish=own_entry_zero),
            "rollout": Settings(finish=own_entry_zero),
            "attention-gradcam": Settings(finish=own_entry_zero),
        },
    )
)

register_profile(
    Profile(
        name="mm_visualbert",
        source=_MM,
        differs="Rollout is not halved layer by layer; GradCAM's whole map is brought to 0…1 before its row is read "
        "(NaN where the clamp leaves nothing of it); padding is part of the maps; the score of the token that is read "
        "is set to zero.",
        methods={
            "generic": Settings(finish=own_entry_zero),
            "attention": Settings(finish=own_entry_zero),
            "rollout": Settings({"half": False}, finish=own_entry_zero),
            "attention-gradcam": Settings({"scaled": True}, finish=own_entry_zero),
        },
        padding=True,
    )
)

register_profile(
    Profile(
        name="mm_detr",
        source=_MM,
        differs="A row of relevance that is zero becomes NaN when it is divided by its sum, and what is then NaN of a "
        "layer's addition (all of it, as a rule) is left out.",
        methods={
            "generic": Settings({"guard": "additions"}),
            "attention": Settings(),
            "rollout": Settings(),
            "attention-gradcam": Settings(),
        },
    )
)

register_profile(
    Profile(
        name="mm_clip",
        source=_MM,
        differs="The last layer of each tower alone; the logit with its scale instead of the cosine; special tokens "
        "are dropped, and the scores of a text are divided by their sum.",
        methods={"generic": Settings({"layers": (-1, None)}, scale="logit", finish=mm_clip_scores)},
    )
)
