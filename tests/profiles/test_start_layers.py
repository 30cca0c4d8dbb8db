"""Profiles whose authors start at a fixed layer, on models of other depths than the authors' twelve layers."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import clearhead
from clearhead.profiles import PROFILES
from tests import models
from tests.methods import replica_comparison
from tests.methods.relevance_models import InputDtypeSoftmax
from tests.replicas import beyond_intuition_head as head
from tests.replicas import beyond_intuition_token as token
from tests.replicas import tam
from tests.replicas.path_passes import InputEvaluator, select_predicted_class
from tests.replicas.plain_pass import watch

HEAD, TOKEN = "beyond-intuition-head", "beyond-intuition-token"
#: Profile, method, and the authors' first layer (counted from 0), which does not depend on the depth.
STARTS = [
    ("bi_vit_h", HEAD, 3),
    ("bi_vit_c", TOKEN, 6),
    ("bi_vit_mae", HEAD, 3),
    ("bi_vit_mae", TOKEN, 6),
    ("bi_vit_dino", HEAD, 3),
    ("bi_vit_dino", TOKEN, 6),
    ("tam", "tam", 4),
]
NAMES = [f"{profile}-{method}" for profile, method, _ in STARTS]
#: The architecture that each profile is for: read from the class token, from the mean of the patches, or from both.
ARCHITECTURES = {"bi_vit_mae": "beit", "bi_vit_dino": "dinov2"}


@cache
def explainer(architecture: str, depth: int) -> clearhead.Explainer:
    models.skip_if_not_yet(architecture)
    return models.explainer(f"{architecture}/image", num_hidden_layers=depth)


def pixels() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(1))}


def authors_scores(model: Any, profile: str, layers: range) -> np.ndarray:
    """The patches' scores by the replica of the authors' method, for the class token of a ViT."""

    def value(output: Any) -> torch.Tensor:
        return select_class(output.logits[0])

    with InputDtypeSoftmax():
        with torch.no_grad():
            select_class = select_predicted_class(model(pixels()["pixel_values"].double()).logits[0])
        seen = watch(model, pixels(), value)
        feedback = head.compute_feedback(InputEvaluator(model, pixels(), value))
        if profile == "bi_vit_h":
            return head.matrix(seen, feedback, layers)[0, 1:]
        if profile == "bi_vit_c":
            return token.matrix(model, seen, feedback, layers)[0, 1:]
        return tam.scores(seen, feedback, np.eye(seen.units)[0], layers)[1:]


@pytest.mark.parametrize("depth", [7, 10, 12, 24])
@pytest.mark.parametrize(("profile", "method", "first"), [STARTS[0], STARTS[1], STARTS[-1]])
def test_absolute_start_layer_equals_the_authors_at_any_depth(
    profile: str, method: str, first: int, depth: int
) -> None:
    ex = explainer("vit", depth)
    with InputDtypeSoftmax():  # as in the authors' code; transformers' ViT computes its softmax in float32
        e = ex.explain(pixels(), method, profile=profile)
    assert e.provenance["layers"] == [first, depth] and np.isnan(e.scores[0])
    assert replica_comparison.gap(e.scores[1:], authors_scores(ex.adapter.model, profile, range(first, depth))) < 1e-9


@pytest.mark.parametrize(("profile", "method", "first"), STARTS, ids=NAMES)
def test_absolute_start_layer_on_the_architecture_of_the_profile(profile: str, method: str, first: int) -> None:
    ex = explainer(ARCHITECTURES.get(profile, "vit"), 10)
    e = ex.explain(pixels(), method, profile=profile)
    assert e.provenance["layers"] == [first, 10]
    np.testing.assert_array_equal(e.scores, ex.explain(pixels(), method, profile=profile, layers=(first, None)).scores)


@pytest.mark.parametrize(("profile", "method", "first"), STARTS, ids=NAMES)
def test_models_without_the_start_layer_are_rejected(profile: str, method: str, first: int) -> None:
    architecture = ARCHITECTURES.get(profile, "vit")
    ex = explainer(architecture, first)
    message = (
        rf"the profile {profile} starts {method} at layer {first} \(counted from 0\).* has {first} layers, and at "
        rf"least {first + 1} are needed\. Use layers= .*, or use the profile {profile}_depth_scaled"
    )
    with pytest.raises(clearhead.UnsupportedError, match=message):
        ex.explain(pixels(), method, profile=profile)
    chosen = ex.explain(pixels(), method, profile=profile, layers=(0, None))
    assert chosen.provenance["layers"] == [0, first]
    deep_enough = explainer(architecture, first + 1).explain(pixels(), method, profile=profile)
    assert deep_enough.provenance["layers"] == [first, first + 1]


def test_error_names_no_depth_scaled_profile_if_none_exists() -> None:
    with pytest.raises(clearhead.UnsupportedError, match="the profile idl_ga starts generic at layer 3") as error:
        explainer("vit", 3).explain(pixels(), "generic", profile="idl_ga")
    assert str(error.value).endswith("Use layers= to choose other layers")


@pytest.mark.parametrize(("profile", "method", "first"), STARTS, ids=NAMES)
def test_depth_scaled_profile_equals_the_authors_for_twelve_layers(profile: str, method: str, first: int) -> None:
    scaled = f"{profile}_depth_scaled"
    architecture = ARCHITECTURES.get(profile, "vit")
    ex = explainer(architecture, 12)
    expected = ex.explain(pixels(), method, profile=profile)
    e = ex.explain(pixels(), method, profile=scaled)
    assert e.provenance["layers"] == [first, 12]
    np.testing.assert_array_equal(e.scores, expected.scores)
    for depth in (1, 3, 24):
        explanation = explainer(architecture, depth).explain(
            pixels(), clearhead.Method(method, steps=2), profile=scaled
        )
        assert explanation.provenance["layers"] == [depth * first // 12, depth]


def test_every_named_depth_scaled_profile_has_the_method() -> None:
    named = [
        (settings.depth_scaled, method)
        for profile in PROFILES.values()
        for method, settings in profile.methods.items()
        if settings.depth_scaled is not None
    ]
    assert {f"{profile}_depth_scaled" for profile, _, _ in STARTS} == {name for name, _ in named}
    for name, method in named:
        assert method in PROFILES[name].methods
        assert "layers" not in PROFILES[name].methods[method].options
