"""The detector finds what was planted, claims nothing on noise, and says when there is too little."""

from dataclasses import replace

import numpy as np
import pytest

from clearhead.errors import InputError
from clearhead.studies.code.attention import CodeAttention
from clearhead.studies.code.error_detector import compute_auroc, evaluate_error_detector


def measured(n=160, planted=0.0, seed=0):
    """Noise in 2 × 2 heads and 3 classes; wrong answers have `planted` more attention on one class in one head."""
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


def test_area_as_scikit_learn_has_it():
    from sklearn.metrics import roc_auc_score

    rng = np.random.default_rng(1)
    scores, wrong = rng.integers(5, size=50) / 5, rng.random(50) < 0.4
    assert compute_auroc(scores, wrong) == pytest.approx(roc_auc_score(wrong, scores))


def test_what_is_planted_is_found_and_adds_to_confidence():
    found = evaluate_error_detector(measured(planted=1.0))
    assert found.auroc["syntax"].low > 0.6 and found.is_better_than_confidence
    assert found.auroc["confidence"].low > 0.5 and abs(found.auroc["length"].mean - 0.5) < 0.15


def test_noise_adds_nothing():
    gains = [evaluate_error_detector(measured(seed=seed)) for seed in (2, 3)]
    assert (
        not any(one.is_better_than_confidence for one in gains)
        and np.mean([one.auroc["syntax"].mean for one in gains]) < 0.6
    )


def test_a_function_is_never_on_both_sides():
    """What only names the function says nothing about others: a detector that knew some of its questions would gain."""
    rng = np.random.default_rng(4)
    noise = measured()
    own = np.repeat(np.arange(16), 10)
    correct = (rng.permutation(16) < 8)[own] ^ (rng.random(160) < 0.1)
    received = rng.lognormal(0, 0.5, size=(16, 2, 2, 3))[own] * rng.lognormal(0, 0.02, size=(160, 2, 2, 3))
    planted = replace(noise, received_attention=received, is_correct=correct)
    seen, unseen = (
        evaluate_error_detector(replace(planted, function_ids=numbers)).auroc["syntax"]
        for numbers in (np.arange(160), own)
    )
    assert seen.mean > 0.8 and unseen.mean < seen.mean - 0.1
    assert unseen.high - unseen.low > seen.high - seen.low


def test_too_few_wrong_answers_raise():
    few = measured(40)
    with pytest.raises(InputError, match=r"1 wrong and 39 right answers are too few.*at least 10"):
        evaluate_error_detector(replace(few, is_correct=np.arange(40) > 0))


@pytest.mark.parametrize("functions", [np.arange(160) % 4, np.where(measured().is_correct, np.arange(160), 0)])
def test_too_few_functions_raise(functions):
    """Many questions about four functions, and all wrong answers about one."""
    with pytest.raises(
        InputError, match=r"too few to fit and evaluate a detector .they are about [14] and \d+ functions"
    ):
        evaluate_error_detector(replace(measured(), function_ids=functions))
