"""Task cost of removing directions: loss and accuracy on the same inputs, before and after the removal."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from clearhead.adapters.base import InputOptions
from clearhead.adapters.masked_lm import MaskedLMAdapter
from clearhead.concepts.directions import Direction, LayerIndex
from clearhead.concepts.hidden_states import check_is_list
from clearhead.concepts.removal import ProjectionMatrix, ablated_directions
from clearhead.engine.batching import with_progress
from clearhead.errors import InputError
from clearhead.explainer import Explainer
from clearhead.stats import RATE_BOUNDS, ConfidenceInterval, compute_mean_interval

#: The direction or projection that is removed at each layer.
ProjectionsByLayer = Mapping[LayerIndex, Direction | ProjectionMatrix]
InputValues = Float[np.ndarray, "input"]


def compute_masked_lm_cost(
    explainer: Explainer,
    texts: Sequence[str],
    projections: ProjectionsByLayer,
    mask_fraction: float = 0.15,
    seed: int = 0,
    progress: Any = False,
) -> dict[str, ConfidenceInterval]:
    """Measure how much the loss of a masked language model grows when directions are removed.

    The same tokens are masked before and after the removal.

    Args:
        explainer: Explainer of a masked language model.
        texts: Texts to measure on; empty ones are skipped.
        projections: Direction or projection matrix to remove, by layer.
        mask_fraction: Fraction of the tokens of a text that are masked (at least one).
        seed: Seed of the choice of tokens.
        progress: True for a progress bar, or a function that wraps a list.

    Returns:
        Intervals over texts of "loss before", "loss after" and "loss difference".

    Raises:
        InputError: The model is not a masked language model, or there is no text.
    """
    if not isinstance(explainer.adapter, MaskedLMAdapter):
        raise InputError(
            f"{explainer.adapter.name} is not a masked language model: use compute_classification_cost(…), "
            "which needs labels"
        )
    check_is_list(texts)
    nonempty_texts = [text for text in texts if text.strip()]
    if not nonempty_texts:
        raise InputError("there are no texts on which to measure the cost")

    def compute_losses(text: str) -> list[float]:
        return [_compute_masked_loss(explainer, text, mask_fraction, seed)]

    before_values, after_values = _measure_before_and_after(
        explainer, nonempty_texts, projections, compute_losses, progress
    )
    return _summarise_change({"loss": (before_values[:, 0], after_values[:, 0])})


def compute_classification_cost(
    explainer: Explainer,
    inputs: Sequence[Any],
    labels: Sequence[str | int],
    projections: ProjectionsByLayer,
    progress: Any = False,
) -> dict[str, ConfidenceInterval]:
    """Measure how accuracy and cross-entropy of a classifier change when directions are removed.

    Args:
        explainer: Explainer of a classifier.
        inputs: Inputs to measure on.
        labels: One label (name or index) for each input.
        projections: Direction or projection matrix to remove, by layer.
        progress: True for a progress bar, or a function that wraps a list.

    Returns:
        Intervals over inputs of accuracy and loss, each "before", "after" and "difference".

    Raises:
        InputError: The numbers of inputs and labels differ, or the model has no classes.
    """
    check_is_list(inputs)
    if len(inputs) != len(labels) or not inputs:
        raise InputError(f"each input needs one label, but there are {len(inputs)} inputs and {len(labels)} labels")
    pairs = [(raw, explainer.adapter.label_index(label)) for raw, label in zip(inputs, labels, strict=True)]

    def compute_accuracy_and_loss(pair: tuple[Any, int]) -> list[float]:
        raw, label = pair
        (sample,) = explainer.adapter.make_samples(raw, InputOptions())
        logits = explainer.adapter.session.forward(explainer.adapter.collate([sample])).logits[0].double()
        if logits.dim() != 1 or len(logits) < 2:
            raise InputError(f"{explainer.adapter.name} has no classes, so its accuracy cannot be measured")
        is_correct = float(int(logits.argmax()) == label)
        return [is_correct, float(-logits.log_softmax(-1)[label])]

    before_values, after_values = _measure_before_and_after(
        explainer, pairs, projections, compute_accuracy_and_loss, progress
    )
    return _summarise_change(
        {name: (before_values[:, i], after_values[:, i]) for i, name in enumerate(("accuracy", "loss"))}
    )


def _measure_before_and_after(
    explainer: Explainer,
    inputs: Sequence[Any],
    projections: ProjectionsByLayer,
    measure: Callable[[Any], list[float]],
    progress: Any,
) -> list[Any]:
    """The measures of every input (input × measure), without and with the removal."""
    before_values = _measure_inputs(inputs, measure, progress)
    with ablated_directions(explainer, projections):
        after_values = _measure_inputs(inputs, measure, progress)
    return [before_values, after_values]


def _measure_inputs(inputs: Sequence[Any], measure: Callable[[Any], list[float]], progress: Any) -> np.ndarray:
    """Measure every input, with a progress bar, and return the values as input × measure."""
    return np.array([measure(raw) for raw in with_progress(list(inputs), progress)])


def _summarise_change(values: Mapping[str, tuple[InputValues, InputValues]]) -> dict[str, ConfidenceInterval]:
    """Compute the intervals of each measure before and after, and of its difference by input (after − before)."""
    intervals = {}
    for name, (before_values, after_values) in values.items():
        bounds = RATE_BOUNDS if name == "accuracy" else None
        difference_bounds = (-1.0, 1.0) if name == "accuracy" else None
        intervals[f"{name} before"] = compute_mean_interval(before_values, bounds=bounds)
        intervals[f"{name} after"] = compute_mean_interval(after_values, bounds=bounds)
        intervals[f"{name} difference"] = compute_mean_interval(after_values - before_values, bounds=difference_bounds)
    return intervals


def _compute_masked_loss(explainer: Explainer, text: str, mask_fraction: float, seed: int) -> float:
    """Mean cross-entropy at randomly masked tokens; the choice depends only on the seed and the text's length."""
    adapter = explainer.adapter
    assert isinstance(adapter, MaskedLMAdapter) and adapter.mask_token_id is not None
    tokens = adapter.tokenizer_wrapper.encode_texts((text,), InputOptions())
    token_ids = tokens.inputs["input_ids"]
    maskable = np.array([i for i, special in enumerate(tokens.units.special) if not special])
    rng = np.random.default_rng([seed, len(text)])
    masked = rng.permutation(maskable)[: max(1, round(mask_fraction * len(maskable)))]
    model_inputs = {
        name: tensor[None].to(adapter.device) for name, tensor in tokens.inputs.items() if adapter.forward_accepts(name)
    }
    model_inputs["input_ids"] = model_inputs["input_ids"].clone()
    model_inputs["input_ids"][0, masked] = adapter.mask_token_id
    logits = adapter.session.forward(model_inputs).logits[0, masked].double()
    return float(torch.nn.functional.cross_entropy(logits, token_ids[masked].to(logits.device)))
