"""DensRay: the direction along which vectors of different classes differ and those of one class do not.

    A = α_≠ Σ_≠ d dᵀ − α_= Σ_= d dᵀ,  d = (x − y) / ‖x − y‖ (or x − y),  q = the eigenvector of its largest eigenvalue

over ordered pairs of unlike and of like vectors. Dufter and Schütze 2019, "Analytical Methods for Interpretable
Ultradense Word Embeddings"; in layers of BERT: Liang, Dufter and Schütze 2020, "Monolingual and Multilingual Reduction
of Gender Bias in Contextualized Representations".

The sign of an eigenvector is arbitrary: here it points from the second class to the first, and zero is midway between
their means.
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
SquareMatrix = Float[Tensor, "model model"]
#: α_≠ and α_=, or "dynamic": the mean over unlike pairs minus the mean over like ones.
PairWeights = tuple[float, float] | str
#: How many pairs are in one block (their distances in float64 take 128 MiB).
MAX_PAIRS_PER_BLOCK = 2**24
#: Pairs whose squared distance is below this fraction of their squared norms are computed from their differences.
CLOSE_PAIR_TOLERANCE = 1e-6


def fit_densray(
    first: Vectors,
    second: Vectors,
    *,
    dimensions: int = 1,
    normalise: bool = True,
    weights: PairWeights = "dynamic",
    names: tuple[str, str] = ("first", "second"),
    few: bool = False,
) -> Direction:
    """Fit the DensRay direction that separates two sets of vectors, positive towards the first.

    Args:
        first: Vectors of the first class.
        second: Vectors of the second class.
        dimensions: Number of eigenvectors to keep.
        normalise: Use only the direction of each pair's difference (the authors' default), which visits all pairs.
            Without it, the means and covariances of the classes suffice.
        weights: α_≠ and α_=, or "dynamic" for the mean over unlike pairs minus the mean over like pairs.
        names: Names of the two classes.
        few: Allow fewer vectors than dimensions; the direction is then partly left to chance.

    Returns:
        The direction, oriented and centred on the two classes.

    Raises:
        InputError: The sets are empty, not finite, of different widths, or too small.

    Example:
        >>> x = torch.tensor([[2.0, 1.0], [2.0, -1.0], [2.5, 0.0]])
        >>> fit_densray(x, -x).q.round(decimals=3)
        tensor([[1., 0.]], dtype=torch.float64)
    """
    first, second = validate_two_sets(first, second, names)
    width = first.shape[1]
    _check_enough_vectors(len(first) + len(second), width, few)
    if normalise:
        unlike_scatter = 2 * compute_pair_scatter(first, second)
        like_scatter = compute_pair_scatter(first, first) + compute_pair_scatter(second, second)
        unlike_weight, like_weight = _resolve_pair_weights(weights, len(first), len(second))
        contrast = unlike_weight * unlike_scatter - like_weight * like_scatter
    else:
        contrast = ClassMoments(width).update(first).compute_contrast(ClassMoments(width).update(second), weights)
    return build_direction_from_contrast(
        contrast, first, second, dimensions, names, {"method": "densray", "normalise": normalise}
    )


def fit_densray_regression(
    vectors: Vectors,
    labels: Float[Tensor, "vector"],
    *,
    dimensions: int = 1,
    normalise: bool = True,
    z_score: bool = True,
    few: bool = False,
) -> Direction:
    """Fit DensRay to numeric labels: A = −Σ l_v l_w d dᵀ. Scores are centred on the mean.

    Args:
        vectors: The vectors.
        labels: One number for each vector.
        dimensions: Number of eigenvectors to keep.
        normalise: Use only the direction of each pair's difference.
        z_score: Standardise the labels first.
        few: Allow fewer vectors than dimensions; the direction is then partly left to chance.

    Returns:
        The direction, positive towards high labels.

    Raises:
        InputError: The labels do not fit the vectors, are not finite or all the same, or there are too few vectors.
    """
    vectors = _validate_vectors(vectors, "the vectors")
    labels = torch.as_tensor(labels).double().to(vectors.device)
    if labels.shape != (len(vectors),):
        raise InputError(f"there are {len(vectors)} vectors, but the labels have the shape {tuple(labels.shape)}")
    if not labels.isfinite().all() or labels.std() == 0:
        raise InputError("the labels must be finite numbers that are not all the same")
    _check_enough_vectors(len(vectors), vectors.shape[1], few)
    label_weights = labels
    if z_score:
        label_weights = (labels - labels.mean()) / labels.std()
    values, q = compute_top_eigenvectors(
        -compute_pair_scatter(vectors, vectors, label_weights, label_weights, normalise=normalise), dimensions
    )
    projections = vectors @ q.T
    sign = _replace_zero_sign(torch.sign((projections - projections.mean(0)).T @ (labels - labels.mean())))
    q = q * sign[:, None]
    projections = projections * sign
    return Direction(
        q,
        values,
        projections.mean(0),
        projections.std(0),
        ("high", "low"),
        (len(vectors), 0),
        metadata={"method": "densray of numbers", "normalise": normalise},
    )


def compute_pair_scatter(
    x: Vectors,
    y: Vectors,
    x_weights: Float[Tensor, "left"] | None = None,
    y_weights: Float[Tensor, "right"] | None = None,
    normalise: bool = True,
) -> SquareMatrix:
    """Σ_ij u_i v_j d_ij d_ijᵀ over all pairs, without the outer product of any pair.

    With W_ij = u_i v_j / ‖x_i − y_j‖² it is Xᵀ diag(W1) X + Yᵀ diag(Wᵀ1) Y − XᵀWY − (XᵀWY)ᵀ. W is computed in blocks of
    rows, so that memory does not grow with the number of pairs. Coincident pairs contribute nothing.
    """
    middle = (x.mean(0) + y.mean(0)) / 2  # centring keeps the differences and loses fewer digits in their squares
    x = x.double() - middle.double()
    y = y.double() - middle.double()
    if x_weights is None:
        x_weights = x.new_ones(len(x))
    if y_weights is None:
        y_weights = y.new_ones(len(y))
    if not normalise:
        cross = torch.outer((x * x_weights[:, None]).sum(0), (y * y_weights[:, None]).sum(0))
        return y_weights.sum() * (x.T * x_weights) @ x + x_weights.sum() * (y.T * y_weights) @ y - cross - cross.T
    scatter = x.new_zeros(x.shape[1], x.shape[1])
    column_sums = y.new_zeros(len(y))
    block_size = max(1, MAX_PAIRS_PER_BLOCK // len(y))
    for start in range(0, len(x), block_size):
        x_block = x[start : start + block_size]
        block_weights = x_weights[start : start + block_size]
        w, close_pairs = _compute_inverse_squared_distances(x_block, y)
        w.mul_(block_weights[:, None]).mul_(y_weights)
        cross = x_block.T @ (w @ y)
        close_scatter = _sum_close_pairs(x_block, y, block_weights, y_weights, close_pairs)
        scatter += (x_block.T * w.sum(1)) @ x_block - cross - cross.T + close_scatter
        column_sums += w.sum(0)
    return scatter + (y.T * column_sums) @ y


def _compute_inverse_squared_distances(
    x: Vectors, y: Vectors
) -> "tuple[Float[Tensor, 'left right'], Int[Tensor, 'close 2']]":
    """1 / ‖x_i − y_j‖², and the index pairs so close that this would lose all digits (0 in the matrix)."""
    norms = (x * x).sum(1)[:, None] + (y * y).sum(1)
    squares = torch.addmm(norms, x, y.T, alpha=-2)
    close = squares < CLOSE_PAIR_TOLERANCE * norms
    return squares.reciprocal_().masked_fill_(close | (norms == 0), 0), close.nonzero()


def _sum_close_pairs(
    x: Vectors, y: Vectors, u: Float[Tensor, "left"], v: Float[Tensor, "right"], close: Int[Tensor, "close 2"]
) -> SquareMatrix:
    """The same sum over close pairs, computed from their differences; coincident pairs contribute nothing."""
    scatter = x.new_zeros(x.shape[1], x.shape[1])
    for pair_block in close.split(max(1, MAX_PAIRS_PER_BLOCK // x.shape[1])):
        i, j = pair_block.unbind(1)
        d = x[i] - y[j]
        squares = (d * d).sum(1)
        scatter += (d.T * torch.where(squares > 0, u[i] * v[j] / squares, 0)) @ d
    return scatter


@dataclass
class ClassMoments:
    """Running mean and covariance of a class, from batches of vectors that need not be kept.

    Attributes:
        num_features: Width of the vectors.
    """

    num_features: int

    def __post_init__(self) -> None:
        self.count = 0
        self.mean = torch.zeros(self.num_features, dtype=torch.float64)
        #: Σ (x − mean)(x − mean)ᵀ
        self.scatter_matrix = torch.zeros(self.num_features, self.num_features, dtype=torch.float64)

    def update(self, vectors: Vectors) -> "ClassMoments":
        """Add vectors to the moments and return self."""
        for chunk in vectors.split(2**13):
            chunk = chunk.double()
            chunk_count = len(chunk)
            chunk_mean = chunk.mean(0)
            centred = chunk - chunk_mean
            mean_shift = chunk_mean - self.mean.to(chunk_mean)
            total = self.count + chunk_count
            self.scatter_matrix = self.scatter_matrix.to(chunk_mean) + centred.T @ centred
            self.scatter_matrix += torch.outer(mean_shift, mean_shift) * (self.count * chunk_count / total)
            self.mean = self.mean.to(chunk_mean) + mean_shift * (chunk_count / total)
            self.count = total
        return self

    @classmethod
    def from_batches(cls, batches: Iterable[Vectors]) -> "ClassMoments":
        """Compute the moments of batches of vectors.

        Raises:
            InputError: There are no batches.
        """
        moments = None
        for vectors in batches:
            if moments is None:
                moments = cls(vectors.shape[1])
            moments.update(vectors)
        if moments is None:
            raise InputError("there are no vectors to fit a direction to")
        return moments

    @property
    def covariance(self) -> SquareMatrix:
        """The covariance matrix, normalised by the number of vectors."""
        return self.scatter_matrix / self.count

    def compute_contrast(self, other_class: "ClassMoments", weights: PairWeights = "dynamic") -> SquareMatrix:
        """A without normalisation: α_≠ 2n₁n₂ (μμᵀ + Σ₁ + Σ₂) − 2α_= (n₁²Σ₁ + n₂²Σ₂), μ the difference of the means.

        In balanced classes with dynamic weights the covariances cancel, and A is μμᵀ.
        """
        n = self.count
        m = other_class.count
        unlike_weight, like_weight = _resolve_pair_weights(weights, n, m)
        mean_difference = self.mean - other_class.mean
        pairs = 2 * n * m * unlike_weight
        first_factor = pairs - 2 * n * n * like_weight
        second_factor = pairs - 2 * m * m * like_weight
        return (
            pairs * torch.outer(mean_difference, mean_difference)
            + first_factor * self.covariance
            + second_factor * other_class.covariance
        )


def compute_top_eigenvectors(
    contrast: SquareMatrix, dimensions: int
) -> "tuple[Float[Tensor, 'dimension'], Float[Tensor, 'dimension model']]":
    """The largest eigenvalues and their unit eigenvectors."""
    width = len(contrast)
    if not 1 <= dimensions <= width:
        raise InputError(
            f"dimensions={dimensions} is not valid: the vectors have {width} dimensions, so use 1 to {width}"
        )
    values, vectors = torch.linalg.eigh((contrast + contrast.T) / 2)
    return values.flip(0)[:dimensions], vectors.flip(1)[:, :dimensions].T.contiguous()


def build_direction_from_contrast(
    contrast: SquareMatrix,
    first: Vectors,
    second: Vectors,
    dimensions: int,
    names: tuple[str, str],
    metadata: dict[str, Any],
) -> Direction:
    """The top eigenvectors as a direction, oriented and centred on the two classes."""
    values, q = compute_top_eigenvectors(contrast, dimensions)
    return build_direction(q, values, first, second, names, metadata)


def build_direction(
    q: Float[Tensor, "dimension model"],
    eigenvalues: Float[Tensor, "dimension"],
    first: Vectors,
    second: Vectors,
    names: tuple[str, str],
    metadata: dict[str, Any],
) -> Direction:
    """A direction from any unit vectors: oriented from the second class to the first and centred midway between."""
    first_projections = first.to(q) @ q.T
    second_projections = second.to(q) @ q.T
    sign = _replace_zero_sign(torch.sign(first_projections.mean(0) - second_projections.mean(0)))
    q = q * sign[:, None]
    first_projections = first_projections * sign
    second_projections = second_projections * sign
    centre = (first_projections.mean(0) + second_projections.mean(0)) / 2
    spread = compute_pooled_std(first_projections, second_projections)
    return Direction(q, eigenvalues, centre, spread, names, (len(first), len(second)), metadata=metadata)


def _resolve_pair_weights(weights: PairWeights, n: int, m: int) -> tuple[float, float]:
    """Return (α_≠, α_=); "dynamic" is 1 / 2nm and 1 / (n² + m²), so that both sums become means."""
    if weights == "dynamic":
        return 1 / (2 * n * m), 1 / (n * n + m * m)
    if isinstance(weights, str) or len(weights) != 2:
        raise InputError(
            f"weights={weights!r} is not valid: use 'dynamic', or two numbers, the weights of pairs across the two "
            "sets and within one set"
        )
    return weights


def compute_pooled_std(
    first: Float[Tensor, "n dimension"], second: Float[Tensor, "m dimension"]
) -> Float[Tensor, "dimension"]:
    """The pooled standard deviation of two classes, with n + m − 2 degrees of freedom; never 0."""
    squares = ((first - first.mean(0)) ** 2).sum(0) + ((second - second.mean(0)) ** 2).sum(0)
    return (squares / max(1, len(first) + len(second) - 2)).sqrt().clamp(min=torch.finfo(first.dtype).tiny)


def _replace_zero_sign(sign: Tensor) -> Tensor:
    """Replace 0 by 1, so that a direction along which the classes do not differ is not erased."""
    return torch.where(sign == 0, torch.ones_like(sign), sign)


def validate_two_sets(first: Any, second: Any, names: tuple[str, str]) -> tuple[Vectors, Vectors]:
    """Convert two sets to floating-point matrices and check that they are non-empty, finite and of one width."""
    first_vectors = _validate_vectors(first, f"the set {names[0]!r}")
    second_vectors = _validate_vectors(second, f"the set {names[1]!r}")
    if first_vectors.shape[1] != second_vectors.shape[1]:
        raise InputError(
            f"the two sets have vectors with different numbers of features: {first_vectors.shape[1]} and "
            f"{second_vectors.shape[1]}"
        )
    return first_vectors, second_vectors


def _validate_vectors(vectors: Any, set_name: str) -> Vectors:
    """Return vectors as a floating-point tensor; raise `InputError` if not vector × model, empty or not finite."""
    vectors = torch.as_tensor(vectors)
    if vectors.dim() != 2:
        raise InputError(f"{set_name} must be vector × model, but has the shape {tuple(vectors.shape)}")
    if not len(vectors):
        raise InputError(f"{set_name} is empty: a direction needs vectors in both sets")
    if not vectors.isfinite().all():
        raise InputError(f"{set_name} contains numbers that are not finite")
    return vectors if vectors.is_floating_point() else vectors.double()


def _check_enough_vectors(count: int, width: int, few: bool) -> None:
    """Refuse fewer vectors than dimensions unless `few`, and fewer than two in any case."""
    if count < width and not few:
        raise InputError(
            f"{count} vectors are too few for {width} dimensions, so the direction would depend on chance: use more "
            "vectors, or set few=True (--few) and check the held-out accuracy"
        )
    if count < 2:
        raise InputError("a direction needs at least two vectors")
