"""TCAV: does a concept drive a class more than a random concept would?

A concept's vectors do not depend on the class: `fit_concepts` computes them once, `FittedConcepts.evaluate` tests them
on the inputs of one class, and `run_tcav` does both. The tests are those of `concepts/significance.py`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.concepts.cav import (
    MIN_HELD_OUT_ACCURACY,
    ConceptActivations,
    InputGradients,
    compute_activations,
    compute_concept_map,
    compute_masked_gradients,
    compute_sensitivities,
    compute_tcav_score,
    fit_concept_vector,
)
from clearhead.concepts.directions import Direction, Directions, LayerIndex
from clearhead.concepts.hidden_states import LayerStates, Progress, compute_layer_states
from clearhead.concepts.significance import (
    ConceptTest,
    compute_random_magnitudes,
    correct_concept_tests,
    evaluate_concept,
    fit_against_random_sets,
    fit_random_vectors,
    split_random_sets,
)
from clearhead.errors import InputError
from clearhead.explainer import Explainer
from clearhead.explanation.explanation import to_json_value
from clearhead.sample import Sample
from clearhead.targets import TargetLike


@dataclass
class TcavResult:
    """The TCAV tests of every concept at every layer, with vectors and sensitivity maps.

    Attributes:
        model: Name of the model.
        target: The target, as text.
        concept_tests: One test for each concept and layer.
        relative_scores: By layer, the TCAV score of each concept against each other concept.
        concept_vectors: By concept and layer, the mean of the vectors against all random sets.
        sensitivity_maps: By concept and layer, the sensitivity of every unit of each input.
        samples: The inputs of the class, as the model takes them.
        settings: The settings of the run.
    """

    model: str
    target: str
    concept_tests: list[ConceptTest]
    relative_scores: dict[LayerIndex, dict[tuple[str, str], float]]
    concept_vectors: dict[str, Directions]
    sensitivity_maps: dict[str, dict[LayerIndex, list[Float[np.ndarray, "unit"]]]]
    samples: list[Sample]
    settings: dict[str, Any]

    def _repr_html_(self) -> str:
        from clearhead.render.html import render_notebook_view_model
        from clearhead.render.reports.concepts import build_tcav_report

        return render_notebook_view_model(build_tcav_report(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the tests, relative scores and settings as a dictionary for JSON.

        Returns:
            Plain JSON values, schema "clearhead/tcav", without the sensitivity maps; non-finite numbers become null.
        """
        relative = [
            {"layer": layer, "concept": a, "against": b, "score": score}
            for layer, scores in self.relative_scores.items()
            for (a, b), score in scores.items()
        ]
        return to_json_value(
            {
                "schema": "clearhead/tcav",
                "version": 2,
                "model": self.model,
                "target": self.target,
                "settings": self.settings,
                "tests": [concept_test.to_dict() for concept_test in self.concept_tests],
                "relative": relative,
            }
        )


def compute_concept_tests(
    explainer: Explainer,
    inputs: Sequence[Any],
    concepts: Mapping[str, Sequence[Any]],
    random_inputs: Sequence[Any],
    layers: Sequence[LayerIndex],
    **kwargs: Any,
) -> list[ConceptTest]:
    """Test every concept at every layer against random concepts.

    Args:
        explainer: Explainer of the model.
        inputs: Inputs of the class.
        concepts: Inputs that show each concept, by name.
        random_inputs: Inputs of any kind, for the random negative sets.
        layers: Layers whose output is read, from 0, negative from the end; "embeddings" is the output of the embedding
            layer.
        **kwargs: Further options of `run_tcav`.

    Returns:
        One test for each concept and layer, corrected by Holm's method.
    """
    return run_tcav(explainer, inputs, concepts, random_inputs, layers, **kwargs).concept_tests


def run_tcav(
    explainer: Explainer,
    inputs: Sequence[Any],
    concepts: Mapping[str, Sequence[Any]],
    random_inputs: Sequence[Any],
    layers: Sequence[LayerIndex],
    *,
    target: TargetLike = None,
    scale: str | None = None,
    threshold: float | None = MIN_HELD_OUT_ACCURACY,
    **fit_kwargs: Any,
) -> TcavResult:
    """Run TCAV: significance tests, relative scores, concept vectors, and sensitivity maps of the inputs.

    Args:
        explainer: Explainer of the model.
        inputs: Inputs of the class.
        concepts: Inputs that show each concept, by name.
        random_inputs: Inputs of any kind, for the random negative sets.
        layers: Layers whose output is read, from 0, negative from the end; "embeddings" is the output of the embedding
            layer.
        target: The target, as in `Explainer.explain`; default: the predicted class.
        scale: Scale of the target. The logits of all classes may grow together; "log-odds" measures what distinguishes
            one class from the others.
        threshold: Held-out accuracy below which a concept gets no score; None scores every concept.
        **fit_kwargs: Options of `fit_concepts`.

    Returns:
        The tests, relative scores, vectors and maps.

    Raises:
        InputError: No concept, too few random inputs or examples, or a layer that does not exist.
    """
    return fit_concepts(explainer, concepts, random_inputs, layers, **fit_kwargs).evaluate(
        inputs, target, scale, threshold
    )


def fit_concepts(
    explainer: Explainer,
    concepts: Mapping[str, Sequence[Any]],
    random_inputs: Sequence[Any],
    layers: Sequence[LayerIndex],
    *,
    pool: str = "class",
    classifier: str = "logistic",
    runs: int = 20,
    seed: int = 0,
    stream: str | None = None,
    batch_size: int = 16,
    progress: Progress = False,
) -> "FittedConcepts":
    """Fit the vectors of concepts against random negative sets, at every layer.

    Args:
        explainer: Explainer of the model.
        concepts: Inputs that show each concept, by name.
        random_inputs: Inputs of any kind; they are split into disjoint sets as large as the smallest concept.
        layers: Layers whose output is read, from 0, negative from the end; "embeddings" is the output of the embedding
            layer.
        pool: How the unit vectors of an input become an activation: "class", "mean", "token" or "flat".
        classifier: "logistic", "sgd", "mean-difference" or "ridge".
        runs: Maximum number of random sets.
        seed: Seed of the random sets, splits and classifiers.
        stream: Stream whose layers are read; default: the adapter's main stream.
        batch_size: Number of inputs in a pass.
        progress: True for a progress bar, or a function that wraps a list.

    Returns:
        The fitted concepts, to be evaluated on the inputs of any class.

    Raises:
        InputError: No concept, too few random inputs or examples, or a layer that does not exist.
    """
    if not concepts:
        raise InputError("no concept was given")
    set_size = min(len(examples) for examples in concepts.values())
    random_splits = split_random_sets(len(random_inputs), set_size, runs, seed)
    pass_kwargs: dict[str, Any] = {"stream": stream, "batch_size": batch_size, "progress": progress}
    random_activations = compute_activations(explainer, random_inputs, layers, pool, **pass_kwargs)
    concept_activations = {
        name: compute_activations(explainer, examples, layers, pool, **pass_kwargs)
        for name, examples in concepts.items()
    }
    vectors: dict[LayerIndex, dict[str, list[Direction]]] = {}
    random_vectors = {}
    relative_vectors = {}
    for layer, layer_activations in random_activations.items():
        random_sets = [layer_activations.select_inputs(indices) for indices in random_splits]
        layer_concepts = {name: by_layer[layer] for name, by_layer in concept_activations.items()}
        random_vectors[layer] = fit_random_vectors(random_sets, classifier, seed)
        relative_vectors[layer] = fit_relative_vectors(layer_concepts, classifier, None, seed)
        vectors[layer] = {
            name: fit_against_random_sets(activations, random_sets, classifier, seed, name)
            for name, activations in layer_concepts.items()
        }
    settings = {
        "pool": pool,
        "classifier": classifier,
        "runs": len(random_splits),
        "examples": set_size,
        "seed": seed,
        "random": len(random_inputs),
    }
    return FittedConcepts(explainer, vectors, relative_vectors, random_vectors, pass_kwargs, settings)


@dataclass
class FittedConcepts:
    """Concept vectors ready to be evaluated on classes.

    Attributes:
        explainer: Explainer of the model.
        vectors: By layer and concept, one vector for each random set.
        relative_vectors: By layer, the vector of each concept against each other concept.
        random_vectors: By layer, the vector of each random set against the others.
        pass_kwargs: Stream, batch size and progress of the passes.
        settings: The settings of the fit.
    """

    explainer: Explainer
    vectors: dict[LayerIndex, dict[str, list[Direction]]]
    relative_vectors: dict[LayerIndex, dict[tuple[str, str], Direction]]
    random_vectors: dict[LayerIndex, Float[Tensor, "set feature"]]
    pass_kwargs: dict[str, Any]
    settings: dict[str, Any]

    def evaluate(
        self,
        inputs: Sequence[Any],
        target: TargetLike = None,
        scale: str | None = None,
        threshold: float | None = MIN_HELD_OUT_ACCURACY,
    ) -> TcavResult:
        """Test whether the concepts drive a target on the inputs of one class.

        Args:
            inputs: Inputs of the class.
            target: The target, as in `Explainer.explain`; default: the predicted class.
            scale: Scale of the target, such as "logit" or "log-odds".
            threshold: Held-out accuracy below which a concept gets no score; None scores every concept.

        Returns:
            The tests, relative scores, vectors and maps.
        """
        layer_states = compute_layer_states(
            self.explainer,
            inputs,
            list(self.vectors),
            target=target,
            scale=scale,
            with_gradients=True,
            **self.pass_kwargs,
        )
        gradients = compute_masked_gradients(
            self.explainer, layer_states, self.settings["pool"], target, self.pass_kwargs["stream"]
        )
        concept_tests: list[ConceptTest] = []
        mean_vectors: dict[str, dict[LayerIndex, Direction]] = {}
        for layer, vectors_by_concept in self.vectors.items():
            chance_magnitudes = compute_random_magnitudes(self.random_vectors[layer], gradients[layer])
            for name, vectors in vectors_by_concept.items():
                concept_test = evaluate_concept(vectors, gradients[layer], chance_magnitudes, threshold, name)
                concept_tests.append(replace(concept_test, layer=layer))
                mean_vectors.setdefault(name, {})[layer] = compute_mean_vector(vectors)
        return TcavResult(
            model=self.explainer.adapter.name,
            target="predicted" if target is None else str(target),
            concept_tests=correct_concept_tests(concept_tests),
            relative_scores={
                layer: compute_relative_scores(vectors, gradients[layer], threshold)
                for layer, vectors in self.relative_vectors.items()
            },
            concept_vectors={name: Directions(by_layer) for name, by_layer in mean_vectors.items()},
            sensitivity_maps={
                name: {
                    layer: _compute_sensitivity_maps(layer_states, layer, vector) for layer, vector in by_layer.items()
                }
                for name, by_layer in mean_vectors.items()
            },
            samples=[states.sample for states in layer_states],
            settings={
                **self.settings,
                "scale": scale or self.explainer.adapter.target_scales[0],
                "threshold": threshold,
                "inputs": len(inputs),
            },
        )


def _compute_sensitivity_maps(
    layer_states: Sequence[LayerStates], layer: LayerIndex, vector: Direction
) -> list[Float[np.ndarray, "unit"]]:
    """The maps over all units, moved by the pool or not: with pool="class", all of S would be on the class token."""
    gradients = [states.gradients[layer].double() for states in layer_states]
    return [concept_map.cpu().numpy() for concept_map in compute_concept_map(gradients, vector)]


def compute_relative_tcav(
    concepts: Mapping[str, ConceptActivations],
    gradients: InputGradients,
    classifier: str = "logistic",
    threshold: float | None = MIN_HELD_OUT_ACCURACY,
    seed: int = 0,
) -> dict[tuple[str, str], float]:
    """Compute the TCAV score of each concept against each other concept: TCAV(A, B) = 1 − TCAV(B, A).

    Args:
        concepts: Activations of each concept, by name.
        gradients: Gradients of the target at the same layer.
        classifier: "logistic", "sgd", "mean-difference" or "ridge".
        threshold: Held-out accuracy below which a vector is rejected; None accepts every vector.
        seed: Seed of the split and of the classifier.

    Returns:
        The score of each ordered pair of names.

    Raises:
        InputError: A pair cannot be distinguished.
    """
    return compute_relative_scores(fit_relative_vectors(concepts, classifier, threshold, seed), gradients)


def fit_relative_vectors(
    concepts: Mapping[str, ConceptActivations],
    classifier: str = "logistic",
    threshold: float | None = MIN_HELD_OUT_ACCURACY,
    seed: int = 0,
) -> dict[tuple[str, str], Direction]:
    """Fit the vector of each concept against each other one; swapping the two flips the sign of the vector."""
    vectors = {}
    for (a, first), (b, second) in combinations(concepts.items(), 2):
        vector = fit_concept_vector(first, second, classifier, threshold=threshold, seed=seed, names=(a, b))
        vectors[a, b] = vector
        vectors[b, a] = replace(vector, q=-vector.q, centre=-vector.centre, names=(b, a), counts=vector.counts[::-1])
    return vectors


def compute_relative_scores(
    vectors: Mapping[tuple[str, str], Direction], gradients: InputGradients, threshold: float | None = None
) -> dict[tuple[str, str], float]:
    """Compute relative TCAV scores; NaN where the held-out accuracy of a pair is below `threshold`."""
    scores = {}
    for pair, vector in vectors.items():
        scores[pair] = math.nan
        if _is_accurate(vector, threshold):
            scores[pair] = compute_tcav_score(compute_sensitivities(gradients, vector))
    return scores


def _is_accurate(vector: Direction, threshold: float | None) -> bool:
    """Whether the held-out accuracy reaches the threshold; True where either is unknown."""
    if threshold is None or vector.held_out_metrics is None or vector.held_out_metrics.accuracy is None:
        return True
    return vector.held_out_metrics.accuracy >= threshold


def compute_mean_vector(vectors: Sequence[Direction]) -> Direction:
    """Compute the mean of the vectors against all random negative sets, normalised to length one; used for maps."""
    q = torch.stack([vector.q[0] for vector in vectors]).mean(0)
    return replace(vectors[0], q=(q / q.norm())[None])
