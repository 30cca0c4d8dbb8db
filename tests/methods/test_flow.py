"""Attention flow against its replica, against minimal cuts, and where its answer is known."""

import sys
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

import clearhead
from clearhead.capture.tape import AttentionCall
from clearhead.errors import CostWarning
from clearhead.methods import UnitContext
from clearhead.methods.flow import AttentionFlow, MiddleLayersGraph, compute_flow_lower_bounds, compute_max_flows
from tests import dual_models, joint_models, models
from tests.methods import replica_comparison
from tests.replicas.flow import graph, max_flow

pytestmark = pytest.mark.skipif(find_spec("igraph") is None, reason="igraph is not installed")


@pytest.mark.parametrize("subject", ["bert/classify", "modernbert/mask", "vit/image", "beit/image"])
def test_equals_its_replica(subject: str) -> None:
    replica_comparison.assert_twins("flow", subject)


def test_every_row() -> None:
    replica_comparison.assert_twins("flow", "bert/classify", every_row=True, layers=replica_comparison.RANGES[1])


@pytest.mark.parametrize("layers", replica_comparison.RANGES, ids=str)
def test_layers_and_heads(layers: tuple) -> None:
    for heads in (None, replica_comparison.HEADS[1]):
        replica_comparison.assert_twins("flow", "bert/classify", layers=layers, heads=heads)


def mixed(layers: int, units: int, seed: int, evenly: float = 0.2) -> torch.Tensor:
    attention = np.random.default_rng(seed).dirichlet(np.full(units, evenly), size=(layers, units))
    return (torch.tensor(attention) + torch.eye(units)) / 2


def least_cut(layers: np.ndarray, p: int, j: int) -> float:
    """The least capacity that parts (L, p) from (0, j), all ways of parting the nodes tried."""
    depth, n, _ = layers.shape
    others = [node for node in product(range(depth + 1), range(n)) if node not in ((depth, p), (0, j))]
    best = np.inf
    for sides in product((True, False), repeat=len(others)):
        above = {(depth, p), *(node for node, side in zip(others, sides, strict=True) if side)}
        cut = sum(
            layers[level - 1, i, k] for level, i in above if level for k in range(n) if (level - 1, k) not in above
        )
        best = min(best, cut)
    return best


@pytest.mark.parametrize("seed", range(3))
def test_is_the_least_cut(seed: int) -> None:
    """Max-flow min-cut, in graphs of 3 × 3 nodes."""
    layers = mixed(2, 3, seed)
    flows = compute_max_flows(layers, torch.tensor([False, True, False]))[1]
    assert replica_comparison.gap(flows, [least_cut(layers.numpy(), 1, j) for j in range(3)]) < 1e-12


@pytest.mark.parametrize("seed", range(3))
def test_flows_after_fewer_layers_save_problems_and_change_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = mixed(6, 5, seed, evenly=2)
    all_rows = torch.ones(5, dtype=torch.bool)
    solved: list[int] = []
    monkeypatch.setattr(MiddleLayersGraph, "compute_max_flow", _counting(MiddleLayersGraph.compute_max_flow, solved))
    flows = None
    for depth in range(1, 7):
        flows = compute_max_flows(layers[:depth], all_rows, flows)
        capacity = graph([2 * layer[None].numpy() - np.eye(5) for layer in layers[:depth]], None)
        slow = [[max_flow(capacity, 5 * depth + p, j) for j in range(5)] for p in range(5)]
        assert replica_comparison.gap(flows, np.array(slow)) < 1e-10
    assert 0 < len(solved) < 4 * 25


@pytest.mark.parametrize("layers", [4, 7])
def test_lower_bounds_save_problems_and_change_nothing(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly even attention, as in deep models with many units: flows are limited by the first and the last layer."""
    layer_maps = mixed(layers, 12, seed=1, evenly=50)
    all_rows = torch.ones(12, dtype=torch.bool)
    solved: list[int] = []
    monkeypatch.setattr(MiddleLayersGraph, "compute_max_flow", _counting(MiddleLayersGraph.compute_max_flow, solved))
    lower_bounds = compute_flow_lower_bounds(layer_maps, all_rows)
    assert len(solved) == 2 * 12
    flows = compute_max_flows(layer_maps, all_rows)
    capacity = graph([2 * layer[None].numpy() - np.eye(12) for layer in layer_maps], None)
    slow = np.array([[max_flow(capacity, 12 * layers + p, j) for j in range(12)] for p in range(12)])
    assert replica_comparison.gap(flows, slow) < 1e-10
    assert (lower_bounds.numpy() <= slow + 1e-10).all()
    if layers == 7:
        assert len(solved) < 2 * 24 + 12 * 12 / 2  # the lower bounds decide most of them


@pytest.mark.parametrize("seed", range(3))
def test_lower_bounds_do_not_exceed_the_flows(seed: int) -> None:
    layer_maps = mixed(5, 6, seed)
    requested_rows = torch.tensor([True, False, False, True, False, False])
    flows = compute_max_flows(layer_maps, torch.ones(6, dtype=torch.bool))
    lower_bounds = compute_flow_lower_bounds(layer_maps, requested_rows)
    assert (lower_bounds <= flows + 1e-12).all() and not lower_bounds[[1, 2, 4, 5]].any()


def test_rows_sum_to_one_in_float64_whatever_the_model_computes_in() -> None:
    """Else upper and lower ends of a flow would miss each other by float32's rounding, and every problem be solved."""
    one = AttentionFlow(unit_context=frame(7, 1))
    attention = torch.softmax(torch.randn(1, 2, 7, 7, generator=torch.Generator().manual_seed(0)), dim=-1)
    one.on_call(AttentionCall(0, "attention", attention=attention))
    assert one.mixing_maps[0].dtype == torch.float64 and (one.mixing_maps[0].sum(-1) - 1).abs().max() < 1e-15


def test_after_the_last_layer_alone_the_scores_are_the_same() -> None:
    ex, (text, *_) = replica_comparison.explainer("bert/classify"), models.inputs("bert/classify")
    whole, last = ex.explain(text, "flow"), ex.explain(text, clearhead.Method("flow", depths=False))
    np.testing.assert_array_equal(whole.scores, last.scores)
    assert whole.per_layer is not None and last.per_layer is None


def _counting(function: Callable[..., float], calls: list[int]) -> Callable[..., float]:
    def counted(*args: Any) -> float:
        calls.append(1)
        return function(*args)

    return counted


def test_one_layer_is_rollout() -> None:
    ex, (text, *_) = replica_comparison.explainer("bert/classify"), models.inputs("bert/classify")
    for layer in range(3):
        both = ex.explain(text, ["flow", "rollout"], layers=(layer, layer + 1), rows="all")
        assert replica_comparison.gap(both["flow"].matrix, both["rollout"].matrix) < 1e-12


def test_units_that_attend_to_themselves_only_keep_everything() -> None:
    flows = compute_max_flows(torch.eye(4, dtype=torch.float64).expand(3, 4, 4), torch.ones(4, dtype=torch.bool))
    np.testing.assert_array_equal(flows, np.eye(4))


def test_does_not_depend_on_the_target() -> None:
    ex, (text, *_) = replica_comparison.explainer("bert/classify"), models.inputs("bert/classify")
    one, other = (ex.explain(text, "flow", target=label).scores for label in (0, 1))
    np.testing.assert_array_equal(one, other)


def test_streams_that_look_at_themselves_alone_and_at_each_other() -> None:
    both = dual_models.explainer("clip").explain(text="So boring!", image=dual_models.pictures()[0], method="flow")
    assert [part.scores.sum() for part in both] == pytest.approx([1, 1])
    with pytest.raises(clearhead.UnsupportedError, match="streams look at each other, which it has no rule for"):
        joint_models.explainer("lxmert").explain(**joint_models.inputs("lxmert")[0], method="flow")


def frame(units: int, layers: int, rows: int = 1) -> UnitContext:
    readout = torch.eye(units)[None, :rows]
    return UnitContext(readout, torch.ones(1, units, dtype=torch.bool), (0,), layers=range(layers))


def test_says_what_it_costs_before_it_begins() -> None:
    """197 patches in 12 layers, as in ViT-B: n problems for one row, after each layer from the third on."""
    with pytest.warns(CostWarning, match=r"1,970 max-flow problems .* 2,169 nodes and 388,484 edges, .* 47 s"):
        AttentionFlow(unit_context=frame(197, 12))
    with pytest.warns(CostWarning, match=r"38,809 max-flow problems .* 28 min"):
        AttentionFlow(unit_context=frame(197, 12, rows=197))
    with pytest.warns(CostWarning, match=r"394 max-flow problems .* 68 s"):
        AttentionFlow(unit_context=frame(394, 12), depths=False)


def test_says_nothing_where_it_is_quick() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        AttentionFlow(unit_context=frame(64, 12))
    assert said == []


def test_without_igraph_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "igraph", None)
    ex = replica_comparison.explainer("bert/classify")
    with pytest.raises(
        clearhead.UnsupportedError, match=r"igraph, which is not installed: pip install 'clearhead\[flow\]'"
    ):
        ex.explain(models.inputs("bert/classify")[0], "flow")
    line = next(line for line in ex.methods() if line.name == "flow")
    assert not line.applies and "clearhead[flow]" in line.why_not
