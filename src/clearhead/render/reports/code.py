"""HTML report of the code study (`clearhead bias code`)."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from clearhead.render.report_blocks import (
    build_panel,
    build_report_page,
    build_section,
    build_table,
    format_report_cell,
    write_report_page,
)
from clearhead.render.view_model import ViewModel
from clearhead.render.views import code
from clearhead.studies.code.permutation_tests import FALSE_DISCOVERY_RATE

if TYPE_CHECKING:
    from clearhead.studies.code.study import CodeStudy

CLASSES_NOTE = (
    "All values are relative to chance: 1 is the value of a class if every token received the same attention (or had "
    "the same score). This corrects for frequent classes and long inputs. Special tokens are a class of their own. "
    "Intervals are over functions, with one value per question."
)
CORRECTNESS_TEST_NOTE = (
    "One value per question, head and class (log₂ of the value relative to chance), compared among questions of "
    "similar length with the same kind of answer; {way}. p is corrected by Benjamini and Hochberg over all cells. No "
    "question is excluded as an outlier."
)
LABEL_SHUFFLE_NOTE = "labels are shuffled among them"
SIGN_FLIP_NOTE = (
    "several questions are about one function, so the contribution of each function to the difference keeps its "
    "magnitude and its sign is flipped"
)
DETECTOR_NOTE = (
    "The probability that a wrong answer is ranked above a right one; 0.5 is chance. Fitted detectors are evaluated on "
    "questions that they were not fitted on. Confidence is the probability of the model’s own answer, without fitting."
)
MAX_DISCOVERY_ROWS = 30


def write_code_report(study: "CodeStudy", path: str | Path) -> Path:
    """Write the HTML report of a code study and return its path.

    Args:
        study: The study.
        path: The HTML file; an existing one is replaced.

    Returns:
        The path.
    """
    return write_report_page(path, build_code_report(study))


def build_code_report(study: "CodeStudy") -> ViewModel:
    """Build the report: accuracy, attention to classes and tree parts, right against wrong, detector, other model.

    Args:
        study: The study.

    Returns:
        The page; sections without data are left out.
    """
    sections: list[ViewModel | None] = [
        _build_accuracy_section(study),
        _build_class_section(study),
        _build_tree_section(study),
        _build_correctness_section(study),
        _build_attribution_section(study),
        _build_detector_section(study),
        _build_model_comparison_section(study),
    ]
    settings = ", ".join(f"{name} {format_report_cell(value)}" for name, value in study.settings.items())
    skipped = "".join(f" Not done: {reason}." for reason in study.skipped_reasons)
    return build_report_page(f"clearhead · {study.model}", "Syntax in a code model", sections, f"{settings}.{skipped}")


def _build_accuracy_section(study: "CodeStudy") -> ViewModel:
    """Tabulate accuracy, over all questions and by what is asked for."""
    rows = [
        ["all", len(study.by_class), study.accuracy],
        *(list(line.values()) for line in study.build_accuracy_table()),
    ]
    return build_section("Accuracy of the answers", build_table(["question type", "questions", "accuracy"], rows))


def _build_table_from_dicts(lines: list[dict[str, Any]]) -> ViewModel:
    """Build a table from dicts with equal keys; the keys of the first one are the heads."""
    return build_table([name.replace("_", " ") for name in lines[0]], [list(line.values()) for line in lines])


def _build_class_section(study: "CodeStudy") -> ViewModel:
    """Tabulate and plot attention to token classes relative to chance, and from class to class."""
    by_class = study.by_class
    return build_section(
        "Attention to token classes",
        _build_table_from_dicts(study.build_class_table(by_class)),
        build_panel(
            *code.make_class_attention_charts(by_class), note="Each point is a head; the line is the mean of the heads."
        ),
        build_panel(code.make_class_to_class_chart(by_class)),
        note=CLASSES_NOTE,
    )


def _build_tree_section(study: "CodeStudy") -> ViewModel:
    """Tabulate and plot attention to the parts of the syntax tree, relative to chance."""
    figure = build_panel(*code.make_class_attention_charts(study.by_part))
    return build_section(
        "Attention to parts of the syntax tree",
        _build_table_from_dicts(study.build_class_table(study.by_part)),
        figure,
    )


def _build_correctness_section(study: "CodeStudy") -> ViewModel | None:
    """Show the heads and classes whose attention differs between right and wrong answers; None if untested."""
    differences = study.attention_differences
    if differences is None:
        return None
    discoveries = study.list_discoveries()
    num_tested = differences.num_tested
    num_uncorrected = int((differences.p_values < FALSE_DISCOVERY_RATE).sum())
    summary = (
        f"{len(discoveries)} of {num_tested} cells differ at a false discovery rate of {FALSE_DISCOVERY_RATE:g}; "
        f"{num_uncorrected} have p < {FALSE_DISCOVERY_RATE:g} before the correction, of which about "
        f"{FALSE_DISCOVERY_RATE * num_tested:.0f} are expected by chance. "
    )
    test_description = LABEL_SHUFFLE_NOTE if study.by_class.has_distinct_functions else SIGN_FLIP_NOTE
    return build_section(
        "Right answers against wrong ones",
        build_panel(*code.make_p_value_charts(differences, study.by_class.classes)),
        build_panel(code.make_correctness_box_chart(study.by_class)),
        _build_table_from_dicts(discoveries[:MAX_DISCOVERY_ROWS]) if discoveries else None,
        note=summary + CORRECTNESS_TEST_NOTE.format(way=test_description),
    )


def _build_attribution_section(study: "CodeStudy") -> ViewModel | None:
    """Tabulate Cliff's delta of right − wrong with q, by method and class; None if untested."""
    differences = study.attribution_differences
    if differences is None:
        return None
    methods = list(study.by_class.attributions)
    rows = []
    for class_index, name in enumerate(study.by_class.classes):
        deltas = (float(differences.cliffs_delta[row, class_index]) for row in range(len(methods)))
        q_values = (float(differences.q_values[row, class_index]) for row in range(len(methods)))
        cells = [
            f"{format_report_cell(delta)} (q {format_report_cell(q)})"
            for delta, q in zip(deltas, q_values, strict=True)
        ]
        rows.append([name, *cells])
    note = (
        "Cliff’s delta, right − wrong: above zero, the class has more attribution in right answers. q: p after the "
        "correction."
    )
    return build_section("Attribution, right against wrong", build_table(["class", *methods], rows), note=note)


def _build_detector_section(study: "CodeStudy") -> ViewModel | None:
    """Tabulate the AUROC of each detector of wrong answers, with a verdict on syntax; None without any."""
    detection = study.detection
    if detection is None:
        return None
    rows: list[list[Any]] = [[name, auroc] for name, auroc in detection.auroc.items()]
    rows.append(["syntax and confidence − confidence", detection.auroc_gain])
    verdict = "Syntax shows no gain over confidence. "
    if detection.is_better_than_confidence:
        verdict = "Syntax adds to confidence. "
    note = f"{verdict}{detection.num_errors} of {len(study.by_class)} answers are wrong. {DETECTOR_NOTE}"
    return build_section("Detection of wrong answers", build_table(["from", "AUROC"], rows), note=note)


def _build_model_comparison_section(study: "CodeStudy") -> ViewModel | None:
    """Tabulate and plot the change relative to another model on the same questions; None without one."""
    change = study.change
    if change is None:
        return None
    note = (
        f"The same questions, answered by {study.compared_model}: {int(change.is_significant.sum())} of "
        f"{change.num_tested} cells differ. p by flipping the signs of each function’s differences, corrected as above."
    )
    rows = [
        [
            name,
            float(np.nanmean(change.mean_difference[..., class_index])),
            int(change.is_significant[..., class_index].sum()),
        ]
        for class_index, name in enumerate(study.by_class.classes)
    ]
    figure = build_panel(*code.make_p_value_charts(change, study.by_class.classes))
    return build_section(
        "Against another model", build_table(["class", "mean change (log₂)", "heads"], rows), figure, note=note
    )
