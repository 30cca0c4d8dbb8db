"""Figures and the page of syntax in code models, on numbers that were made up."""

from pathlib import Path

import numpy as np
import pytest

from clearhead.render.mpl import code
from clearhead.render.reports.code import write_code_report
from clearhead.stats import bootstrap_interval
from clearhead.studies.code.error_detector import evaluate_error_detector
from clearhead.studies.code.permutation_tests import compare_groups, compare_paired_inputs
from clearhead.studies.code.study import CodeStudy
from tests.render.static_html import Page
from tests.studies.test_error_detector import measured


@pytest.fixture(scope="module")
def found() -> CodeStudy:
    own = measured(planted=1.5)
    own.attributions["saliency"] = own.received_attention[:, 0, 0]
    log = np.log2(own.received_attention)
    return CodeStudy(
        own,
        own,
        bootstrap_interval(own.is_correct.astype(float)),
        compare_groups(log, own.is_correct, own.lengths.astype(float), num_permutations=500),
        compare_groups(log[:, 0, :1], own.is_correct, num_permutations=200),
        evaluate_error_detector(own),
        compare_paired_inputs(log, log + 1, 200),
        "another",
        ("nothing",),
        {"seed": 0},
    )


def test_every_head_is_a_point_and_the_line_is_their_mean(found: CodeStudy) -> None:
    figure = code.plot_class_attention(found.by_class)
    (axes, *_), means = figure.axes, np.nanmean(found.by_class.received_attention, 0)
    assert [one.get_title(loc="left") for one in figure.axes] == list(found.by_class.classes)
    np.testing.assert_allclose(np.asarray(axes.collections[0].get_offsets())[:, 1], means[..., 0].ravel())
    np.testing.assert_allclose(axes.lines[-1].get_ydata(), means[..., 0].mean(1))


def test_the_planted_head_is_marked_and_no_other(found: CodeStudy) -> None:
    assert found.attention_differences is not None
    figure = code.plot_p_values(found.attention_differences, found.by_class.classes)
    dots = [np.asarray(axes.collections[0].get_offsets()).tolist() for axes in figure.axes[:3]]
    assert dots == [[], [], [[0.0, 1.0]]], "layer 1, head 0 of the last class"


def test_boxes_are_of_both_groups(found: CodeStudy) -> None:
    axes = code.plot_correctness_boxes(found.by_class).axes[0]
    words = [one.get_text() for one in axes.get_legend().get_texts()]
    right = int(found.by_class.is_correct.sum())
    assert words == [f"right ({right})", f"wrong ({len(found.by_class) - right})"]
    assert code.plot_class_to_class_attention(found.by_class).axes[0].images[0].get_array().shape == (3, 3)


def test_page_says_everything_that_was_found(found: CodeStudy, tmp_path: Path) -> None:
    text = write_code_report(found, tmp_path / "code.html").read_text("utf-8")
    for words in ("Right answers against wrong ones", "Detection of wrong answers", "Against another model"):
        assert words in text
    assert "1 of 12 cells differ" in text and "Syntax adds to confidence" in text and "Not done: nothing." in text
    assert Page(found._repr_html_()).document["parts"] == Page(text).document["parts"]
    told = found.to_dict()
    assert [(one["layer"], one["head"], one["class"]) for one in told["wrong against right"]] == [(1, 0, "operator")]
    assert told["changed cells"] == 12 and told["detector"]["wrong"] == int((~found.by_class.is_correct).sum())
