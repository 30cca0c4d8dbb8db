"""Aggregation of explanations by word, label and position, and conversion to a data frame."""

import sys
from dataclasses import replace

import numpy as np
import pytest

import clearhead
from clearhead import Explanation, InputError
from tests.models import TEXTS, explainer, inputs


def explanations() -> list[Explanation]:
    return explainer("bert/classify").explain(["Good good film", "a good book", *TEXTS], "input-x-gradient")


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_aggregate_by_word(reduction: str) -> None:
    es = explanations()
    aggregation = clearhead.aggregate(es, by="word", reduction=reduction)
    words = [e.words() for e in es]
    good = [float(w.scores[i]) for w in words for i, name in enumerate(w.tokens) if name.lower() == "good"]
    assert len(good) == 4  # one in TEXTS, too
    row = next(row for row in aggregation.rows if row[0] == "good")
    assert row == ("good", pytest.approx(sum(good) if reduction == "sum" else np.mean(good)), 4)
    scores = [score for _, score, _ in aggregation.rows]
    assert scores == sorted(scores, reverse=True) and aggregation.top(2) == [row[:2] for row in aggregation.rows[:2]]
    assert not {"[cls]", "[sep]"} & {name for name, _, _ in aggregation.rows}
    if reduction == "sum":
        total = sum(float(e.scores[e.units.content_indices()].sum()) for e in es)
        assert sum(scores) == pytest.approx(total)


def test_aggregate_by_label_and_position() -> None:
    es = explanations()
    labels = clearhead.aggregate(es, by="label")
    assert {name for name, _, _ in labels.rows} == {e.target["name"] for e in es}
    assert sum(count for _, _, count in labels.rows) == len(es)
    positions = clearhead.aggregate(es, by="position", reduction="mean")
    first = next(row for row in positions.rows if row[0] == "1")
    assert first == ("1", pytest.approx(np.mean([e.scores[1] for e in es])), len(es))
    assert "0" not in {name for name, _, _ in positions.rows}  # [CLS]
    form = positions.to_dict()
    assert form["by"] == "position" and form["how"] == "mean" and form["rows"][0]["count"] >= 1


def test_units_without_scores_are_ignored() -> None:
    e = explanations()[0]
    marked = replace(e, scores=np.where(np.arange(len(e)) == 1, np.nan, 1.0))
    assert all(np.isfinite(score) for _, score, _ in clearhead.aggregate([marked], by="position").rows)
    assert np.isfinite(clearhead.aggregate([marked], by="label").rows[0][1])


def test_single_explanation_is_accepted() -> None:
    e = explanations()[0]
    assert clearhead.aggregate(e) == clearhead.aggregate([e])  # type: ignore[arg-type]


def test_invalid_aggregations_raise() -> None:
    ex = explainer("bert/classify")
    by_method = ex.explain(TEXTS[0], ["generic", "cat"])
    with pytest.raises(InputError, match="different methods"):
        clearhead.aggregate(list(by_method.values()))
    with pytest.raises(InputError, match="different scales"):
        clearhead.aggregate(
            [ex.explain(TEXTS[0], method="generic"), ex.explain(TEXTS[0], scale="probability", method="generic")]
        )
    with pytest.raises(InputError, match="the list is empty"):
        clearhead.aggregate([])
    with pytest.raises(InputError, match="contains a str"):
        clearhead.aggregate(by_method)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="unknown value for by= 'words': did you mean 'word'"):
        clearhead.aggregate(explanations(), by="words")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="unknown reduction 'median'"):
        clearhead.aggregate(explanations(), reduction="median")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="patches cannot be merged into words"):
        clearhead.aggregate(explainer("vit/image").explain(inputs("vit/image"), method="generic"))


def test_data_frame_has_one_row_per_unit() -> None:
    es = explanations()
    frame = clearhead.to_frame(es)
    assert len(frame) == sum(map(len, es)) and frame["input"].nunique() == len(es)
    assert frame["score"].tolist() == pytest.approx(np.concatenate([e.scores for e in es]).tolist())
    assert set(frame.columns) >= {"name", "special", "method", "target", "predicted", "probability"}
    assert frame[frame["special"]]["name"].isin(["[CLS]", "[SEP]"]).all()
    assert len(clearhead.to_frame(es[0])) == len(es[0])  # type: ignore[arg-type]


def test_to_frame_without_pandas_raises_input_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InputError, match="pip install pandas"):
        clearhead.to_frame(explanations())
