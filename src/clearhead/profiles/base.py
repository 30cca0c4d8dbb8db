"""Profiles: settings that reproduce an author's released code, including its implementation deviations.

A profile maps methods to settings and refuses other methods. Explicit arguments override the profile. Units that an
author drops or sets to zero stay units, with the author's value (NaN if dropped).
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from clearhead.errors import ClearheadWarning, InputError, UnsupportedError, unknown_value_error
from clearhead.methods.base import Method
from clearhead.targets import TargetLike
from clearhead.units import Units

if TYPE_CHECKING:
    from clearhead.adapters.base import ModelAdapter
    from clearhead.profiles.model_filters import ModelFilter
    from clearhead.sample import Sample
    from clearhead.targets import Target

#: Maps the scores of one stream, its units, and the read-out positions with their weights to the author's scores.
PostprocessFunction = Callable[
    [Float[np.ndarray, "*row unit"], Units, Mapping[int, float]], Float[np.ndarray, "*row unit"]
]
#: Changes an input and its target as the author's code does, before the forward pass.
PrepareFunction = Callable[["ModelAdapter", "Sample", "Target"], "tuple[Sample, Target]"]


@dataclass(frozen=True)
class MethodSettings:
    """Settings of one method in a profile.

    Attributes:
        options: Options of the method.
        scale: The scale of the target, such as "logit" or "probability"; None for the default.
        target: The target; None for the default.
        postprocess: Applied to the final scores.
        explains_prediction: Whether the predicted class is explained, whatever target is given.
        depth_scaled: For settings whose `layers` start at a fixed layer: the profile that starts at the same fraction
            of any model's depth.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    scale: str | None = None
    target: TargetLike = None
    postprocess: PostprocessFunction | None = None
    explains_prediction: bool = False
    depth_scaled: str | None = None


@dataclass(frozen=True)
class Profile:
    """The settings of an author.

    Attributes:
        name: The name for `profile=`.
        source: Publication and repository.
        differences: What differs from the defaults, and why.
        methods: The settings of each method.
        settings_by_model: Settings that replace `methods` for some models.
        keeps_padding: Whether padding in given model inputs is kept, since the author's code does not remove it.
        prepare_sample: Changes the input and its target before the forward pass.
        model_filters: The models that the author's code is for; empty for any model.
    """

    name: str
    source: str
    differences: str
    methods: Mapping[str, MethodSettings]
    settings_by_model: Mapping["ModelFilter", Mapping[str, MethodSettings]] = field(default_factory=dict)
    keeps_padding: bool = False
    prepare_sample: PrepareFunction | None = None
    model_filters: tuple["ModelFilter", ...] = ()

    def get_settings(self, method: str) -> MethodSettings:
        """Return the settings of a method.

        Args:
            method: Name of the method.

        Returns:
            The author's options and deviations for this method.

        Raises:
            InputError: If the profile has no settings for the method; the message lists those that it has.
        """
        if method not in self.methods:
            supported = ", ".join(sorted(self.methods))
            raise InputError(f"the profile {self.name} has no settings for {method}: it has settings for {supported}")
        return self.methods[method]

    def resolve_target(
        self, methods: Sequence[str], target: TargetLike | Sequence[TargetLike], scale: str | None
    ) -> tuple[TargetLike | Sequence[TargetLike], str | None]:
        """Return the target and its scale: the given ones, else those of the profile.

        Args:
            methods: The names of the methods to run.
            target: The target that the caller gave, if any.
            scale: The scale that the caller gave, if any.

        Returns:
            The target and the scale, None for the defaults. A warning is given if the profile ignores the target.
        """
        settings = [self.get_settings(method) for method in methods]
        if self.overrides_target(methods, target):
            warnings.warn(
                f"the profile {self.name} always explains the predicted class, as its authors' code does: "
                f"target={target!r} is ignored",
                ClearheadWarning,
                stacklevel=3,
            )
            target = None
        elif target is None:
            target = next((item.target for item in settings if item.target is not None), None)
        return target, scale or next((item.scale for item in settings if item.scale), None)

    def overrides_target(self, methods: Sequence[str], target: TargetLike | Sequence[TargetLike]) -> bool:
        """Whether the author's code ignores the given target.

        Args:
            methods: Names of the requested methods.
            target: The value of `target=`.

        Returns:
            True if a target was given and a method of the profile always explains the prediction.
        """
        return target is not None and any(self.get_settings(method).explains_prediction for method in methods)

    def configure_method(self, method: Method) -> Method:
        """Return the method with the author's options added; options of the caller have precedence.

        Args:
            method: The requested method.

        Returns:
            A new method.
        """
        return method.with_defaults(**self.get_settings(method.name).options)

    def check_depth(self, method: Method, depth: int, model: str) -> None:
        """Check that the model has the layer at which the author's code starts.

        Args:
            method: The method with its final options; other layers than the author's are not checked here.
            depth: The number of attention layers of the model.
            model: The name of the model, for the message.

        Raises:
            UnsupportedError: The author's first layer is beyond the model's last.
        """
        settings = self.get_settings(method.name)
        layers = settings.options.get("layers")
        if layers is None or layers != method.get_option("layers"):
            return
        first, _ = layers
        if first is None or first < depth:
            return
        message = (
            f"the profile {self.name} starts {method.name} at layer {first} (counted from 0), as its authors' code "
            f"does: {model} has {depth} layers, and at least {first + 1} are needed. Use layers= to choose other "
            "layers"
        )
        if settings.depth_scaled:
            message += f", or use the profile {settings.depth_scaled}, which scales the first layer with the depth"
        raise UnsupportedError(message)


PROFILES: dict[str, Profile] = {}


def register_profile(profile: Profile) -> Profile:
    """Register a profile under its name, from inside or outside the package.

    Args:
        profile: The profile; it replaces one with the same name.

    Returns:
        The profile.
    """
    PROFILES[profile.name] = profile
    return profile


def get_profile(name: str | None, adapter: "ModelAdapter") -> Profile | None:
    """Return a profile with the settings for this model.

    Args:
        name: The name of the profile; None for no profile.
        adapter: The adapter of the model.

    Returns:
        The profile, with settings that apply to this model only; None without a name.

    Raises:
        InputError: The profile is unknown.
        UnsupportedError: The author's code is not for models of this type.
    """
    if name is None:
        return None
    if name not in PROFILES:
        raise unknown_value_error("profile", name, sorted(PROFILES))
    profile = PROFILES[name]
    if profile.model_filters and not any(model_filter.matches(adapter) for model_filter in profile.model_filters):
        supported = ", or that ".join(model_filter.description for model_filter in profile.model_filters)
        raise UnsupportedError(
            f"the profile {name} reproduces its authors' code for models that {supported}: {adapter.name} "
            f"({adapter.model_class_name}) is not one of them"
        )
    methods = dict(profile.methods)
    for model_filter, settings in profile.settings_by_model.items():
        if model_filter.matches(adapter):
            methods |= settings
    return replace(profile, methods=methods)
