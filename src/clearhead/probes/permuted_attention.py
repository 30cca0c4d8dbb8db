"""Attention permutation test: shuffle the weights of a row over the keys that it sees, a hundred times.

Jain & Wallace, 2019:

    Δ = median over draws of TVD(ŷ(A), ŷ(πA)),     TVD(p, q) = ½ Σ_o |p_o − q_o|

compared with the largest weight of the read-out row (mean over heads). The random numbers depend on the input, not on
the batch that it is in.
"""

from collections.abc import Sequence
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
from clearhead.probes.divergences import compute_total_variation
from clearhead.probes.probe_result import ProbeResult, compute_estimates

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

#: Number of inputs in a pass.
BATCH_SIZE = 32
#: Number of draws of one input in a pass.
MAX_DRAWS_PER_PASS = 25

METRIC_DESCRIPTIONS = {
    "median TVD": "total variation distance of the output: 0 unchanged, 1 another class with certainty",
    "largest weight": "largest attention weight of the read-out row, mean over heads",
    "flips": "fraction of draws that change the predicted class",
}


def run_permutation_probe(
    explainer: "Explainer",
    inputs: Any,
    scope: str = "S1",
    *,
    layer: int | None = None,
    heads: Sequence[int] | None = None,
    draws: int = 100,
    keep: bool = False,
    shared: bool = False,
    frozen: bool = False,
    seed: int = 0,
    target: Any = None,
    candidates: Sequence[str | int] | None = None,
    by_head: bool = False,
    progress: Progress = False,
) -> ProbeResult:
    """Shuffle attention weights over the visible keys, and measure how far the output changes.

    Args:
        explainer: Explainer of the model.
        inputs: One input or a list of inputs.
        scope: "S1" to "S4": which rows and layers are shuffled.
        layer: The layer of scope S3, counted from 0.
        heads: The heads that are shuffled; default: all.
        draws: Number of permutations of each input.
        keep: Keep the weights on special tokens and on the query itself.
        shared: Use one permutation for all heads instead of one for each.
        frozen: Keep the attention of later layers as in the unpatched pass.
        seed: Seed of the permutations.
        target: The target, as in `Explainer.explain`; default: the predicted class.
        candidates: Labels or masked words whose probabilities are compared among themselves; default: all.
        by_head: Also measure every head of every layer separately (all its rows), as a table.
        progress: True for a progress bar, or a function that wraps a list.

    Returns:
        One record for each input, and means with intervals.

    Raises:
        InputError: Invalid options.
        UnsupportedError: The model cannot be probed.

    Example:
        >>> run_permutation_probe(ex, texts, "S2", draws=50).estimates[0].interval  # doctest: +SKIP
    """
    if draws < 1:
        raise InputError(f"draws={draws} is not valid: it must be at least 1")
    probe_scope = make_scope(scope, layer, heads)
    context = ProbeContext(explainer, inputs, target, candidates)
    context.check_heads(probe_scope)
    sampler = PermutationSampler(draws, keep, shared, seed)
    records: list[dict[str, Any]] = [{}] * len(context.samples)
    uses_last_row = has_last_row_shortcut(context) and probe_scope.name == "S1"
    for indices, batch in context.iter_batches(BATCH_SIZE, progress):
        if uses_last_row:
            batch_records = _permute_last_row(batch, sampler, probe_scope)
        else:
            batch_records = _permute_full_model(batch, sampler, probe_scope, frozen)
        for index, record in zip(indices, batch_records, strict=True):
            records[index] = record
    settings = {
        "scope": str(probe_scope),
        "draws": draws,
        "keep": keep,
        "shared": shared,
        "frozen": frozen,
        "seed": seed,
    }
    tables = {}
    if by_head:
        tables["median TVD by layer and head"] = _measure_by_head(context, sampler, frozen)
    estimates = compute_estimates(records, METRIC_DESCRIPTIONS)
    conclusion = _format_conclusion(probe_scope)
    return ProbeResult("permutation", context.adapter.name, settings, records, estimates, conclusion, tables)


class PermutationSampler:
    """Settings and random numbers of the permutations.

    Args:
        num_draws: Number of permutations of each input.
        keep_special_and_self: Whether the weights of special tokens and of the query itself stay in place.
        share_across_heads: Whether all heads of a layer are permuted alike.
        seed: Seed of the permutations.
    """

    def __init__(self, num_draws: int, keep_special_and_self: bool, share_across_heads: bool, seed: int) -> None:
        self.num_draws = num_draws
        self.keep_special_and_self = keep_special_and_self
        self.share_across_heads = share_across_heads
        self.seed = seed

    def split_draws(self) -> list[range]:
        """Split the draws into ranges that fit into one pass."""
        return [
            range(start, min(start + MAX_DRAWS_PER_PASS, self.num_draws))
            for start in range(0, self.num_draws, MAX_DRAWS_PER_PASS)
        ]

    def sample_noise(
        self, seed: int, draw_range: range, layer: int, num_heads: int, num_rows: int, length: int
    ) -> Float[Tensor, "draw head row key"]:
        """Sample the random numbers of a range of draws in one layer of one input, whose seed is `seed`."""
        generator_seed = (seed + 1_000_003 * draw_range.start + 7919 * layer) % 2**63
        generator = torch.Generator().manual_seed(generator_seed)
        shape = (len(draw_range), 1 if self.share_across_heads else num_heads, num_rows, length)
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    def find_movable_keys(
        self, visible: Bool[Tensor, "*row key"], special: Bool[Tensor, "*#row key"], is_query: Bool[Tensor, "*#row key"]
    ) -> Bool[Tensor, "*row key"]:
        """Return the keys whose weights are shuffled."""
        return visible & ~special & ~is_query if self.keep_special_and_self else visible


def permute_weights(
    weights: Float[Tensor, "*row key"], movable: Bool[Tensor, "*#row key"], noise: Float[Tensor, "*#row key"]
) -> Float[Tensor, "*row key"]:
    """Reorder the weights at movable keys by the noise; all other weights stay in place.

    >>> movable = torch.tensor([True, True, False, True])
    >>> permute_weights(torch.tensor([0.1, 0.2, 0.3, 0.4]), movable, torch.tensor([0.9, 0.1, 0.0, 0.5]))
    tensor([0.2000, 0.4000, 0.3000, 0.1000])
    """
    movable = movable.expand(weights.shape)
    noise = noise.expand(weights.shape)
    # fixed keys sort behind all movable ones (noise is below 1), in their own order
    fixed_keys = 2 + torch.arange(weights.shape[-1], dtype=noise.dtype, device=noise.device)
    target_keys = (~movable).to(torch.uint8).argsort(dim=-1, stable=True)
    source_keys = torch.where(movable, noise, fixed_keys).argsort(dim=-1)
    return torch.empty_like(weights).scatter(-1, target_keys, weights.gather(-1, source_keys))


def _permute_last_row(batch: ProbeBatch, sampler: PermutationSampler, scope: ProbeScope) -> list[dict[str, Any]]:
    """Permute the read-out row of the last layer; everything below is computed once."""
    evaluator = LastRowEvaluator(batch)
    num_heads = evaluator.attention.shape[1]
    last_layer = batch.context.num_layers - 1
    heads = list(range(num_heads) if scope.heads is None else scope.heads)
    model_weights = evaluator.attention.cpu()
    weights = model_weights[:, None].repeat(1, sampler.num_draws, 1, 1)
    for i, (sample, length) in enumerate(zip(batch.samples, batch.lengths, strict=True)):
        is_query = torch.arange(length) == evaluator.readout_rows[i]
        movable = sampler.find_movable_keys(
            evaluator.visible_mask[i, :length].cpu(), batch.special_mask[i, :length], is_query
        )
        seed = sample.derive_seed(sampler.seed)
        noise = [
            sampler.sample_noise(seed, draw_range, last_layer, num_heads, 1, length)[:, :, 0]
            for draw_range in sampler.split_draws()
        ]
        permuted = permute_weights(weights[i, :, :, :length], movable, torch.cat(noise))
        weights[i, :, heads, :length] = permuted[:, heads]
    with torch.no_grad():
        probabilities = evaluator.compute_probabilities(weights.to(evaluator.attention))
    max_weights = model_weights.mean(1).amax(-1)
    return [
        _build_record(batch, i, evaluator.unpatched_probabilities[i], probabilities[i], float(max_weights[i]))
        for i in range(len(probabilities))
    ]


def _permute_full_model(
    batch: ProbeBatch, sampler: PermutationSampler, scope: ProbeScope, frozen: bool
) -> list[dict[str, Any]]:
    """Run the whole model for each draw, several draws of one input in a pass."""
    records = []
    for sample in batch.samples:
        sample_batch = ProbeBatch(batch.context, [sample])
        probabilities = [
            _run_permuted_draws(sample_batch.repeat(len(draw_range)), draw_range, sampler, scope, frozen)
            for draw_range in sampler.split_draws()
        ]
        max_weight = sample_batch.compute_max_weight(scope)
        records.append(
            _build_record(sample_batch, 0, sample_batch.probabilities[0], torch.cat(probabilities), max_weight)
        )
    return records


def _measure_by_head(context: ProbeContext, sampler: PermutationSampler, frozen: bool) -> list[list[float]]:
    """The median TVD of each head, mean over inputs."""
    batches = [batch for _, batch in context.iter_batches(BATCH_SIZE)]

    def compute_mean(scope: ProbeScope) -> float:
        records = [record for batch in batches for record in _permute_full_model(batch, sampler, scope, frozen)]
        return sum(record["median TVD"] for record in records) / len(records)

    return [
        [compute_mean(ProbeScope("S3", layer, (head,))) for head in range(context.num_heads)]
        for layer in range(context.num_layers)
    ]


def _run_permuted_draws(
    batch: ProbeBatch, draw_range: range, sampler: PermutationSampler, scope: ProbeScope, frozen: bool
) -> Float[Tensor, "draw label"]:
    """Run one input, repeated once per draw, with another permutation of the weights in each repetition."""
    seed = batch.samples[0].derive_seed(sampler.seed)
    length = batch.lengths[0]

    def permute(attention: AttentionWeights, visible: VisibleKeys, layer: int) -> AttentionWeights:
        num_rows = 1 if scope.is_readout_row_only else attention.shape[2]
        noise = sampler.sample_noise(seed, draw_range, layer, attention.shape[1], num_rows, length)
        is_query = torch.zeros(1, length) if batch.context.has_pooling_query else torch.eye(length)
        movable = sampler.find_movable_keys(visible.cpu(), batch.special_mask[:1, None, None], is_query.bool())
        return permute_weights(attention, movable.to(attention.device), noise.to(attention.device))

    with torch.no_grad():
        return batch.compute_patched_probabilities(permute, scope, frozen)


def _build_record(
    batch: ProbeBatch,
    i: int,
    model_probabilities: Float[Tensor, "label"],
    probabilities: Float[Tensor, "draw label"],
    max_weight: float,
) -> dict[str, Any]:
    """Build the record of one input: median TVD of its draws, and how often they change the class."""
    tvd = compute_total_variation(probabilities, model_probabilities, batch.context.multi_label)
    predicted = int(model_probabilities.argmax())
    return {
        "input": batch.format_input_name(i),
        "prediction": batch.context.get_predicted_label(model_probabilities),
        "median TVD": float(tvd.median()),
        "largest weight": max_weight,
        "flips": float((probabilities.argmax(-1) != predicted).double().mean()),
    }


def _format_conclusion(scope: ProbeScope) -> str:
    """Return the conclusion; for one row it adds that the residual stream bypasses attention."""
    residual_note = ""
    if scope.is_readout_row_only:
        residual_note = (
            " The residual stream bypasses attention, so a small change does not prove that attention is unused."
        )
    return (
        f"Attention weights were permuted in scope {scope}, and everything else was kept. If the output hardly changes "
        "although one weight is large, it does not depend on which units the row attends to; if the output changes, "
        f"it does.{residual_note} The probe tests this trained model with weights that it never produces, and does not "
        "show which weights a different training run would produce."
    )
