"""A model without a direction: what is removed, from which layer, and that the model is itself again afterwards."""

import pytest
import torch

from clearhead.concepts.ablation_cost import cost_at_masks, cost_with_labels
from clearhead.concepts.densray import densray
from clearhead.concepts.hidden_states import states_of
from clearhead.concepts.layer_hooks import sites
from clearhead.concepts.removal import conceptor_negation, hard_direction, removed, without
from clearhead.errors import InputError
from tests.models import TEXTS, explainer, inputs


def direction(width=32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    first, second = (torch.randn(40, width, generator=generator).double() for _ in range(2))
    return densray(first + 1, second)


def random_pairs():
    generator = torch.Generator().manual_seed(2)
    return torch.randn(60, 8, generator=generator).double(), torch.randn(60, 8, generator=generator).double()


@pytest.mark.parametrize("subject", ["bert/mask", "albert/classify", "vit/image", "deberta/classify"])
def test_states_are_the_models_own(subject):
    ex, raws = explainer(subject), inputs(subject)
    found = states_of(ex, raws, [0, 1, -1], batch_size=2)
    for raw, own in zip(raws, found, strict=True):
        batch = ex.subject.collate(ex.subject.samples(raw, how()))
        with torch.no_grad():
            real = ex.subject.model(**batch, output_hidden_states=True).hidden_states
        for layer in (0, 1):
            torch.testing.assert_close(own.states[layer], real[layer][0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("subject", ["bert/mask", "albert/classify", "vit/image", "deberta/classify"])
def test_a_removed_direction_is_gone_from_its_layers_alone(subject):
    ex, raws, q = explainer(subject), inputs(subject), direction()
    before = states_of(ex, raws, [0, 1, 2, 3])
    with removed(ex, {0: q, 2: q}):
        inside = states_of(ex, raws, [0, 1, 2, 3])
    after = states_of(ex, raws, [0, 1, 2, 3])
    for was, now, again in zip(before, inside, after, strict=True):
        for layer, gone in ((0, True), (1, False), (2, True), (3, False)):
            assert (q.projection(now.states[layer]).abs().max() < 1e-6) == gone
            assert q.projection(was.states[layer]).abs().max() > 1e-3
            torch.testing.assert_close(again.states[layer], was.states[layer], rtol=0, atol=0)
        torch.testing.assert_close(now.states[0], was.states[0] @ without(q).to(was.states[0]), rtol=1e-5, atol=1e-6)


def test_it_is_gone_also_while_a_method_records():
    ex, q = explainer("bert/classify"), direction()
    plain = ex.explain(TEXTS[0], method="grad-sam").scores
    with removed(ex, {1: q}):
        other = ex.explain(TEXTS[0], method="grad-sam").scores
    assert abs(plain - other).max() > 1e-6
    assert (ex.explain(TEXTS[0], method="grad-sam").scores == plain).all()
    assert not ex.subject.model._forward_pre_hooks


def test_hooks_go_when_a_pass_fails():
    ex = explainer("bert/classify")
    with pytest.raises(InputError, match="8 wide, but the layer's states are 32"), removed(ex, {1: direction(8)}):
        ex.explain(TEXTS[0], method="grad-sam")
    assert all(not site.block._forward_hooks and not site.block._forward_pre_hooks for site in sites(ex))
    with pytest.raises(InputError, match="layer 4 does not exist: give 0"), removed(ex, {4: direction()}):
        pass


def test_hard_debiasing_is_the_principal_component_of_pairs():
    first, second = random_pairs()
    centred = torch.cat([first - (first + second) / 2, second - (first + second) / 2])
    _, _, v = torch.linalg.svd(centred)
    assert abs(hard_direction(first, second).q[0] @ v[0]) == pytest.approx(1, abs=1e-10)
    with pytest.raises(InputError, match="takes pairs, but the sets hold 60 and 59"):
        hard_direction(first, second[1:])


def test_conceptor_negation_damps_each_axis_by_how_much_lies_there():
    first, second = random_pairs()
    first, second = first + 3, second + 3
    every = torch.cat([first, second])
    r = every.T @ every / 120
    values, axes = torch.linalg.eigh(r)
    expected = axes @ torch.diag(1 - values / (values + 0.25)) @ axes.T
    found = conceptor_negation(first, second, aperture=2.0)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    with pytest.raises(InputError, match="must be greater than 0"):
        conceptor_negation(first, second, aperture=0)


def test_what_removing_costs_is_measured_on_the_same_inputs():
    ex, q = explainer("bert/classify"), direction()
    labels = [int(ex.explain(text, method="grad-sam").prediction["index"]) for text in TEXTS]
    found = cost_with_labels(ex, TEXTS, labels, {2: q})
    assert found["accuracy before"].mean == 1 and found["loss difference"].mean != 0
    nothing = cost_with_labels(ex, TEXTS, labels, {2: torch.eye(32).double()})
    assert nothing["loss difference"].mean == pytest.approx(0, abs=1e-12)
    with pytest.raises(InputError, match="there are 3 inputs and 2 labels"):
        cost_with_labels(ex, TEXTS, labels[:2], {2: q})
    with pytest.raises(InputError, match="guesses no masked words"):
        cost_at_masks(ex, TEXTS, {2: q})


def how():
    from clearhead.adapters import How

    return How()
