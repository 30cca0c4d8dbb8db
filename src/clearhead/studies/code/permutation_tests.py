"""Permutation tests between two groups of inputs, by head and class, with control of the false discovery rate.

One value per input, because tokens of one input are not independent. Labels are shuffled among inputs of similar length
and of the same category, so that a group of longer inputs, or of harder questions, does not differ for that reason
alone. Benjamini and Hochberg's step-up procedure corrects over all cells; Cliff's delta is the effect size. Inputs far
from their group's mean are not dropped: that would remove the variance that the test is about.

Inputs about the same function are not independent either: shuffling their labels one by one would count a property of
the function as a difference. In that case the contribution of each function to the difference of means,
Σ (label − mean)(value − mean), keeps its magnitude and its sign is flipped, function by function: if labels are
unrelated to values, both signs are equally likely (a sign-flipping score test).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from clearhead.errors import InputError

NUM_PERMUTATIONS = 5_000
#: Rate of false discoveries among the significant cells.
FALSE_DISCOVERY_RATE = 0.05
#: Labels are shuffled within this number of length strata,
NUM_STRATA = 10
#: and within this number per category if there are several categories.
NUM_STRATA_PER_KIND = 4


@dataclass(frozen=True, eq=False)
class GroupDifferences:
    """Differences between two groups of inputs, one test per cell; NaN in cells that were not tested.

    Attributes:
        mean_difference: Mean of the first group − mean of the second, after subtraction of the stratum means.
        p_values: Permutation p-values.
        q_values: p-values corrected for the number of tested cells.
        cliffs_delta: P(first > second) − P(first < second), from −1 to 1.
        value_counts: Number of members of each group that have a value in the cell.
    """

    mean_difference: Float[np.ndarray, "*cell"]
    p_values: Float[np.ndarray, "*cell"]
    q_values: Float[np.ndarray, "*cell"]
    cliffs_delta: Float[np.ndarray, "*cell"]
    value_counts: Int[np.ndarray, "2 *cell"]

    @property
    def num_tested(self) -> int:
        """Number of cells with enough values for a test."""
        return int((~np.isnan(self.p_values)).sum())

    @property
    def is_significant(self) -> Bool[np.ndarray, "*cell"]:
        """Cells whose q-value is below `FALSE_DISCOVERY_RATE`."""
        return np.asarray(self.q_values < FALSE_DISCOVERY_RATE)


def compare_groups(
    values: Float[np.ndarray, "input *cell"],
    in_first_group: Bool[np.ndarray, " input"],
    lengths: Float[np.ndarray, " input"] | None = None,
    categories: Sequence[str] | None = None,
    num_permutations: int = NUM_PERMUTATIONS,
    seed: int = 0,
    function_ids: Int[np.ndarray, " input"] | None = None,
) -> GroupDifferences:
    """Test whether two groups of inputs differ, comparing inputs of similar length and the same category.

    Cells are not tested (NaN) if a group has fewer than two values or, where several inputs are about one function, if
    the values of a group come from fewer than two functions.

    Args:
        values: One value per input and cell; NaN where there is none.
        in_first_group: Group membership.
        lengths: Input lengths to stratify by; one stratum if omitted.
        categories: Input categories to stratify by.
        num_permutations: Number of random labellings or sign flips.
        seed: Seed of the permutations.
        function_ids: Index of the function that each input is about; inputs are independent if omitted.

    Raises:
        InputError: A group has fewer than two inputs.
    """
    if not 2 <= in_first_group.sum() <= len(in_first_group) - 2:
        raise InputError(
            f"groups of {int(in_first_group.sum())} and {int((~in_first_group).sum())} inputs cannot be compared: "
            "each needs at least two"
        )
    if lengths is None:
        lengths = np.zeros(len(in_first_group))
    strata = _assign_strata(lengths, categories)
    cells = _subtract_stratum_means(values.reshape(len(values), -1), strata)
    is_present = ~np.isnan(cells)
    present = is_present.astype(np.float64)
    filled = np.where(is_present, cells, 0.0)
    observed = _compute_mean_differences(in_first_group[None].astype(np.float64), filled, present)[0]
    rng = np.random.default_rng(seed)
    group_masks = [is_present & in_first_group[:, None], is_present & ~in_first_group[:, None]]
    counts = np.stack([mask.sum(0) for mask in group_masks])
    function_indices = np.arange(len(in_first_group))
    if function_ids is not None:
        function_indices = np.unique(function_ids, return_inverse=True)[1]
    if function_indices.max() + 1 == len(function_indices):
        is_tested = (counts >= 2).all(0)
        num_extreme = np.zeros(cells.shape[1])
        for size in _split_into_chunks(num_permutations, len(in_first_group)):
            shuffled = _shuffle_labels(rng, in_first_group, strata, size)
            differences = np.abs(_compute_mean_differences(shuffled, filled, present))
            # the factor counts differences as equal that only rounding distinguishes
            num_extreme += (differences >= np.abs(observed) * (1 - 1e-9)).sum(0)
    else:
        function_counts = np.stack([_sum_by_function(mask, function_indices) > 0 for mask in group_masks]).sum(1)
        is_tested = (function_counts >= 2).all(0)
        labels = np.where(is_present, in_first_group[:, None].astype(np.float64), np.nan)
        contributions = _sum_by_function(
            np.nan_to_num(_subtract_stratum_means(labels, strata)) * filled, function_indices
        )
        num_extreme = _count_extreme_sign_flips(rng, contributions, num_permutations)
    p_values = np.where(is_tested, (num_extreme + 1) / (num_permutations + 1), np.nan)
    delta = np.array([compute_cliffs_delta(column[in_first_group], column[~in_first_group]) for column in cells.T])
    shape = values.shape[1:]
    return GroupDifferences(
        np.where(is_tested, observed, np.nan).reshape(shape),
        p_values.reshape(shape),
        compute_q_values(p_values).reshape(shape),
        np.where(is_tested, delta, np.nan).reshape(shape),
        counts.reshape(2, *shape),
    )


def compare_paired_inputs(
    first_values: Float[np.ndarray, "input *cell"],
    second_values: Float[np.ndarray, "input *cell"],
    num_permutations: int = NUM_PERMUTATIONS,
    seed: int = 0,
    function_ids: Int[np.ndarray, " input"] | None = None,
) -> GroupDifferences:
    """Test whether paired values differ, by flipping the signs of the differences (second − first).

    Args:
        first_values: Values of the inputs under the first model, such as the pretrained one.
        second_values: Values of the same inputs under the second model, such as the fine-tuned one.
        num_permutations: Number of random sign flips.
        seed: Seed of the sign flips.
        function_ids: Index of the function that each input is about; the signs of one function are flipped together.

    Raises:
        InputError: The shapes differ.
    """
    if first_values.shape != second_values.shape:
        raise InputError(
            f"both samples must have the same inputs and heads, but their shapes are {first_values.shape} and "
            f"{second_values.shape}"
        )
    differences = (second_values - first_values).reshape(len(first_values), -1)
    is_present = ~np.isnan(differences)
    filled = np.where(is_present, differences, 0.0)
    count = np.maximum(is_present.sum(0), 1)
    observed = filled.sum(0) / count
    function_indices = np.arange(len(differences))
    if function_ids is not None:
        function_indices = np.unique(function_ids, return_inverse=True)[1]
    contributions = _sum_by_function(filled, function_indices)
    num_extreme = _count_extreme_sign_flips(np.random.default_rng(seed), contributions, num_permutations)
    is_tested = (_sum_by_function(is_present, function_indices) > 0).sum(0) >= 2
    p_values = np.where(is_tested, (num_extreme + 1) / (num_permutations + 1), np.nan)
    num_positive, num_negative = ((np.sign(filled) == sign).sum(0) for sign in (1, -1))
    shape = first_values.shape[1:]
    return GroupDifferences(
        np.where(is_tested, observed, np.nan).reshape(shape),
        p_values.reshape(shape),
        compute_q_values(p_values).reshape(shape),
        np.where(is_tested, (num_positive - num_negative) / count, np.nan).reshape(shape),
        np.stack([is_present.sum(0)] * 2).reshape(2, *shape),
    )


def compute_q_values(p_values: Float[np.ndarray, "*cell"]) -> Float[np.ndarray, "*cell"]:
    """Compute Benjamini–Hochberg q-values; NaN entries were not tested and are not counted.

    >>> compute_q_values(np.array([0.01, 0.02, 0.9, np.nan])).round(3).tolist()
    [0.03, 0.03, 0.9, nan]
    """
    flat = p_values.ravel()
    tested = np.flatnonzero(~np.isnan(flat))
    order = tested[np.argsort(flat[tested], kind="stable")]
    scaled = flat[order] * len(order) / np.arange(1, len(order) + 1)
    q_values = np.full(len(flat), np.nan)
    q_values[order] = np.minimum.accumulate(scaled[::-1])[::-1].clip(max=1.0)
    return q_values.reshape(p_values.shape)


def compute_cliffs_delta(first: Float[np.ndarray, " first"], second: Float[np.ndarray, " second"]) -> float:
    """Compute Cliff's delta, P(first > second) − P(first < second); NaN entries are ignored.

    >>> compute_cliffs_delta(np.array([2.0, 3.0]), np.array([1.0, 2.0]))
    0.75
    """
    first = first[~np.isnan(first)]
    second = np.sort(second[~np.isnan(second)])
    if not len(first) or not len(second):
        return float("nan")
    num_below, num_up_to = (np.searchsorted(second, first, side) for side in ("left", "right"))
    return float((num_below - (len(second) - num_up_to)).sum() / (len(first) * len(second)))


def _compute_mean_differences(labels: np.ndarray, filled: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Compute the difference of the group means for each labelling; 0 if a group has no value."""
    first_sums = labels @ filled
    first_counts = labels @ present
    second_sums = filled.sum(0) - first_sums
    second_counts = present.sum(0) - first_counts
    has_values = (first_counts > 0) & (second_counts > 0)
    differences = first_sums / np.maximum(first_counts, 1) - second_sums / np.maximum(second_counts, 1)
    return np.asarray(np.where(has_values, differences, 0.0))


def _assign_strata(lengths: np.ndarray, categories: Sequence[str] | None) -> np.ndarray:
    """Number the strata: inputs of one category, split by the length quantiles of that category."""
    category_indices = np.zeros(len(lengths), dtype=int)
    if categories is not None:
        category_indices = np.unique(list(categories), return_inverse=True)[1]
    has_several_categories = categories is not None and len(set(categories)) != 1
    count = NUM_STRATA_PER_KIND if has_several_categories else NUM_STRATA
    strata = np.zeros(len(lengths), dtype=int)
    for category in np.unique(category_indices):
        mask = category_indices == category
        edges = np.quantile(lengths[mask], np.linspace(0, 1, count + 1)[1:-1])
        strata[mask] = category * count + np.searchsorted(edges, lengths[mask], "right")
    return strata


def _subtract_stratum_means(cells: np.ndarray, strata: np.ndarray) -> np.ndarray:
    """Subtract the mean of each stratum, which shuffling within strata does not change."""
    centred = cells.copy()
    for stratum in np.unique(strata):
        mask = strata == stratum
        count = np.maximum((~np.isnan(cells[mask])).sum(0), 1)
        centred[mask] -= np.nansum(cells[mask], 0) / count
    return centred


def _shuffle_labels(rng: np.random.Generator, labels: np.ndarray, strata: np.ndarray, size: int) -> np.ndarray:
    """Draw `size` labellings, shuffled within each stratum."""
    shuffled = np.repeat(labels[None].astype(np.float64), size, 0)
    for stratum in np.unique(strata):
        indices = np.flatnonzero(strata == stratum)
        shuffled[:, indices] = rng.permuted(shuffled[:, indices], axis=1)
    return shuffled


def _sum_by_function(
    values: Float[np.ndarray, "input cell"], function_indices: Int[np.ndarray, " input"]
) -> np.ndarray:
    """Sum over the inputs of each function."""
    sums = np.zeros((int(function_indices.max()) + 1, values.shape[1]))
    np.add.at(sums, function_indices, values)
    return sums


def _count_extreme_sign_flips(
    rng: np.random.Generator, contributions: Float[np.ndarray, "function cell"], num_flips: int
) -> np.ndarray:
    """Count the sign flips, function by function, whose sum is at least as far from zero as the observed sum."""
    observed = np.abs(contributions.sum(0))
    num_extreme = np.zeros(contributions.shape[1])
    for size in _split_into_chunks(num_flips, len(contributions)):
        signs = rng.integers(2, size=(size, len(contributions))) * 2.0 - 1
        num_extreme += (np.abs(signs @ contributions) >= observed * (1 - 1e-9)).sum(0)
    return num_extreme


def _split_into_chunks(total: int, num_inputs: int, max_elements: int = 2**21) -> list[int]:
    """Split labellings into chunks of bounded memory: at most `max_elements` labels each."""
    size = max(1, max_elements // max(num_inputs, 1))
    return [min(size, total - start) for start in range(0, total, size)]
