"""Adversarial training: models trained to give the same output as this one while attending elsewhere.

Wiegreffe & Pinter, 2019:

    loss = mean TVD(ŷ_a, ŷ_b) − λ · mean KL(A_a ‖ A_b)

starting from the model's own weights, with all parameters trained. Each λ gives a point of the frontier: the change of
the output (TVD) against the change of attention (JSD). λ = 0 gives the model back; other seeds and uniform attention
are reference points.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.errors import InputError
from clearhead.probes.base import ProbeScope, make_scope
from clearhead.probes.divergences import compute_total_variation
from clearhead.probes.fine_tuning import (
    FineTuningConfig,
    LabelledSplit,
    ModelCopy,
    TrainingProgress,
    compute_attention_divergence,
    compute_prediction_shift,
    fine_tune_copy,
)
from clearhead.probes.probe_result import ProbeEstimate, ProbeResult
from clearhead.probes.uniform_attention import make_uniform_patch
from clearhead.stats import RATE_BOUNDS, compute_mean_interval

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

DEFAULT_STRENGTHS = (0.0, 1e-4, 1e-3, 1e-2, 1e-1)
#: Lower bound of the arguments of logarithms.
LOG_EPS = 1e-10
CONCLUSION = (
    "Complete models were trained to give the same outputs with different attention. A point in the upper left corner "
    "is a model that gives the same outputs but attends to other units: the model's attention is then not the only "
    "one that is compatible with these outputs. If divergence increases only together with the change of the outputs, "
    "the outputs constrain the attention. Compare the points with those of the seeds: a divergence below theirs is "
    "not larger than chance. The existence of a model that attends to other units does not show whether this model "
    "uses its own attention."
)


def run_frontier_probe(
    explainer: "Explainer",
    inputs: Any,
    labels: Sequence[str | int] | None = None,
    *,
    strengths: Sequence[float] = DEFAULT_STRENGTHS,
    seeds: int = 2,
    fresh: int | str = 0,
    scope: str = "S1",
    steps: int = 300,
    batch_size: int = 32,
    learning_rate: float = 5e-5,
    held_out: float | int = 0.25,
    seed: int = 0,
    target: Any = None,
    checkpoint_dir: str | Path | None = None,
    progress: TrainingProgress | None = None,
) -> ProbeResult:
    """Train adversarial models of several strengths λ, and measure the change of outputs against that of attention.

    Args:
        explainer: Explainer of the model.
        inputs: One input or a list of inputs.
        labels: One label for each input; default: the model's own predictions.
        strengths: Values of λ, the weight of the divergence of attention.
        seeds: Number of models from other seeds, for comparison.
        fresh: How many of the last layers of these models are reinitialised, together with everything after them;
            "all" for the whole model.
        scope: "S1", the read-out row; "S2", that row in every layer; "S4", all attention.
        steps: Number of training steps.
        batch_size: Number of inputs in a training step.
        learning_rate: Peak learning rate.
        held_out: Fraction of the inputs to measure on, or how many of the last inputs.
        seed: Seed of the split and of the training.
        target: The target, as in `Explainer.explain`; default: the predicted class.
        checkpoint_dir: Folder for the checkpoints of training runs, which are resumed from it.
        progress: Function that is called with the name of a run and its completed fraction.

    Returns:
        One record for each point of the frontier, and estimates with intervals.

    Raises:
        InputError: Invalid options.
        UnsupportedError: The model cannot be probed or trained.

    Example:
        >>> run_frontier_probe(ex, texts, labels, strengths=(0.0, 1e-3, 1e-2), seeds=2).estimates  # doctest: +SKIP
    """
    if not strengths or any(strength < 0 for strength in strengths):
        raise InputError(f"strengths={list(strengths)} is not valid: use at least one value, none below 0")
    if scope not in ("S1", "S2", "S4"):
        raise InputError(f"scope={scope!r} is not valid: adversarial models are trained on S1, S2 or S4")
    split = LabelledSplit(explainer, inputs, labels, held_out, target, seed)
    probe_scope = make_scope(scope)
    config = FineTuningConfig(steps, batch_size, learning_rate, checkpoint_dir, progress)
    test_indices = split.test_indices.tolist()
    model_probabilities, model_maps = split.base_copy.predict_probabilities(test_indices, probe_scope)
    points: list[tuple[str, float | None, Tensor, list[Tensor]]] = []
    for strength in strengths:
        adversary = train_adversary(split, probe_scope, strength, config, seed)
        points.append((f"λ {strength:g}", strength, *adversary.predict_probabilities(test_indices, probe_scope)))
    for copy_seed in range(seed + 1, seed + 1 + seeds):
        model_copy = fine_tune_copy(split, f"seed {copy_seed}", config, copy_seed, fresh)
        points.append((f"seed {copy_seed}", None, *model_copy.predict_probabilities(test_indices, probe_scope)))

    def make_uniform_patches(samples: Sequence[Any]) -> list[Any]:
        return [make_uniform_patch(split.context, probe_scope, samples)]

    uniform_copies = {
        "uniform": split.base_copy,
        "uniform, trained": _train_with_uniform_attention(split, probe_scope, config, seed),
    }
    for name, model_copy in uniform_copies.items():
        outputs = model_copy.predict_probabilities(test_indices, probe_scope, make_uniform_patches)
        points.append((name, None, *outputs))
    estimates = [
        ProbeEstimate(
            "model: accuracy",
            compute_mean_interval(split.compute_correctness(model_probabilities, test_indices), bounds=RATE_BOUNDS),
            _METRIC_DESCRIPTIONS["accuracy"],
        )
    ]
    records = []
    for name, point_strength, probabilities, maps in points:
        jsd, mean_head_jsd = compute_attention_divergence(maps, model_maps)
        metrics = {
            "TVD": compute_prediction_shift(probabilities, model_probabilities),
            "JSD": jsd,
            "accuracy": split.compute_correctness(probabilities, test_indices),
        }
        means = {metric: float(values.mean()) for metric, values in metrics.items()}
        records.append(
            {"point": name, "strength": point_strength, **means, "JSD of the mean head": float(mean_head_jsd.mean())}
        )
        estimates += [
            ProbeEstimate(
                f"{name}: {metric}",
                compute_mean_interval(values, bounds=RATE_BOUNDS if metric == "accuracy" else None),
                _METRIC_DESCRIPTIONS[metric],
            )
            for metric, values in metrics.items()
        ]
    settings = {
        "scope": str(probe_scope),
        "steps": steps,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "num_training_inputs": len(split.train_indices),
        "fresh": fresh,
        "labels": split.label_source,
    }
    return ProbeResult("frontier", split.context.adapter.name, settings, records, estimates, CONCLUSION)


_METRIC_DESCRIPTIONS = {
    "TVD": "total variation distance of the outputs from the model's",
    "JSD": "divergence of attention from the model's, mean over heads",
    "accuracy": "fraction of correct predictions",
}


def train_adversary(
    split: LabelledSplit, scope: ProbeScope, strength: float, config: FineTuningConfig, seed: int
) -> ModelCopy:
    """Train a copy of the model to keep its outputs and to attend elsewhere.

    Args:
        split: Inputs to train and to measure on.
        scope: The attention that is to differ.
        strength: λ, the weight of the divergence of attention.
        config: Length and learning rate of the training.
        seed: Seed of the order of the inputs.

    Returns:
        The trained copy.
    """
    adversary = ModelCopy(split.context).eval()  # without dropout: λ = 0 must give the model back

    def compute_loss(step: int) -> Tensor:
        indices = split.select_batch_indices(step, config.batch_size, seed)
        samples = [split.context.samples[i] for i in indices]
        with torch.no_grad():
            model_scores, model_maps = split.base_copy.compute_scores_and_attention(samples)
            model_attention = split.base_copy.select_attention(model_maps, samples, scope)
        scores, maps = adversary.compute_scores_and_attention(samples)
        tvd = compute_total_variation(scores.softmax(-1), model_scores.softmax(-1)).mean()
        return tvd - strength * compute_mean_kl(
            adversary.select_attention(maps, samples, scope),
            model_attention,
            adversary.compute_row_weights(samples, scope),
        )

    cache_key = {**split.cache_key, "scope": str(scope), "strength": strength}
    config.train_model(f"adversary {strength:g}", adversary.model, compute_loss, seed, cache_key)
    return adversary


def compute_mean_kl(
    attention: Float[Tensor, "batch layer head row key"],
    reference_attention: Float[Tensor, "batch layer head row key"],
    row_weights: Float[Tensor, "batch row"],
) -> Float[Tensor, ""]:
    """Mean KL(attention ‖ reference) over inputs, layers, heads and rows without padding, with finite gradients."""
    log_ratio = attention.clamp(min=LOG_EPS).log() - reference_attention.clamp(min=LOG_EPS).log()
    divergence = (attention * log_ratio).sum(-1)
    return (divergence.mean((1, 2)) * row_weights).sum(-1).mean()


def _train_with_uniform_attention(
    split: LabelledSplit, scope: ProbeScope, config: FineTuningConfig, seed: int
) -> ModelCopy:
    """Fine-tune a copy of the model while its attention in the scope is uniform."""

    def make_patches(samples: Sequence[Any]) -> list[Any]:
        return [make_uniform_patch(split.context, scope, samples)]

    return fine_tune_copy(split, "uniform", config, seed, None, make_patches, {"uniform": str(scope)})
