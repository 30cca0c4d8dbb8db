"""The error detector finds a planted effect, reports none on noise, and rejects too few samples."""

from dataclasses import replace

import numpy as np
import pytest

from clearhead.errors import InputError
from clearhead.studies.code.attention import CodeAttention
from clearhead.studies.code.error_detector import compute_auroc, evaluate_error_detector


def make_code_attention(n=160, planted=0.0, seed=0):
    """Make noise in 2 × 2 heads and 3 classes; wrong answers get `planted` more log attention on a class of a head."""
    rng = np.random.default_rng(seed)
    correct = rng.random(n) < 0.7
    received = rng.lognormal(0, 0.4, size=(n, 2, 2, 3))
    received[~correct, 1, 0, 2] *= np.exp(planted)
    received[rng.random(received.shape) < 0.05] = np.nan
    return CodeAttention(
        model="noise",
        grouping="class",
        classes=("identifier", "keyword", "operator"),
        received_attention=received,
        paid_attention=np.ones((n, 2, 3, 3)),
        token_counts=rng.integers(5, 20, size=(n, 3)),
        is_correct=correct,
        confidence=np.clip(0.6 + 0.2 * correct + rng.normal(0, 0.25, n), 0.01, 0.99),
        predictions=("",) * n,
        question_types=("",) * n,
        function_ids=np.arange(n),
    )


def test_auroc_equals_scikit_learn():
    from sklearn.metrics import roc_auc_score

    rng = np.random.default_rng(1)
    scores, wrong = rng.integers(5, size=50) / 5, rng.random(50) < 0.4
    assert compute_auroc(scores, wrong) == pytest.approx(roc_auc_score(wrong, scores))


def test_planted_effect_is_detected_and_improves_on_confidence():
    evaluation = evaluate_error_detector(make_code_attention(planted=1.0))
    assert evaluation.auroc["syntax"].low > 0.6 and evaluation.is_better_than_confidence
    assert evaluation.auroc["confidence"].low > 0.5 and abs(evaluation.auroc["length"].mean - 0.5) < 0.15


def test_noise_does_not_improve_on_confidence():
    evaluations = [evaluate_error_detector(make_code_attention(seed=seed)) for seed in (2, 3)]
    assert (
        not any(evaluation.is_better_than_confidence for evaluation in evaluations)
        and np.mean([evaluation.auroc["syntax"].mean for evaluation in evaluations]) < 0.6
    )


def test_cross_validation_splits_by_function():
    """Features that only identify a function do not generalise; a split within functions inflates the AUROC."""
    rng = np.random.default_rng(4)
    noise = make_code_attention()
    true_function_ids = np.repeat(np.arange(16), 10)
    correct = (rng.permutation(16) < 8)[true_function_ids] ^ (rng.random(160) < 0.1)
    received = rng.lognormal(0, 0.5, size=(16, 2, 2, 3))[true_function_ids] * rng.lognormal(
        0, 0.02, size=(160, 2, 2, 3)
    )
    planted = replace(noise, received_attention=received, is_correct=correct)
    ungrouped, grouped = (
        evaluate_error_detector(replace(planted, function_ids=ids)).auroc["syntax"]
        for ids in (np.arange(160), true_function_ids)
    )
    assert ungrouped.mean > 0.8 and grouped.mean < ungrouped.mean - 0.1
    assert grouped.high - grouped.low > ungrouped.high - ungrouped.low


def test_too_few_wrong_answers_raise():
    few = make_code_attention(40)
    with pytest.raises(InputError, match=r"1 wrong and 39 right answers are too few.*at least 10"):
        evaluate_error_detector(replace(few, is_correct=np.arange(40) > 0))


@pytest.mark.parametrize(
    "functions", [np.arange(160) % 4, np.where(make_code_attention().is_correct, np.arange(160), 0)]
)
def test_too_few_functions_raise(functions):
    """Many questions about four functions; and all wrong answers about one function."""
    with pytest.raises(
        InputError, match=r"too few to fit and evaluate a detector .they are about [14] and \d+ functions"
    ):
        evaluate_error_detector(replace(make_code_attention(), function_ids=functions))
