"""Profiles: what an author's released code computes, quirks included, beside the corrected default.

A profile is a table from method to settings. Asked for a method that it does not name, it refuses; arguments given
beside it win. What an author drops or zeroes stays a unit, with the author's value (NaN for dropped).
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from clearhead.errors import ClearheadWarning, InputError, Refusal, unknown
from clearhead.methods.base import Method
from clearhead.targets import TargetLike
from clearhead.units import Units

if TYPE_CHECKING:
    from clearhead.adapters.base import Sample, Subject
    from clearhead.profiles.model_filters import Kind
    from clearhead.targets import Target

#: The scores of one stream's units, the units, and the rows that were read (with their weights) → the author's scores.
Finish = Callable[[Float[np.ndarray, "*row unit"], Units, Mapping[int, float]], Float[np.ndarray, "*row unit"]]
#: What an author does to an input, and to what is explained of it, before anything is computed.
Prepare = Callable[["Subject", "Sample", "Target"], "tuple[Sample, Target]"]


@dataclass(frozen=True)
class Settings:
    """One method as an author computes it: options of the method, the target and its scale, and what is done last."""

    options: Mapping[str, Any] = field(default_factory=dict)
    scale: str | None = None
    target: TargetLike = None
    finish: Finish | None = None
    #: Whether the predicted class is explained, whichever one was asked for.
    predicted: bool = False
    #: The profile that starts at the same fraction of any model's depth, where `layers` starts at a fixed layer.
    depth_scaled: str | None = None


@dataclass(frozen=True)
class Profile:
    """An author's settings. `differs` says what differs from the defaults, and why."""

    name: str
    source: str
    differs: str
    methods: Mapping[str, Settings]
    #: What is different for some kinds of models.
    kinds: Mapping["Kind", Mapping[str, Settings]] = field(default_factory=dict)
    #: Whether padding in given model inputs stays, since the author's code does not cut it off.
    padding: bool = False
    prepare: Prepare | None = None
    #: The kinds of models that the author's code is for; any model without.
    fits: tuple["Kind", ...] = ()

    def settings(self, method: str) -> Settings:
        if method not in self.methods:
            named = ", ".join(sorted(self.methods))
            raise InputError(f"the profile {self.name} says nothing about {method}: it has settings for {named}")
        return self.methods[method]

    def asked(
        self, methods: Sequence[str], target: TargetLike | Sequence[TargetLike], scale: str | None
    ) -> tuple[TargetLike | Sequence[TargetLike], str | None]:
        """The target and its scale as the author has them, where they were not given."""
        settings = [self.settings(method) for method in methods]
        if self.ignored(methods, target):
            warnings.warn(
                f"the profile {self.name} explains the predicted class, whichever one is asked for, as its authors' "
                f"code does: target={target!r} is ignored",
                ClearheadWarning,
                stacklevel=3,
            )
            target = None
        elif target is None:
            target = next((one.target for one in settings if one.target is not None), None)
        return target, scale or next((one.scale for one in settings if one.scale), None)

    def ignored(self, methods: Sequence[str], target: TargetLike | Sequence[TargetLike]) -> bool:
        """Whether a target was given that the author's code does not heed."""
        return target is not None and any(self.settings(method).predicted for method in methods)

    def applied(self, method: Method) -> Method:
        """The method with the author's options, where it was not given others."""
        return method.defaults(**self.settings(method.name).options)

    def check_depth(self, method: Method, depth: int, model: str) -> None:
        """Refuse a model that does not have the layer at which the author's code starts.

        Args:
            method: The method with its final options; other layers than the author's are not checked here.
            depth: The number of attention layers of the model.
            model: The name of the model, for the message.

        Raises:
            Refusal: The author's first layer is beyond the model's last.
        """
        settings = self.settings(method.name)
        layers = settings.options.get("layers")
        if layers is None or layers != method.option("layers"):
            return
        first, _ = layers
        if first is None or first < depth:
            return
        scaled = f", or use the profile {settings.depth_scaled}, which scales the first layer with the depth"
        raise Refusal(
            f"the profile {self.name} starts {method.name} at layer {first} (counted from 0), as its authors' code "
            f"does: {model} has {depth} layers, and at least {first + 1} are needed. Give layers= to choose other "
            f"layers{scaled if settings.depth_scaled else ''}"
        )


PROFILES: dict[str, Profile] = {}


def register_profile(profile: Profile) -> Profile:
    """Add a profile, from inside or outside the package."""
    PROFILES[profile.name] = profile
    return profile


def profile_named(name: str | None, subject: "Subject") -> Profile | None:
    """A profile, as it is for this model."""
    if name is None:
        return None
    if name not in PROFILES:
        raise unknown("profile", name, sorted(PROFILES))
    profile = PROFILES[name]
    if profile.fits and not any(kind.fits(subject) for kind in profile.fits):
        meant = ", or that ".join(kind.said for kind in profile.fits)
        raise Refusal(
            f"the profile {name} is what its authors compute for models that {meant}: {subject.name} "
            f"({subject.model_class}) is none of them"
        )
    methods = dict(profile.methods)
    for kind, settings in profile.kinds.items():
        methods |= settings if kind.fits(subject) else {}
    return replace(profile, methods=methods)
