"""Can one tell from attention and attribution that a model is wrong, and better than from its own confidence?

A logistic regression on the syntax scores of an input, fitted and judged on different inputs (cross-fitting), its
area under the ROC curve beside that of the largest probability alone, of the input's length alone, and of both
together. Everything that is learned (scales, how strong to regularise) is learned on the fitting part. Questions about
one function are never on both sides, and are drawn together for intervals.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from clearhead.errors import InputError
from clearhead.stats import LEVEL, Interval
from clearhead.studies.code.attention import Measured

FOLDS = 5
RESAMPLES = 1000
#: How strong the regression is regularised is chosen among these, on the fitting part.
STRENGTHS = (1e-3, 1e-2, 1e-1)
#: With fewer functions that have a wrong answer (or a right one) nothing can be fitted and judged.
LEAST = 2 * FOLDS


@dataclass(frozen=True)
class Detection:
    """How well wrong answers are told from right ones (0.5 is chance), each judged on inputs it was not fitted on.

    gain: what syntax adds to confidence: AUROC of both together − AUROC of confidence alone
    """

    auroc: Mapping[str, Interval]
    gain: Interval
    wrong: int

    @property
    def helps(self) -> bool:
        return self.gain.low > 0


def detect(measured: Measured, folds: int = FOLDS, seed: int = 0) -> Detection:
    """Judge a detector of wrong answers by what `measure` found."""
    wrong = ~measured.correct
    if (reason := too_few(measured)) is not None:
        raise InputError(reason)
    doubt = -np.log(np.clip(measured.confidence, 1e-12, 1))
    syntax, own = features(measured), measured.functions
    # confidence needs no fitting: it is used as it is
    scores = {
        "confidence": doubt,
        "length": fitted(np.log(measured.lengths)[:, None], None, wrong, own, folds, seed),
        "syntax": fitted(syntax, None, wrong, own, folds, seed),
        "syntax and confidence": fitted(syntax, doubt, wrong, own, folds, seed),
    }
    drawn = _resamples(wrong, own, seed)
    areas = {name: np.array([auroc(own[rows], wrong[rows]) for rows in drawn]) for name, own in scores.items()}
    found = {name: _interval(auroc(own, wrong), areas[name], len(wrong)) for name, own in scores.items()}
    both, alone = "syntax and confidence", "confidence"
    gain = _interval(found[both].mean - found[alone].mean, areas[both] - areas[alone], len(wrong))
    return Detection(found, gain, int(wrong.sum()))


def too_few(measured: Measured) -> str | None:
    """Why there is nothing to fit and judge a detector by; None where there is."""
    right = measured.correct
    functions = [len(np.unique(measured.functions[rows])) for rows in (~right, right)]
    if min(functions) >= LEAST:
        return None
    return (
        f"{int((~right).sum())} wrong and {int(right.sum())} right answers are too few to fit and judge a detector "
        f"(they are about {functions[0]} and {functions[1]} functions, and at least {LEAST} each are needed); ask more "
        "questions"
    )


def features(measured: Measured) -> Float[np.ndarray, "question feature"]:
    """Received attention of every head and class, and attribution by class; a class that an input lacks counts as 1."""
    parts = [measured.received.reshape(len(measured), -1), *measured.attributed.values()]
    whole = np.concatenate(parts, 1)
    # ratios: twice and half of what chance gives are equally far from it
    return np.asarray(np.log2(np.clip(np.nan_to_num(whole, nan=1.0), 2**-6, 2**6)))


def fitted(
    x: Float[np.ndarray, "question feature"],
    beside: Float[np.ndarray, " question"] | None,
    wrong: Bool[np.ndarray, " question"],
    functions: Int[np.ndarray, " question"],
    folds: int,
    seed: int,
) -> Float[np.ndarray, " question"]:
    """The log-odds of each input by a regression that was fitted on the other folds.

    beside: one more score, weighed against the regression's by a second one (else it would be lost among hundreds)
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV, StratifiedGroupKFold, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = make_pipeline(StandardScaler(), LogisticRegression(class_weight="balanced", max_iter=500))
    inner = StratifiedGroupKFold(3, shuffle=True, random_state=seed)
    search = GridSearchCV(model, {"logisticregression__C": STRENGTHS}, cv=inner, scoring="roc_auc")
    scores = np.zeros(len(wrong))
    for train, test in StratifiedGroupKFold(folds, shuffle=True, random_state=seed).split(x, wrong, functions):
        best = search.fit(x[train], wrong[train], groups=functions[train]).best_estimator_
        own = best.decision_function(x[test])
        if beside is not None:
            parts = {"groups": functions[train], "cv": inner, "method": "decision_function"}
            seen = cross_val_predict(best, x[train], wrong[train], **parts)
            both = make_pipeline(StandardScaler(), LogisticRegression(class_weight="balanced"))
            both.fit(np.stack([seen, beside[train]], 1), wrong[train])
            own = both.decision_function(np.stack([own, beside[test]], 1))
        # each fold has its own zero: only the order within a fold is meant, so folds are set to one scale
        scores[test] = (own - own.mean()) / max(float(own.std()), 1e-12)
    return scores


def auroc(scores: Float[np.ndarray, " question"], wrong: Bool[np.ndarray, " question"]) -> float:
    """The chance that a wrong answer has a higher score than a right one, ties counted half.

    >>> auroc(np.array([0.9, 0.2, 0.8]), np.array([True, False, False]))
    1.0
    """
    from scipy.stats import rankdata

    ranks, bad = rankdata(scores), int(wrong.sum())
    good = len(wrong) - bad
    return float((ranks[wrong].sum() - bad * (bad + 1) / 2) / (bad * good)) if bad and good else float("nan")


def _resamples(wrong: np.ndarray, functions: np.ndarray, seed: int) -> list[np.ndarray]:
    """Functions drawn with replacement, each with all its questions; those with a wrong answer and those without apart,
    so that no resample lacks wrong ones."""
    rng = np.random.default_rng(seed)
    own = np.unique(functions, return_inverse=True)[1]
    rows = np.split(np.argsort(own, kind="stable"), np.cumsum(np.bincount(own))[:-1])
    failed = np.bincount(own, wrong) > 0
    groups = [group for group in (np.flatnonzero(failed), np.flatnonzero(~failed)) if len(group)]
    drawn = ([rng.choice(group, len(group)) for group in groups] for _ in range(RESAMPLES))
    return [np.concatenate([rows[place] for place in np.concatenate(chosen)]) for chosen in drawn]


def _interval(value: float, resampled: np.ndarray, count: int) -> Interval:
    low, high = np.nanquantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(value), float(low), float(high), count)
