"""Study of syntax in a code model: attention by syntax class, wrong against right answers, error detection, comparison.

The comparison is with the attention of another model on the same inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Float

from clearhead.explainer import Explainer, MethodLike
from clearhead.explanation.json_keys import to_snake_case
from clearhead.stats import RATE_BOUNDS, ConfidenceInterval, compute_mean_interval
from clearhead.studies.code.attention import CodeAttention, Progress, compute_received_attention, measure_by_groupings
from clearhead.studies.code.error_detector import ErrorDetection, evaluate_error_detector, find_too_few_reason
from clearhead.studies.code.permutation_tests import (
    FALSE_DISCOVERY_RATE,
    NUM_PERMUTATIONS,
    GroupDifferences,
    compare_groups,
    compare_paired_inputs,
)
from clearhead.studies.code.tasks import CodeQuestion

#: Minimum number of wrong and of right answers for a test between them.
MIN_GROUP_SIZE = 5


@dataclass(frozen=True, eq=False)
class CodeStudy:
    """Results of a study of syntax in a code model.

    Results that need more answers than there are are `None`; `skipped_reasons` explains why.

    Attributes:
        by_class: Measurements by token class.
        by_part: Measurements by syntactic construct.
        accuracy: Share of right answers.
        attention_differences: Right − wrong answers in log2 received attention, by layer, head and class.
        attribution_differences: Right − wrong answers in log2 attribution, by method and class.
        detection: Evaluation of a detector of wrong answers.
        change: log2 received attention of the compared model − that of this model, by layer, head and class.
        compared_model: Name of the compared model; empty if there is none.
        skipped_reasons: Why results are missing, in sentences.
        settings: Settings of the run, for the report.
    """

    by_class: CodeAttention
    by_part: CodeAttention
    accuracy: ConfidenceInterval
    attention_differences: GroupDifferences | None = None
    attribution_differences: GroupDifferences | None = None
    detection: ErrorDetection | None = None
    change: GroupDifferences | None = None
    compared_model: str = ""
    skipped_reasons: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> str:
        """Name of the model."""
        return self.by_class.model

    def build_class_table(self, code_attention: CodeAttention) -> list[dict[str, Any]]:
        """Build one row per class: frequency, received attention and attribution, as multiples of chance level.

        Args:
            code_attention: Measurements by token class or by part of the syntax tree.

        Returns:
            Rows with "class", "token_fraction", "received_attention" and one interval per method.
        """
        function_ids = code_attention.function_ids
        rows = []
        for class_index, name in enumerate(code_attention.classes):
            received = _average_over_heads(code_attention.received_attention[..., class_index])
            row = {
                "class": name,
                "token_fraction": float(code_attention.class_frequencies[class_index]),
                "received_attention": compute_mean_interval(received, groups=function_ids),
            }
            for method, lifts in code_attention.attributions.items():
                row[method] = compute_mean_interval(lifts[:, class_index], groups=function_ids)
            rows.append(row)
        return rows

    def build_accuracy_table(self) -> list[dict[str, Any]]:
        """Build one row per question type: number of questions and share of right answers.

        Returns:
            Rows with "question_type", "questions" and "accuracy"; empty for tasks without types.
        """
        measurements = self.by_class
        rows = []
        for question_type in sorted({name for name in measurements.question_types if name}):
            mask = np.array([name == question_type for name in measurements.question_types])
            accuracy = compute_mean_interval(
                measurements.is_correct[mask].astype(float), bounds=RATE_BOUNDS, groups=measurements.function_ids[mask]
            )
            rows.append({"question_type": question_type, "questions": int(mask.sum()), "accuracy": accuracy})
        return rows

    def list_discoveries(self) -> list[dict[str, Any]]:
        """List the heads and classes in which wrong answers differ significantly, smallest q-value first.

        Returns:
            Rows with layer, head, class, effect sizes and q-value; empty if nothing was tested.
        """
        differences = self.attention_differences
        if differences is None:
            return []
        rows = [
            {
                "layer": int(layer),
                "head": int(head),
                "class": self.by_class.classes[class_index],
                "mean_difference": float(differences.mean_difference[layer, head, class_index]),
                "cliffs_delta": float(differences.cliffs_delta[layer, head, class_index]),
                "q_value": float(differences.q_values[layer, head, class_index]),
            }
            for layer, head, class_index in np.argwhere(differences.is_significant)
        ]
        return sorted(rows, key=lambda row: (row["q_value"], -abs(row["cliffs_delta"])))

    def _repr_html_(self) -> str:
        from clearhead.render.html import render_notebook_view_model
        from clearhead.render.reports.code import build_code_report

        return render_notebook_view_model(build_code_report(self))

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON-serialisable values, schema "clearhead/code-study".

        Returns:
            Settings, tables and significant differences; the attention of single questions is not included.
        """
        return {
            "schema": "clearhead/code-study",
            "version": 2,
            "model": self.model,
            "settings": self.settings,
            "questions": len(self.by_class),
            "functions": len(np.unique(self.by_class.function_ids)),
            "accuracy": _interval_to_dict(self.accuracy),
            "accuracy_by_type": [_row_to_dict(row) for row in self.build_accuracy_table()],
            "by_class": [_row_to_dict(row) for row in self.build_class_table(self.by_class)],
            "by_syntax_node": [_row_to_dict(row) for row in self.build_class_table(self.by_part)],
            "tested_cells": _count_tested_cells(self.attention_differences),
            "false_discovery_rate": FALSE_DISCOVERY_RATE,
            "attention_differences": self.list_discoveries(),
            "attribution_differences": self._build_attribution_rows(),
            "detector": self._detection_to_dict(),
            "compared_model": self.compared_model or None,
            "compared_cells": _count_tested_cells(self.change),
            "changed_cells": None if self.change is None else int(self.change.is_significant.sum()),
            "skipped_reasons": list(self.skipped_reasons),
        }

    def _detection_to_dict(self) -> dict[str, Any] | None:
        """Convert the error detector's AUROC, gain and error count to JSON values; None without a detector."""
        if self.detection is None:
            return None
        return {
            "auroc": {
                to_snake_case(name): _interval_to_dict(interval) for name, interval in self.detection.auroc.items()
            },
            "auroc_gain": _interval_to_dict(self.detection.auroc_gain),
            "num_errors": self.detection.num_errors,
        }

    def _build_attribution_rows(self) -> list[dict[str, Any]]:
        """Build a row for each method and class: difference right − wrong, Cliff's delta and q."""
        differences = self.attribution_differences
        if differences is None:
            return []
        return [
            {
                "method": method,
                "class": name,
                "mean_difference": _nan_to_none(differences.mean_difference[method_index, class_index]),
                "cliffs_delta": _nan_to_none(differences.cliffs_delta[method_index, class_index]),
                "q_value": _nan_to_none(differences.q_values[method_index, class_index]),
            }
            for method_index, method in enumerate(self.by_class.attributions)
            for class_index, name in enumerate(self.by_class.classes)
        ]


def run_code_study(
    explainer: Explainer,
    questions: Sequence[CodeQuestion],
    methods: Sequence[MethodLike] = (),
    other_explainer: Explainer | None = None,
    include_special: bool = True,
    num_permutations: int = NUM_PERMUTATIONS,
    seed: int = 0,
    progress: Progress = False,
    **settings: Any,
) -> CodeStudy:
    """Run all questions and test which heads and classes differ between wrong and right answers.

    Args:
        explainer: Explainer of the model under study.
        questions: At least one question.
        methods: Registered attribution methods to run as well.
        other_explainer: Explainer of another model with the same number of layers and heads, whose attention on the
            same inputs is compared; it need not answer the questions.
        include_special: Whether special tokens count as a class; otherwise they are excluded.
        num_permutations: Number of permutations of each test.
        seed: Seed of permutations, folds and resampling.
        progress: Whether to show a progress bar, or a function that wraps the sequence.
        **settings: Further settings to store with the result.

    Returns:
        The measurements and tests.

    Raises:
        InputError: There are no questions, or the models differ in layers or heads.
    """
    by_class, by_part = measure_by_groupings(
        explainer, questions, methods=methods, include_special=include_special, progress=progress
    )
    code_study = analyse_measurements(by_class, by_part, num_permutations, seed)
    run_settings = {
        "questions": len(questions),
        "permutations": num_permutations,
        "include_special": include_special,
        "seed": seed,
    }
    if other_explainer is not None:
        attention = compute_received_attention(other_explainer, questions, by_class.classes, include_special, progress)
        model_name = other_explainer.adapter.name
        code_study = add_model_comparison(code_study, attention, model_name, num_permutations, seed)
    return replace(code_study, settings={**run_settings, **settings})


def add_model_comparison(
    code_study: CodeStudy,
    other_attention: Float[np.ndarray, "question layer head class"],
    name: str,
    num_permutations: int = NUM_PERMUTATIONS,
    seed: int = 0,
) -> CodeStudy:
    """Return the study with a comparison of received attention with another model.

    Args:
        code_study: Study of the first model.
        other_attention: Result of `compute_received_attention` for the other model on the same questions.
        name: Name of the other model.
        num_permutations: Number of sign flips.
        seed: Seed of the sign flips.
    """
    measurements = code_study.by_class
    change = compare_paired_inputs(
        _compute_log_lift(measurements.received_attention),
        _compute_log_lift(other_attention),
        num_permutations,
        seed,
        measurements.function_ids,
    )
    return replace(code_study, change=change, compared_model=name)


def analyse_measurements(
    by_class: CodeAttention, by_part: CodeAttention, num_permutations: int = NUM_PERMUTATIONS, seed: int = 0
) -> CodeStudy:
    """Run the tests and the error detector on measurements; skipped analyses are explained in `skipped_reasons`.

    Args:
        by_class: Measurements by token class, which are tested.
        by_part: Measurements by syntactic construct, which are only reported.
        num_permutations: Number of permutations of each test.
        seed: Seed of permutations, folds and resampling.
    """
    is_correct = by_class.is_correct
    question_types = by_class.question_types
    lengths = by_class.lengths.astype(float)
    function_ids = by_class.function_ids
    num_right = int(is_correct.sum())
    num_wrong = int((~is_correct).sum())
    skipped_reasons = []
    attention_differences = attribution_differences = detection = None
    if len(is_correct) > 1 and len(np.unique(function_ids)) == 1:
        skipped_reasons.append(
            f"intervals: all {len(is_correct)} questions are about one function, or joined by functions they share"
        )
    if min(num_right, num_wrong) < MIN_GROUP_SIZE:
        skipped_reasons.append(f"wrong against right: {num_wrong} wrong and {num_right} right answers")
    else:
        received = _compute_log_lift(by_class.received_attention)
        attention_differences = compare_groups(
            received, is_correct, lengths, question_types, num_permutations, seed, function_ids
        )
        if by_class.attributions:
            attributed = _compute_log_lift(np.stack(list(by_class.attributions.values()), 1))
            attribution_differences = compare_groups(
                attributed, is_correct, lengths, question_types, num_permutations, seed, function_ids
            )
    if (reason := find_too_few_reason(by_class)) is not None:
        skipped_reasons.append(f"the detector: {reason}")
    else:
        detection = evaluate_error_detector(by_class, seed=seed)
    accuracy = compute_mean_interval(is_correct.astype(float), bounds=RATE_BOUNDS, groups=function_ids, seed=seed)
    return CodeStudy(
        by_class,
        by_part,
        accuracy,
        attention_differences,
        attribution_differences,
        detection,
        skipped_reasons=tuple(skipped_reasons),
    )


def _compute_log_lift(lifts: np.ndarray) -> np.ndarray:
    """Compute log2, because ratios of 2 and 1/2 are equally far from chance level."""
    return np.asarray(np.log2(np.clip(lifts, 2.0**-10, None)))


def _average_over_heads(values: np.ndarray) -> np.ndarray:
    """Average over layers and heads for each question; NaN where the class has no token."""
    return np.asarray(values.reshape(len(values), -1).mean(1))


def _count_tested_cells(differences: GroupDifferences | None) -> int | None:
    """Return the number of tested cells, or None if there was no test."""
    return None if differences is None else differences.num_tested


def _interval_to_dict(interval: ConfidenceInterval) -> dict[str, float | int | None]:
    """Convert an interval to JSON values; NaN becomes None."""
    return {
        "mean": _nan_to_none(interval.mean),
        "low": _nan_to_none(interval.low),
        "high": _nan_to_none(interval.high),
        "count": interval.count,
    }


def _row_to_dict(row: dict[str, Any]) -> dict[str, Any]:
    """Convert the intervals in a table row to dicts, and keep its other cells."""
    return {
        name: _interval_to_dict(value) if isinstance(value, ConfidenceInterval) else value
        for name, value in row.items()
    }


def _nan_to_none(value: float) -> float | None:
    """Convert NaN, which JSON does not have, to None, and numpy numbers to float."""
    return None if np.isnan(value) else float(value)
