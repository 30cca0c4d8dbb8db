"""Detect wrong predictions from attention and attribution, compared with the model's own confidence.

A logistic regression on the syntax scores of an input, cross-fitted: fitted and evaluated on different inputs. Its area
under the ROC curve is reported next to that of the largest probability alone, of the input length alone, and of
syntax and confidence together. Everything that is learned (feature scales, regularisation strength) is learned on the
training folds. Questions about one function are never in both training and test folds, and are resampled together
for intervals.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from clearhead.errors import InputError
from clearhead.stats import CONFIDENCE_LEVEL, ConfidenceInterval
from clearhead.studies.code.attention import CodeAttention

NUM_FOLDS = 5
NUM_RESAMPLES = 1000
#: Inverse regularisation strengths of the grid search on the training folds.
REGULARISATION_STRENGTHS = (1e-3, 1e-2, 1e-1)
#: With fewer functions that have a wrong (or a right) answer, a detector can be neither fitted nor evaluated.
MIN_FUNCTIONS_PER_OUTCOME = 2 * NUM_FOLDS


@dataclass(frozen=True)
class ErrorDetection:
    """AUROC of detectors of wrong predictions (0.5 is chance), each evaluated on inputs it was not fitted on.

    Attributes:
        auroc: Feature set ("confidence", "length", "syntax", "syntax and confidence") → AUROC.
        auroc_gain: AUROC of syntax and confidence together − AUROC of confidence alone.
        num_errors: Number of wrong predictions.
    """

    auroc: Mapping[str, ConfidenceInterval]
    auroc_gain: ConfidenceInterval
    num_errors: int

    @property
    def is_better_than_confidence(self) -> bool:
        """Whether the interval of the gain over confidence lies above zero."""
        return self.auroc_gain.low > 0


def evaluate_error_detector(code_attention: CodeAttention, num_folds: int = NUM_FOLDS, seed: int = 0) -> ErrorDetection:
    """Cross-fit and evaluate detectors of wrong predictions.

    Args:
        code_attention: Measurements of `measure_code_attention`.
        num_folds: Number of cross-fitting folds.
        seed: Seed of the folds and of the bootstrap.

    Raises:
        InputError: There are too few wrong or too few right answers.
    """
    is_wrong = ~code_attention.is_correct
    if (reason := find_too_few_reason(code_attention)) is not None:
        raise InputError(reason)
    uncertainty = -np.log(np.clip(code_attention.confidence, 1e-12, 1))
    syntax = build_detector_features(code_attention)
    log_lengths = np.log(code_attention.lengths)[:, None]
    function_ids = code_attention.function_ids
    scores = {
        "confidence": uncertainty,  # needs no fitting
        "length": cross_fit_scores(log_lengths, None, is_wrong, function_ids, num_folds, seed),
        "syntax": cross_fit_scores(syntax, None, is_wrong, function_ids, num_folds, seed),
        "syntax and confidence": cross_fit_scores(syntax, uncertainty, is_wrong, function_ids, num_folds, seed),
    }
    resamples = _resample_functions(is_wrong, function_ids, seed)
    resampled_auroc: dict[str, np.ndarray] = {}
    auroc: dict[str, ConfidenceInterval] = {}
    for name, values in scores.items():
        resampled_auroc[name] = np.array([compute_auroc(values[rows], is_wrong[rows]) for rows in resamples])
        auroc[name] = _make_interval(compute_auroc(values, is_wrong), resampled_auroc[name], len(is_wrong))
    gain = _make_interval(
        auroc["syntax and confidence"].mean - auroc["confidence"].mean,
        resampled_auroc["syntax and confidence"] - resampled_auroc["confidence"],
        len(is_wrong),
    )
    return ErrorDetection(auroc, gain, int(is_wrong.sum()))


def find_too_few_reason(code_attention: CodeAttention) -> str | None:
    """Explain why there are too few answers to fit and evaluate a detector; None if there are enough."""
    is_correct = code_attention.is_correct
    functions = [len(np.unique(code_attention.function_ids[rows])) for rows in (~is_correct, is_correct)]
    if min(functions) >= MIN_FUNCTIONS_PER_OUTCOME:
        return None
    return (
        f"{int((~is_correct).sum())} wrong and {int(is_correct.sum())} right answers are too few to fit and evaluate "
        f"a detector (they are about {functions[0]} and {functions[1]} functions, and at least "
        f"{MIN_FUNCTIONS_PER_OUTCOME} each are needed); use more questions"
    )


def build_detector_features(code_attention: CodeAttention) -> Float[np.ndarray, "question feature"]:
    """Build the features: log2 of received attention by head and class, and of attribution by class.

    A class that an input lacks counts as 1, the chance level.
    """
    blocks = [code_attention.received_attention.reshape(len(code_attention), -1), *code_attention.attributions.values()]
    lifts = np.concatenate(blocks, 1)
    # log scale, because ratios of 2 and 1/2 are equally far from chance
    return np.asarray(np.log2(np.clip(np.nan_to_num(lifts, nan=1.0), 2**-6, 2**6)))


def cross_fit_scores(
    features: Float[np.ndarray, "question feature"],
    extra_score: Float[np.ndarray, " question"] | None,
    is_wrong: Bool[np.ndarray, " question"],
    function_ids: Int[np.ndarray, " question"],
    num_folds: int,
    seed: int,
) -> Float[np.ndarray, " question"]:
    """Compute the log-odds of an error for each input by a regression fitted on the other folds.

    Args:
        features: Features of the regression.
        extra_score: One more score, combined with the regression's output by a second regression; as one more feature
            it would be lost among hundreds.
        is_wrong: Labels.
        function_ids: Questions about one function stay in one fold.
        num_folds: Number of folds.
        seed: Seed of the folds.

    Returns:
        Scores, standardised within each fold.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV, StratifiedGroupKFold, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = make_pipeline(StandardScaler(), LogisticRegression(class_weight="balanced", max_iter=500))
    inner = StratifiedGroupKFold(3, shuffle=True, random_state=seed)
    search = GridSearchCV(model, {"logisticregression__C": REGULARISATION_STRENGTHS}, cv=inner, scoring="roc_auc")
    outer = StratifiedGroupKFold(num_folds, shuffle=True, random_state=seed)
    scores = np.zeros(len(is_wrong))
    for train, test in outer.split(features, is_wrong, function_ids):
        best = search.fit(features[train], is_wrong[train], groups=function_ids[train]).best_estimator_
        test_scores = best.decision_function(features[test])
        if extra_score is not None:
            options = {"groups": function_ids[train], "cv": inner, "method": "decision_function"}
            train_scores = cross_val_predict(best, features[train], is_wrong[train], **options)
            combined = make_pipeline(StandardScaler(), LogisticRegression(class_weight="balanced"))
            combined.fit(np.stack([train_scores, extra_score[train]], 1), is_wrong[train])
            test_scores = combined.decision_function(np.stack([test_scores, extra_score[test]], 1))
        # Each fold has its own intercept; only the order within a fold is meaningful, so the folds share one scale.
        scores[test] = (test_scores - test_scores.mean()) / max(float(test_scores.std()), 1e-12)
    return scores


def compute_auroc(scores: Float[np.ndarray, " question"], is_wrong: Bool[np.ndarray, " question"]) -> float:
    """Compute the probability that a wrong answer scores higher than a right one, ties counted half.

    >>> compute_auroc(np.array([0.9, 0.2, 0.8]), np.array([True, False, False]))
    1.0
    """
    from scipy.stats import rankdata

    ranks = rankdata(scores)
    num_wrong = int(is_wrong.sum())
    num_right = len(is_wrong) - num_wrong
    if not num_wrong or not num_right:
        return float("nan")
    return float((ranks[is_wrong].sum() - num_wrong * (num_wrong + 1) / 2) / (num_wrong * num_right))


def _resample_functions(is_wrong: np.ndarray, function_ids: np.ndarray, seed: int) -> list[np.ndarray]:
    """Draw functions with replacement, each with all its questions, and return the rows of each resample.

    Functions with and without a wrong answer are drawn separately, so that every resample has wrong answers.
    """
    rng = np.random.default_rng(seed)
    function_indices = np.unique(function_ids, return_inverse=True)[1]
    function_rows = np.split(np.argsort(function_indices, kind="stable"), np.cumsum(np.bincount(function_indices))[:-1])
    has_error = np.bincount(function_indices, is_wrong) > 0
    groups = [group for group in (np.flatnonzero(has_error), np.flatnonzero(~has_error)) if len(group)]
    draws = ([rng.choice(group, len(group)) for group in groups] for _ in range(NUM_RESAMPLES))
    return [np.concatenate([function_rows[index] for index in np.concatenate(drawn)]) for drawn in draws]


def _make_interval(value: float, resampled: np.ndarray, count: int) -> ConfidenceInterval:
    """Make an interval around `value` from quantiles of the resampled values; NaN is ignored."""
    low, high = np.nanquantile(resampled, [(1 - CONFIDENCE_LEVEL) / 2, (1 + CONFIDENCE_LEVEL) / 2])
    return ConfidenceInterval(float(value), float(low), float(high), count)
