"""The steps of TCAV, one by one: activations → concept vector → gradients → sensitivities → score.

    v = the unit normal of a linear classifier of concept against counter-examples, S(x) = ∇y(x)·v,
    TCAV = the fraction of the class's inputs with S > 0 (those with S = 0 count half)

Kim et al. 2018, "Interpretability Beyond Feature Attribution: Quantitative Testing with Concept Activation Vectors".

`pool` sets how the unit vectors of an input become an activation, and which units are moved along v:
    class   the read-out rows of the model; only these are moved
    mean    the mean of the units that are not special; all of them are moved, S = Σ_t g_t·v
    token   every unit that is not special is an activation of its own; all of them are moved
    flat    all units concatenated; for inputs of one length, such as images of one size
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.concepts.densray import build_direction
from clearhead.concepts.directions import Direction, HeldOutMetrics, LayerIndex
from clearhead.concepts.hidden_states import LayerStates, Progress, compute_layer_states
from clearhead.errors import InputError, unknown_value_error
from clearhead.explainer import Explainer
from clearhead.sample import Sample
from clearhead.targets import Target, TargetLike, make_target

POOLING_MODES = ("class", "mean", "token", "flat")
CLASSIFIERS = ("logistic", "sgd", "mean-difference", "ridge")
#: Held-out accuracy below which a concept vector is rejected: its direction would not be that of the concept.
MIN_HELD_OUT_ACCURACY = 0.6

ActivationMatrix = Float[Tensor, "example feature"]
#: For each input, one gradient vector for each unit.
InputGradients = Sequence[Float[Tensor, "unit model"]]


@dataclass
class ConceptActivations:
    """The activations of a set of inputs at one layer.

    Attributes:
        activations: One row for each activation.
        input_indices: The index of the input that each row belongs to; with pool="token", an input has several rows.
    """

    activations: ActivationMatrix
    input_indices: list[int]

    @property
    def num_inputs(self) -> int:
        """Number of different inputs."""
        return len(set(self.input_indices))

    def select_inputs(self, inputs: Sequence[int]) -> "ConceptActivations":
        """Return the activations of these inputs only, in this order."""
        rows_by_input: dict[int, list[int]] = {}
        for row, input_index in enumerate(self.input_indices):
            rows_by_input.setdefault(input_index, []).append(row)
        rows = [row for input_index in inputs for row in rows_by_input[input_index]]
        return ConceptActivations(self.activations[rows], [self.input_indices[row] for row in rows])


def compute_activations(
    explainer: Explainer,
    inputs: Sequence[Any],
    layers: Sequence[LayerIndex],
    pool: str = "class",
    *,
    stream: str | None = None,
    batch_size: int = 16,
    progress: Progress = False,
) -> dict[LayerIndex, ConceptActivations]:
    """Compute the pooled hidden states of inputs at chosen layers.

    Args:
        explainer: Explainer of the model.
        inputs: The inputs, as `Explainer.explain` takes them.
        layers: Layers whose output is read, from 0, negative from the end; "embeddings" is the output of the embedding
            layer.
        pool: How the unit vectors of an input become an activation: "class", "mean", "token" or "flat".
        stream: Stream whose layers are read; default: the adapter's main stream.
        batch_size: Number of inputs in a pass.
        progress: True for a progress bar, or a function that wraps a list.

    Returns:
        The activations by layer.

    Raises:
        InputError: An unknown pool, a layer that does not exist, or inputs that the pool does not fit.
    """
    _check_pool(pool)
    layer_states = compute_layer_states(
        explainer, inputs, layers, stream=stream, batch_size=batch_size, progress=progress
    )
    return {
        layer: _pool_states(explainer, layer_states, layer, pool, stream or explainer.adapter.stream)
        for layer in layer_states[0].states
    }


def _pool_states(
    explainer: Explainer, layer_states: Sequence[LayerStates], layer: LayerIndex, pool: str, stream: str
) -> ConceptActivations:
    """Pool a layer's states: "flat" joins all units, "token" keeps the weighted units, else their weighted mean."""
    input_indices: list[int] = []
    pooled: list[Tensor] = []
    for input_index, input_states in enumerate(layer_states):
        states = input_states.states[layer].double()
        if pool == "flat":
            activations = states.reshape(1, -1)
        else:
            weights = _compute_pooling_weights(explainer, input_states.sample, make_target(None), pool, stream)
            weights = weights.to(states)
            activations = states[weights > 0] if pool == "token" else (weights @ states)[None]
        pooled.append(activations)
        input_indices += [input_index] * len(activations)
    if len({activations.shape[1] for activations in pooled}) > 1:
        raise InputError("pool='flat' needs inputs of one length: choose pool='mean', 'class' or 'token'")
    return ConceptActivations(torch.cat(pooled), input_indices)


def _compute_pooling_weights(
    explainer: Explainer, sample: Sample, target: Target, pool: str, stream: str
) -> Float[Tensor, "unit"]:
    """The weight of each unit in an activation; units with a positive weight are moved together."""
    axis = sample.axes[stream]
    weights = torch.zeros(len(axis), dtype=torch.float64)
    if pool == "class":
        # a masked language model has its read-out rows at the masks, and this text has none
        lacks_mask = explainer.adapter.masked and not sample.mask_positions
        readouts = {} if lacks_mask else explainer.adapter.find_readouts(sample, target)
        rows = readouts.get(stream)
        if not rows:
            raise InputError(
                f"{explainer.adapter.name} has no read-out position here: choose pool='mean', 'token' or 'flat'"
            )
        weights[list(rows)] = torch.tensor(list(rows.values()), dtype=torch.float64)
        return weights
    non_special = [i for i, special in enumerate(axis.special) if not special]
    weights[non_special] = 1 / len(non_special)
    return weights


def compute_target_gradients(
    explainer: Explainer,
    inputs: Sequence[Any],
    layers: Sequence[LayerIndex],
    pool: str = "class",
    target: TargetLike = None,
    *,
    scale: str | None = None,
    stream: str | None = None,
    batch_size: int = 16,
) -> dict[LayerIndex, InputGradients]:
    """Compute ∂y/∂h of every unit that the pool moves; the gradients of other units are 0.

    Args:
        explainer: Explainer of the model.
        inputs: The inputs, as `Explainer.explain` takes them.
        layers: Layers whose output is read, from 0, negative from the end; "embeddings" is the output of the embedding
            layer.
        pool: Which units are moved: "class", "mean", "token" or "flat".
        target: The target y, as in `Explainer.explain`; default: the predicted class.
        scale: Scale of the target, such as "logit" or "log-odds".
        stream: Stream whose layers are read; default: the adapter's main stream.
        batch_size: Number of inputs in a pass.

    Returns:
        The gradients by layer, one matrix (unit × model) for each input.

    Raises:
        InputError: An unknown pool, or a layer that does not exist.
    """
    _check_pool(pool)
    layer_states = compute_layer_states(
        explainer,
        inputs,
        layers,
        target=target,
        scale=scale,
        with_gradients=True,
        stream=stream,
        batch_size=batch_size,
    )
    return compute_masked_gradients(explainer, layer_states, pool, target, stream)


def compute_masked_gradients(
    explainer: Explainer,
    layer_states: Sequence[LayerStates],
    pool: str,
    target: TargetLike = None,
    stream: str | None = None,
) -> dict[LayerIndex, InputGradients]:
    """Select the gradients of the units that the pool moves, from states that were computed with gradients.

    Args:
        explainer: Explainer of the model.
        layer_states: Result of `compute_layer_states(…, with_gradients=True)`.
        pool: Which units are moved: "class", "mean", "token" or "flat".
        target: The target that the gradients belong to.
        stream: Stream whose layers were read; default: the adapter's main stream.

    Returns:
        The gradients by layer, one matrix (unit × model) for each input; 0 for units that are not moved.
    """
    _check_pool(pool)
    stream = stream or explainer.adapter.stream
    if pool == "flat":
        moved_masks = [torch.ones(len(states.sample.axes[stream])).double() for states in layer_states]
    else:
        resolved_target = make_target(target, explainer.adapter.target_scales[0])
        moved_masks = [
            (_compute_pooling_weights(explainer, states.sample, resolved_target, pool, stream) > 0).double()
            for states in layer_states
        ]
    return {
        layer: [
            states.gradients[layer].double() * mask[:, None].to(states.gradients[layer].device)
            for states, mask in zip(layer_states, moved_masks, strict=True)
        ]
        for layer in layer_states[0].gradients
    }


def fit_concept_vector(
    concept: ConceptActivations,
    counterexamples: ConceptActivations,
    classifier: str = "logistic",
    *,
    threshold: float | None = MIN_HELD_OUT_ACCURACY,
    held_out_fraction: float = 0.33,
    seed: int = 0,
    names: tuple[str, str] = ("concept", "counter-examples"),
) -> Direction:
    """Fit a concept activation vector: the unit normal of a linear classifier, pointing to the concept.

    Both sets are cut to the size of the smaller one. The vector is fitted on all inputs; its held-out metrics come from
    a second classifier that is fitted without a fraction of the inputs and tested on them.

    Args:
        concept: Activations of inputs that show the concept.
        counterexamples: Activations of inputs that do not.
        classifier: "logistic", "sgd", "mean-difference" or "ridge".
        threshold: Held-out accuracy below which the vector is rejected; None accepts every vector.
        held_out_fraction: Fraction of the inputs that are held out.
        seed: Seed of the split and of the classifier.
        names: Names of the two sets, for messages and for the direction.

    Returns:
        The concept vector as a Direction with its held-out metrics.

    Raises:
        InputError: A set has fewer than 3 inputs, the widths differ, or the accuracy is below the threshold.
    """
    if classifier not in CLASSIFIERS:
        raise unknown_value_error("classifier", classifier, CLASSIFIERS)
    for activation_set, name in zip((concept, counterexamples), names, strict=True):
        if activation_set.num_inputs < 3:
            raise InputError(
                f"{name} has {activation_set.num_inputs} inputs: a concept vector needs at least 3, of which one is "
                "held out"
            )
    if concept.activations.shape[1] != counterexamples.activations.shape[1]:
        widths = concept.activations.shape[1], counterexamples.activations.shape[1]
        raise InputError(
            f"{names[0]} and {names[1]} have activations with different numbers of features: {widths[0]} and "
            f"{widths[1]}"
        )
    ordered_sets, _ = _order_sets(concept, counterexamples)
    splits = [_split_train_test(activation_set, held_out_fraction, seed) for activation_set in ordered_sets]
    train_sets, test_sets = zip(*splits, strict=True)
    trial = _fit_classifier(train_sets[0].activations, train_sets[1].activations, classifier, seed)
    metrics = _compute_held_out_metrics(trial, test_sets[0].activations, test_sets[1].activations)
    v = fit_unit_normal(concept, counterexamples, classifier, seed)
    assert metrics.accuracy is not None
    if threshold is not None and metrics.accuracy < threshold:
        raise InputError(
            f"{names[0]} cannot be distinguished from {names[1]}: accuracy {metrics.accuracy:.2f} on {metrics.count} "
            f"held-out activations, less than {threshold}: choose another layer or pool, use more examples, or "
            "threshold=None"
        )
    metadata = {"method": "tcav", "classifier": classifier, "seed": seed}
    direction = build_direction(
        v[None], v.new_zeros(1), concept.activations, counterexamples.activations, names, metadata
    )
    # build_direction orients by the difference of the means; the normal may point away from it, and it decides the side
    sign = -1.0 if float(direction.q[0] @ v) < 0 else 1.0
    return replace(direction, q=direction.q * sign, centre=direction.centre * sign, held_out_metrics=metrics)


def fit_unit_normal(
    concept: ConceptActivations, counterexamples: ConceptActivations, classifier: str, seed: int = 0
) -> Float[Tensor, "feature"]:
    """Fit a linear classifier and return its unit normal, pointing to the concept."""
    ordered_sets, sign = _order_sets(concept, counterexamples)
    return sign * _fit_classifier(ordered_sets[0].activations, ordered_sets[1].activations, classifier, seed)[0]


def _order_sets(concept: ConceptActivations, counter: ConceptActivations) -> tuple[list[ConceptActivations], int]:
    """Both sets at one size, in an order that does not depend on which is called the concept (sign −1: swapped).

    This makes TCAV(A, B) = 1 − TCAV(B, A) exact for every classifier.
    """
    size = min(concept.num_inputs, counter.num_inputs)
    sets = [_truncate_to_size(activation_set, size) for activation_set in (concept, counter)]
    first_key, second_key = (activation_set.activations.cpu().numpy().tobytes() for activation_set in sets)
    if first_key > second_key:
        return sets[::-1], -1
    return sets, 1


def _truncate_to_size(activation_set: ConceptActivations, size: int) -> ConceptActivations:
    """Keep the activations of the first `size` inputs."""
    if activation_set.num_inputs == size:
        return activation_set
    return activation_set.select_inputs(list(dict.fromkeys(activation_set.input_indices))[:size])


def _split_train_test(
    activation_set: ConceptActivations, held_out_fraction: float, seed: int
) -> tuple[ConceptActivations, ConceptActivations]:
    """Hold out whole inputs: the same positions in every set of one size."""
    inputs = np.array(list(dict.fromkeys(activation_set.input_indices)))
    order = np.random.default_rng(seed).permutation(len(inputs))
    num_held_out = max(1, round(held_out_fraction * len(inputs)))
    train_inputs = inputs[order[num_held_out:]].tolist()
    test_inputs = inputs[order[:num_held_out]].tolist()
    return activation_set.select_inputs(train_inputs), activation_set.select_inputs(test_inputs)


def _fit_classifier(
    first: ActivationMatrix, second: ActivationMatrix, classifier: str, seed: int
) -> "tuple[Float[Tensor, 'feature'], float]":
    """The unit normal towards the first set, and the decision threshold along it."""
    if classifier == "mean-difference":
        difference = first.mean(0) - second.mean(0)
        middle = (first.mean(0) + second.mean(0)) / 2
        normal = difference / difference.norm().clamp(min=1e-300)
        return normal, float(middle @ normal)
    from sklearn.linear_model import LogisticRegression, RidgeClassifier, SGDClassifier

    estimator = {
        "logistic": lambda: LogisticRegression(max_iter=1000),
        "sgd": lambda: SGDClassifier(alpha=0.01, max_iter=1000, tol=1e-3, random_state=seed),
        "ridge": lambda: RidgeClassifier(),
    }[classifier]()
    x = torch.cat([first, second]).cpu().numpy()
    estimator.fit(x, np.r_[np.ones(len(first)), np.zeros(len(second))])
    normal = torch.from_numpy(np.asarray(estimator.coef_, dtype=np.float64).reshape(-1)).to(first.device)
    norm = float(normal.norm()) or 1.0
    return normal / norm, -float(np.ravel(estimator.intercept_)[0]) / norm


def _compute_held_out_metrics(
    classifier: tuple[Tensor, float], first: ActivationMatrix, second: ActivationMatrix
) -> HeldOutMetrics:
    """Return balanced accuracy and effect size (difference of mean scores by their pooled deviation)."""
    v, threshold = classifier
    first_scores = first @ v - threshold
    second_scores = second @ v - threshold
    accuracy = float(((first_scores > 0).double().mean() + (second_scores <= 0).double().mean()) / 2)
    residuals = torch.cat([first_scores - first_scores.mean(), second_scores - second_scores.mean()])
    effect = (first_scores.mean() - second_scores.mean()) / residuals.std().clamp(min=1e-300)
    return HeldOutMetrics(accuracy, float(effect), len(first) + len(second))


def compute_sensitivities(gradients: InputGradients, vector: Direction) -> Float[Tensor, "input"]:
    """Compute S(x) = ∇y·v: how the target grows when the activation moves towards the concept.

    Args:
        gradients: Gradients of one layer, as `compute_target_gradients` returns them.
        vector: Concept vector of the same layer.

    Returns:
        One sensitivity for each input.
    """
    return pool_gradients(gradients, vector.q.shape[1]) @ vector.q[0].to(gradients[0])


def pool_gradients(gradients: InputGradients, num_features: int) -> "Float[Tensor, 'input feature']":
    """Compute ∂y/∂activation: the effect of moving all units together along a vector of `num_features` features.

    Raises:
        InputError: The gradients fit neither one unit nor all units of an input concatenated.
    """
    if all(gradient.shape[1] == num_features for gradient in gradients):
        return torch.stack([gradient.sum(0) for gradient in gradients])
    if all(gradient.numel() == num_features for gradient in gradients):
        return torch.stack([gradient.flatten() for gradient in gradients])
    raise InputError(
        f"the concept vector has {num_features} features, but the layer's gradients have the shape "
        f"{tuple(gradients[0].shape)}"
    )


def compute_concept_map(gradients: InputGradients, vector: Direction) -> list[Float[Tensor, "unit"]]:
    """Compute the sensitivity of every unit of each input, g_t·v; the values of an input add up to S.

    Args:
        gradients: Gradients of one layer, as `compute_target_gradients` returns them.
        vector: Concept vector of the same layer.

    Returns:
        One value for each unit, by input.
    """
    width = vector.q.shape[1]
    pool_gradients(gradients, width)  # raises if the widths do not fit
    concept_maps = []
    for gradient in gradients:
        q = vector.q[0].to(gradient)
        if gradient.shape[1] == width:
            concept_maps.append(gradient @ q)
        else:
            concept_maps.append((gradient * q.view_as(gradient)).sum(1))
    return concept_maps


def compute_tcav_score(sensitivities: Float[Tensor, "input"]) -> float:
    """Compute the TCAV score: the fraction of inputs with a positive sensitivity; zeros count half.

    >>> compute_tcav_score(torch.tensor([0.5, 0.1, -1.0, 0.0]))
    0.625
    """
    return float(((sensitivities > 0).double() + (sensitivities == 0).double() / 2).mean())


def _check_pool(pool: str) -> None:
    """Raise `InputError` if `pool` is not one of `POOLING_MODES`."""
    if pool not in POOLING_MODES:
        raise unknown_value_error("pool", pool, POOLING_MODES)
