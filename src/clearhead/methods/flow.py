"""Attention flow: the maximum flow from the read-out position to each input unit through the attention of all layers.

    F_pj = max-flow from (L, p) to (0, j),     r = w · F, rows of F divided by their sums

in the graph of (L + 1) · n nodes whose edge from (l, i) to (l − 1, j) has the capacity Ã_l[i, j], with Ã_l = E_h A_l +
I and rows divided by their sums, as in rollout. `per_layer[l]` is the read-out after layer l. Each F_pj is a separate
max-flow problem, solved exactly by igraph (push–relabel): n problems for each read-out row and each depth. Several rows
(`rows="all"`) are read out after the last layer only, and so is a single row with depths=False. A warning announces
long computations.

With many read-out rows (mean pooling), many problems can be skipped. F_pj ≤ min(1, Σ_i Ã_1[i, j]) is an upper bound,
and smaller problems give lower bounds, since flows can be mixed, and joined at a middle layer m:

    F_pj  ≥  Σ_k Ã_L[p, k] F′_kj                     F′: the flows after one layer less
    F_pj  ≥  v_p + f_j − 1                           for any supply q at the units of layer m with a sum of one

with v_p the maximum flow from p into q, and f_j the maximum flow from q to j. If the bounds meet, they are the flow.
"""

import warnings
from functools import reduce

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from clearhead.capture.tape import AttentionCall, Tape
from clearhead.errors import CostWarning
from clearhead.methods.base import AttributionMethod, MethodScores, register_method
from clearhead.methods.cost import Cost

#: Edges that igraph processes per second, summed over all problems (measured).
EDGES_PER_SECOND = 9_000_000
#: Estimated duration above which a warning is given.
COST_WARNING_SECONDS = 30
#: Largest difference between an upper and a lower bound that are taken to be equal.
BOUND_TOLERANCE = 1e-12


@register_method(
    "flow",
    family="attention",
    requires=("attention",),
    cost=Cost(forward=1, needs_max_flow=True, note="solved by igraph"),
    citation="Abnar & Zuidema (2020), Quantifying attention flow in transformers, ACL",
    signed=False,
    target="none",
    measures="the maximum flow of attention from each unit to the read-out position",
    misleads="the maximum flow need not match the information flow in the model, and it ignores values and target",
    supports=("layers", "heads", "rows"),
    layer_scores="depths",
    axioms=("rows sum to one",),
    required_package="igraph",
    pip_extra="flow",
)
class AttentionFlow(AttributionMethod):
    """Attention flow.

    Attributes:
        depths: Whether to read out after every layer, not only after the last one.
    """

    depths: bool = True

    def setup(self) -> None:
        self.mixing_maps: list[Float[Tensor, "batch query key"]] = []
        row_counts = (self.unit_context.readout != 0).any(1).sum(-1).tolist()
        num_layers = len(self.unit_context.layers)
        # layers whose edges are all part of the graph: all but the first and the last
        num_middle_layers = [depth - 2 for depth in self._get_readout_depths(num_layers) if depth > 2]
        lengths = self.unit_context.lengths.tolist()
        num_problems = [
            count * length * len(num_middle_layers) for count, length in zip(row_counts, lengths, strict=True)
        ]
        work = sum(
            count * length**3 * sum(num_middle_layers) for count, length in zip(row_counts, lengths, strict=True)
        )
        if work > COST_WARNING_SECONDS * EDGES_PER_SECOND:
            longest = int(self.unit_context.lengths.max())
            warnings.warn(
                f"flow: {sum(num_problems):,} max-flow problems in graphs of up to {(num_layers - 1) * longest + 2:,} "
                f"nodes and {(num_layers - 2) * longest**2 + 2 * longest:,} edges, which may take "
                f"{_format_duration(work / EDGES_PER_SECOND)}",
                CostWarning,
                stacklevel=2,
            )

    def on_call(self, call: AttentionCall) -> None:
        """Keep Ã_l = E_h A_l + I with rows divided by their sums, in float64 on the CPU."""
        # float64 before rows are normalised, since the bounds meet only if rows sum to one
        attention = call.mean_attention.double().cpu()
        mixed = attention + torch.eye(attention.shape[-1]).to(attention)
        self.mixing_maps.append(mixed / mixed.sum(-1, keepdim=True))

    def compute_scores(self, tape: Tape) -> MethodScores:
        """Read out w · F at each depth; the flows of one depth bound those of the next."""
        layers = torch.stack(self.mixing_maps[::-1], dim=1)  # the first layer first
        readout = self.unit_context.readout
        depths = self._get_readout_depths(layers.shape[1])
        scores = torch.zeros(len(readout), len(depths), *readout.shape[1:], dtype=torch.float64)
        for i, length in enumerate(self.unit_context.lengths.tolist()):
            weights = readout[i, :, :length].double().cpu()
            flows = None
            for d, depth in enumerate(depths):
                flows = compute_max_flows(layers[i, :depth, :length, :length], _select_requested_rows(weights), flows)
                scores[i, d, :, :length] = weights @ _normalise_rows(flows)
        scores = scores.to(readout)
        return MethodScores(scores[:, -1], per_layer=scores[:, :, 0] if self._reads_every_depth else None)

    @property
    def _reads_every_depth(self) -> bool:
        """Whether scores are read out after every layer: with `depths`, for a single row."""
        return self.depths and self.unit_context.readout.shape[1] == 1

    def _get_readout_depths(self, num_layers: int) -> range:
        """Return the numbers of layers after which the flow is read out."""
        first_depth = 1 if self._reads_every_depth else num_layers
        return range(first_depth, num_layers + 1)


def compute_max_flows(
    layer_maps: Float[Tensor, "layer unit unit"],
    requested_rows: Bool[Tensor, "unit"],
    previous_flows: Float[Tensor, "unit unit"] | None = None,
) -> Float[Tensor, "unit unit"]:
    """Compute rows of F, the maximum flows from units of the last layer to the inputs.

    Args:
        layer_maps: Ã of each layer, the first layer first.
        requested_rows: True for the rows to compute; the others stay zero.
        previous_flows: F after one layer less, for lower bounds.
    """
    first = layer_maps[0]
    last = layer_maps[-1]
    graph = None
    if len(layer_maps) > 2:
        graph = MiddleLayersGraph(layer_maps[1:-1])
    flows = torch.zeros_like(first)
    lower_bounds = torch.zeros_like(first)
    if len(layer_maps) > 3 and requested_rows.count_nonzero() > 2:
        lower_bounds = compute_flow_lower_bounds(layer_maps, requested_rows)
    for p in requested_rows.nonzero().flatten().tolist():
        if len(layer_maps) == 1:
            flows[p] = first[p]
        elif graph is None:  # through each middle unit flows the smaller of two capacities
            flows[p] = torch.minimum(last[p, :, None], first).sum(0)
        else:
            flows[p] = first.sum(0).clamp(max=last[p].sum())
            lower_bound = lower_bounds[p]
            if previous_flows is not None:
                lower_bound = torch.maximum(lower_bound, last[p] @ previous_flows)
            for j in (flows[p] - lower_bound > BOUND_TOLERANCE).nonzero().flatten().tolist():
                flows[p, j] = graph.compute_max_flow(last[p], first[:, j])
    return flows


def compute_flow_lower_bounds(
    layer_maps: Float[Tensor, "layer unit unit"], requested_rows: Bool[Tensor, "unit"]
) -> Float[Tensor, "unit unit"]:
    """Compute lower bounds of F for the requested rows: v_p + f_j − 1, with one problem per row and per unit.

    The supply q of the middle layer is the mean rollout of the requested rows, which is close to what each can send.
    """
    middle = len(layer_maps) // 2
    lower = layer_maps[:middle]
    upper = layer_maps[middle:]
    rows = requested_rows.nonzero().flatten().tolist()
    supply = reduce(torch.matmul, upper.flip(0))[rows].mean(0)
    upper_graph = MiddleLayersGraph(upper[:-1])
    lower_graph = MiddleLayersGraph(lower[1:])
    received = layer_maps.new_tensor([lower_graph.compute_max_flow(supply, column) for column in lower[0].T])
    bounds = torch.zeros_like(layer_maps[0])
    for p in rows:
        bounds[p] = (upper_graph.compute_max_flow(upper[-1, p], supply) + received - supply.sum()).clamp(min=0)
    return bounds


def _select_requested_rows(weights: Float[Tensor, "row unit"]) -> Bool[Tensor, "unit"]:
    """Select the rows of F to compute: those with a weight, or all if more than half have one.

    The flows of all rows give the lower bounds of the next layer, which saves problems there.
    """
    requested = weights.any(0)
    if 2 * requested.sum() > len(requested):
        return torch.ones_like(requested)
    return requested


def _normalise_rows(rows: Float[Tensor, "unit unit"]) -> Float[Tensor, "unit unit"]:
    """Divide each row by its sum; rows of zeros stay zero."""
    sums = rows.sum(-1, keepdim=True)
    return rows / torch.where(sums == 0, 1.0, sums)


class MiddleLayersGraph:
    """Flow graph of the layers between the last, of which one row is needed, and the first, of which one column is.

    One graph serves all rows and columns: their entries are the capacities of its last edges, from the source and to
    the sink.

    Args:
        layers: The attention of the middle layers, residual connections included, from the first to the last.
    """

    def __init__(self, layers: Float[Tensor, "layer unit unit"]) -> None:
        from igraph import Graph

        depth, n, _ = layers.shape
        layer, i, j = layers.nonzero(as_tuple=True)  # unit i after layer l is node (l + 1) · n + i
        self.source = (depth + 1) * n
        self.sink = self.source + 1
        units = torch.arange(n)
        ones = torch.ones(n, dtype=torch.long)
        edges = [
            torch.stack([(layer + 1) * n + i, layer * n + j], dim=1),
            torch.stack([self.source * ones, depth * n + units], dim=1),
            torch.stack([units, self.sink * ones], dim=1),
        ]
        self.graph = Graph(n=self.sink + 1, edges=torch.cat(edges).numpy(), directed=True)
        self.capacities = layers[layer, i, j].tolist()

    def compute_max_flow(
        self, source_capacities: Float[Tensor, "unit"], sink_capacities: Float[Tensor, "unit"]
    ) -> float:
        """Return the maximum flow with these capacities from the source and to the sink."""
        capacity = [*self.capacities, *source_capacities.tolist(), *sink_capacities.tolist()]
        return float(self.graph.maxflow_value(self.source, self.sink, capacity=capacity))


def _format_duration(seconds: float) -> str:
    """Format a duration in seconds, minutes or hours.

    >>> _format_duration(45), _format_duration(600), _format_duration(9000)
    ('45 s', '10 min', '2.5 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
