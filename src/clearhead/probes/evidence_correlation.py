"""Rank correlation of attention with other evidence: gradients and leave-one-out (Jain & Wallace, 2019).

    g_t = Σ_o |∂ŷ_o/∂x_t · x_t|        gradient × input, attention detached (theirs) or not
    Δ_t = mean_o |ŷ_o(x without t) − ŷ_o(x)|        leave one out, deleted or masked
    τ(a, g), τ(a, Δ)        tau-b of the scores without special tokens; τ(g, Δ) is the agreement of the evidence

with ŷ the probabilities. Scores of subword tokens are summed where units are words. The chance level is the mean tau
with the evidence in random order: for the best of several heads it is not zero.
"""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from clearhead.adapters.base import InputOptions
from clearhead.adapters.custom.tokens import CustomTokenAdapter
from clearhead.errors import InputError, UnsupportedError, unknown_value_error
from clearhead.interventions.attention_patch import AttentionPatch, AttentionWeights, VisibleKeys, run_patched_forward
from clearhead.perturbation.multi_stream import find_masking_unsupported_reason, make_players
from clearhead.perturbation.players import MaskablePlayers
from clearhead.perturbation.text import TextPlayers
from clearhead.probes.base import ProbeBatch, ProbeContext, Progress
from clearhead.probes.divergences import compute_tau_b
from clearhead.probes.probe_result import ProbeResult, compute_estimates
from clearhead.sample import Sample

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

#: Number of inputs in a pass.
BATCH_SIZE = 32
#: With more classes than this, only the gradient of the predicted class is computed.
MAX_GRADIENT_CLASSES = 10
#: Number of random orders for the chance level.
NUM_RANDOM_ORDERS = 20
SIGNIFICANCE_LEVEL = 0.05
UNIT_LEVELS = ("token", "word", "patch")
BEST_HEAD = "best head"
CONCLUSION = (
    "The values measure whether attention ranks units in the same order as gradients and leave-one-out do. A low tau "
    "is evidence against attention only if gradients and leave-one-out are reliable: compare it with their agreement "
    "with each other, and with the chance level. The best head is selected after the measurement, so compare it with "
    "its own chance level. With attention detached, the gradient ignores that attention itself depends on the input. "
    "Agreement would not show that attention causes the output."
)


def run_correlation_probe(
    explainer: "Explainer",
    inputs: Any,
    *,
    unit: str | None = None,
    seed: int = 0,
    target: Any = None,
    progress: Progress = False,
) -> ProbeResult:
    """Compute the rank correlation of attention with gradients and with leave-one-out.

    Args:
        explainer: Explainer of the model.
        inputs: One input or a list of inputs.
        unit: "token" or "word" (default); the tokens of a word are summed and left out together. For images "patch".
        seed: Seed of the random orders.
        target: The target, as in `Explainer.explain`; default: the predicted class.
        progress: True for a progress bar, or a function that wraps a list.

    Returns:
        One record for each input, means with intervals, and the fraction of significant correlations.

    Raises:
        InputError: An unknown unit, or an input with a single token.
        UnsupportedError: The model cannot be probed, or its inputs cannot be masked.

    Example:
        >>> run_correlation_probe(ex, texts, unit="word").estimates  # doctest: +SKIP
    """
    context = ProbeContext(explainer, inputs, target)
    if unit is None:
        has_grid = context.get_units(context.samples[0]).grid is not None
        unit = "patch" if has_grid else "word"
    if unit not in UNIT_LEVELS:
        raise unknown_value_error("unit", unit, UNIT_LEVELS)
    if not isinstance(context.adapter, CustomTokenAdapter):
        reason = find_masking_unsupported_reason(context.adapter, context.samples[0])
        if reason:
            raise UnsupportedError(f"leave-one-out is not possible: {reason}")
    if context.self_test.detaches_gradients:
        raise UnsupportedError(
            f"{context.adapter.name} detaches its own gradients, so attention cannot be detached separately"
        )
    records: list[dict[str, Any]] = [{}] * len(context.samples)
    for indices, batch in context.iter_batches(1, progress):
        records[indices[0]] = _build_record(batch, unit, seed)
    tau_names = [name for name in records[0] if name.startswith("τ(")]
    chance_names = [name for name in records[0] if name.startswith("chance")]
    descriptions = dict.fromkeys(tau_names, "rank correlation; 1 is the same order")
    descriptions |= dict.fromkeys(chance_names, "the same with the evidence in random order")
    tables = {
        "share significant": {
            name: float(np.nanmean([record[f"p of {name}"] <= SIGNIFICANCE_LEVEL for record in records]))
            for name in tau_names
        },
        "standard deviation": {name: float(np.nanstd([record[name] for record in records])) for name in tau_names},
    }
    settings = {"unit": unit, "seed": seed}
    estimates = compute_estimates(records, descriptions)
    return ProbeResult("correlation", context.adapter.name, settings, records, estimates, CONCLUSION, tables)


def _build_record(batch: ProbeBatch, unit: str, seed: int) -> dict[str, Any]:
    """Build the record of one input: τ of each attention score with each evidence, and τ of random orders."""
    (sample,) = batch.samples
    players = _make_players(batch.context, sample, unit)
    detached_gradient = _sum_by_player(_compute_gradient_x_input(batch, detached=True), players)
    gradient = _sum_by_player(_compute_gradient_x_input(batch, detached=False), players)
    left_out = _compute_leave_one_out(batch, players)
    evidence = {
        "gradient, attention detached": detached_gradient,
        "gradient": gradient,
        f"left out ({players.replacement})": left_out,
    }
    if isinstance(players, TextPlayers) and players.replacement != "delete":
        deleting_players = make_players(batch.context.adapter, sample, unit, "delete")
        left_out = _compute_leave_one_out(batch, deleting_players)
        evidence["left out (delete)"] = left_out
    record: dict[str, Any] = {
        "input": batch.format_input_name(0),
        "prediction": batch.context.get_predicted_label(batch.probabilities[0]),
        "units": players.num_players,
    }
    rng = np.random.default_rng(sample.derive_seed(seed))
    for summary_name, unit_scores in _summarise_attention(batch).items():
        player_scores = [_sum_by_player(scores, players) for scores in unit_scores]
        for evidence_name, evidence_scores in evidence.items():
            tau, p = _find_best_tau(player_scores, evidence_scores)
            _add_correlation(record, f"τ({summary_name}, {evidence_name})", tau, p)
        random_taus = [_find_best_tau(player_scores, rng.permutation(gradient))[0] for _ in range(NUM_RANDOM_ORDERS)]
        record[f"chance, {summary_name}"] = float(np.mean(random_taus))
    _add_correlation(record, "τ(gradient, left out)", *compute_tau_b(detached_gradient, left_out))
    return record


class _CustomTokenPlayers:
    """The tokens of a custom model as players: each is one player, and is masked by deletion."""

    replacement = "delete"

    def __init__(self, adapter: CustomTokenAdapter, sample: Sample) -> None:
        self.adapter = adapter
        (self.token_ids,) = sample.inputs.values()
        is_special = torch.tensor(adapter.get_units(sample).special)
        self.player_of_unit = torch.where(is_special, -1, (~is_special).cumsum(0) - 1)
        self.num_players = int((~is_special).sum())

    def keep_only(self, keep: Bool[Tensor, "player"]) -> Sample:
        """Return the sample with only these players; special tokens always stay.

        Raises:
            InputError: No token is left.
        """
        kept = (self.player_of_unit < 0) | keep[self.player_of_unit.clamp(min=0)]
        if not kept.any():
            raise InputError("a text of one token cannot be probed by leave-one-out: use longer texts")
        return self.adapter.make_samples(self.token_ids[kept], InputOptions())[0]


def _make_players(context: ProbeContext, sample: Sample, unit: str) -> "MaskablePlayers | _CustomTokenPlayers":
    """Make the groups of units that are left out together; custom models delete single tokens."""
    if isinstance(context.adapter, CustomTokenAdapter):
        return _CustomTokenPlayers(context.adapter, sample)
    return make_players(context.adapter, sample, unit, None)


def _add_correlation(record: dict[str, Any], name: str, tau: float, p: float) -> None:
    """Add τ and its p value to a record, under `name` and "p of" `name`."""
    record[name] = tau
    record[f"p of {name}"] = p


def _find_best_tau(
    score_lists: list[Float[np.ndarray, "unit"]], evidence_scores: Float[np.ndarray, "unit"]
) -> tuple[float, float]:
    """The largest tau of several lists of scores, with its p."""
    correlations = [compute_tau_b(scores, evidence_scores) for scores in score_lists]
    return max(correlations, key=lambda correlation: -np.inf if np.isnan(correlation[0]) else correlation[0])


def _summarise_attention(batch: ProbeBatch) -> Mapping[str, Float[Tensor, "list unit"]]:
    """Attention scores of the units, summarised in several ways; of "best head", one list for each head."""
    row = batch.select_readout_attention()[0]
    if batch.context.has_pooling_query:
        return {"last row": row.mean(0)[None]}
    maps = [layer[0].mean(0) for layer in batch.attention]
    rollout = batch.readout_mask[0].to(row)
    for attention in reversed(maps):
        rollout = (rollout + rollout @ attention) / 2
    received = torch.stack(maps).mean((0, 1))
    return {"last row": row.mean(0)[None], BEST_HEAD: row, "rollout": rollout[None], "received": received[None]}


def _sum_by_player(
    scores: Float[Tensor, "unit"], players: "MaskablePlayers | _CustomTokenPlayers"
) -> Float[np.ndarray, "player"]:
    """The summed scores of each player's units; units that always stay are left out."""
    if isinstance(players, TextPlayers | _CustomTokenPlayers):
        player_of_unit = players.player_of_unit
    else:  # patches, in their order
        is_patch = ~torch.tensor(players.sample.units.special)
        player_of_unit = torch.where(is_patch, is_patch.cumsum(0) - 1, -1)
    is_player = player_of_unit >= 0
    return np.bincount(player_of_unit[is_player].numpy(), weights=scores.detach().double().cpu()[is_player].numpy())


def _detach_attention(attention: AttentionWeights, visible: VisibleKeys, layer: int) -> AttentionWeights:
    """Replacement that stops gradients at the attention weights, as in Jain & Wallace."""
    return attention.detach()


def _compute_gradient_x_input(batch: ProbeBatch, detached: bool) -> Float[Tensor, "unit"]:
    """Σ_o |∂ŷ_o/∂x_t · x_t| over all classes, or of the predicted class if there are many."""
    patches = [AttentionPatch(_detach_attention, keep_row_sums=False)] if detached else []
    target_batch = batch.target_batch
    with torch.enable_grad():
        output, _, leaf_vectors = run_patched_forward(
            batch.context.recorder, target_batch.model_inputs, patches, leaves=target_batch.leaves
        )
        probabilities = batch.compute_probabilities(output)[0]
        classes = list(range(len(probabilities)))
        if len(classes) > MAX_GRADIENT_CLASSES:
            classes = [int(probabilities.argmax())]
        (leaf,) = target_batch.leaves
        vectors = leaf_vectors[leaf]
        gradients = [torch.autograd.grad(probabilities[o], vectors, retain_graph=True)[0] for o in classes]
    class_scores = []
    for gradient in gradients:
        by_stream = batch.context.adapter.to_unit_vectors({leaf: gradient * vectors}, batch.samples)
        class_scores.append(next(iter(by_stream.values()))[0].sum(-1).abs())
    return torch.stack(class_scores).sum(0)


def _compute_leave_one_out(
    batch: ProbeBatch, players: "MaskablePlayers | _CustomTokenPlayers"
) -> Float[np.ndarray, "player"]:
    """mean_o |ŷ_o(x without t) − ŷ_o(x)|."""
    coalitions = torch.ones(players.num_players, players.num_players, dtype=torch.bool).fill_diagonal_(False)
    samples = list(map(players.keep_only, coalitions))
    chunks = [samples[start : start + BATCH_SIZE] for start in range(0, len(samples), BATCH_SIZE)]
    batches = map(partial(ProbeBatch, batch.context), chunks)
    probabilities = torch.cat([masked_batch.probabilities for masked_batch in batches])
    return (probabilities - batch.probabilities).abs().mean(-1).double().cpu().numpy()
