"""TCAV: does a concept drive a class, more than a random concept would?

A concept's vectors do not depend on the class that is asked about: `prepare` finds them once, `Prepared.ask` holds them
against the inputs of one class, and `inquire` is both. The tests are those of `concepts/significance.py`.
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

from clearhead.adapters.base import Sample
from clearhead.concepts.cav import (
    THRESHOLD,
    Examples,
    Gradients,
    activations,
    concept_map,
    concept_vector,
    moved_gradients,
    sensitivities,
    tcav_score,
)
from clearhead.concepts.directions import Direction, Directions
from clearhead.concepts.hidden_states import Found, Progress, states_of
from clearhead.concepts.significance import (
    Tested,
    against_all,
    corrected,
    deal,
    judged,
    random_magnitudes,
    random_vectors,
)
from clearhead.errors import InputError
from clearhead.explainer import Explainer
from clearhead.explanation.explanation import plain
from clearhead.targets import TargetLike


@dataclass
class Inquiry:
    """Every concept at every layer, and what was found on the way.

    relative: by layer, TCAV of each concept against each other one; vectors: by concept and layer, the mean of the
    vectors against all random sets; maps: by concept and layer, what a step along the vector does at
    every unit of each input
    """

    model: str
    target: str
    lines: list[Tested]
    relative: dict[int, dict[tuple[str, str], float]]
    vectors: dict[str, Directions]
    maps: dict[str, dict[int, list[Float[np.ndarray, "unit"]]]]
    samples: list[Sample]
    settings: dict[str, Any]

    def _repr_html_(self) -> str:
        from clearhead.render.html import notebook_cell
        from clearhead.render.reports.concepts import tcav_sheet

        return notebook_cell(tcav_sheet(self))

    def to_dict(self) -> dict[str, Any]:
        about = {"schema": "clearhead/tcav", "version": 1, "model": self.model, "target": self.target}
        relative = [
            {"layer": layer, "concept": a, "against": b, "score": score}
            for layer, own in self.relative.items()
            for (a, b), score in own.items()
        ]
        lines = [line.to_dict() for line in self.lines]
        return plain({**about, "settings": self.settings, "lines": lines, "relative": relative})


def tcav(
    ex: Explainer,
    inputs: Sequence[Any],
    concepts: Mapping[str, Sequence[Any]],
    random: Sequence[Any],
    layers: Sequence[int],
    **how: Any,
) -> list[Tested]:
    """Every concept at every layer (k of h^k), tested against random concepts; arguments as in `inquire`."""
    return inquire(ex, inputs, concepts, random, layers, **how).lines


def inquire(
    ex: Explainer,
    inputs: Sequence[Any],
    concepts: Mapping[str, Sequence[Any]],
    random: Sequence[Any],
    layers: Sequence[int],
    *,
    target: TargetLike = None,
    scale: str | None = None,
    threshold: float | None = THRESHOLD,
    **how: Any,
) -> Inquiry:
    """TCAV with all that belongs to it: tests, relative scores, vectors, and maps over the units of each input.

    inputs: of the class; scale: of the target, as in `explain`: logits of all classes may grow together, and "log-odds"
    tells what sets one apart; the rest and `how` are as in `prepare`
    """
    return prepare(ex, concepts, random, layers, **how).ask(inputs, target, scale, threshold)


def prepare(
    ex: Explainer,
    concepts: Mapping[str, Sequence[Any]],
    random: Sequence[Any],
    layers: Sequence[int],
    *,
    pool: str = "class",
    classifier: str = "logistic",
    runs: int = 20,
    seed: int = 0,
    stream: str | None = None,
    batch_size: int = 16,
    progress: Progress = False,
) -> "Prepared":
    """The vectors of concepts against random counter-sets, at every layer (k of h^k).

    concepts: name → inputs that show it; random: inputs of any kind, which are dealt out into `runs` sets without
    overlap, as large as the smallest concept
    """
    if not concepts:
        raise InputError("no concept was given")
    size = min(len(examples) for examples in concepts.values())
    dealt = deal(len(random), size, runs, seed)
    how: dict[str, Any] = {"stream": stream, "batch_size": batch_size, "progress": progress}
    others = activations(ex, random, layers, pool, **how)
    shown = {name: activations(ex, examples, layers, pool, **how) for name, examples in concepts.items()}
    vectors: dict[int, dict[str, list[Direction]]] = {}
    chance, among = {}, {}
    for layer, every in others.items():
        sets = [every.some(chosen) for chosen in dealt]
        chance[layer] = random_vectors(sets, classifier, seed)
        among[layer] = relative_vectors({name: own[layer] for name, own in shown.items()}, classifier, None, seed)
        vectors[layer] = {name: against_all(own[layer], sets, classifier, seed, name) for name, own in shown.items()}
    settings = {"pool": pool, "classifier": classifier, "runs": len(dealt), "examples": size, "seed": seed}
    return Prepared(ex, vectors, among, chance, how, {**settings, "random": len(random)})


@dataclass
class Prepared:
    """Concepts ready to be held against classes: by layer, each one's vectors, theirs among themselves, random ones."""

    ex: Explainer
    vectors: dict[int, dict[str, list[Direction]]]
    among: dict[int, dict[tuple[str, str], Direction]]
    random: dict[int, Float[Tensor, "set feature"]]
    how: dict[str, Any]
    settings: dict[str, Any]

    def ask(
        self,
        inputs: Sequence[Any],
        target: TargetLike = None,
        scale: str | None = None,
        threshold: float | None = THRESHOLD,
    ) -> Inquiry:
        """Do the concepts drive this target, on these inputs?"""
        found = states_of(self.ex, inputs, list(self.vectors), target=target, scale=scale, gradient=True, **self.how)
        own = moved_gradients(self.ex, found, self.settings["pool"], target, self.how["stream"])
        lines: list[Tested] = []
        mean: dict[str, dict[int, Direction]] = {}
        for layer, by_concept in self.vectors.items():
            chance = random_magnitudes(self.random[layer], own[layer])
            for name, vectors in by_concept.items():
                lines.append(replace(judged(vectors, own[layer], chance, threshold, name), layer=layer))
                mean.setdefault(name, {})[layer] = mean_vector(vectors)
        return Inquiry(
            model=self.ex.subject.name,
            target="what is predicted" if target is None else str(target),
            lines=corrected(lines),
            relative={k: relative_scores(v, own[k], threshold) for k, v in self.among.items()},
            vectors={name: Directions(by_layer) for name, by_layer in mean.items()},
            maps={name: {k: _maps(found, k, v) for k, v in by_layer.items()} for name, by_layer in mean.items()},
            samples=[one.sample for one in found],
            settings={
                **self.settings,
                "scale": scale or self.ex.subject.scales[0],
                "threshold": threshold,
                "inputs": len(inputs),
            },
        )


def _maps(found: Sequence[Found], layer: int, vector: Direction) -> list[Float[np.ndarray, "unit"]]:
    """Of every unit, moved by the pool or not: with pool="class", all of S would lie on the class token."""
    every = [one.gradients[layer].double() for one in found]
    return [one.cpu().numpy() for one in concept_map(every, vector)]


def relative(
    concepts: Mapping[str, Examples],
    own: Gradients,
    classifier: str = "logistic",
    threshold: float | None = THRESHOLD,
    seed: int = 0,
) -> dict[tuple[str, str], float]:
    """TCAV of each concept against each other one: TCAV(A, B) = 1 − TCAV(B, A)."""
    return relative_scores(relative_vectors(concepts, classifier, threshold, seed), own)


def relative_vectors(
    concepts: Mapping[str, Examples],
    classifier: str = "logistic",
    threshold: float | None = THRESHOLD,
    seed: int = 0,
) -> dict[tuple[str, str], Direction]:
    """The vector of each concept against each other one; both ways round it is the same vector with another sign."""
    found = {}
    for (a, first), (b, second) in combinations(concepts.items(), 2):
        vector = concept_vector(first, second, classifier, threshold=threshold, seed=seed, names=(a, b))
        found[a, b] = vector
        found[b, a] = replace(vector, q=-vector.q, centre=-vector.centre, names=(b, a), counts=vector.counts[::-1])
    return found


def relative_scores(
    vectors: Mapping[tuple[str, str], Direction], own: Gradients, threshold: float | None = None
) -> dict[tuple[str, str], float]:
    """NaN for concepts that are told from each other less often than `threshold`: their score would say nothing."""

    def told_apart(vector: Direction) -> bool:
        accuracy = None if vector.tested is None else vector.tested.accuracy
        return threshold is None or accuracy is None or accuracy >= threshold

    scores = {pair: tcav_score(sensitivities(own, vector)) for pair, vector in vectors.items()}
    return {pair: score if told_apart(vectors[pair]) else math.nan for pair, score in scores.items()}


def mean_vector(vectors: Sequence[Direction]) -> Direction:
    """One vector for maps: the mean of those against all counter-sets, of length one again."""
    q = torch.stack([vector.q[0] for vector in vectors]).mean(0)
    return replace(vectors[0], q=(q / q.norm())[None])
