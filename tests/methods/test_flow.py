"""Attention flow equals its reference implementation, minimal cuts, and known values; cost warnings."""

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
def test_equals_reference_implementation(subject: str) -> None:
    replica_comparison.assert_equals_reference("flow", subject)


def test_all_rows_equal_reference() -> None:
    replica_comparison.assert_equals_reference(
        "flow", "bert/classify", all_rows=True, layers=replica_comparison.LAYER_RANGES[1]
    )


@pytest.mark.parametrize("layers", replica_comparison.LAYER_RANGES, ids=str)
def test_selected_layers_and_heads_equal_reference(layers: tuple) -> None:
    for heads in (None, replica_comparison.HEADS[1]):
        replica_comparison.assert_equals_reference("flow", "bert/classify", layers=layers, heads=heads)


def draw_mixing_maps(layers: int, units: int, seed: int, concentration: float = 0.2) -> torch.Tensor:
    attention = np.random.default_rng(seed).dirichlet(np.full(units, concentration), size=(layers, units))
    return (torch.tensor(attention) + torch.eye(units)) / 2


def compute_min_cut(layers: np.ndarray, p: int, j: int) -> float:
    """Return the capacity of the minimal cut between (L, p) and (0, j), over all partitions of the nodes."""
    depth, n, _ = layers.shape
    others = [node for node in product(range(depth + 1), range(n)) if node not in ((depth, p), (0, j))]
    best = np.inf
    for sides in product((True, False), repeat=len(others)):
        source_side = {(depth, p), *(node for node, side in zip(others, sides, strict=True) if side)}
        cut = sum(
            layers[level - 1, i, k]
            for level, i in source_side
            if level
            for k in range(n)
            if (level - 1, k) not in source_side
        )
        best = min(best, cut)
    return best


@pytest.mark.parametrize("seed", range(3))
def test_max_flow_equals_min_cut(seed: int) -> None:
    """Max-flow min-cut theorem, on graphs of 3 × 3 nodes."""
    layers = draw_mixing_maps(2, 3, seed)
    flows = compute_max_flows(layers, torch.tensor([False, True, False]))[1]
    assert replica_comparison.gap(flows, [compute_min_cut(layers.numpy(), 1, j) for j in range(3)]) < 1e-12


@pytest.mark.parametrize("seed", range(3))
def test_flows_of_fewer_layers_save_problems_without_changing_flows(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = draw_mixing_maps(6, 5, seed, concentration=2)
    all_rows = torch.ones(5, dtype=torch.bool)
    solved: list[int] = []
    monkeypatch.setattr(MiddleLayersGraph, "compute_max_flow", _count_calls(MiddleLayersGraph.compute_max_flow, solved))
    flows = None
    for depth in range(1, 7):
        flows = compute_max_flows(layers[:depth], all_rows, flows)
        capacity = graph([2 * layer[None].numpy() - np.eye(5) for layer in layers[:depth]], None)
        expected = [[max_flow(capacity, 5 * depth + p, j) for j in range(5)] for p in range(5)]
        assert replica_comparison.gap(flows, np.array(expected)) < 1e-10
    assert 0 < len(solved) < 4 * 25


@pytest.mark.parametrize("layers", [4, 7])
def test_lower_bounds_save_problems_without_changing_flows(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly uniform attention, as in deep models with many units: the first and the last layer limit the flows."""
    layer_maps = draw_mixing_maps(layers, 12, seed=1, concentration=50)
    all_rows = torch.ones(12, dtype=torch.bool)
    solved: list[int] = []
    monkeypatch.setattr(MiddleLayersGraph, "compute_max_flow", _count_calls(MiddleLayersGraph.compute_max_flow, solved))
    lower_bounds = compute_flow_lower_bounds(layer_maps, all_rows)
    assert len(solved) == 2 * 12
    flows = compute_max_flows(layer_maps, all_rows)
    capacity = graph([2 * layer[None].numpy() - np.eye(12) for layer in layer_maps], None)
    expected = np.array([[max_flow(capacity, 12 * layers + p, j) for j in range(12)] for p in range(12)])
    assert replica_comparison.gap(flows, expected) < 1e-10
    assert (lower_bounds.numpy() <= expected + 1e-10).all()
    if layers == 7:
        assert len(solved) < 2 * 24 + 12 * 12 / 2  # the lower bounds decide most of them


@pytest.mark.parametrize("seed", range(3))
def test_lower_bounds_do_not_exceed_the_flows(seed: int) -> None:
    layer_maps = draw_mixing_maps(5, 6, seed)
    requested_rows = torch.tensor([True, False, False, True, False, False])
    flows = compute_max_flows(layer_maps, torch.ones(6, dtype=torch.bool))
    lower_bounds = compute_flow_lower_bounds(layer_maps, requested_rows)
    assert (lower_bounds <= flows + 1e-12).all() and not lower_bounds[[1, 2, 4, 5]].any()


def test_float32_attention_rows_are_normalised_in_float64() -> None:
    """Otherwise upper and lower bounds would differ by float32 rounding, and every problem would be solved."""
    method = AttentionFlow(unit_context=make_unit_context(7, 1))
    attention = torch.softmax(torch.randn(1, 2, 7, 7, generator=torch.Generator().manual_seed(0)), dim=-1)
    method.on_call(AttentionCall(0, "attention", attention=attention))
    assert method.mixing_maps[0].dtype == torch.float64 and (method.mixing_maps[0].sum(-1) - 1).abs().max() < 1e-15


def test_depths_false_gives_the_same_scores_without_per_layer() -> None:
    ex, (text, *_) = replica_comparison.explainer("bert/classify"), models.inputs("bert/classify")
    e, without_depths = ex.explain(text, "flow"), ex.explain(text, clearhead.Method("flow", depths=False))
    np.testing.assert_array_equal(e.scores, without_depths.scores)
    assert e.per_layer is not None and without_depths.per_layer is None


def _count_calls(function: Callable[..., float], calls: list[int]) -> Callable[..., float]:
    def counted(*args: Any) -> float:
        calls.append(1)
        return function(*args)

    return counted


def test_one_layer_equals_rollout() -> None:
    ex, (text, *_) = replica_comparison.explainer("bert/classify"), models.inputs("bert/classify")
    for layer in range(3):
        results = ex.explain(text, ["flow", "rollout"], layers=(layer, layer + 1), rows="all")
        assert replica_comparison.gap(results["flow"].matrix, results["rollout"].matrix) < 1e-12


def test_identity_attention_gives_identity_flows() -> None:
    flows = compute_max_flows(torch.eye(4, dtype=torch.float64).expand(3, 4, 4), torch.ones(4, dtype=torch.bool))
    np.testing.assert_array_equal(flows, np.eye(4))


def test_does_not_depend_on_the_target() -> None:
    ex, (text, *_) = replica_comparison.explainer("bert/classify"), models.inputs("bert/classify")
    first, second = (ex.explain(text, "flow", target=label).scores for label in (0, 1))
    np.testing.assert_array_equal(first, second)


def test_dual_encoder_is_supported_and_cross_attention_is_rejected() -> None:
    e = dual_models.explainer("clip").explain(text="So boring!", image=dual_models.pictures()[0], method="flow")
    assert [stream.scores.sum() for stream in e] == pytest.approx([1, 1])
    with pytest.raises(
        clearhead.UnsupportedError, match=r"streams of .* attend to each other, for which the method has no rule"
    ):
        joint_models.explainer("lxmert").explain(**joint_models.inputs("lxmert")[0], method="flow")


def make_unit_context(units: int, layers: int, rows: int = 1) -> UnitContext:
    readout = torch.eye(units)[None, :rows]
    return UnitContext(readout, torch.ones(1, units, dtype=torch.bool), (0,), layers=range(layers))


def test_cost_warning_states_number_of_problems_and_time() -> None:
    """197 units in 12 layers, as in ViT-B: n problems for one row, for each depth from the third layer on."""
    with pytest.warns(CostWarning, match=r"1,970 max-flow problems .* 2,169 nodes and 388,484 edges, .* 47 s"):
        AttentionFlow(unit_context=make_unit_context(197, 12))
    with pytest.warns(CostWarning, match=r"38,809 max-flow problems .* 28 min"):
        AttentionFlow(unit_context=make_unit_context(197, 12, rows=197))
    with pytest.warns(CostWarning, match=r"394 max-flow problems .* 68 s"):
        AttentionFlow(unit_context=make_unit_context(394, 12), depths=False)


def test_small_problem_gives_no_warning() -> None:
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        AttentionFlow(unit_context=make_unit_context(64, 12))
    assert record == []


def test_missing_igraph_is_rejected_with_install_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "igraph", None)
    ex = replica_comparison.explainer("bert/classify")
    with pytest.raises(
        clearhead.UnsupportedError, match=r"igraph, which is not installed: pip install 'clearhead\[flow\]'"
    ):
        ex.explain(models.inputs("bert/classify")[0], "flow")
    row = next(row for row in ex.methods() if row.name == "flow")
    assert not row.applies and "clearhead[flow]" in row.why_not
