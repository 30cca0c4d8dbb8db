"""Seed variance of attention: the same training from other seeds, and the divergence of the resulting attention.

Wiegreffe & Pinter, 2019:

    per input: median over seeds of JSD(A of the model, A of the seed's model)

It sets the scale for "different": adversarial attention that diverges no more than that of another seed shows nothing.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from clearhead.errors import InputError
from clearhead.probes.base import make_scope
from clearhead.probes.fine_tuning import (
    FineTuningConfig,
    LabelledSplit,
    TrainingProgress,
    compute_attention_divergence,
    compute_prediction_shift,
    fine_tune_copy,
)
from clearhead.probes.probe_result import ProbeResult, compute_estimates

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clearhead.explainer import Explainer

METRIC_DESCRIPTIONS = {
    "median JSD": "divergence of the seeds' attention from the model's, median over seeds, mean over heads: 0 to 0.693",
    "median JSD of the mean head": "the same divergence for the mean over heads; differences between heads can cancel",
    "median TVD": "total variation distance of the seeds' outputs from the model's, median over seeds",
    "largest weight": "largest attention weight of the rows in scope, mean over heads",
    "accuracy": "fraction of inputs that the model predicts correctly",
    "accuracy of seeds": "the same fraction for the models from other seeds, mean over these models",
}
CONCLUSION = (
    "Copies of the model were trained with other seeds on the same inputs. If their outputs agree but their attention "
    "does not, attention depends on the seed more than on the task, and the attention map of a single model is one of "
    "several that training could have produced. If their attention also agrees, it is determined by the task and the "
    "initial weights, because all seeds share the layers that were not reinitialised; this alone does not mean that "
    "attention explains the output. The divergence of adversarial attention is meaningful only if it exceeds the "
    "divergence between seeds."
)


def run_seeds_probe(
    explainer: "Explainer",
    inputs: Any,
    labels: "Sequence[str | int] | None" = None,
    *,
    seeds: int = 5,
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
    """Train copies of the model from several seeds, and measure how far their attention diverges from the model's.

    Args:
        explainer: Explainer of the model.
        inputs: One input or a list of inputs.
        labels: One label for each input; default: the model's own predictions.
        seeds: Number of other seeds.
        fresh: How many of the last layers are reinitialised, together with everything after them; "all" for the whole
            model.
        scope: The attention that is compared, "S1" to "S4".
        steps: Number of training steps.
        batch_size: Number of inputs in a training step.
        learning_rate: Peak learning rate.
        held_out: Fraction of the inputs to measure on, or how many of the last inputs.
        seed: Seed of the split; the copies use the following seeds.
        target: The target, as in `Explainer.explain`; default: the predicted class.
        checkpoint_dir: Folder for the checkpoints of training runs, which are resumed from it.
        progress: Function that is called with the name of a run and its completed fraction.

    Returns:
        One record for each held-out input, and means with intervals.

    Raises:
        InputError: Invalid options.
        UnsupportedError: The model cannot be probed or trained.

    Example:
        >>> run_seeds_probe(ex, texts, labels).estimates  # doctest: +SKIP
    """
    if seeds < 1:
        raise InputError(f"seeds={seeds} is not valid: it must be at least 1")
    split = LabelledSplit(explainer, inputs, labels, held_out, target, seed)
    probe_scope = make_scope(scope)
    config = FineTuningConfig(steps, batch_size, learning_rate, checkpoint_dir, progress)
    test_indices = split.test_indices.tolist()
    model_probabilities, model_maps = split.base_copy.predict_probabilities(test_indices, probe_scope)
    jsds = []
    mean_head_jsds = []
    tvds = []
    correctness = []
    table = []
    for copy_seed in range(seed + 1, seed + 1 + seeds):
        model_copy = fine_tune_copy(split, f"seed {copy_seed}", config, copy_seed, fresh)
        probabilities, maps = model_copy.predict_probabilities(test_indices, probe_scope)
        jsd, mean_head_jsd = compute_attention_divergence(maps, model_maps)
        jsds.append(jsd)
        mean_head_jsds.append(mean_head_jsd)
        tvds.append(compute_prediction_shift(probabilities, model_probabilities))
        correctness.append(split.compute_correctness(probabilities, test_indices))
        table.append(
            {
                "seed": copy_seed,
                "JSD": float(jsd.mean()),
                "TVD": float(tvds[-1].mean()),
                "accuracy": float(correctness[-1].mean()),
            }
        )
    model_correctness = split.compute_correctness(model_probabilities, test_indices)
    units = [split.context.get_units(split.context.samples[i]) for i in test_indices]
    records = [
        {
            "input": " / ".join(units[n].texts),
            "prediction": split.context.get_predicted_label(model_probabilities[n]),
            "median JSD": float(np.median(jsds, axis=0)[n]),
            "median JSD of the mean head": float(np.median(mean_head_jsds, axis=0)[n]),
            "median TVD": float(np.median(tvds, axis=0)[n]),
            "largest weight": float(model_maps[n].mean(1).amax(-1).mean()),
            "accuracy": float(model_correctness[n]),
            "accuracy of seeds": float(np.mean(correctness, axis=0)[n]),
        }
        for n in range(len(test_indices))
    ]
    settings = {
        "scope": str(probe_scope),
        "seeds": seeds,
        "fresh": fresh,
        "steps": steps,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "num_training_inputs": len(split.train_indices),
        "labels": split.label_source,
    }
    estimates = compute_estimates(records, METRIC_DESCRIPTIONS)
    return ProbeResult("seeds", split.context.adapter.name, settings, records, estimates, CONCLUSION, {"seeds": table})
