"""The steps of TCAV, one by one: activations → concept vector → gradients → sensitivities → score.

    v = the unit normal of a linear classifier of concept against counter-examples, S(x) = ∇y(x)·v,
    TCAV = the share of the class's inputs with S > 0 (those with S = 0 count half)

Kim et al. 2018, "Interpretability Beyond Feature Attribution: Quantitative Testing with Concept Activation Vectors".

How the vectors of an input's units become one activation (`pool`), and what moving it along v means for the units:
    class   the rows that the model's answer is read from; only these are moved
    mean    the mean of the units that are not special; all of them are moved, S = Σ_t g_t·v
    token   every unit that is not special is an activation of its own; all of them are moved
    flat    all units end to end; for inputs of one length, as pictures of one size are
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.adapters.base import Sample
from clearhead.concepts.densray import placed
from clearhead.concepts.directions import Direction, HeldOut
from clearhead.concepts.hidden_states import Found, Progress, states_of
from clearhead.errors import InputError, unknown
from clearhead.explainer import Explainer
from clearhead.targets import Target, TargetLike, make_target

POOLS = ("class", "mean", "token", "flat")
CLASSIFIERS = ("logistic", "sgd", "mean-difference", "ridge")
#: Held-out accuracy below which a concept vector is refused: it would name a direction that is not the concept's.
THRESHOLD = 0.6

Activations = Float[Tensor, "example feature"]
#: For each input, one vector for each unit.
Gradients = Sequence[Float[Tensor, "unit model"]]


@dataclass
class Examples:
    """The activations of a set of inputs at one layer. A unit's activations keep its input together (`owners`)."""

    activations: Activations
    owners: list[int]

    @property
    def count(self) -> int:
        return len(set(self.owners))

    def some(self, inputs: Sequence[int]) -> "Examples":
        """Those of these inputs alone."""
        at: dict[int, list[int]] = {}
        for row, owner in enumerate(self.owners):
            at.setdefault(owner, []).append(row)
        rows = [row for one in inputs for row in at[one]]
        return Examples(self.activations[rows], [self.owners[row] for row in rows])


def activations(
    ex: Explainer,
    inputs: Sequence[Any],
    layers: Sequence[int],
    pool: str = "class",
    *,
    stream: str | None = None,
    batch_size: int = 16,
    progress: Progress = False,
) -> dict[int, Examples]:
    """What the inputs look like at each layer (k of h^k)."""
    _check_pool(pool)
    found = states_of(ex, inputs, layers, stream=stream, batch_size=batch_size, progress=progress)
    return {layer: _pooled(ex, found, layer, pool, stream or ex.subject.stream) for layer in found[0].states}


def _pooled(ex: Explainer, found: Sequence[Found], layer: int, pool: str, stream: str) -> Examples:
    owners: list[int] = []
    parts: list[Tensor] = []
    for owner, one in enumerate(found):
        states = one.states[layer].double()
        if pool == "flat":
            part = states.reshape(1, -1)
        else:
            weights = _weights(ex, one.sample, make_target(None), pool, stream).to(states)
            part = states[weights > 0] if pool == "token" else (weights @ states)[None]
        parts.append(part)
        owners += [owner] * len(part)
    if len({part.shape[1] for part in parts}) > 1:
        raise InputError("pool='flat' needs inputs of one length: choose pool='mean', 'class' or 'token'")
    return Examples(torch.cat(parts), owners)


def _weights(ex: Explainer, sample: Sample, target: Target, pool: str, stream: str) -> Float[Tensor, "unit"]:
    """How much each unit counts in an activation; those that count at all are moved together."""
    axis = sample.axes[stream]
    weights = torch.zeros(len(axis), dtype=torch.float64)
    if pool == "class":
        unread = ex.subject.masked and not sample.masks  # a text without a mask, of a model that is read at masks
        rows = None if unread else ex.subject.readouts(sample, target).get(stream)
        if not rows:
            raise InputError(f"no row of {ex.subject.name} is read here: choose pool='mean', 'token' or 'flat'")
        weights[list(rows)] = torch.tensor(list(rows.values()), dtype=torch.float64)
        return weights
    inside = [i for i, special in enumerate(axis.special) if not special]
    weights[inside] = 1 / len(inside)
    return weights


def gradients(
    ex: Explainer,
    inputs: Sequence[Any],
    layers: Sequence[int],
    pool: str = "class",
    target: TargetLike = None,
    *,
    scale: str | None = None,
    stream: str | None = None,
    batch_size: int = 16,
) -> dict[int, Gradients]:
    """∂y/∂h of every unit that is moved; 0 at the others."""
    _check_pool(pool)
    how: Any = {"target": target, "scale": scale, "gradient": True, "stream": stream, "batch_size": batch_size}
    found = states_of(ex, inputs, layers, **how)
    return moved_gradients(ex, found, pool, target, stream)


def moved_gradients(
    ex: Explainer, found: Sequence[Found], pool: str, target: TargetLike = None, stream: str | None = None
) -> dict[int, Gradients]:
    """The same from states that are there already."""
    _check_pool(pool)
    moved = [torch.ones(len(one.sample.axes[stream or ex.subject.stream])).double() for one in found]
    if pool != "flat":
        wanted, own = make_target(target, ex.subject.scales[0]), stream or ex.subject.stream
        moved = [(_weights(ex, one.sample, wanted, pool, own) > 0).double() for one in found]
    return {
        layer: [
            one.gradients[layer].double() * w[:, None].to(one.gradients[layer].device)
            for one, w in zip(found, moved, strict=True)
        ]
        for layer in found[0].gradients
    }


def concept_vector(
    concept: Examples,
    counter: Examples,
    classifier: str = "logistic",
    *,
    threshold: float | None = THRESHOLD,
    share: float = 0.33,
    seed: int = 0,
    names: tuple[str, str] = ("concept", "counter-examples"),
) -> Direction:
    """The unit normal of a linear classifier, pointing to the concept, with its accuracy on inputs held out.

    Sets are cut to the size of the smaller one. Below the threshold of accuracy the vector is refused (None: never).
    """
    if classifier not in CLASSIFIERS:
        raise unknown("classifier", classifier, CLASSIFIERS)
    for one, name in zip((concept, counter), names, strict=True):
        if one.count < 3:
            raise InputError(f"{name} has {one.count} inputs: a concept vector needs at least 3, one to be held out")
    if concept.activations.shape[1] != counter.activations.shape[1]:
        widths = concept.activations.shape[1], counter.activations.shape[1]
        raise InputError(f"{names[0]} and {names[1]} have activations of different widths: {widths[0]} and {widths[1]}")
    sets, _ = _in_order(concept, counter)
    train, test = zip(*(_split(one, share, seed) for one in sets), strict=True)
    tried = _fitted(train[0].activations, train[1].activations, classifier, seed)
    tested = _tested(tried, test[0].activations, test[1].activations)
    v = normal(concept, counter, classifier, seed)
    assert tested.accuracy is not None
    if threshold is not None and tested.accuracy < threshold:
        raise InputError(
            f"{names[0]} cannot be told from {names[1]}: accuracy {tested.accuracy:.2f} on {tested.count} held-out "
            f"activations, less than {threshold}: choose another layer or pool, give more examples, or threshold=None"
        )
    about = {"method": "tcav", "classifier": classifier, "seed": seed}
    made = placed(v[None], v.new_zeros(1), concept.activations, counter.activations, names, about)
    # a classifier's normal may point away from the difference of the means: it says what the concept's side is
    flipped = -1.0 if float(made.q[0] @ v) < 0 else 1.0
    return replace(made, q=made.q * flipped, centre=made.centre * flipped, tested=tested)


def normal(concept: Examples, counter: Examples, classifier: str, seed: int = 0) -> Float[Tensor, "feature"]:
    """The unit normal of the classifier, pointing to the concept."""
    sets, sign = _in_order(concept, counter)
    return sign * _fitted(sets[0].activations, sets[1].activations, classifier, seed)[0]


def _in_order(concept: Examples, counter: Examples) -> tuple[list[Examples], int]:
    """Both sets, of one size, in an order that does not depend on which of them is called the concept (−1: swapped).

    So TCAV(A, B) = 1 − TCAV(B, A), whatever the classifier.
    """
    size = min(concept.count, counter.count)
    sets = [one if one.count == size else _cut(one, size) for one in (concept, counter)]
    first, second = (one.activations.cpu().numpy().tobytes() for one in sets)
    return (sets[::-1], -1) if first > second else (sets, 1)


def _cut(one: Examples, size: int) -> Examples:
    return one.some(list(dict.fromkeys(one.owners))[:size])


def _split(one: Examples, share: float, seed: int) -> tuple[Examples, Examples]:
    """Whole inputs are held out, the same places in every set of one size."""
    owners = np.array(list(dict.fromkeys(one.owners)))
    order = np.random.default_rng(seed).permutation(len(owners))
    out = max(1, round(share * len(owners)))
    return one.some(owners[order[out:]].tolist()), one.some(owners[order[:out]].tolist())


def _fitted(
    first: Activations, second: Activations, classifier: str, seed: int
) -> "tuple[Float[Tensor, 'feature'], float]":
    """The unit normal towards the first set, and the threshold along it."""
    if classifier == "mean-difference":
        apart = first.mean(0) - second.mean(0)
        middle = (first.mean(0) + second.mean(0)) / 2
        normal = apart / apart.norm().clamp(min=1e-300)
        return normal, float(middle @ normal)
    from sklearn.linear_model import LogisticRegression, RidgeClassifier, SGDClassifier

    made = {
        "logistic": lambda: LogisticRegression(max_iter=1000),
        "sgd": lambda: SGDClassifier(alpha=0.01, max_iter=1000, tol=1e-3, random_state=seed),
        "ridge": lambda: RidgeClassifier(),
    }[classifier]()
    x = torch.cat([first, second]).cpu().numpy()
    made.fit(x, np.r_[np.ones(len(first)), np.zeros(len(second))])
    normal = torch.from_numpy(np.asarray(made.coef_, dtype=np.float64).reshape(-1)).to(first.device)
    size = float(normal.norm()) or 1.0
    return normal / size, -float(np.ravel(made.intercept_)[0]) / size


def _tested(fitted: tuple[Tensor, float], first: Activations, second: Activations) -> HeldOut:
    v, limit = fitted
    one, other = first @ v - limit, second @ v - limit
    accuracy = float(((one > 0).double().mean() + (other <= 0).double().mean()) / 2)
    spread = torch.cat([one - one.mean(), other - other.mean()]).std().clamp(min=1e-300)
    return HeldOut(accuracy, float((one.mean() - other.mean()) / spread), len(first) + len(second))


def sensitivities(own: Gradients, vector: Direction) -> Float[Tensor, "input"]:
    """S(x) = ∇y·v: how the target grows when the activation moves towards the concept."""
    return together(own, vector.q.shape[1]) @ vector.q[0].to(own[0])


def together(own: Gradients, width: int) -> "Float[Tensor, 'input feature']":
    """What a step along a vector of this width does to all units together: ∂y/∂activation."""
    if all(one.shape[1] == width for one in own):
        return torch.stack([one.sum(0) for one in own])
    if all(one.numel() == width for one in own):
        return torch.stack([one.flatten() for one in own])
    raise InputError(f"the concept vector is {width} wide, but the layer's gradients are {tuple(own[0].shape)}")


def concept_map(own: Gradients, vector: Direction) -> list[Float[Tensor, "unit"]]:
    """Where in each input the concept's sensitivity sits: g_t·v of every unit; they add up to S."""
    width = vector.q.shape[1]
    together(own, width)  # for its message
    v = [vector.q[0].to(one) for one in own]
    pairs = zip(own, v, strict=True)
    return [g @ q if g.shape[1] == width else (g * q.view_as(g)).sum(1) for g, q in pairs]


def tcav_score(s: Float[Tensor, "input"]) -> float:
    """The share of inputs that the concept speaks for; where it says nothing, half.

    >>> tcav_score(torch.tensor([0.5, 0.1, -1.0, 0.0]))
    0.625
    """
    return float(((s > 0).double() + (s == 0).double() / 2).mean())


def _check_pool(pool: str) -> None:
    if pool not in POOLS:
        raise unknown("pool", pool, POOLS)
