"""TCAV with tests that hold: does a concept drive a class, more than a random concept would?

Each concept is held against many random counter-sets. Its scores against them are not independent: all of them share
the concept's own examples. A t-test over them, as usual, takes every second random concept for significant (measured in
tests/concepts/test_tcav.py). So here

    against random concepts   the concept's mean signed sensitivity is one draw; every random set, held against all the
                              others, is one more. t = (m − mean r) / (sd r · √(1 + 1/R)), R − 1 degrees of freedom
    against one half          the scores c_1 … c_R against 0.5, with the variance of correlated runs: two vectors that
                              share one of their two sets correlate by ½. t = (c − 0.5) / (sd c · √(1 + 1/R))

The first is on sensitivities, not on scores: where all inputs of a class have nearly one gradient, any vector scores
near 0 or 1, and no score is then far from the random ones. A concept is significant if both tests say so, after Holm's
correction over concepts and layers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from clearhead.bench.statistics import ALPHA, holm
from clearhead.concepts.directions import Direction, Directions
from clearhead.concepts.states import Progress, states_of
from clearhead.concepts.testing import against_half, against_random, binomial_interval, spread_of, two_sided
from clearhead.concepts.vectors import (
    THRESHOLD,
    Examples,
    Gradients,
    activations,
    concept_map,
    concept_vector,
    moved_gradients,
    normal,
    sensitivities,
    tcav_score,
    together,
)
from clearhead.errors import InputError
from clearhead.explainer import Explainer
from clearhead.explanation import plain
from clearhead.subjects.base import Sample
from clearhead.targets import TargetLike

#: Fewer random sets than this leave a test no say.
LEAST = 3


@dataclass(frozen=True)
class Tested:
    """One concept at one layer.

    score, sd: of TCAV over the counter-sets; low, high: exact binomial interval of the score over the class's inputs
    magnitude: the mean of S, signed; strength: the mean of |S|; effect: the magnitude in standard deviations of random
    p_random, p_half: the two tests; p: the larger; corrected: by Holm; p_uncorrected: the usual t-test of scores on 0.5
    refused: why there is no score, if there is none
    """

    concept: str
    layer: int
    score: float
    sd: float
    low: float
    high: float
    magnitude: float
    strength: float
    effect: float
    accuracy: float
    p_random: float
    p_half: float
    p_uncorrected: float
    p: float
    corrected: float
    runs: int
    inputs: int
    refused: str = ""

    @property
    def significant(self) -> bool:
        return not self.refused and self.corrected < ALPHA

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "significant": self.significant}


@dataclass
class Inquiry:
    """Every concept at every layer, and what was found on the way.

    relative: by layer, TCAV of each concept against each other one; vectors: by concept and layer, the mean of the
    vectors against all random sets; maps: by concept and layer, where in each input the sensitivity sits
    """

    model: str
    target: str
    lines: list[Tested]
    relative: dict[int, dict[tuple[str, str], float]]
    vectors: dict[str, Directions]
    maps: dict[str, dict[int, list[Float[np.ndarray, "unit"]]]]
    samples: list[Sample]
    settings: dict[str, Any]

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
    pool: str = "class",
    classifier: str = "logistic",
    runs: int = 20,
    threshold: float | None = THRESHOLD,
    seed: int = 0,
    stream: str | None = None,
    batch_size: int = 16,
    progress: Progress = False,
) -> Inquiry:
    """TCAV with all that belongs to it: tests, relative scores, vectors, and maps over the units of each input.

    inputs: of the class; concepts: name → inputs that show it; random: inputs of any kind, which are dealt out into
    `runs` sets without overlap, as large as the smallest concept
    """
    if not concepts:
        raise InputError("no concept was given")
    size = min(len(examples) for examples in concepts.values())
    dealt = deal(len(random), size, runs, seed)
    how: dict[str, Any] = {"stream": stream, "batch_size": batch_size, "progress": progress}
    found = states_of(ex, inputs, layers, target=target, gradient=True, **how)
    own = moved_gradients(ex, found, pool, target, stream)
    others = activations(ex, random, layers, pool, **how)
    shown = {name: activations(ex, examples, layers, pool, **how) for name, examples in concepts.items()}
    lines: list[Tested] = []
    vectors: dict[str, dict[int, Direction]] = {name: {} for name in concepts}
    for layer in own:
        sets = [others[layer].some(chosen) for chosen in dealt]
        chance = random_magnitudes(sets, own[layer], classifier, seed)
        for name, examples in shown.items():
            every = against_all(examples[layer], sets, classifier, seed, name)
            line = judged(every, own[layer], chance, threshold, name)
            lines.append(replace(line, layer=layer))
            vectors[name][layer] = mean_vector(every)
    return Inquiry(
        model=ex.subject.name,
        target="what is predicted" if target is None else str(target),
        lines=corrected(lines),
        relative={k: relative({n: e[k] for n, e in shown.items()}, own[k], classifier, None, seed) for k in own},
        vectors={name: Directions(by_layer) for name, by_layer in vectors.items()},
        maps={
            name: {layer: [m.numpy() for m in concept_map(own[layer], v)] for layer, v in by_layer.items()}
            for name, by_layer in vectors.items()
        },
        samples=[one.sample for one in found],
        settings={"pool": pool, "classifier": classifier, "runs": len(dealt), "examples": size, "seed": seed}
        | {"threshold": threshold, "inputs": len(inputs), "random": len(random)},
    )


def deal(count: int, size: int, runs: int, seed: int = 0) -> list[list[int]]:
    """Random sets without overlap: sets that share examples would differ less than random concepts do."""
    sets = min(runs, count // size) if size else 0
    if sets < LEAST:
        raise InputError(
            f"{count} random inputs make {sets} sets of {size} (as many as the smallest concept has): give at least "
            f"{LEAST * size}, better {20 * size}"
        )
    order = np.random.default_rng(seed).permutation(count)
    return [order[i * size : (i + 1) * size].tolist() for i in range(sets)]


def against_all(
    concept: Examples, sets: Sequence[Examples], classifier: str = "logistic", seed: int = 0, name: str = "concept"
) -> list[Direction]:
    """The vectors of one concept against every random set, however well they do."""
    return [
        concept_vector(concept, one, classifier, threshold=None, seed=seed + i, names=(name, f"random set {i}"))
        for i, one in enumerate(sets)
    ]


def judged(
    vectors: Sequence[Direction],
    own: Gradients,
    chance: Float[np.ndarray, "set"],
    threshold: float | None = THRESHOLD,
    name: str = "concept",
) -> Tested:
    """One concept by its vectors against all random sets; `chance` is what these sets have among themselves."""
    accuracy = float(np.mean([v.tested.accuracy for v in vectors if v.tested is not None]))
    s = torch.stack([sensitivities(own, vector) for vector in vectors])
    scores = np.array([tcav_score(run) for run in s])
    refused = ""
    if threshold is not None and accuracy < threshold:
        refused = (
            f"{name} cannot be told from random inputs here: held-out accuracy {accuracy:.2f}, less than {threshold}"
        )
        scores = np.full_like(scores, math.nan)
    low, high = binomial_interval(float(scores.mean()), s.shape[1])
    magnitude = float(s.mean())
    p_random, p_half = against_random(magnitude, chance), against_half(scores, s.shape[1])
    return Tested(
        concept=name,
        layer=0,
        score=float(scores.mean()),
        sd=float(scores.std(ddof=1)),
        low=low,
        high=high,
        magnitude=magnitude,
        strength=float(s.abs().mean()),
        effect=(magnitude - float(chance.mean())) / max(float(chance.std(ddof=1)), 1e-300),
        accuracy=accuracy,
        p_random=p_random,
        p_half=p_half,
        p_uncorrected=two_sided(float(scores.mean()) - 0.5, spread_of(scores, s.shape[1]) / math.sqrt(len(s)), len(s)),
        p=1.0 if refused else max(p_random, p_half),
        corrected=1.0,
        runs=len(vectors),
        inputs=s.shape[1],
        refused=refused,
    )


def corrected(lines: Sequence[Tested]) -> list[Tested]:
    """Holm's correction over all concepts and layers."""
    return [replace(line, corrected=p) for line, p in zip(lines, holm([line.p for line in lines]), strict=True)]


def random_magnitudes(
    sets: Sequence[Examples], own: Gradients, classifier: str, seed: int = 0
) -> Float[np.ndarray, "set"]:
    """The mean signed sensitivity of each random set, held against all the others."""
    found = np.zeros((len(sets), len(sets)))
    mean = together(own, sets[0].activations.shape[1]).mean(0).to(sets[0].activations)
    for i, one in enumerate(sets):
        for j in range(i + 1, len(sets)):
            found[i, j] = float(normal(one, sets[j], classifier, seed) @ mean)
            found[j, i] = -found[i, j]  # the same vector, seen from the other side
    return found.sum(1) / (len(sets) - 1)


def relative(
    concepts: Mapping[str, Examples],
    own: Gradients,
    classifier: str = "logistic",
    threshold: float | None = THRESHOLD,
    seed: int = 0,
) -> dict[tuple[str, str], float]:
    """TCAV of each concept against each other one: TCAV(A, B) = 1 − TCAV(B, A)."""
    found = {}
    for a, first in concepts.items():
        for b, second in concepts.items():
            if a != b:
                vector = concept_vector(first, second, classifier, threshold=threshold, seed=seed, names=(a, b))
                found[a, b] = tcav_score(sensitivities(own, vector))
    return found


def mean_vector(vectors: Sequence[Direction]) -> Direction:
    """One vector for maps: the mean of those against all counter-sets, of length one again."""
    q = torch.stack([vector.q[0] for vector in vectors]).mean(0)
    return replace(vectors[0], q=(q / q.norm())[None])
