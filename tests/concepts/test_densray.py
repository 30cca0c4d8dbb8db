"""DensRay compared with its brute-force definition and the difference of means; saving and loading."""

import itertools

import pytest
import torch

from clearhead.concepts import Directions
from clearhead.concepts.densray import ClassMoments, compute_pair_scatter, fit_densray, fit_densray_regression
from clearhead.concepts.direction_validation import fit_regression_with_held_out, fit_with_held_out
from clearhead.errors import InputError


def make_clusters(n=40, m=40, width=6, shift=1.0):
    generator = torch.Generator().manual_seed(1)
    mix = torch.randn(width, width, generator=generator, dtype=torch.float64)
    first, second = (torch.randn(k, width, generator=generator, dtype=torch.float64) @ mix for k in (n, m))
    return first + shift, second


def outer_product(x, y, unit):
    d = x - y
    norm = d.norm() if unit else torch.tensor(1.0)
    d = d / (norm if norm else 1.0)
    return torch.outer(d, d)


def compute_scatter_by_pairs(first, second, unit, weights=None):
    """The definition: every ordered pair, self pairs included."""
    n, m = len(first), len(second)
    unlike, like = weights or (1 / (2 * n * m), 1 / (n**2 + m**2))
    across = [(x, y) for x in first for y in second]
    across += [(y, x) for x, y in across]
    within = [pair for vectors in (first, second) for pair in itertools.product(vectors, vectors)]
    return unlike * sum(outer_product(x, y, unit) for x, y in across) - like * sum(
        outer_product(x, y, unit) for x, y in within
    )


@pytest.mark.parametrize("unit", [True, False])
@pytest.mark.parametrize("sizes", [(12, 12), (9, 14)])
@pytest.mark.parametrize("weights", [None, (0.5, 0.5)])
def test_pair_scatter_equals_brute_force(unit, sizes, weights):
    first, second = make_clusters(*sizes)
    second[0] = first[3]  # coincident points contribute nothing
    second[1] = first[4] + 1e-7  # so close that ‖x‖² + ‖y‖² − 2x·y cancels completely
    values, vectors = torch.linalg.eigh(compute_scatter_by_pairs(first, second, unit, weights))
    result = fit_densray(first, second, dimensions=6, normalise=unit, weights=weights or "dynamic")
    torch.testing.assert_close(result.eigenvalues, values.flip(0), rtol=1e-8, atol=1e-8)
    assert abs(result.q[0] @ vectors[:, -1]) == pytest.approx(1, abs=1e-8)
    torch.testing.assert_close(result.q @ result.q.T, torch.eye(6).double(), rtol=0, atol=1e-10)


def test_pair_scatter_is_independent_of_block_size(monkeypatch):
    first, second = make_clusters(17, 23)
    expected = compute_pair_scatter(first, second)
    monkeypatch.setattr("clearhead.concepts.densray.MAX_PAIRS_PER_BLOCK", 50)
    torch.testing.assert_close(compute_pair_scatter(first, second), expected, rtol=1e-12, atol=1e-12)
    assert torch.trace(expected) == pytest.approx(17 * 23)


def test_balanced_unnormalised_direction_is_the_difference_of_means():
    first, second = make_clusters()
    difference = first.mean(0) - second.mean(0)
    result = fit_densray(first, second, normalise=False, dimensions=6)
    torch.testing.assert_close(result.q[0], difference / difference.norm(), rtol=0, atol=1e-10)
    expected = torch.tensor([float(difference @ difference), 0, 0, 0, 0, 0], dtype=torch.float64)
    torch.testing.assert_close(result.eigenvalues, expected, rtol=0, atol=1e-10)
    contrast = ClassMoments.from_batches([first]).compute_contrast(ClassMoments.from_batches([second]))
    torch.testing.assert_close(contrast, torch.outer(difference, difference), rtol=0, atol=1e-10)


def test_moments_of_batches_equal_moments_of_all_vectors():
    first, _ = make_clusters(30)
    batched, single = ClassMoments.from_batches(first.split(7)), ClassMoments.from_batches([first])
    torch.testing.assert_close(batched.covariance, single.covariance, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(batched.covariance, first.T.cov(correction=0), rtol=1e-12, atol=1e-12)


def test_direction_points_to_first_class_and_is_centred():
    first, second = make_clusters(shift=3.0)
    direction, opposite = fit_densray(first, second), fit_densray(second, first)
    torch.testing.assert_close(direction.q, -opposite.q)
    scores = direction.compute_score(first).mean(), direction.compute_score(second).mean()
    assert scores[0] > 0 and scores[0] == pytest.approx(-float(scores[1]))
    shifted = fit_densray(first + 100, second + 100)
    torch.testing.assert_close(shifted.compute_score(first + 100), direction.compute_score(first), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("unit", [True, False])
def test_regression_equals_brute_force_and_follows_labels(unit):
    first, _ = make_clusters(15)
    labels = torch.randn(15, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    standardised = (labels - labels.mean()) / labels.std()
    pairs = itertools.product(range(15), repeat=2)
    scatter = -sum(standardised[v] * standardised[w] * outer_product(first[v], first[w], unit) for v, w in pairs)
    vectors = torch.linalg.eigh(scatter).eigenvectors
    result = fit_densray_regression(first, labels, normalise=unit)
    assert abs(result.q[0] @ vectors[:, -1]) == pytest.approx(1, abs=1e-8)
    assert torch.corrcoef(torch.stack([result.project(first), labels]))[0, 1] > 0


def test_regression_has_held_out_correlation():
    vectors, _ = make_clusters(200)
    noise = torch.randn(200, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    # normalised differences make the labels of one pair weak evidence: the direction is rough
    metrics = fit_regression_with_held_out(vectors, vectors[:, 2] + 0.1 * noise).held_out_metrics
    assert metrics.accuracy is None and metrics.effect > 0.5 and metrics.count == 50
    assert abs(fit_regression_with_held_out(vectors, noise).held_out_metrics.effect) < 0.4


def test_held_out_metrics_distinguish_classes_from_noise():
    first, second = make_clusters(200, 200, shift=4.0)
    metrics = fit_with_held_out(first, second).held_out_metrics
    assert metrics.accuracy > 0.9 and metrics.effect > 2 and metrics.count == 100
    noise = fit_with_held_out(*make_clusters(200, 200, shift=0.0)).held_out_metrics
    assert abs(noise.accuracy - 0.5) < 0.15 and abs(noise.effect) < 0.6


def test_held_out_split_keeps_groups_together():
    """Each word has its own random vector and the classes share nothing: only copies in the training set reveal it."""
    generator = torch.Generator().manual_seed(2)
    words = torch.randn(20, 60, generator=generator).double() * 5
    copies = words.repeat_interleave(10, 0) + 0.1 * torch.randn(200, 60, generator=generator)
    names = [i // 10 for i in range(200)]
    ungrouped = fit_with_held_out(copies[:100], copies[100:]).held_out_metrics
    grouped = fit_with_held_out(copies[:100], copies[100:], groups=(names[:100], names[100:])).held_out_metrics
    assert ungrouped.accuracy > 0.9 > 0.8 > grouped.accuracy


def test_directions_round_trip_through_file(tmp_path):
    first, second = make_clusters()
    directions = Directions(
        {2: fit_with_held_out(first, second, dimensions=2, names=("he", "she")), 0: fit_densray(first, second)}
    )
    loaded = Directions.load(directions.save(tmp_path / "gender.safetensors"))
    assert (
        list(loaded) == [0, 2]
        and loaded[2].names == ("he", "she")
        and loaded[2].held_out_metrics == directions[2].held_out_metrics
    )
    assert loaded[2].counts == (40, 40) and loaded[0].metadata == {"method": "densray", "normalise": True}
    torch.testing.assert_close(loaded[2].compute_score(first), directions[2].compute_score(first), rtol=0, atol=0)
    (tmp_path / "other").write_text("no tensors")
    with pytest.raises(InputError, match="cannot be opened as directions"):
        Directions.load(tmp_path / "other")
    with pytest.raises(KeyError, match=r"there are directions for \[0, 2\]"):
        directions[1]


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (torch.zeros(0, 3), torch.ones(5, 3), "the set 'he' is empty"),
        (torch.ones(5, 3), torch.ones(5, 4), "different numbers of features: 3 and 4"),
        (torch.ones(1, 6), torch.zeros(2, 6), "3 vectors are too few for 6 dimensions"),
        (torch.full((5, 3), torch.nan), torch.ones(5, 3), "'he' contains numbers that are not finite"),
        (torch.ones(5), torch.ones(5, 3), "must be vector × model"),
    ],
)
def test_invalid_sets_raise(first, second, message):
    with pytest.raises(InputError, match=message):
        fit_densray(first, second, names=("he", "she"))


def test_invalid_options_raise():
    first, second = make_clusters()
    with pytest.raises(InputError, match="the vectors have 6 dimensions, so use 1 to 6"):
        fit_densray(first, second, dimensions=7)
    with pytest.raises(InputError, match="use 'dynamic', or two numbers"):
        fit_densray(first, second, weights="fair")
    with pytest.raises(InputError, match="not all the same"):
        fit_densray_regression(first, torch.ones(40))
    with pytest.raises(InputError, match="6 features, but these states have 5"):
        fit_densray(first, second).compute_score(torch.ones(2, 5))
