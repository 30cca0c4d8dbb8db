"""Simulated coverage of the intervals and error rate of the ranks of `clearhead.stats` → docs/statistics.md.

python benchmarks/statistics_page.py
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import scipy
from marked import render_table, replace_marked_sections

from clearhead.stats import (
    ALPHA,
    RATE_BOUNDS,
    adjust_p_values_holm,
    compute_mean_interval,
    compute_rank_ranges,
)

PAGE = Path("docs/statistics.md")
COUNTS = (2, 3, 5, 10, 20, 50, 200)
NUM_SAMPLES = 1000
#: Number of methods → number of simulated comparisons.
NUM_COMPARISONS = {2: 1000, 6: 400, 20: 100}
Sampler = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
#: Name → sampler and mean.
UNBOUNDED: dict[str, tuple[Sampler, float]] = {
    "normal": (lambda rng, shape: rng.normal(size=shape), 0.0),
    "exponential": (lambda rng, shape: rng.exponential(size=shape), 1.0),
    "log-normal": (lambda rng, shape: rng.lognormal(size=shape), float(np.exp(0.5))),
}
RATES: dict[str, tuple[Sampler, float]] = {
    "beta(18, 2)": (lambda rng, shape: rng.beta(18, 2, size=shape), 0.9),
    "beta(0.9, 0.1)": (lambda rng, shape: rng.beta(0.9, 0.1, size=shape), 0.9),
    "0 or 1, mean 0.5": (lambda rng, shape: (rng.random(shape) < 0.5).astype(float), 0.5),
    "0 or 1, mean 0.9": (lambda rng, shape: (rng.random(shape) < 0.9).astype(float), 0.9),
    "0 or 1, mean 0.98": (lambda rng, shape: (rng.random(shape) < 0.98).astype(float), 0.98),
}


def main() -> None:
    replace_marked_sections(
        PAGE,
        {
            "coverage": render_coverage(UNBOUNDED, None),
            "coverage of rates": render_coverage(RATES, RATE_BOUNDS),
            "false winners": render_false_winners(),
        },
    )
    print(PAGE)


def render_coverage(distributions: dict[str, tuple[Sampler, float]], bounds: tuple[float, float] | None) -> str:
    rows = []
    for name, (draw, mean) in distributions.items():
        cells = []
        for count in COUNTS:
            samples = draw(np.random.default_rng(count), (NUM_SAMPLES, count))
            coverages = [
                _compute_coverage([compute(values) for values in samples], mean)
                for compute in (lambda values: _compute_bounds(values, bounds), compute_percentile_bootstrap)
            ]
            cells.append(" / ".join(f"{coverage:.2f}" for coverage in coverages))
        rows.append([name, *cells])
    return render_table(["", *(f"n = {count}" for count in COUNTS)], rows)


def _compute_bounds(values: np.ndarray, bounds: tuple[float, float] | None) -> tuple[float, float]:
    interval = compute_mean_interval(values, bounds=bounds, num_resamples=500)
    return interval.low, interval.high


def compute_percentile_bootstrap(values: np.ndarray) -> tuple[float, float]:
    indices = np.random.default_rng(0).integers(len(values), size=(500, len(values)))
    low, high = np.quantile(values[indices].mean(1), [0.025, 0.975])
    return float(low), float(high)


def _compute_coverage(intervals: list[tuple[float, float]], mean: float) -> float:
    # the means of resamples of equal values are rounded
    return float(np.mean([low - 1e-12 <= mean <= high + 1e-12 for low, high in intervals]))


def render_false_winners() -> str:
    """In how many comparisons of methods with equal means any two are ranked apart: now, and by signed ranks."""
    rows = []
    for name, (draw, mean) in [*UNBOUNDED.items(), ("beta(0.9, 0.1)", RATES["beta(0.9, 0.1)"])]:
        for num_methods, num_comparisons in NUM_COMPARISONS.items():
            cells = []
            for count in (10, 20, 50, 100):
                errors = draw(np.random.default_rng(count), (num_comparisons, num_methods, count)) - mean
                errors[:, 1::2] *= -1  # every second method is skewed in the other direction
                if num_methods == 2:
                    errors[:, 1] = 0
                rates = [
                    np.mean([ranks_apart(values) for values in errors])
                    for ranks_apart in (_ranks_apart, _signed_ranks_differ)
                ]
                cells.append(" / ".join(f"{100 * rate:.0f} %" for rate in rates))
            rows.append([f"{name}, {num_methods} methods", *cells])
    return render_table(["errors", *(f"n = {count}" for count in (10, 20, 50, 100))], rows)


def _ranks_apart(values: np.ndarray) -> bool:
    ranks = compute_rank_ranges({str(index): own for index, own in enumerate(values)})
    return set(ranks.values()) != {f"1–{len(values)}"}


def _signed_ranks_differ(values: np.ndarray) -> bool:
    first, second = np.triu_indices(len(values), 1)
    p_values = scipy.stats.wilcoxon(values[first] - values[second], axis=1).pvalue
    return min(adjust_p_values_holm(list(p_values))) < ALPHA


if __name__ == "__main__":
    main()
