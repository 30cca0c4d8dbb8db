"""Calibrated Shapley values: dense generalised least squares under the constraint, and refits without each pair."""

from collections.abc import Sequence

import numpy as np

GRID = [-8 + 32 * i / 48 for i in range(49)]


def scores(
    coalitions: Sequence[Sequence[bool]],
    differences: Sequence[float],
    weights: Sequence[float],
    share: float,
    total: float,
    guess: np.ndarray,
    scales: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, float]:
    """Return the scores, their covariance and the prior weight c; the guess is not zero.

    differences: (v(z) − v(¬z)) / 2 of each pair; share: the share of the kernel mass that was evaluated.
    """
    n, m = len(coalitions), len(guess)
    # the prior of the scores, given their sum
    s2 = scales**2
    prior = np.diag(s2) - np.outer(s2, s2) / s2.sum()
    offset, trend = total * s2 / s2.sum(), guess - guess.sum() * s2 / s2.sum()
    # rows in which the misfit has equal variances
    rows, y = np.zeros((n, m)), np.zeros(n)
    for k in range(n):
        factor = (n * weights[k]) ** 0.5
        for i in range(m):
            rows[k, i] = factor * (0.5 if coalitions[k][i] else -0.5)
        y[k] = factor * differences[k] - rows[k] @ offset
    centred = rows - rows.mean(1, keepdims=True)
    hat = centred @ np.linalg.pinv(centred, rcond=1e-9)
    unit_misfit = np.eye(n) - share * hat
    signal = rows @ prior @ rows.T
    h = rows @ trend
    fits, log_probabilities = [], []
    for log_ratio in GRID:
        ratio = np.exp(log_ratio) / np.mean(np.diag(signal))
        covariance = unit_misfit + ratio * signal
        inverse = np.linalg.inv(covariance)
        c = (h @ inverse @ y) / (h @ inverse @ h)
        residual = y - c * h
        sigma2 = residual @ inverse @ residual / (n - 1)
        log_evidence = -np.linalg.slogdet(covariance)[1] / 2 - (n - 1) / 2 * np.log(sigma2)
        log_evidence -= np.log(h @ inverse @ h) / 2
        misfit_share = 1 / (1 + np.exp(log_ratio))
        log_probabilities.append(log_evidence + np.log(misfit_share) + np.log(1 - misfit_share))
        gain = ratio * prior @ rows.T @ inverse
        mean = offset + c * trend + gain @ residual
        trend_effect = trend - gain @ h
        posterior = sigma2 * (ratio * (prior - gain @ rows @ prior))
        posterior += sigma2 * np.outer(trend_effect, trend_effect) / (h @ inverse @ h)
        smoother = gain + np.outer(trend_effect, h @ inverse) / (h @ inverse @ h)
        sandwich = np.zeros((m, m))
        for k in range(n):
            error = y[k] - _predict_without(k, covariance, h, y)
            sandwich += (1 - share) * error**2 * np.outer(smoother[:, k], smoother[:, k])
        fits.append((mean, (posterior + sandwich) / 2, c))
    probabilities = np.exp(np.array(log_probabilities) - max(log_probabilities))
    probabilities[probabilities <= 1e-3] = 0
    probabilities /= probabilities.sum()
    estimate = sum(p * mean for p, (mean, _, _) in zip(probabilities, fits, strict=True))
    scores_covariance = np.zeros((m, m))
    for p, (mean, covariance, _) in zip(probabilities, fits, strict=True):
        scores_covariance += p * (covariance + np.outer(mean - estimate, mean - estimate))
    return estimate, scores_covariance, sum(p * c for p, (_, _, c) in zip(probabilities, fits, strict=True))


def _predict_without(k: int, covariance: np.ndarray, h: np.ndarray, y: np.ndarray) -> float:
    """Predict the datum of one pair from all other pairs, c estimated from these."""
    others = [j for j in range(len(y)) if j != k]
    inverse = np.linalg.inv(covariance[np.ix_(others, others)])
    c = (h[others] @ inverse @ y[others]) / (h[others] @ inverse @ h[others])
    return c * h[k] + covariance[k, others] @ inverse @ (y[others] - c * h[others])
