"""How much goes past attention: the share of the skip connection, layer by layer, in three forms.

    flow       in max-flows from the row that is read to each input unit, with edges ½ E_h A and ½ I:
               what runs along the identity, over all that leaves the layer (max-flows are not unique: one is taken)
    norm       ‖h_i‖ / (‖h_i‖ + ‖Σ_j Σ_m A_ij W_O^m v_j^m‖), mean over units, before any norm
    gradient   |⟨g_i, h_i⟩| / (|⟨g_i, h_i⟩| + |⟨g_i, a_i⟩|), g the gradient at their sum, mean over units that have one

The share that attention maps alone would give, ½ + ½ Ā_ii, is near ½ whatever the model does.
"""

import math
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.capture.session import at_rest, hooks
from clearhead.capture.sources.attention_interface import Captured
from clearhead.capture.tape import check_asks
from clearhead.errors import Refusal
from clearhead.probes.base import Batch, Probed, Progress
from clearhead.probes.probe_result import Finding, ProbeResult
from clearhead.stats import interval

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

FORMS = ("flow", "norm", "gradient")
#: With more units than this, no flow is computed.
LONGEST = 40
SAYS = (
    "Each share says how much of what leaves a layer came past its attention. The three forms measure different things "
    "and need not agree: the flow knows attention alone, the norm knows how large values are and not where they point, "
    "the gradient knows what counts for this answer, to first order. A large share means that changing attention there "
    "can change little, not that the unit itself matters."
)
_ASKS = check_asks(("attention", "values", "output_projection", "block_input"))


def skips(ex: "Explainer", inputs: Any, *, target: Any = None, progress: Progress = False) -> ProbeResult:
    """The share of the skip connections in each layer, by flow, by norms and by gradients."""
    probed = Probed(ex, inputs, target)
    if probed.tested.path != "interface":
        raise Refusal(f"{probed.subject.name} ignores transformers' attention interface: its values cannot be recorded")
    shares: list[Float[np.ndarray, "form layer"]] = []
    for _, batch in probed.batches(1, progress):
        flow = _flow(batch) if find_spec("igraph") and batch.lengths[0] <= LONGEST else [math.nan] * probed.layers
        shares.append(np.array([flow, *_by_values(batch)]))
    every = np.stack(shares)
    lines = [
        {"layer": layer, **{form: float(every[:, f, layer].mean()) for f, form in enumerate(FORMS)}}
        for layer in range(probed.layers)
    ]
    shown = [
        Finding(f"layer {layer}, {form}", interval(every[:, f, layer]), "share of the skip connection")
        for layer in range(probed.layers)
        for f, form in enumerate(FORMS)
    ]
    return ProbeResult("skips", probed.subject.name, {"inputs": len(shares)}, lines, shown, SAYS)


def _by_values(batch: Batch) -> tuple[list[float], list[float]]:
    """The shares by norms and by gradients."""
    calls, sums, number = _recorded(batch)
    slopes = torch.autograd.grad(number, sums, allow_unused=True)
    norms, gradients = [], []
    for call, slope in zip(calls, slopes, strict=True):
        assert call.block_input is not None and call.output_projection is not None
        attended = (call.rebuilt().flatten(2) @ call.output_projection.T)[0].detach()
        past = call.block_input[0].detach()
        norms.append(float((past.norm(dim=-1) / (past.norm(dim=-1) + attended.norm(dim=-1))).mean()))
        gradients.append(math.nan if slope is None else _projected(slope[0], past, attended))
    return norms, gradients


def _projected(
    slope: Float[Tensor, "unit model"], past: Float[Tensor, "unit model"], attended: Float[Tensor, "unit model"]
) -> float:
    straight, around = (slope * past).sum(-1).abs(), (slope * attended).sum(-1).abs()
    there = straight + around > 0  # in the last layer, the row that is read alone
    return float((straight / (straight + around))[there].mean())


def _recorded(batch: Batch) -> tuple[list[Captured], list[Tensor], Tensor]:
    """The calls of a pass, what each output projection gave (its gradient is that at the sum), and the target."""
    recorder, plan = batch.probed.recorder, batch.plan
    with recorder.lock, at_rest(recorder.model), torch.inference_mode(False):
        with torch.no_grad():
            _, first, _ = recorder.forward(plan.batch, _ASKS, ())
        weights = {call.output_projection.data_ptr() for call in first if call.output_projection is not None}
        given: list[Tensor] = []

        def hear(module: nn.Module, args: Any, output: Tensor) -> None:
            given.append(output)

        modules = [m for m in recorder.model.modules() if _pointer(m) in weights]
        with torch.enable_grad(), hooks([module.register_forward_hook(hear) for module in modules]):
            output, calls, _ = recorder.forward(plan.batch, _ASKS, plan.leaves)
            number = plan.value(output).sum()
    if len(given) != len(calls):
        raise Refusal(f"{batch.probed.subject.name}: the projections of its heads cannot be told from other maps")
    return calls, given, number


def _pointer(module: nn.Module) -> int | None:
    weight = getattr(module, "weight", None)
    return weight.data_ptr() if isinstance(weight, Tensor) else None


def _flow(batch: Batch) -> list[float]:
    from igraph import Graph

    maps = torch.stack([part[0].mean(0).double().cpu() for part in batch.attention])
    depth, n, _ = maps.shape
    layer, i, j = (maps > 0).nonzero(as_tuple=True)  # node (l, i) is number l · n + i
    halves = 1 + maps.sum(-1)
    attended = torch.stack([(layer + 1) * n + i, layer * n + j], 1)
    nodes = torch.arange(depth * n)
    edges = torch.cat([attended, torch.stack([nodes + n, nodes], 1)])
    capacity = torch.cat([maps[layer, i, j] / halves[layer, i], 1 / halves.flatten()]).tolist()
    of_layer = torch.cat([layer, nodes // n]).numpy()
    graph = Graph(n=(depth + 1) * n, edges=edges.numpy(), directed=True)
    source, total = depth * n + int(batch.rows[0].long().argmax()), np.zeros((2, depth))
    for unit in range(n):
        ran = np.array(graph.maxflow(source, unit, capacity=capacity).flow)
        for past, part in enumerate((slice(None, len(attended)), slice(len(attended), None))):
            total[past] += np.bincount(of_layer[part], weights=ran[part], minlength=depth)
    return (total[1] / total.sum(0)).tolist()
