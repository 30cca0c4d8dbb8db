"""Validation of a direction on held-out vectors: fit it without a fraction of the vectors and test it on these."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from clearhead.concepts.densray import (
    Vectors,
    compute_pooled_std,
    fit_densray,
    fit_densray_regression,
    validate_two_sets,
)
from clearhead.concepts.directions import Direction, HeldOutMetrics
from clearhead.errors import InputError


def fit_with_held_out(
    first: Vectors,
    second: Vectors,
    *,
    groups: tuple[Sequence[Any], Sequence[Any]] | None = None,
    share: float = 0.25,
    seed: int = 0,
    find: Any = fit_densray,
    **fit_kwargs: Any,
) -> Direction:
    """Fit a direction to all vectors, with held-out metrics from a second fit without a fraction of them.

    Args:
        first: Vectors of the first class.
        second: Vectors of the second class.
        groups: For each vector of each set, the group that is held out as a unit: the word, or the sentence that it and
            its counterfactual come from. Without groups, a word would be tested on its own duplicates.
        share: Fraction of the vectors to hold out.
        seed: Seed of the split.
        find: Function of two sets that fits the direction, such as `fit_densray` or `fit_pca_direction`.
        **fit_kwargs: Options of that function.

    Returns:
        The direction of all vectors, with `held_out_metrics`.

    Raises:
        InputError: The groups do not fit the sets, or holding them out leaves a set empty.
    """
    first, second = validate_two_sets(first, second, fit_kwargs.get("names", ("first", "second")))
    sides = groups or (range(len(first)), range(len(first), len(first) + len(second)))
    if [len(side) for side in sides] != [len(first), len(second)]:
        raise InputError("groups= must name one group for each vector of each of the two sets")
    direction = find(first, second, **fit_kwargs)
    first_out, second_out = _select_held_out_groups(sides, share, seed)
    if find is fit_densray:  # the size check applies to all vectors; the remaining ones may be fewer
        fit_kwargs = {**fit_kwargs, "few": True}
    trial = find(first[~first_out], second[~second_out], **fit_kwargs)
    return replace(direction, held_out_metrics=compute_held_out_metrics(trial, first[first_out], second[second_out]))


def fit_regression_with_held_out(
    vectors: Vectors, labels: Float[Tensor, "vector"], *, share: float = 0.25, seed: int = 0, **fit_kwargs: Any
) -> Direction:
    """Fit DensRay to all vectors with numeric labels; a second fit to a part gives the held-out Pearson correlation.

    Args:
        vectors: The vectors.
        labels: One number for each vector.
        share: Fraction of the vectors to hold out (at least two).
        seed: Seed of the split.
        **fit_kwargs: Options of `fit_densray_regression`.

    Returns:
        The direction of all vectors, with `held_out_metrics`.
    """
    direction = fit_densray_regression(vectors, labels, **fit_kwargs)
    order = torch.randperm(len(vectors), generator=torch.Generator().manual_seed(seed))
    count = max(2, round(share * len(vectors)))
    held_out = order[:count]
    kept = order[count:]
    labels = torch.as_tensor(labels).double()
    trial = fit_densray_regression(vectors[kept], labels[kept], **{**fit_kwargs, "few": True})
    scores_and_labels = torch.stack([trial.compute_score(vectors[held_out].double()).cpu(), labels[held_out].cpu()])
    correlation = float(torch.corrcoef(scores_and_labels)[0, 1])
    return replace(direction, held_out_metrics=HeldOutMetrics(None, correlation, count))


def compute_held_out_metrics(direction: Direction, first: Vectors, second: Vectors) -> HeldOutMetrics:
    """Compute balanced accuracy (the score has the sign of its class) and Cohen's d on two sets of vectors."""
    first_scores = direction.compute_score(first.double())
    second_scores = direction.compute_score(second.double())
    accuracy = float(((first_scores > 0).double().mean() + (second_scores < 0).double().mean()) / 2)
    pooled_std = compute_pooled_std(first_scores[:, None], second_scores[:, None])[0]
    effect = (first_scores.mean() - second_scores.mean()) / pooled_std
    return HeldOutMetrics(accuracy, float(effect), len(first) + len(second))


def _select_held_out_groups(
    sides: tuple[Sequence[Any], Sequence[Any]], share: float, seed: int
) -> list[Bool[Tensor, "vector"]]:
    """Masks of the held-out vectors of each set: whole groups, until both sets have about that share."""
    group_ids = {group: group_id for group_id, group in enumerate(dict.fromkeys([*sides[0], *sides[1]]))}
    side_groups = [torch.tensor([group_ids[group] for group in side]) for side in sides]
    order = torch.randperm(len(group_ids), generator=torch.Generator().manual_seed(seed))
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order))
    # a group that one set holds out is held out of the other set, too
    is_held_out = torch.zeros(len(group_ids), dtype=torch.bool)
    for group_of_vector in side_groups:
        ranks = rank[group_of_vector]
        min_count = max(1, round(share * len(group_of_vector)))
        limit = ranks.sort().values[min_count - 1]
        is_held_out[group_of_vector[ranks <= limit]] = True
    masks = [is_held_out[group_of_vector] for group_of_vector in side_groups]
    if any(mask.all() for mask in masks):
        raise InputError(
            "holding out whole groups leaves one set empty: use more groups, or a smaller held-out fraction"
        )
    return masks
