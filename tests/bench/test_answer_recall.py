"""Answer recall: answer tokens among the top scores, against hand-computed values."""

import numpy as np
import pytest

from clearhead.bench.data import CharSpan, Example
from clearhead.bench.protocols.answer_recall import AnswerRecall
from clearhead.explanation.explanation import Explanation
from clearhead.units import Units

TEXT = "w0 w1 w2 w3 w4 w5"


def explanation(scores: list[float]) -> Explanation:
    names = ("[CLS]", *TEXT.split())
    offsets = ((0, 0), *((3 * i, 3 * i + 2) for i in range(6)))
    units = Units("text", "token", names, (True, *(False,) * 6), (TEXT,), (0,) * 7, offsets)
    return Explanation(units, np.array([99.0, *scores]), "m", {}, {})


def test_answer_recall_counts_answer_tokens_among_top_scores() -> None:
    example = Example("q", TEXT, None, ((CharSpan(6, 11),),))  # w2 and w3
    (measurement,) = AnswerRecall(top=3).measure(None, [example], {"m": [explanation([6, 5, 4, 1, 2, 3])]})  # type: ignore[arg-type]
    assert measurement.figures == pytest.approx({"found": 1, "perfect": 2, "share": 0.5, "chance": 0.5})
    (measurement,) = AnswerRecall(top=1).measure(None, [example], {"m": [explanation([1, 2, 9, 8, 3, 4])]})  # type: ignore[arg-type]
    assert measurement.figures["share"] == 1 and measurement.figures["perfect"] == 1
