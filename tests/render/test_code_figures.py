"""Figures and report page of the code study, on synthetic numbers."""

from pathlib import Path

import numpy as np
import pytest

from clearhead.render.mpl import code
from clearhead.render.reports.code import write_code_report
from clearhead.stats import compute_mean_interval
from clearhead.studies.code.error_detector import evaluate_error_detector
from clearhead.studies.code.permutation_tests import compare_groups, compare_paired_inputs
from clearhead.studies.code.study import CodeStudy
from tests.render.static_html import Page
from tests.studies.test_error_detector import make_code_attention


@pytest.fixture(scope="module")
def study() -> CodeStudy:
    attention = make_code_attention(planted=1.5)
    attention.attributions["saliency"] = attention.received_attention[:, 0, 0]
    log = np.log2(attention.received_attention)
    return CodeStudy(
        attention,
        attention,
        compute_mean_interval(attention.is_correct.astype(float)),
        compare_groups(log, attention.is_correct, attention.lengths.astype(float), num_permutations=500),
        compare_groups(log[:, 0, :1], attention.is_correct, num_permutations=200),
        evaluate_error_detector(attention),
        compare_paired_inputs(log, log + 1, 200),
        "another",
        ("nothing",),
        {"seed": 0},
    )


def test_points_are_heads_and_line_is_their_mean(study: CodeStudy) -> None:
    figure = code.plot_class_attention(study.by_class)
    (axes, *_), means = figure.axes, np.nanmean(study.by_class.received_attention, 0)
    assert [panel.get_title(loc="left") for panel in figure.axes] == list(study.by_class.classes)
    np.testing.assert_allclose(np.asarray(axes.collections[0].get_offsets())[:, 1], means[..., 0].ravel())
    np.testing.assert_allclose(axes.lines[-1].get_ydata(), means[..., 0].mean(1))


def test_only_the_planted_head_is_marked(study: CodeStudy) -> None:
    assert study.attention_differences is not None
    figure = code.plot_p_values(study.attention_differences, study.by_class.classes)
    dots = [np.asarray(axes.collections[0].get_offsets()).tolist() for axes in figure.axes[:3]]
    assert dots == [[], [], [[0.0, 1.0]]], "layer 1, head 0 of the last class"


def test_box_plot_has_right_and_wrong_groups(study: CodeStudy) -> None:
    axes = code.plot_correctness_boxes(study.by_class).axes[0]
    labels = [label.get_text() for label in axes.get_legend().get_texts()]
    right = int(study.by_class.is_correct.sum())
    assert labels == [f"right ({right})", f"wrong ({len(study.by_class) - right})"]
    assert code.plot_class_to_class_attention(study.by_class).axes[0].images[0].get_array().shape == (3, 3)


def test_report_page_and_dict_contain_all_results(study: CodeStudy, tmp_path: Path) -> None:
    text = write_code_report(study, tmp_path / "code.html").read_text("utf-8")
    for words in ("Right answers against wrong ones", "Detection of wrong answers", "Against another model"):
        assert words in text
    assert "1 of 12 cells differ" in text and "Syntax adds to confidence" in text and "Not done: nothing." in text
    assert Page(study._repr_html_()).document["children"] == Page(text).document["children"]
    document = study.to_dict()
    assert [(cell["layer"], cell["head"], cell["class"]) for cell in document["attention_differences"]] == [
        (1, 0, "operator")
    ]
    assert document["changed_cells"] == 12 and document["detector"]["num_errors"] == int(
        (~study.by_class.is_correct).sum()
    )
