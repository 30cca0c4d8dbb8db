"""LIME equals scikit-learn's ridge on the same coalitions, and solves games with known weights."""

import numpy as np
import pytest
import torch

import clearhead
from clearhead.methods.lime import Lime, fit_weighted_ridge
from tests import models
from tests.methods import coalition_values, replica_comparison
from tests.methods.test_kernel_shap import run_game
from tests.replicas import lime


def draw_coalitions(subject, raw, count, evaluations):
    """Return the coalitions that are drawn with the seed of an input."""
    sample = replica_comparison.explainer(subject).adapter.make_samples(raw, clearhead.adapters.base.InputOptions())[0]
    generator = torch.Generator().manual_seed(sample.derive_seed(0))
    rows = torch.rand(evaluations - 1, count, generator=generator) < 0.5
    return [[True] * count, *rows.tolist()]


@pytest.mark.parametrize(
    ("subject", "options"),
    [
        ("bert/classify", {}),
        ("bert/classify", {"width": 0.4, "ridge": 0.01}),
        ("roberta/mask", {}),
        ("vit/image", {"unit": "patch"}),
    ],
)
def test_equals_reference_implementation(subject: str, options: dict) -> None:
    raw, evaluations = models.inputs(subject)[0], 60
    players, units, value = coalition_values.game(subject, raw)
    e = replica_comparison.explainer(subject).explain(raw, clearhead.Method("lime", evaluations=evaluations, **options))
    rows = draw_coalitions(subject, raw, len(players), evaluations)
    replica_options = {key: value for key, value in options.items() if key != "unit"}
    slopes, intercept = lime.scores(players, value, rows, **replica_options)
    assert replica_comparison.gap(e.scores, coalition_values.on_units(slopes, players, units)) < (
        1e-6 if "image" in subject else 1e-9
    )
    assert e.base_value == pytest.approx(intercept, rel=1e-6)


def test_additive_game_recovers_its_weights_without_ridge() -> None:
    weights = np.linspace(-2, 3, 9)
    result, coalitions = run_game(Lime(unit_context=None, ridge=0.0), 9, lambda members: 5 + weights[members].sum())
    np.testing.assert_allclose(result.scores, weights, atol=1e-9)
    assert result.base_value == pytest.approx(5)
    assert result.diagnostics["misfit"] < 1e-12
    assert len(coalitions) == 1000


def test_narrow_kernel_keeps_coalitions_of_low_weight() -> None:
    """The smallest singular direction has 2e-10 of the largest weight, and an additive game is still solved."""
    generator = torch.Generator().manual_seed(0)
    z = torch.cat([torch.ones(1, 20), (torch.rand(999, 20, generator=generator) < 0.5).float()]).double()
    slopes = torch.randn(20, generator=generator).double()
    weights = (-((1 - (z.sum(1) / 20).sqrt()) ** 2) / 0.03**2).exp()
    fitted, intercept = fit_weighted_ridge(z, z @ slopes + 1, weights, ridge=0)
    torch.testing.assert_close(fitted, slopes, rtol=0, atol=1e-6)
    assert float(intercept) == pytest.approx(1, abs=1e-5)


def test_superpixel_scores_are_distributed_over_patches() -> None:
    pytest.importorskip("skimage")
    ex, image = replica_comparison.explainer("vit/image"), models.inputs("vit/image")[0]
    e = ex.explain(image, clearhead.Method("lime", evaluations=80))
    assert e.provenance["players"] == "superpixel"
    assert len(e) == 17 and e.scores[0] == 0 and np.abs(e.scores[1:]).min() > 0
    patches = ex.explain(image, clearhead.Method("lime", evaluations=80, unit="patch"))
    assert replica_comparison.gap(patches.scores, e.scores) > 1e-3


def test_certificate_reports_misfit_and_evaluations() -> None:
    checks = replica_comparison.explainer("bert/classify").explain(models.TEXTS[0], "lime").certificate["checks"]
    assert 0 < checks["misfit"] < 1
    assert checks["completeness_gap"] > 0
    assert checks["evaluations"] <= 64, "of a thousand draws no coalition is evaluated twice"


@pytest.mark.parametrize("options", [{"width": 0.0}, {"width": -1.0}, {"ridge": -1.0}])
def test_invalid_width_and_ridge_are_rejected(options: dict) -> None:
    with pytest.raises(clearhead.InputError, match=r"must be above 0|a number that is not negative"):
        replica_comparison.explainer("bert/classify").explain(models.TEXTS[0], clearhead.Method("lime", **options))
