"""DensRay: the direction along which vectors of different classes differ and those of one class do not.

    A = α_≠ Σ_≠ d dᵀ − α_= Σ_= d dᵀ,  d = (x − y) / ‖x − y‖ (or x − y),  q = the eigenvector of its largest eigenvalue

over ordered pairs of unlike and of like vectors. Dufter and Schütze 2019, "Analytical Methods for Interpretable
Ultradense Word Embeddings"; in layers of BERT: Liang, Dufter and Schütze 2020, "Monolingual and Multilingual Reduction
of Gender Bias in Contextualized Representations".

An eigenvector has no sign: here it points from the second class to the first, and its zero is midway between them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.concepts.directions import Direction
from clearhead.errors import InputError

Vectors = Float[Tensor, "vector model"]
Square = Float[Tensor, "model model"]
#: α_≠ and α_=, or "dynamic": the mean over unlike pairs minus the mean over like ones.
Weights = tuple[float, float] | str
#: How many pairs are looked at together (their distances in float64 take 128 MiB).
PAIRS = 2**24
#: Pairs whose squared distance is below this share of their own squares are looked at one by one.
CLOSE = 1e-6


def densray(
    first: Vectors,
    second: Vectors,
    *,
    dimensions: int = 1,
    normalise: bool = True,
    weights: Weights = "dynamic",
    names: tuple[str, str] = ("first", "second"),
    few: bool = False,
) -> Direction:
    """The direction that tells two sets of vectors apart, positive towards the first.

    normalise: pairs count by the direction of their difference alone (the authors' default), all pairs are looked at;
    without it, only the classes' means and covariances are
    few: allow fewer vectors than dimensions, which leave the direction to chance where the model has no say

    >>> x = torch.tensor([[2.0, 1.0], [2.0, -1.0], [2.5, 0.0]])
    >>> densray(x, -x).q.round(decimals=3)
    tensor([[1., 0.]], dtype=torch.float64)
    """
    first, second = two_sets(first, second, names)
    width = first.shape[1]
    _enough(len(first) + len(second), width, few)
    if normalise:
        across = 2 * scatter(first, second)
        within = scatter(first, first) + scatter(second, second)
        unlike, like = _weights(weights, len(first), len(second))
        contrast = unlike * across - like * within
    else:
        contrast = Moments(width).add(first).contrast(Moments(width).add(second), weights)
    return oriented(contrast, first, second, dimensions, names, {"method": "densray", "normalise": normalise})


def densray_of_numbers(
    vectors: Vectors,
    labels: Float[Tensor, "vector"],
    *,
    dimensions: int = 1,
    normalise: bool = True,
    z_score: bool = True,
    few: bool = False,
) -> Direction:
    """The same for labels that are numbers: A = −Σ l_v l_w d dᵀ. Scores are centred on the mean."""
    vectors, labels = _checked(vectors, "the vectors"), torch.as_tensor(labels).double().to(vectors.device)
    if labels.shape != (len(vectors),):
        raise InputError(f"there are {len(vectors)} vectors, but the labels have the shape {tuple(labels.shape)}")
    if not labels.isfinite().all() or labels.std() == 0:
        raise InputError("the labels must be finite numbers that are not all the same")
    _enough(len(vectors), vectors.shape[1], few)
    own = (labels - labels.mean()) / labels.std() if z_score else labels
    values, q = top(-scatter(vectors, vectors, own, own, unit=normalise), dimensions)
    along = vectors @ q.T
    sign = torch.sign((along - along.mean(0)).T @ (labels - labels.mean()))
    q, along = q * _never_zero(sign)[:, None], along * _never_zero(sign)
    about = {"method": "densray of numbers", "normalise": normalise}
    return Direction(q, values, along.mean(0), along.std(0), ("high", "low"), (len(vectors), 0), about=about)


def scatter(
    x: Vectors,
    y: Vectors,
    u: Float[Tensor, "left"] | None = None,
    v: Float[Tensor, "right"] | None = None,
    unit: bool = True,
) -> Square:
    """Σ_ij u_i v_j d_ij d_ijᵀ over all pairs, without any outer product of a pair.

    With W_ij = u_i v_j / ‖x_i − y_j‖² it is Xᵀ diag(W1) X + Yᵀ diag(Wᵀ1) Y − XᵀWY − (XᵀWY)ᵀ; W is made a block of rows
    at a time, so that memory does not grow with the number of pairs. Coincident pairs count nothing.
    """
    middle = (x.mean(0) + y.mean(0)) / 2  # differences stay, and their squares lose fewer digits
    x, y = x.double() - middle.double(), y.double() - middle.double()
    u = x.new_ones(len(x)) if u is None else u
    v = y.new_ones(len(y)) if v is None else v
    if not unit:
        left, right = (x * u[:, None]).sum(0), (y * v[:, None]).sum(0)
        cross = torch.outer(left, right)
        return v.sum() * (x.T * u) @ x + u.sum() * (y.T * v) @ y - cross - cross.T
    found, columns = x.new_zeros(x.shape[1], x.shape[1]), y.new_zeros(len(y))
    rows = max(1, PAIRS // len(y))
    for start in range(0, len(x), rows):
        part, own = x[start : start + rows], u[start : start + rows]
        w, close = _inverse_squares(part, y)
        w.mul_(own[:, None]).mul_(v)
        cross = part.T @ (w @ y)
        found += (part.T * w.sum(1)) @ part - cross - cross.T + _one_by_one(part, y, own, v, close)
        columns += w.sum(0)
    return found + (y.T * columns) @ y


def _inverse_squares(x: Vectors, y: Vectors) -> "tuple[Float[Tensor, 'left right'], Int[Tensor, 'close 2']]":
    """1 / ‖x_i − y_j‖², and the pairs so close that this would cost all digits: they have 0 there."""
    sizes = (x * x).sum(1)[:, None] + (y * y).sum(1)
    squares = torch.addmm(sizes, x, y.T, alpha=-2)
    close = squares < CLOSE * sizes
    return squares.reciprocal_().masked_fill_(close | (sizes == 0), 0), close.nonzero()


def _one_by_one(
    x: Vectors, y: Vectors, u: Float[Tensor, "left"], v: Float[Tensor, "right"], close: Int[Tensor, "close 2"]
) -> Square:
    """The same sum over close pairs, from their differences; a pair that coincides has none."""
    found = x.new_zeros(x.shape[1], x.shape[1])
    for some in close.split(max(1, PAIRS // x.shape[1])):
        i, j = some.unbind(1)
        d = x[i] - y[j]
        squares = (d * d).sum(1)
        found += (d.T * torch.where(squares > 0, u[i] * v[j] / squares, 0)) @ d
    return found


@dataclass
class Moments:
    """The mean and the covariance of a class, from vectors that come a few at a time and need not be kept."""

    width: int

    def __post_init__(self) -> None:
        self.count, self.mean = 0, torch.zeros(self.width, dtype=torch.float64)
        self.square = torch.zeros(self.width, self.width, dtype=torch.float64)  # Σ (x − mean)(x − mean)ᵀ

    def add(self, vectors: Vectors) -> "Moments":
        for part in vectors.split(2**13):
            part = part.double()
            count, mean = len(part), part.mean(0)
            centred, step = part - mean, mean - self.mean.to(mean)
            whole = self.count + count
            self.square = self.square.to(mean) + centred.T @ centred
            self.square += torch.outer(step, step) * (self.count * count / whole)
            self.mean = self.mean.to(mean) + step * (count / whole)
            self.count = whole
        return self

    @classmethod
    def of(cls, parts: Iterable[Vectors]) -> "Moments":
        found = None
        for part in parts:
            found = (cls(part.shape[1]) if found is None else found).add(part)
        if found is None:
            raise InputError("there are no vectors to find a direction with")
        return found

    @property
    def covariance(self) -> Square:
        return self.square / self.count

    def contrast(self, other: "Moments", weights: Weights = "dynamic") -> Square:
        """A of plain differences, μ that of the means: α_≠ 2n₁n₂ (μμᵀ + Σ₁ + Σ₂) − 2α_= (n₁²Σ₁ + n₂²Σ₂).

        In balanced classes with dynamic weights the covariances cancel, and it is μμᵀ: the difference of means.
        """
        (n, m), (unlike, like) = (self.count, other.count), _weights(weights, self.count, other.count)
        apart = self.mean - other.mean
        pairs = 2 * n * m * unlike
        own, others = pairs - 2 * n * n * like, pairs - 2 * m * m * like
        return pairs * torch.outer(apart, apart) + own * self.covariance + others * other.covariance


def top(contrast: Square, dimensions: int) -> "tuple[Float[Tensor, 'dimension'], Float[Tensor, 'dimension model']]":
    """The largest eigenvalues and their unit eigenvectors."""
    width = len(contrast)
    if not 1 <= dimensions <= width:
        raise InputError(f"dimensions={dimensions}: the vectors have {width}, so give 1 to {width}")
    values, vectors = torch.linalg.eigh((contrast + contrast.T) / 2)
    return values.flip(0)[:dimensions], vectors.flip(1)[:, :dimensions].T.contiguous()


def oriented(
    contrast: Square, first: Vectors, second: Vectors, dimensions: int, names: tuple[str, str], about: dict[str, Any]
) -> Direction:
    """The top eigenvectors, each pointing to the first class, with the classes' middle and spread along it."""
    values, q = top(contrast, dimensions)
    return placed(q, values, first, second, names, about)


def placed(
    q: Float[Tensor, "dimension model"],
    values: Float[Tensor, "dimension"],
    first: Vectors,
    second: Vectors,
    names: tuple[str, str],
    about: dict[str, Any],
) -> Direction:
    """Any vectors as a direction from the second class to the first."""
    along, others = first.to(q) @ q.T, second.to(q) @ q.T
    sign = _never_zero(torch.sign(along.mean(0) - others.mean(0)))
    q, along, others = q * sign[:, None], along * sign, others * sign
    centre = (along.mean(0) + others.mean(0)) / 2
    counts = (len(first), len(second))
    return Direction(q, values, centre, pooled(along, others), names, counts, about=about)


def _weights(weights: Weights, n: int, m: int) -> tuple[float, float]:
    if weights == "dynamic":
        return 1 / (2 * n * m), 1 / (n * n + m * m)
    if isinstance(weights, str) or len(weights) != 2:
        raise InputError(f"weights={weights!r}: give 'dynamic', or two numbers for unlike and for like pairs")
    return weights


def pooled(one: Float[Tensor, "n dimension"], other: Float[Tensor, "m dimension"]) -> Float[Tensor, "dimension"]:
    squares = ((one - one.mean(0)) ** 2).sum(0) + ((other - other.mean(0)) ** 2).sum(0)
    return (squares / max(1, len(one) + len(other) - 2)).sqrt().clamp(min=torch.finfo(one.dtype).tiny)


def _never_zero(sign: Tensor) -> Tensor:
    return torch.where(sign == 0, torch.ones_like(sign), sign)


def two_sets(first: Any, second: Any, names: tuple[str, str]) -> tuple[Vectors, Vectors]:
    found = _checked(first, f"the set {names[0]!r}"), _checked(second, f"the set {names[1]!r}")
    if found[0].shape[1] != found[1].shape[1]:
        raise InputError(f"the two sets have vectors of different widths: {found[0].shape[1]} and {found[1].shape[1]}")
    return found


def _checked(vectors: Any, what: str) -> Vectors:
    vectors = torch.as_tensor(vectors)
    if vectors.dim() != 2:
        raise InputError(f"{what} must be vector × model, but has the shape {tuple(vectors.shape)}")
    if not len(vectors):
        raise InputError(f"{what} is empty: a direction needs vectors on both sides")
    if not vectors.isfinite().all():
        raise InputError(f"{what} holds numbers that are not finite")
    return vectors if vectors.is_floating_point() else vectors.double()


def _enough(count: int, width: int, few: bool) -> None:
    if count < width and not few:
        raise InputError(
            f"{count} vectors are fewer than their {width} dimensions, so chance decides the direction: give more, or "
            "say few=True (--few) and look at what is held out"
        )
    if count < 2:
        raise InputError("a direction needs at least two vectors")
