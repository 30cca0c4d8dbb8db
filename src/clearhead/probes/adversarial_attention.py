"""Adversarial attention search: weights as far as possible from the model's, with the same output.

Jain & Wallace, 2019:

    max  Σ_i JSD(α_i, α̂) + 1/(k(k−1)) Σ_{i<j} JSD(α_i, α_j) − λ/k Σ_i max(0, TVD(ŷ(α_i), ŷ(α̂)) − ε)

over k free sets of weights; JSD is the mean over all heads, rows and layers in scope. Of all weights visited by the
search, the farthest whose output stays within the tolerance is kept; the model's own weights (JSD 0) are among them.
The largest divergence that any weights could have is reported with it, because a short or evenly weighted row leaves
little room.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from clearhead.errors import InputError
from clearhead.interventions.attention_patch import AttentionWeights, VisibleKeys
from clearhead.probes.base import (
    LastRowEvaluator,
    ProbeBatch,
    ProbeContext,
    ProbeScope,
    Progress,
    has_last_row_shortcut,
    make_scope,
)
from clearhead.probes.divergences import compute_js_divergence, compute_max_jsd, compute_total_variation
from clearhead.probes.probe_result import ProbeResult, compute_estimates

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

# The authors' settings.
ATTACK_PENALTY = 500.0
ATTACK_LEARNING_RATE = 0.01
INITIAL_LOGIT_STD = 3.0
#: Lower bound of the arguments of logarithms during the search.
LOG_EPS = 1e-10
METRIC_DESCRIPTIONS = {
    "JSD": "divergence of the farthest weights with the same output, mean over heads: 0 to 0.693",
    "attainable JSD": "the largest divergence that any weights could have",
    "JSD of the mean head": "divergence of the mean over heads; differences between heads can cancel",
    "TVD": "total variation distance of the output",
    "largest weight": "largest attention weight of the rows in scope, mean over heads",
}
CONCLUSION = (
    "The probe searched for attention weights far from the model's own that leave its output within the tolerance. "
    "Where their divergence is close to the attainable maximum, the output does not determine the attention weights: "
    "the attention map is one of many that give the same output. The model itself never produces these weights, and "
    "everything that it computes before them is unchanged, so the result does not prove that another model, trained "
    "in the same way, would attend to these units. A small divergence may also mean that the search failed."
)

#: Number of inputs that are searched together if only the read-out row is in scope.
BATCH_SIZE = 32
#: The weights that are optimised: a few sets for each input.
CandidateWeights = Float[Tensor, "batch set layer head row key"]


@dataclass
class _AttackProblem:
    """The weights of some inputs in one scope, and a function from other weights to the model's probabilities."""

    model_weights: Float[Tensor, "batch layer head row key"]
    visible_mask: Bool[Tensor, "batch layer 1 row key"]
    model_probabilities: Float[Tensor, "batch label"]
    compute_probabilities: Callable[[CandidateWeights], Float[Tensor, "batch set label"]]


def run_adversary_probe(
    explainer: "Explainer",
    inputs: Any,
    scope: str = "S1",
    *,
    layer: int | None = None,
    heads: Sequence[int] | None = None,
    tolerance: float = 0.05,
    margin: float = 0.01,
    sets: int = 5,
    steps: int = 500,
    seed: int = 0,
    target: Any = None,
    candidates: Sequence[str | int] | None = None,
    progress: Progress = False,
) -> ProbeResult:
    """Search for attention weights far from the model's own that leave its output unchanged.

    Args:
        explainer: Explainer of the model.
        inputs: One input or a list of inputs.
        scope: "S1" to "S4": which rows and layers are free.
        layer: The layer of scope S3, counted from 0.
        heads: The heads that are free; default: all.
        tolerance: Total variation distance up to which an output counts as the same.
        margin: Total variation distance from which the search is penalised.
        sets: Number of sets of weights that are searched together.
        steps: Number of optimisation steps.
        seed: Seed of the initial weights.
        target: The target, as in `Explainer.explain`; default: the predicted class.
        candidates: Labels or masked words whose probabilities are compared among themselves; default: all.
        progress: True for a progress bar, or a function that wraps a list.

    Returns:
        One record for each input, and means with intervals.

    Raises:
        InputError: Invalid options.
        UnsupportedError: The model cannot be probed.

    Example:
        >>> print(run_adversary_probe(ex, ["A wonderful film", "A dull film"]).to_markdown())  # doctest: +SKIP
    """
    if sets < 1 or steps < 1:
        raise InputError(f"sets={sets}, steps={steps} are not valid: both must be at least 1")
    probe_scope = make_scope(scope, layer, heads)
    context = ProbeContext(explainer, inputs, target, candidates)
    context.check_heads(probe_scope)
    records: list[dict[str, Any]] = [{}] * len(context.samples)
    batch_size = BATCH_SIZE if probe_scope.is_readout_row_only else 1
    for indices, batch in context.iter_batches(batch_size, progress):
        problem = _build_attack_problem(batch, probe_scope, sets)
        batch_records = _search_weights(problem, batch, probe_scope, sets, steps, margin, tolerance, seed)
        for index, record in zip(indices, batch_records, strict=True):
            records[index] = record
    settings = {"scope": str(probe_scope), "tolerance": tolerance, "margin": margin, "sets": sets, "steps": steps}
    estimates = compute_estimates(records, METRIC_DESCRIPTIONS)
    return ProbeResult("adversary", context.adapter.name, settings, records, estimates, CONCLUSION)


def _build_attack_problem(batch: ProbeBatch, scope: ProbeScope, sets: int) -> _AttackProblem:
    """Build the problem, with the shortcut for scope S1 (recompute only the last row) where the model allows it."""
    heads = list(scope.heads or range(batch.context.num_heads))
    if scope.name == "S1" and has_last_row_shortcut(batch.context):
        return _build_last_row_problem(batch, heads)
    return _build_full_model_problem(batch, scope, heads, sets)


def _build_last_row_problem(batch: ProbeBatch, heads: list[int]) -> _AttackProblem:
    """The problem at scope S1, where only the last layer's read-out row is computed again."""
    evaluator = LastRowEvaluator(batch)

    def compute_probabilities(free: CandidateWeights) -> Float[Tensor, "batch set label"]:
        weights = evaluator.attention[:, None].repeat(1, free.shape[1], 1, 1)
        weights[:, :, heads] = free[:, :, 0, :, 0].to(weights.dtype)
        return evaluator.compute_probabilities(weights)

    model_weights = evaluator.attention[:, None, heads][:, :, :, None]
    visible_mask = evaluator.visible_mask[:, None, None, None]
    return _AttackProblem(model_weights, visible_mask, evaluator.unpatched_probabilities, compute_probabilities)


def _build_full_model_problem(batch: ProbeBatch, scope: ProbeScope, heads: list[int], sets: int) -> _AttackProblem:
    """The problem at any scope, with a pass of the whole model for each evaluation."""
    layers = scope.resolve_layers(batch.context.num_layers)
    sample_indices = torch.arange(len(batch.samples))
    readout_rows = batch.readout_mask.long().argmax(1)
    repeated_batch = batch.repeat(sets)
    visible_by_layer = dict[int, VisibleKeys]()

    def select_rows(maps: Float[Tensor, "batch head query key"]) -> Float[Tensor, "batch head row key"]:
        if scope.is_readout_row_only:
            return maps[sample_indices, :, readout_rows][:, :, None]
        return maps

    def compute_probabilities(free: CandidateWeights) -> Float[Tensor, "batch set label"]:
        def replace_weights(attention: AttentionWeights, visible: VisibleKeys, layer: int) -> AttentionWeights:
            weights = attention.detach().clone()
            layer_weights = free[:, :, layers.index(layer)].flatten(0, 1).to(weights.dtype)
            # with one row in scope, it is written to every row; the patch applies the read-out row only
            weights[:, heads] = layer_weights.expand(-1, -1, weights.shape[2], -1)
            return weights

        probabilities = repeated_batch.compute_patched_probabilities(replace_weights, scope)
        return probabilities.unflatten(0, (len(sample_indices), sets))

    def record_visible(attention: AttentionWeights, visible: VisibleKeys, layer: int) -> AttentionWeights:
        visible_by_layer[layer] = visible.expand(len(sample_indices), -1, -1, -1)[:, :1]
        return attention

    with torch.no_grad():
        batch.compute_patched_probabilities(record_visible, scope)
    model_weights = torch.stack([select_rows(batch.attention[layer][:, heads]) for layer in layers], dim=1)
    visible_mask = torch.stack([select_rows(visible_by_layer[layer]) for layer in layers], dim=1)
    return _AttackProblem(model_weights, visible_mask, batch.probabilities, compute_probabilities)


def _search_weights(
    problem: _AttackProblem,
    batch: ProbeBatch,
    scope: ProbeScope,
    sets: int,
    steps: int,
    margin: float,
    tolerance: float,
    seed: int,
) -> list[dict[str, Any]]:
    """Optimise the weights and return one record for each input."""
    model_weights = problem.model_weights.detach()
    model_probabilities = problem.model_probabilities[:, None]
    logits = _sample_initial_logits(batch, model_weights, sets, seed).requires_grad_()
    optimiser = torch.optim.Adam([logits], lr=ATTACK_LEARNING_RATE, amsgrad=True)
    sample_indices = torch.arange(len(model_weights), device=model_weights.device)
    best_jsd = model_weights.new_zeros(len(model_weights))
    best_weights = model_weights.clone()
    best_tvd = model_weights.new_zeros(len(model_weights))
    for _ in range(steps):
        with torch.enable_grad():
            free = logits.masked_fill(~problem.visible_mask[:, None], -torch.inf).softmax(-1)
            tvd = compute_total_variation(
                problem.compute_probabilities(free), model_probabilities, batch.context.multi_label
            )
            jsd = _compute_smooth_jsd(free, model_weights[:, None]).mean((2, 3, 4))
            set_jsds = [
                _compute_smooth_jsd(free[:, i], free[:, j]).mean((1, 2, 3)) for i in range(sets) for j in range(i)
            ]
            gain = jsd.sum() + (torch.stack(set_jsds).sum() / (sets * (sets - 1)) if set_jsds else 0)
            loss = ATTACK_PENALTY / sets * (tvd - margin).clamp(min=0).sum() - gain
        # update the best weights with those just measured, before the optimiser changes them
        max_jsd, set_indices = jsd.detach().masked_fill(tvd.detach() > tolerance, -1).max(1)
        is_better = max_jsd > best_jsd
        best_jsd = torch.where(is_better, max_jsd, best_jsd)
        best_weights[is_better] = free.detach()[sample_indices, set_indices][is_better].to(best_weights)
        best_tvd = torch.where(is_better, tvd.detach()[sample_indices, set_indices].to(best_tvd), best_tvd)
        optimiser.zero_grad()
        (logits.grad,) = torch.autograd.grad(loss, [logits])
        optimiser.step()
    attainable_jsd = compute_max_jsd(model_weights, problem.visible_mask.expand_as(model_weights))
    return [
        _build_record(batch, i, scope, problem, best_weights[i], attainable_jsd[i], float(best_tvd[i]))
        for i in range(len(model_weights))
    ]


def _sample_initial_logits(
    batch: ProbeBatch, model_weights: Float[Tensor, "batch layer head row key"], sets: int, seed: int
) -> CandidateWeights:
    """Random start of each search; the random numbers depend on the input, not on its batch."""
    logits = model_weights.new_zeros(len(model_weights), sets, *model_weights.shape[1:])
    for i, (sample, length) in enumerate(zip(batch.samples, batch.lengths, strict=True)):
        generator = torch.Generator().manual_seed(sample.derive_seed(seed) % 2**63)
        noise = torch.randn(sets, *model_weights.shape[1:-1], length, generator=generator, dtype=torch.float64)
        logits[i, ..., :length] = INITIAL_LOGIT_STD * noise.to(model_weights)
    return logits


def _build_record(
    batch: ProbeBatch,
    i: int,
    scope: ProbeScope,
    problem: _AttackProblem,
    best_weights: Float[Tensor, "layer head row key"],
    attainable_jsd: Float[Tensor, "layer head row"],
    tvd: float,
) -> dict[str, Any]:
    """Build the record of one input: divergences and TVD of the best weights; for one row, the weights too."""
    model_weights = problem.model_weights[i]
    record: dict[str, Any] = {
        "input": batch.format_input_name(i),
        "prediction": batch.context.get_predicted_label(problem.model_probabilities[i]),
        "JSD": float(compute_js_divergence(best_weights, model_weights).mean()),
        "attainable JSD": float(attainable_jsd.mean()),
        "JSD of the mean head": float(compute_js_divergence(best_weights.mean(1), model_weights.mean(1)).mean()),
        "TVD": tvd,
        "largest weight": float(model_weights.mean(1).amax(-1).mean()),
    }
    if scope.is_readout_row_only:  # for the heat maps of the last layer in scope
        length = batch.lengths[i]
        record["tokens"] = list(batch.context.get_units(batch.samples[i]).names)
        record["own weights"] = model_weights[-1, :, 0, :length].mean(0).tolist()
        record["other weights"] = best_weights[-1, :, 0, :length].mean(0).tolist()
    return record


def _compute_smooth_jsd(p: Float[Tensor, "*batch key"], q: Float[Tensor, "*batch key"]) -> Float[Tensor, "*batch"]:
    """The Jensen–Shannon divergence with gradients that stay finite where a weight is zero."""
    p, q = torch.broadcast_tensors(p, q)
    middle = ((p + q) / 2).clamp(min=LOG_EPS).log()
    return (p * (p.clamp(min=LOG_EPS).log() - middle) + q * (q.clamp(min=LOG_EPS).log() - middle)).sum(-1) / 2
