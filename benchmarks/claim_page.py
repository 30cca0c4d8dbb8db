"""Evaluates the claim of docs/claim.md on the stored scores, and writes docs/claim-results.md."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from claim_tasks import ZOO_SEED, ClaimCase, KnownAnswerCase, MethodScores, read_scores
from marked import render_table
from numpy.typing import NDArray

import clearhead_zoo
from clearhead.methods.base import METHOD_REGISTRY
from clearhead.stats import ALPHA, adjust_p_values_holm, compare_paired

RESULTS_PAGE = Path("docs/claim-results.md")
DEFAULT_METHOD = "ensemble"
CONTROLS = ("position", "random")
EXPENSIVE_RIVAL = "kernel-shap"
REMOVAL_BASELINE = "generic"
#: Criteria of the claim.
MIN_TIED_FRACTION = 0.8
MIN_TASK_MEAN = 0.85
MAX_RIVAL_PASSES = 10
MAX_REMOVAL_LOSSES = 1
#: A model is left out if its first figure is below this fraction of that of the zoo's model.
MIN_QUALITY_RATIO = 0.95

Values = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ClaimColumn:
    """The figures of all methods on one model and stream.

    Attributes:
        task: Name of the task or model.
        stream: The stream, or stream and replacement.
        seed: Seed of the model; None for the zoo's models of real data.
        values: Method → figure of each example; NaN on examples on which it was not measured.
        has_default_failed: Whether the default method failed on an example, which counts as a lost column.
    """

    task: str
    stream: str
    seed: int | None
    values: Mapping[str, Values]
    has_default_failed: bool = False

    @property
    def heading(self) -> str:
        """Task and stream, which the seeds of a task share."""
        return f"{self.task}, {self.stream}"

    @property
    def attribution_methods(self) -> list[str]:
        """The measured methods without the controls."""
        return [name for name in self.values if name not in CONTROLS]

    def compare(self, first: str, second: str) -> tuple[float, float]:
        """Return the mean difference of two methods on shared examples, and the p-value of the paired test."""
        differences, p_value, _ = compare_paired(self.values[first], self.values[second])
        return float(differences.mean()) if len(differences) else float("nan"), p_value

    def is_tied_for_best(self, method: str, rivals: Sequence[str] | None = None) -> bool:
        """Whether no rival is significantly better, with Holm's correction over the rivals (default: all methods)."""
        if method not in self.values or (method == DEFAULT_METHOD and self.has_default_failed):
            return False
        others = [name for name in (self.attribution_methods if rivals is None else rivals) if name != method]
        comparisons = [self.compare(method, other) for other in others]
        p_values = adjust_p_values_holm([p_value for _, p_value in comparisons])
        return not any(
            difference < 0 and p_value < ALPHA for (difference, _), p_value in zip(comparisons, p_values, strict=True)
        )

    def find_best_method(self) -> str:
        """Return the method with the highest mean."""
        return max(self.attribution_methods, key=lambda name: float(np.nanmean(self.values[name])))


@dataclass(frozen=True)
class Verdict:
    """One criterion of the claim.

    Attributes:
        criterion: What is claimed.
        required: The threshold.
        measured: The figure.
        is_met: Whether the figure meets it.
    """

    criterion: str
    required: str
    measured: str
    is_met: bool


def build_claim_columns(name: str, seed: int | None, methods: Mapping[str, MethodScores]) -> list[ClaimColumn]:
    """Build the columns of one case from its stored figures.

    Args:
        name: Name of the task or model.
        seed: Seed of the model.
        methods: The figures of each method.
    """
    num_examples = max(scores.num_measured for scores in methods.values())
    columns = []
    for part in sorted({part for scores in methods.values() for part in scores.columns}):
        values = {}
        for method, scores in methods.items():
            if any(figure is not None for figure in scores.columns.get(part, [])):
                measured = np.array(scores.columns[part], dtype=np.float64)  # None becomes NaN
                values[method] = np.pad(measured, (0, num_examples - len(measured)), constant_values=np.nan)
        default_scores = methods.get(DEFAULT_METHOD)
        has_failed = default_scores is not None and bool(default_scores.failures)
        columns.append(ClaimColumn(name, part, seed, values, has_failed))
    return columns


def compute_task_means(columns: Sequence[ClaimColumn]) -> dict[str, dict[str, list[float]]]:
    """Return method → heading → the mean of each seed."""
    means: dict[str, dict[str, list[float]]] = {}
    for column in columns:
        for method, values in column.values.items():
            means.setdefault(method, {}).setdefault(column.heading, []).append(float(np.nanmean(values)))
    return means


def compute_overall_means(
    task_means: Mapping[str, Mapping[str, Sequence[float]]], first: str, second: str
) -> tuple[float, float]:
    """Return the means of two methods over the headings that both have; each heading is the mean of its seeds."""
    shared = [heading for heading in task_means[first] if heading in task_means[second]]
    pairs = [(np.mean(task_means[first][heading]), np.mean(task_means[second][heading])) for heading in shared]
    first_mean, second_mean = np.mean(pairs, axis=0)
    return float(first_mean), float(second_mean)


def is_cheap(method: str) -> bool:
    """Whether a method takes at most `MAX_RIVAL_PASSES` passes, for inputs of any length."""
    cost = METHOD_REGISTRY[method].declaration.cost
    return cost.forward <= MAX_RIVAL_PASSES and not cost.per_unit and not cost.needs_max_flow


def evaluate_claim(columns: Sequence[ClaimColumn], removal_columns: Sequence[ClaimColumn]) -> list[Verdict]:
    """Evaluate the criteria of docs/claim.md, in their order there.

    Args:
        columns: Average precision on the known-answer models that are good enough.
        removal_columns: Removal gap on models of real data.
    """
    task_means = compute_task_means(columns)
    return [
        _evaluate_ties(columns),
        _evaluate_lowest_task(columns),
        _evaluate_cheap_rivals(task_means),
        _evaluate_expensive_rival(columns),
        _evaluate_removal_against_baseline(removal_columns),
        _evaluate_removal_against_best(removal_columns),
    ]


def _evaluate_ties(columns: Sequence[ClaimColumn]) -> Verdict:
    fraction = _compute_tied_fraction(columns)
    zoo = [column for column in columns if column.seed == ZOO_SEED]
    others = [column for column in columns if column.seed != ZOO_SEED]
    measured = f"{fraction:.0%} of {len(columns)} (the zoo's seeds {_compute_tied_fraction(zoo):.0%} of {len(zoo)}, "
    measured += f"others {_compute_tied_fraction(others):.0%} of {len(others)})"
    return Verdict("tied for best, columns", f"≥ {MIN_TIED_FRACTION:.0%}", measured, fraction >= MIN_TIED_FRACTION)


def _compute_tied_fraction(columns: Sequence[ClaimColumn]) -> float:
    if not columns:
        return float("nan")
    return float(np.mean([column.is_tied_for_best(DEFAULT_METHOD) for column in columns]))


def _evaluate_lowest_task(columns: Sequence[ClaimColumn]) -> Verdict:
    """A column without figures of the default method counts as zero."""
    means: dict[str, list[float]] = {}
    for column in columns:
        values = column.values.get(DEFAULT_METHOD)
        means.setdefault(column.heading, []).append(0.0 if values is None else float(np.nanmean(values)))
    lowest = min(means, key=lambda heading: np.mean(means[heading]))
    mean = float(np.mean(means[lowest]))
    return Verdict(
        "lowest task, mean over seeds", f"≥ {MIN_TASK_MEAN}", f"{mean:.3f} ({lowest})", mean >= MIN_TASK_MEAN
    )


def _evaluate_cheap_rivals(task_means: Mapping[str, Mapping[str, Sequence[float]]]) -> Verdict:
    criterion = f"lead of the overall mean over every method of at most {MAX_RIVAL_PASSES} passes"
    rivals = [name for name in task_means if name not in (DEFAULT_METHOD, *CONTROLS) and is_cheap(name)]
    if DEFAULT_METHOD not in task_means or not rivals:
        return Verdict(criterion, "> 0", "not measured", False)
    leads = {}
    for rival in rivals:
        own_mean, rival_mean = compute_overall_means(task_means, DEFAULT_METHOD, rival)
        leads[rival] = own_mean - rival_mean
    nearest = min(leads, key=lambda name: leads[name])
    return Verdict(criterion, "> 0", f"{leads[nearest]:+.3f} ({nearest})", leads[nearest] > 0)


def _evaluate_expensive_rival(columns: Sequence[ClaimColumn]) -> Verdict:
    """Each example counts once: its difference is the mean over its streams."""
    differences_by_model: dict[tuple[str, int | None], list[Values]] = {}
    for column in columns:
        if EXPENSIVE_RIVAL in column.values and DEFAULT_METHOD in column.values:
            difference = column.values[DEFAULT_METHOD] - column.values[EXPENSIVE_RIVAL]
            differences_by_model.setdefault((column.task, column.seed), []).append(difference)
    shared = np.array([])
    for differences in differences_by_model.values():
        by_stream = np.array(differences)
        has_value = ~np.isnan(by_stream).all(0)
        shared = np.append(shared, np.nanmean(by_stream[:, has_value], 0))
    criterion = f"overall difference from {EXPENSIVE_RIVAL}, where it applies"
    if not len(shared):
        return Verdict(criterion, "not significantly below 0", "not measured", False)
    _, p_value, _ = compare_paired(shared, np.zeros_like(shared))
    mean = float(shared.mean())
    measured = f"{mean:+.3f}, p = {p_value:.2g}, n = {len(shared)}"
    return Verdict(criterion, "not significantly below 0", measured, mean >= 0 or p_value >= ALPHA)


def _evaluate_removal_against_baseline(columns: Sequence[ClaimColumn]) -> Verdict:
    worse = [column.heading for column in columns if not column.is_tied_for_best(DEFAULT_METHOD, [REMOVAL_BASELINE])]
    criterion = f"removal gap significantly below that of {REMOVAL_BASELINE}, columns"
    return Verdict(criterion, "0", _format_columns(worse, columns), bool(columns) and not worse)


def _evaluate_removal_against_best(columns: Sequence[ClaimColumn]) -> Verdict:
    worse = []
    for column in columns:
        rivals = [name for name in column.attribution_methods if is_cheap(name)]
        if not column.is_tied_for_best(DEFAULT_METHOD, rivals):
            worse.append(column.heading)
    criterion = f"removal gap significantly below that of a method of at most {MAX_RIVAL_PASSES} passes, columns"
    is_met = bool(columns) and len(worse) <= MAX_REMOVAL_LOSSES
    return Verdict(criterion, f"≤ {MAX_REMOVAL_LOSSES}", _format_columns(worse, columns), is_met)


def _format_columns(worse: Sequence[str], columns: Sequence[ClaimColumn]) -> str:
    if not columns:
        return "not measured"
    return f"{len(worse)} of {len(columns)}" + (f" ({'; '.join(worse)})" if worse else "")


def write_page(cases: Sequence[ClaimCase]) -> None:
    """Write the results page from the stored figures. As long as some are missing, it gives no verdict.

    Args:
        cases: The cases of the claim.
    """
    columns: list[ClaimColumn] = []
    removal_columns: list[ClaimColumn] = []
    missing: list[str] = []
    left_out: list[str] = []
    contents = []
    for case in cases:
        if not case.scores_path.exists():
            missing.append(f"{case.name}: not measured")
            continue
        content = json.loads(case.scores_path.read_text())
        contents.append(content)
        scores = read_scores(case)
        missing += [
            f"{case.name}: `{name}` on {method_scores.num_measured} of {method_scores.num_expected} examples"
            for name, method_scores in scores.items()
            if not method_scores.is_complete
        ]
        left_out += _describe_failures(case.name, scores)
        if not isinstance(case, KnownAnswerCase):
            removal_columns += build_claim_columns(case.model, None, scores)
        elif content["quality"] < MIN_QUALITY_RATIO * _read_zoo_quality(case.task):
            left_out.append(f"{case.name}: {content['quality_name']} {content['quality']:.3f}")
        else:
            columns += build_claim_columns(case.task, case.seed, scores)
    if not columns:
        raise SystemExit("no known-answer model is measured yet: run `claim.py measure`")
    RESULTS_PAGE.write_text(render_page(columns, removal_columns, missing, left_out, contents), encoding="utf-8")
    print(f"{RESULTS_PAGE}: {len(missing)} missing figures" if missing else RESULTS_PAGE)


def _read_zoo_quality(task: str) -> float:
    """The first figure of the card of the zoo's model."""
    return float(next(iter(clearhead_zoo.card(task)["figures"].values())))


def _describe_failures(name: str, scores: Mapping[str, MethodScores]) -> list[str]:
    """On how many examples methods failed, and the first reason."""
    return [
        f"{name}: `{method}` failed on {len(method_scores.failures)} examples "
        f"({next(iter(method_scores.failures.values()))})"
        for method, method_scores in scores.items()
        if method_scores.failures
    ]


def render_page(
    columns: Sequence[ClaimColumn],
    removal_columns: Sequence[ClaimColumn],
    missing: Sequence[str],
    left_out: Sequence[str],
    contents: Sequence[Mapping[str, Any]],
) -> str:
    """Render the results: verdicts, methods × tasks, and the default's difference from the best in each column.

    Args:
        columns: Average precision on known-answer models.
        removal_columns: Removal gap on models of real data.
        missing: Figures that are not measured yet; with any of them there is no verdict.
        left_out: Cases and examples that are left out, each with the reason.
        contents: The stored files.
    """
    verdicts = evaluate_claim(columns, removal_columns)
    verdict_notes = []
    if missing:
        verdict_notes.append(f"**No verdict yet: {len(missing)} figures are missing** (listed at the end).")
    sections = [
        "# Results of the registered claim",
        "[The claim](claim.md) was written before these figures were measured.",
        "\n".join(f"- {line}" for line in _describe_provenance(contents)),
        "## Verdict",
        *verdict_notes,
        render_table(
            ["criterion", "required", "measured", "met"],
            [[v.criterion, v.required, v.measured, _format_met(v.is_met, bool(missing))] for v in verdicts],
        ),
        "## Average precision of the known evidence",
        "Mean over seeds, and the smallest and largest seed. `tied`: fraction of the method's columns in which no "
        "other method is significantly better.",
        _render_methods(columns),
        f"## `{DEFAULT_METHOD}` in each column",
        _render_columns(columns),
        "## Removal gap on models of real data",
        *(
            [_render_methods(removal_columns), _render_columns(removal_columns)]
            if removal_columns
            else ["Not measured."]
        ),
        "## Left out",
        "\n".join(f"- {line}" for line in left_out) or "Nothing.",
        *(["## Missing", "\n".join(f"- {line}" for line in missing)] if missing else []),
    ]
    return "\n\n".join(sections) + "\n"


def _format_met(is_met: bool, is_preliminary: bool) -> str:
    if is_preliminary:
        return "–"
    return "yes" if is_met else "**no**"


def _describe_provenance(contents: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        f"{name}: {', '.join(sorted({value for content in contents for value in content[name]}))}"
        for name in ("dates", "commits", "machines")
    ] + ["command: `make claim`"]


def _render_methods(columns: Sequence[ClaimColumn]) -> str:
    task_means = compute_task_means(columns)
    headings = list(dict.fromkeys(column.heading for column in columns))
    overall = {name: float(np.mean([np.mean(seeds) for seeds in means.values()])) for name, means in task_means.items()}
    rows = []
    for name in sorted(overall, key=lambda name: (-len(task_means[name]), -overall[name])):
        measured = [column for column in columns if name in column.values]
        tied = "–"
        if name not in CONTROLS:
            tied = f"{np.mean([column.is_tied_for_best(name) for column in measured]):.0%}"
        cells = [_format_seeds(task_means[name].get(heading)) for heading in headings]
        rows.append([f"`{name}`", f"{overall[name]:.3f}", tied, *cells])
    return render_table(["method", "mean", "tied", *headings], rows)


def _format_seeds(seed_means: Sequence[float] | None) -> str:
    if not seed_means:
        return "–"
    if len(seed_means) == 1:
        return f"{seed_means[0]:.3f}"
    return f"{np.mean(seed_means):.3f} ({min(seed_means):.2f}–{max(seed_means):.2f})"


def _render_columns(columns: Sequence[ClaimColumn]) -> str:
    rows = []
    for column in columns:
        if DEFAULT_METHOD not in column.values:
            continue
        best = column.find_best_method()
        difference, _ = column.compare(DEFAULT_METHOD, best)
        values = column.values[DEFAULT_METHOD]
        count = int((~np.isnan(values)).sum())
        tied = "yes" if column.is_tied_for_best(DEFAULT_METHOD) else "**no**"
        best_cell = "–" if best == DEFAULT_METHOD else f"`{best}` ({difference:+.3f})"
        seed = "–" if column.seed is None else str(column.seed)
        rows.append([column.heading, seed, str(count), f"{np.nanmean(values):.3f}", best_cell, tied])
    return render_table(["column", "seed", "n", "mean", "best method (difference)", "tied for best"], rows)
