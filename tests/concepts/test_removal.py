"""Removal of a direction from a model: which states of which layers change, and that the model is restored."""

import pytest
import torch

from clearhead.concepts.ablation_cost import compute_classification_cost, compute_masked_lm_cost
from clearhead.concepts.densray import fit_densray
from clearhead.concepts.hidden_states import compute_layer_states
from clearhead.concepts.layer_hooks import find_hook_points
from clearhead.concepts.removal import (
    ablated_directions,
    compute_conceptor_negation,
    compute_removal_projection,
    fit_pca_direction,
)
from clearhead.errors import InputError
from tests.models import TEXTS, explainer, inputs


def direction(width=32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    first, second = (torch.randn(40, width, generator=generator).double() for _ in range(2))
    return fit_densray(first + 1, second)


def random_pairs():
    generator = torch.Generator().manual_seed(2)
    return torch.randn(60, 8, generator=generator).double(), torch.randn(60, 8, generator=generator).double()


@pytest.mark.parametrize("subject", ["bert/mask", "albert/classify", "vit/image", "deberta/classify"])
def test_states_equal_output_hidden_states(subject):
    ex, raws = explainer(subject), inputs(subject)
    result = compute_layer_states(ex, raws, ["embeddings", 0, -1], batch_size=2)
    for raw, captured in zip(raws, result, strict=True):
        batch = ex.adapter.collate(ex.adapter.make_samples(raw, input_options()))
        with torch.no_grad():
            hidden_states = ex.adapter.model(**batch, output_hidden_states=True).hidden_states
        for layer, index in (("embeddings", 0), (0, 1)):
            torch.testing.assert_close(captured.states[layer], hidden_states[index][0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("subject", ["bert/mask", "albert/classify", "vit/image", "deberta/classify"])
def test_removed_direction_is_zero_in_its_layers_only(subject):
    ex, raws, q = explainer(subject), inputs(subject), direction()
    states_before = compute_layer_states(ex, raws, ["embeddings", 0, 1, 2])
    with ablated_directions(ex, {"embeddings": q, 1: q}):
        ablated_states = compute_layer_states(ex, raws, ["embeddings", 0, 1, 2])
    states_after = compute_layer_states(ex, raws, ["embeddings", 0, 1, 2])
    for before, ablated, after in zip(states_before, ablated_states, states_after, strict=True):
        for layer, is_removed in (("embeddings", True), (0, False), (1, True), (2, False)):
            assert (q.project(ablated.states[layer]).abs().max() < 1e-6) == is_removed
            assert q.project(before.states[layer]).abs().max() > 1e-3
            torch.testing.assert_close(after.states[layer], before.states[layer], rtol=0, atol=0)
        torch.testing.assert_close(
            ablated.states["embeddings"],
            before.states["embeddings"] @ compute_removal_projection(q).to(before.states["embeddings"]),
            rtol=1e-5,
            atol=1e-6,
        )


def test_removal_is_active_while_a_method_runs():
    ex, q = explainer("bert/classify"), direction()
    unchanged = ex.explain(TEXTS[0], method="grad-sam").scores
    with ablated_directions(ex, {0: q}):
        ablated = ex.explain(TEXTS[0], method="grad-sam").scores
    assert abs(unchanged - ablated).max() > 1e-6
    assert (ex.explain(TEXTS[0], method="grad-sam").scores == unchanged).all()
    assert not ex.adapter.model._forward_pre_hooks


def test_hooks_are_removed_when_a_pass_fails():
    ex = explainer("bert/classify")
    with (
        pytest.raises(InputError, match="8 features, but the states of the layer have 32"),
        ablated_directions(ex, {0: direction(8)}),
    ):
        ex.explain(TEXTS[0], method="grad-sam")
    assert all(not site.block._forward_hooks and not site.block._forward_pre_hooks for site in find_hook_points(ex))
    with (
        pytest.raises(InputError, match="layer 3 does not exist: use 0 to 2"),
        ablated_directions(ex, {3: direction()}),
    ):
        pass


def test_pca_direction_is_the_principal_component_of_pairs():
    first, second = random_pairs()
    centred = torch.cat([first - (first + second) / 2, second - (first + second) / 2])
    _, _, v = torch.linalg.svd(centred)
    assert abs(fit_pca_direction(first, second).q[0] @ v[0]) == pytest.approx(1, abs=1e-10)
    with pytest.raises(InputError, match="takes pairs, but the sets contain 60 and 59"):
        fit_pca_direction(first, second[1:])


def test_conceptor_negation_damps_each_axis_by_its_variance():
    first, second = random_pairs()
    first, second = first + 3, second + 3
    stacked = torch.cat([first, second])
    r = stacked.T @ stacked / 120
    values, axes = torch.linalg.eigh(r)
    expected = axes @ torch.diag(1 - values / (values + 0.25)) @ axes.T
    result = compute_conceptor_negation(first, second, aperture=2.0)
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-10)
    with pytest.raises(InputError, match="must be greater than 0"):
        compute_conceptor_negation(first, second, aperture=0)


def test_removal_cost_is_measured_on_the_same_inputs():
    ex, q = explainer("bert/classify"), direction()
    labels = [int(ex.explain(text, method="grad-sam").prediction["index"]) for text in TEXTS]
    result = compute_classification_cost(ex, TEXTS, labels, {2: q})
    assert result["accuracy before"].mean == 1 and result["loss difference"].mean != 0
    identity = compute_classification_cost(ex, TEXTS, labels, {2: torch.eye(32).double()})
    assert identity["loss difference"].mean == pytest.approx(0, abs=1e-12)
    with pytest.raises(InputError, match="there are 3 inputs and 2 labels"):
        compute_classification_cost(ex, TEXTS, labels[:2], {2: q})
    with pytest.raises(InputError, match="is not a masked language model"):
        compute_masked_lm_cost(ex, TEXTS, {2: q})


def input_options():
    from clearhead.adapters import InputOptions

    return InputOptions()
