"""Do two groups of inputs differ, head by head and class by class? Permutation tests with false discoveries held.

One number an input (tokens of one input are not independent); labels shuffled among inputs of like length and of one
kind (a group of longer inputs, or one that was asked harder things, must not look different for that alone); Benjamini
and Hochberg's step-up over all cells; Cliff's delta for how large a difference is. No input is dropped for being far
from its group's mean: that removes the variance that the test is about.

Where several inputs are about one function they are not independent of each other, and shuffling their labels one by
one would call the function's own peculiarity a difference. Then what each function adds to the difference of means,
Σ (label − mean)(value − mean), keeps its size and its sign is flipped, function by function: if labels have nothing to
do with values, each sign is as likely as the other (a sign-flipping score test).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from clearhead.errors import InputError

PERMUTATIONS = 5_000
#: The rate of false discoveries among those that are named.
RATE = 0.05
#: Inputs are shuffled within so many groups of like length, fewer where they are of several kinds.
STRATA, STRATA_OF_KIND = 10, 4


@dataclass(frozen=True, eq=False)
class Differences:
    """One number for each cell: the difference of means (first group − second), its p, and p corrected (q).

    Means are of what is left when the mean of all inputs of like length and kind is taken away.

    delta: how much more often a member of the first group is above one of the second than below it (−1 … 1)
    counts: the members of both groups that have a value in the cell
    """

    difference: Float[np.ndarray, "*cell"]
    p: Float[np.ndarray, "*cell"]
    q: Float[np.ndarray, "*cell"]
    delta: Float[np.ndarray, "*cell"]
    counts: Int[np.ndarray, "2 *cell"]

    @property
    def tested(self) -> int:
        """How many cells had enough values."""
        return int((~np.isnan(self.p)).sum())

    @property
    def found(self) -> Bool[np.ndarray, "*cell"]:
        return np.asarray(self.q < RATE)


def differences(
    values: Float[np.ndarray, "input *cell"],
    first: Bool[np.ndarray, " input"],
    lengths: Float[np.ndarray, " input"] | None = None,
    kinds: Sequence[str] | None = None,
    permutations: int = PERMUTATIONS,
    seed: int = 0,
    functions: Int[np.ndarray, " input"] | None = None,
) -> Differences:
    """Two groups of inputs, compared among those of like length and of one kind.

    Cells in which a group has fewer than two values are not tested (NaN), nor, where several inputs are about one
    function (`functions`: its number), those in which a group's values come from fewer than two functions.
    """
    if not 2 <= first.sum() <= len(first) - 2:
        raise InputError(
            f"groups of {int(first.sum())} and {int((~first).sum())} inputs cannot be compared: each needs two at least"
        )
    strata = _strata(lengths if lengths is not None else np.zeros(len(first)), kinds)
    cells = _without_means(values.reshape(len(values), -1), strata)
    there = ~np.isnan(cells)
    known, filled = there.astype(np.float64), np.where(there, cells, 0.0)
    observed = _gap(first[None].astype(np.float64), filled, known)[0]
    rng = np.random.default_rng(seed)
    own = None if functions is None else np.unique(functions, return_inverse=True)[1]
    sides = [there & first[:, None], there & ~first[:, None]]
    counts = np.stack([side.sum(0) for side in sides])
    if own is None or own.max() + 1 == len(own):
        tested = (counts >= 2).all(0)
        more = np.zeros(cells.shape[1])
        for size in _portions(permutations, len(first)):
            shuffled = _shuffled(rng, first, strata, size)
            # differences that are equal but for rounding count as equal
            more += (np.abs(_gap(shuffled, filled, known)) >= np.abs(observed) * (1 - 1e-9)).sum(0)
    else:
        tested = (np.stack([_summed(side, own) > 0 for side in sides]).sum(1) >= 2).all(0)
        labels = np.where(there, first[:, None].astype(np.float64), np.nan)
        added = _summed(np.nan_to_num(_without_means(labels, strata)) * filled, own)
        more = _flipped(rng, added, permutations)
    p = np.where(tested, (more + 1) / (permutations + 1), np.nan)
    delta = np.array([cliffs_delta(column[first], column[~first]) for column in cells.T])
    shape = values.shape[1:]
    return Differences(
        np.where(tested, observed, np.nan).reshape(shape),
        p.reshape(shape),
        benjamini_hochberg(p).reshape(shape),
        np.where(tested, delta, np.nan).reshape(shape),
        counts.reshape(2, *shape),
    )


def changes(
    one: Float[np.ndarray, "input *cell"],
    other: Float[np.ndarray, "input *cell"],
    permutations: int = PERMUTATIONS,
    seed: int = 0,
    functions: Int[np.ndarray, " input"] | None = None,
) -> Differences:
    """The same inputs twice (a model before and after it was fine-tuned): signs of the differences are flipped.

    functions: the number of the function that an input is about; the signs of one function are flipped together
    """
    if one.shape != other.shape:
        raise InputError(
            f"the same inputs and heads are needed twice, but the shapes are {one.shape} and {other.shape}"
        )
    gaps = (other - one).reshape(len(one), -1)
    there = ~np.isnan(gaps)
    filled, count = np.where(there, gaps, 0.0), np.maximum(there.sum(0), 1)
    observed = filled.sum(0) / count
    own = np.arange(len(gaps)) if functions is None else np.unique(functions, return_inverse=True)[1]
    more = _flipped(np.random.default_rng(seed), _summed(filled, own), permutations)
    tested = (_summed(there, own) > 0).sum(0) >= 2
    p = np.where(tested, (more + 1) / (permutations + 1), np.nan)
    up, down = ((np.sign(filled) == sign).sum(0) for sign in (1, -1))
    shape = one.shape[1:]
    return Differences(
        np.where(tested, observed, np.nan).reshape(shape),
        p.reshape(shape),
        benjamini_hochberg(p).reshape(shape),
        np.where(tested, (up - down) / count, np.nan).reshape(shape),
        np.stack([there.sum(0)] * 2).reshape(2, *shape),
    )


def benjamini_hochberg(p: Float[np.ndarray, "*cell"]) -> Float[np.ndarray, "*cell"]:
    """The smallest rate of false discoveries at which each would be named; cells that were not tested do not count.

    >>> benjamini_hochberg(np.array([0.01, 0.02, 0.9, np.nan])).round(3).tolist()
    [0.03, 0.03, 0.9, nan]
    """
    flat = p.ravel()
    tested = np.flatnonzero(~np.isnan(flat))
    order = tested[np.argsort(flat[tested], kind="stable")]
    scaled = flat[order] * len(order) / np.arange(1, len(order) + 1)
    q = np.full(len(flat), np.nan)
    q[order] = np.minimum.accumulate(scaled[::-1])[::-1].clip(max=1.0)
    return q.reshape(p.shape)


def cliffs_delta(one: Float[np.ndarray, " first"], other: Float[np.ndarray, " second"]) -> float:
    """P(one > other) − P(one < other).

    >>> cliffs_delta(np.array([2.0, 3.0]), np.array([1.0, 2.0]))
    0.75
    """
    one, other = one[~np.isnan(one)], np.sort(other[~np.isnan(other)])
    if not len(one) or not len(other):
        return float("nan")
    below, up_to = (np.searchsorted(other, one, side) for side in ("left", "right"))
    return float((below - (len(other) - up_to)).sum() / (len(one) * len(other)))


def _gap(first: np.ndarray, filled: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Difference of the groups' means for each labelling; groups without a value give 0."""
    sums, counts = first @ filled, first @ known
    rest, others = filled.sum(0) - sums, known.sum(0) - counts
    both = (counts > 0) & (others > 0)
    return np.asarray(np.where(both, sums / np.maximum(counts, 1) - rest / np.maximum(others, 1), 0.0))


def _strata(lengths: np.ndarray, kinds: Sequence[str] | None) -> np.ndarray:
    """A number for each input; equal for those of one kind and of like length among that kind."""
    own = np.zeros(len(lengths), dtype=int) if kinds is None else np.unique(list(kinds), return_inverse=True)[1]
    count = STRATA if kinds is None or len(set(kinds)) == 1 else STRATA_OF_KIND
    strata = np.zeros(len(lengths), dtype=int)
    for kind in np.unique(own):
        mine = own == kind
        edges = np.quantile(lengths[mine], np.linspace(0, 1, count + 1)[1:-1])
        strata[mine] = kind * count + np.searchsorted(edges, lengths[mine], "right")
    return strata


def _without_means(cells: np.ndarray, strata: np.ndarray) -> np.ndarray:
    """Shuffling within strata leaves their means as they are, so they can be taken away: the test is about the rest."""
    made = cells.copy()
    for stratum in np.unique(strata):
        mine = strata == stratum
        count = np.maximum((~np.isnan(cells[mine])).sum(0), 1)
        made[mine] -= np.nansum(cells[mine], 0) / count
    return made


def _shuffled(rng: np.random.Generator, first: np.ndarray, strata: np.ndarray, size: int) -> np.ndarray:
    labels = np.repeat(first[None].astype(np.float64), size, 0)
    for stratum in np.unique(strata):
        mine = np.flatnonzero(strata == stratum)
        labels[:, mine] = rng.permuted(labels[:, mine], axis=1)
    return labels


def _summed(values: Float[np.ndarray, "input cell"], functions: Int[np.ndarray, " input"]) -> np.ndarray:
    """The sums over the inputs of each function."""
    made = np.zeros((int(functions.max()) + 1, values.shape[1]))
    np.add.at(made, functions, values)
    return made


def _flipped(rng: np.random.Generator, added: Float[np.ndarray, "function cell"], times: int) -> np.ndarray:
    """How often the sum is at least as far from zero when signs are flipped, function by function."""
    observed, more = np.abs(added.sum(0)), np.zeros(added.shape[1])
    for size in _portions(times, len(added)):
        signs = rng.integers(2, size=(size, len(added))) * 2.0 - 1
        more += (np.abs(signs @ added) >= observed * (1 - 1e-9)).sum(0)
    return more


def _portions(total: int, inputs: int, at_once: int = 2**21) -> list[int]:
    """So many labellings at a time that memory does not grow with their number."""
    size = max(1, at_once // max(inputs, 1))
    return [min(size, total - start) for start in range(0, total, size)]
