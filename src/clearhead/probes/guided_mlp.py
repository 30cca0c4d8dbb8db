"""Guided-MLP diagnostic: does a classifier without context improve when a guide weighs its words?

Wiegreffe & Pinter, 2019:

    z_t = tanh(W E[x_t] + b),   ŷ = softmax(U Σ_t w_t z_t + c)

on the model's static embeddings E, with no positions and no context. The weights w are frozen and come from a guide:
uniform, the model's own attention, an adversary's, or the scores of any method of the library (absolute, summing to
one); "own" weights are learned by the classifier. Special tokens get weight 0.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead.errors import InputError, UnsupportedError, unknown_value_error
from clearhead.methods.base import METHOD_REGISTRY
from clearhead.probes.adversarial_training import train_adversary
from clearhead.probes.base import ProbeScope
from clearhead.probes.fine_tuning import FineTuningConfig, LabelledSplit, ModelCopy, TrainingProgress, fixed_seed
from clearhead.probes.probe_result import ProbeEstimate, ProbeResult
from clearhead.stats import RATE_BOUNDS, compute_mean_interval

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

#: Guides that are not methods of the library.
GUIDE_DESCRIPTIONS = {
    "uniform": "the same weight for every unit",
    "own": "learned by the classifier itself",
    "base": "the model's attention in the read-out row, mean over heads",
    "adversary": "the attention of a model that was trained to give the same outputs but attend to other units",
}
CONCLUSION = (
    "A classifier that sees words without their context received a weight for each word. If a guide makes it more "
    "accurate than uniform weights and its own learned weights do, the guide identifies the words that matter to the "
    "task. This shows that the weights contain information, not that the model computed its output from them: a guide "
    "may be correct about the task and wrong about the model. A guide that helps no more than uniform weights may "
    "still be faithful to a model that uses context."
)


class GuidedBagOfWords(nn.Module):
    """A classifier of words without context, weighted by a guide or by its own attention.

    Args:
        embedding: Module that looks up token embeddings; it is not trained.
        embedding_size: Width of the embeddings.
        num_classes: Number of classes.
        hidden_size: Width of the hidden layer.
        learns_weights: Whether it learns attention of its own, for use without a guide.
    """

    def __init__(
        self, embedding: nn.Module, embedding_size: int, num_classes: int, hidden_size: int, learns_weights: bool
    ) -> None:
        super().__init__()
        self.embedding_modules = [embedding]  # in a list, so that its parameters are not registered and not trained
        self.word = nn.Linear(embedding_size, hidden_size)
        self.out = nn.Linear(hidden_size, num_classes)
        self.query = nn.Linear(hidden_size, 1, bias=False) if learns_weights else None

    def forward(
        self, tokens: Int[Tensor, "batch unit"], weights: Float[Tensor, "batch unit"]
    ) -> Float[Tensor, "batch label"]:
        """Return logits of the sum of weights · tanh(W e); learned attention replaces the weights, except 0."""
        with torch.no_grad():
            vectors = self.embedding_modules[0](tokens).float()
        z = torch.tanh(self.word(vectors))
        if self.query is not None:
            weights = self.query(z).squeeze(-1).masked_fill(weights == 0, -torch.inf).softmax(-1)
        return self.out((weights[..., None] * z).sum(1))


def run_diagnostic_probe(
    explainer: "Explainer",
    inputs: Any,
    labels: Sequence[str | int] | None = None,
    *,
    guides: Sequence[str] = ("uniform", "own", "base"),
    width: int = 128,
    strength: float = 1e-2,
    steps: int = 500,
    batch_size: int = 32,
    learning_rate: float = 3e-3,
    adversary_steps: int = 300,
    adversary_learning_rate: float = 5e-5,
    held_out: float | int = 0.25,
    seed: int = 0,
    target: Any = None,
    checkpoint_dir: str | Path | None = None,
    progress: TrainingProgress | None = None,
) -> ProbeResult:
    """Train a classifier without context under each guide, and measure its accuracy.

    Args:
        explainer: Explainer of the model.
        inputs: One input or a list of inputs.
        labels: One label for each input; default: the model's own predictions.
        guides: "uniform", "own", "base", "adversary" (trained with strength λ), or any method of the library.
        width: Hidden size of the classifier.
        strength: λ of the adversary.
        steps: Number of training steps of the classifier.
        batch_size: Number of inputs in a training step.
        learning_rate: Peak learning rate of the classifier.
        adversary_steps: Number of training steps of the adversary.
        adversary_learning_rate: Peak learning rate of the adversary.
        held_out: Fraction of the inputs to measure on, or how many of the last inputs.
        seed: Seed of the split and of the training.
        target: The target, as in `Explainer.explain`; default: the predicted class.
        checkpoint_dir: Folder for the checkpoints of training runs, which are resumed from it.
        progress: Function that is called with the name of a run and its completed fraction.

    Returns:
        One record for each held-out input, the accuracy of each guide with intervals, and macro F1.

    Raises:
        InputError: Invalid options.
        UnsupportedError: The model does not read text, or cannot be probed or trained.

    Example:
        >>> run_diagnostic_probe(ex, texts, labels, guides=("uniform", "own", "base", "generic"))  # doctest: +SKIP
    """
    for guide in guides:
        if guide not in GUIDE_DESCRIPTIONS and guide not in METHOD_REGISTRY:
            raise unknown_value_error("guide", guide, [*GUIDE_DESCRIPTIONS, *sorted(METHOD_REGISTRY)])
    if not guides:
        raise InputError(f"no guide was given: choose from {', '.join(GUIDE_DESCRIPTIONS)} and the attribution methods")
    split = LabelledSplit(explainer, inputs, labels, held_out, target, seed)
    if split.context.samples[0].inputs.get(_get_input_argument(split)) is None:
        raise UnsupportedError(f"{split.context.adapter.name} does not take text, which the diagnostic probe needs")
    config = FineTuningConfig(steps, batch_size, learning_rate, checkpoint_dir, progress)
    adversary_config = FineTuningConfig(adversary_steps, batch_size, adversary_learning_rate, checkpoint_dir, progress)
    make_adversary = partial(train_adversary, split, ProbeScope("S1"), strength, adversary_config, seed)
    raw_inputs = inputs if isinstance(inputs, list) else [inputs]
    weights = _compute_guide_weights(split, raw_inputs, guides, make_adversary)
    test_indices = split.test_indices.tolist()
    classes = torch.unique(split.labels, return_inverse=True)[1]
    correctness: dict[str, np.ndarray] = {}
    macro_f1: dict[str, float] = {}
    for guide in guides:
        classifier = _train_classifier(split, guide, weights[guide], classes, width, config, seed)
        predicted = _predict_classes(split, classifier, weights[guide], test_indices)
        correctness[guide] = (predicted == classes[test_indices]).double().numpy()
        macro_f1[guide] = compute_macro_f1(predicted, classes[test_indices])
    model_probabilities, _ = split.base_copy.predict_probabilities(test_indices)
    model_correctness = split.compute_correctness(model_probabilities, test_indices)
    model_accuracy = compute_mean_interval(model_correctness, bounds=RATE_BOUNDS)
    estimates = [ProbeEstimate("model", model_accuracy, "accuracy of the model, for comparison")]
    for guide in guides:
        description = GUIDE_DESCRIPTIONS.get(guide, "absolute scores of this method")
        accuracy = compute_mean_interval(correctness[guide], bounds=RATE_BOUNDS)
        estimates.append(ProbeEstimate(guide, accuracy, f"accuracy; {description}"))
    records = []
    for n, i in enumerate(test_indices):
        name = " / ".join(split.context.get_units(split.context.samples[i]).texts)
        guide_correctness = {guide: float(correctness[guide][n]) for guide in guides}
        records.append({"input": name, "model": float(model_correctness[n]), **guide_correctness})
    settings: dict[str, Any] = {
        "width": width,
        "steps": steps,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "num_training_inputs": len(split.train_indices),
        "labels": split.label_source,
    }
    model_name = split.context.adapter.name
    return ProbeResult("diagnostic", model_name, settings, records, estimates, CONCLUSION, {"macro F1": macro_f1})


def _get_input_argument(split: LabelledSplit) -> str:
    """The name of the model input that holds the token ids."""
    return getattr(split.context.adapter, "input_argument", "input_ids")


def _compute_guide_weights(
    split: LabelledSplit, raw_inputs: Sequence[Any], guides: Sequence[str], make_adversary: Callable[[], ModelCopy]
) -> dict[str, list[Float[Tensor, "unit"]]]:
    """The weights that each guide gives to the units of each input."""
    context = split.context
    special_masks = [torch.tensor(context.get_units(sample).special) for sample in context.samples]
    scores: dict[str, list[Tensor]] = {
        guide: [torch.ones(len(mask)) for mask in special_masks] for guide in ("uniform", "own")
    }
    model_factories: dict[str, Callable[[], ModelCopy]] = {
        "base": lambda: split.base_copy,
        "adversary": make_adversary,
    }
    for guide in set(guides) & model_factories.keys():
        guide_model = model_factories[guide]()
        _, maps = guide_model.predict_probabilities(range(len(context.samples)), ProbeScope("S1"))
        scores[guide] = [attention[0, :, 0].mean(0).cpu() for attention in maps]
    methods = [guide for guide in guides if guide not in GUIDE_DESCRIPTIONS]
    if methods:
        explanations = context.explainer.explain(
            list(raw_inputs), method=methods, target=context.target.spec, batch_size=32
        )
        for method in methods:
            scores[method] = [torch.from_numpy(np.abs(e.scores)).float() for e in explanations[method]]
    return {
        guide: [_normalise_weights(*pair) for pair in zip(scores[guide], special_masks, strict=True)]
        for guide in guides
    }


def _normalise_weights(scores: Float[Tensor, "unit"], special: Tensor) -> Float[Tensor, "unit"]:
    """Weights without special tokens that sum to one; uniform if all scores are 0."""
    weights = scores.nan_to_num().float().masked_fill(special, 0)
    if not weights.sum() > 0:
        weights = (~special).float()
    return weights / weights.sum().clamp(min=1e-12)


def _pad_batch(split: LabelledSplit, weights: Sequence[Tensor], indices: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Pad token ids and weights of some inputs with 0, on the model's device."""
    argument = _get_input_argument(split)
    device = split.context.adapter.device
    token_ids = [split.context.samples[i].inputs[argument] for i in indices]
    padded_tokens = nn.utils.rnn.pad_sequence(token_ids, batch_first=True)
    padded_weights = nn.utils.rnn.pad_sequence([weights[i] for i in indices], batch_first=True)
    return padded_tokens.to(device), padded_weights.to(device)


def _train_classifier(
    split: LabelledSplit,
    guide: str,
    weights: Sequence[Tensor],
    classes: Tensor,
    width: int,
    config: FineTuningConfig,
    seed: int,
) -> GuidedBagOfWords:
    """Train a bag-of-words classifier with fixed word weights; the guide "own" learns them instead."""
    embedding = split.context.recorder.get_embedding_modules()[0]
    device = split.context.adapter.device
    (embedding_size,) = embedding(torch.zeros(1, dtype=torch.long, device=device)).shape[1:]
    num_classes = int(classes.max()) + 1
    with fixed_seed(seed):
        classifier = GuidedBagOfWords(embedding, embedding_size, num_classes, width, learns_weights=guide == "own")
        classifier = classifier.to(device)

    def compute_loss(step: int) -> Tensor:
        indices = split.select_batch_indices(step, config.batch_size, seed)
        return nn.functional.cross_entropy(
            classifier(*_pad_batch(split, weights, indices)), classes[indices].to(device)
        )

    # a position-weighted sum, so that the same weights in another order make another run
    digest = float(sum(float((vector * torch.arange(1, len(vector) + 1)).sum()) for vector in weights))
    cache_key = {**split.cache_key, "guide": guide, "weights": round(digest, 4), "width": width}
    config.train_model(f"guided by {guide}", classifier, compute_loss, seed, cache_key)
    return classifier


def _predict_classes(
    split: LabelledSplit, classifier: GuidedBagOfWords, weights: Sequence[Tensor], indices: Sequence[int]
) -> Int[Tensor, "input"]:
    """Return the most probable class of each input, computed in chunks of 256."""
    chunks = [list(indices)[start : start + 256] for start in range(0, len(indices), 256)]
    with torch.no_grad():
        return torch.cat([classifier(*_pad_batch(split, weights, chunk)).argmax(-1).cpu() for chunk in chunks])


def compute_macro_f1(predicted: Int[Tensor, "input"], expected: Int[Tensor, "input"]) -> float:
    """Compute the mean F1 over the classes that occur in `expected`.

    >>> compute_macro_f1(torch.tensor([0, 1, 1]), torch.tensor([0, 1, 0]))
    0.6666666666666666
    """
    scores = []
    for label in torch.unique(expected):
        true_positives = float(((predicted == label) & (expected == label)).sum())
        denominator = float((predicted == label).sum() + (expected == label).sum())
        scores.append(2 * true_positives / denominator)
    return sum(scores) / len(scores)
