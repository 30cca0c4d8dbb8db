"""Residual-stream share: how much bypasses attention in each layer, measured in three ways.

    flow       in max-flows from the read-out row to each input unit, with edges ½ E_h A and ½ I:
               the flow along the identity, divided by all that leaves the layer (max-flows are not unique: one is used)
    norm       ‖h_i‖ / (‖h_i‖ + ‖Σ_j Σ_m A_ij W_O^m v_j^m‖), mean over units, before any norm
    gradient   |⟨g_i, h_i⟩| / (|⟨g_i, h_i⟩| + |⟨g_i, a_i⟩|), g the gradient at their sum, mean over units that have one

The share that attention maps alone would give, ½ + ½ Ā_ii, is near ½ for any model.
"""

import math
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.capture.context import CapturedCall
from clearhead.capture.session import remove_hooks_on_exit
from clearhead.capture.tape import resolve_requirements
from clearhead.errors import UnsupportedError
from clearhead.probes.base import ProbeBatch, ProbeContext, Progress
from clearhead.probes.probe_result import ProbeEstimate, ProbeResult
from clearhead.stats import compute_mean_interval

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

RESIDUAL_SHARE_MEASURES = ("flow", "norm", "gradient")
#: With more units than this, no flow is computed.
MAX_FLOW_LENGTH = 40
CONCLUSION = (
    "Each share measures how much of a layer's output bypassed its attention. The three measures are based on "
    "different quantities and need not agree: the flow uses only attention, the norm uses the size but not the "
    "direction of the values, and the gradient measures the effect on this output to first order. A large share means "
    "that changing the attention in that layer has little effect on the output, not that the unit itself is important."
)
_REQUIREMENTS = resolve_requirements(("attention", "values", "output_projection", "block_input"))


def run_skips_probe(
    explainer: "Explainer", inputs: Any, *, target: Any = None, progress: Progress = False
) -> ProbeResult:
    """Measure the share of the skip connection (residual stream) in each layer, by flow, norms and gradients.

    Args:
        explainer: Explainer of the model.
        inputs: One input or a list of inputs.
        target: The target, as in `Explainer.explain`; default: the predicted class.
        progress: True for a progress bar, or a function that wraps a list.

    Returns:
        One record for each layer, and means with intervals.

    Raises:
        UnsupportedError: The model's values cannot be recorded, or it cannot be probed.

    Example:
        >>> run_skips_probe(ex, texts).estimates  # doctest: +SKIP
    """
    context = ProbeContext(explainer, inputs, target)
    if not context.self_test.capture_source.shows_computation:
        raise UnsupportedError(
            f"{context.adapter.name} does not use transformers' attention interface: its values cannot be recorded"
        )
    sample_shares: list[Float[np.ndarray, "measure layer"]] = []
    for _, batch in context.iter_batches(1, progress):
        flow_shares = [math.nan] * context.num_layers
        if find_spec("igraph") and batch.lengths[0] <= MAX_FLOW_LENGTH:
            flow_shares = _compute_flow_shares(batch)
        sample_shares.append(np.array([flow_shares, *_compute_norm_and_gradient_shares(batch)]))
    shares = np.stack(sample_shares)
    measures = list(enumerate(RESIDUAL_SHARE_MEASURES))
    records = [
        {"layer": layer, **{measure: float(shares[:, m, layer].mean()) for m, measure in measures}}
        for layer in range(context.num_layers)
    ]
    estimates = [
        ProbeEstimate(
            f"layer {layer}, {measure}", compute_mean_interval(shares[:, m, layer]), "share of the skip connection"
        )
        for layer in range(context.num_layers)
        for m, measure in measures
    ]
    return ProbeResult("skips", context.adapter.name, {"inputs": len(shares)}, records, estimates, CONCLUSION)


def _compute_norm_and_gradient_shares(batch: ProbeBatch) -> tuple[list[float], list[float]]:
    """The shares of each layer by norms and by gradients."""
    calls, projections, target_sum = _record_projections(batch)
    gradients = torch.autograd.grad(target_sum, projections, allow_unused=True)
    norm_shares = []
    gradient_shares = []
    for call, gradient in zip(calls, gradients, strict=True):
        assert call.block_input is not None and call.output_projection is not None
        attention_output = (call.rebuild_output().flatten(2) @ call.output_projection.T)[0].detach()
        residual = call.block_input[0].detach()
        residual_norm = residual.norm(dim=-1)
        norm_shares.append(float((residual_norm / (residual_norm + attention_output.norm(dim=-1))).mean()))
        if gradient is None:
            gradient_shares.append(math.nan)
        else:
            gradient_shares.append(_compute_gradient_share(gradient[0], residual, attention_output))
    return norm_shares, gradient_shares


def _compute_gradient_share(
    gradient: Float[Tensor, "unit model"],
    residual: Float[Tensor, "unit model"],
    attention_output: Float[Tensor, "unit model"],
) -> float:
    """Return the mean of |g·h| / (|g·h| + |g·a|) over the units with an effect on the target."""
    residual_effect = (gradient * residual).sum(-1).abs()
    attention_effect = (gradient * attention_output).sum(-1).abs()
    has_effect = residual_effect + attention_effect > 0  # in the last layer, only the read-out row has one
    return float((residual_effect / (residual_effect + attention_effect))[has_effect].mean())


def _record_projections(batch: ProbeBatch) -> tuple[list[CapturedCall], list[Tensor], Tensor]:
    """The calls of a pass, the outputs of the output projections, and the summed target.

    The gradient of a projection's output is that at its sum with the residual stream.
    """
    recorder = batch.context.recorder
    target_batch = batch.target_batch
    with recorder.session.running():
        _, first_calls, _ = recorder.forward(target_batch.model_inputs, _REQUIREMENTS, ())
        weight_pointers = {
            call.output_projection.data_ptr() for call in first_calls if call.output_projection is not None
        }
        projections: list[Tensor] = []

        def store_output(module: nn.Module, args: Any, output: Tensor) -> None:
            projections.append(output)

        modules = [
            module for module in recorder.session.topology.modules if _get_weight_pointer(module) in weight_pointers
        ]
        handles = [module.register_forward_hook(store_output) for module in modules]
        with torch.enable_grad(), remove_hooks_on_exit(handles):
            output, calls, _ = recorder.forward(target_batch.model_inputs, _REQUIREMENTS, target_batch.leaves)
            target_sum = target_batch.compute_target(output).sum()
    if len(projections) != len(calls):
        raise UnsupportedError(
            f"{batch.context.adapter.name}: the output projections of its heads cannot be distinguished from other "
            "linear layers"
        )
    return calls, projections, target_sum


def _get_weight_pointer(module: nn.Module) -> int | None:
    """Return the data pointer of a module's weight, by which output projections are recognised."""
    weight = getattr(module, "weight", None)
    return weight.data_ptr() if isinstance(weight, Tensor) else None


def _compute_flow_shares(batch: ProbeBatch) -> list[float]:
    """The share of the identity edges in the max-flows from the read-out row to each unit, by layer."""
    from igraph import Graph

    maps = torch.stack([attention[0].mean(0).double().cpu() for attention in batch.attention])
    depth, n, _ = maps.shape
    layer, i, j = (maps > 0).nonzero(as_tuple=True)  # node (l, i) has the number l · n + i
    row_totals = 1 + maps.sum(-1)
    attention_edges = torch.stack([(layer + 1) * n + i, layer * n + j], 1)
    nodes = torch.arange(depth * n)
    edges = torch.cat([attention_edges, torch.stack([nodes + n, nodes], 1)])
    capacity = torch.cat([maps[layer, i, j] / row_totals[layer, i], 1 / row_totals.flatten()]).tolist()
    edge_layers = torch.cat([layer, nodes // n]).numpy()
    graph = Graph(n=(depth + 1) * n, edges=edges.numpy(), directed=True)
    source = depth * n + int(batch.readout_mask[0].long().argmax())
    attention_flow = np.zeros(depth)
    identity_flow = np.zeros(depth)
    num_attention_edges = len(attention_edges)
    for unit in range(n):
        flow = np.array(graph.maxflow(source, unit, capacity=capacity).flow)
        attention_flow += np.bincount(
            edge_layers[:num_attention_edges], weights=flow[:num_attention_edges], minlength=depth
        )
        identity_flow += np.bincount(
            edge_layers[num_attention_edges:], weights=flow[num_attention_edges:], minlength=depth
        )
    return (identity_flow / (attention_flow + identity_flow)).tolist()
