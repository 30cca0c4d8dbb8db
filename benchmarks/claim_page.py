"""Evaluates the claim of docs/claim.md on the stored scores, and writes docs/claim-results.md."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from claim_tasks import MethodScores, TrainedModel, read_scores
from marked import render_table
from numpy.typing import NDArray

from clearhead.methods.base import METHOD_REGISTRY
from clearhead.stats import ALPHA, adjust_p_values_holm, compare_paired

RESULTS_PAGE = Path("docs/claim-results.md")
DEFAULT_METHOD = "ensemble"
CONTROLS = ("position", "random")
EXPENSIVE_RIVAL = "kernel-shap"
#: Criteria of the claim.
MIN_TIED_FRACTION = 0.8
MIN_TASK_MEAN = 0.85
MAX_RIVAL_PASSES = 10
#: A model is left out if its first figure is below this fraction of that of the zoo's model.
MIN_QUALITY_RATIO = 0.95

Values = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ClaimColumn:
    """One task, stream and seed.

    Attributes:
        task: Name of the task.
        stream: The stream whose units are ranked.
        seed: Seed of the model.
        values: Method → average precision of each example; NaN on examples on which it was not measured.
    """

    task: str
    stream: str
    seed: int
    values: Mapping[str, Values]

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

    def is_tied_for_best(self, method: str) -> bool:
        """Whether no other method is significantly better, with Holm's correction over the other methods."""
        others = [name for name in self.attribution_methods if name != method]
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


def build_claim_columns(task: str, seed: int, methods: Mapping[str, MethodScores]) -> list[ClaimColumn]:
    """Build the columns of one model from its stored scores.

    Args:
        task: Name of the task.
        seed: Seed of the model.
        methods: The scores of each method.
    """
    num_examples = max(scores.num_measured for scores in methods.values())
    columns = []
    for stream in sorted({stream for scores in methods.values() for stream in scores.streams}):
        values = {}
        for name, scores in methods.items():
            if any(value is not None for value in scores.streams.get(stream, [])):
                measured = np.array(scores.streams[stream], dtype=np.float64)  # None becomes NaN
                values[name] = np.pad(measured, (0, num_examples - len(measured)), constant_values=np.nan)
        columns.append(ClaimColumn(task, stream, seed, values))
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


def evaluate_claim(columns: Sequence[ClaimColumn]) -> list[Verdict]:
    """Evaluate the criteria of docs/claim.md.

    Args:
        columns: The columns of all models that are good enough.
    """
    task_means = compute_task_means(columns)
    return [
        _evaluate_ties(columns),
        _evaluate_lowest_task(task_means),
        _evaluate_cheap_rivals(task_means),
        _evaluate_expensive_rival(columns),
    ]


def _evaluate_ties(columns: Sequence[ClaimColumn]) -> Verdict:
    fraction = float(np.mean([column.is_tied_for_best(DEFAULT_METHOD) for column in columns]))
    measured = f"{fraction:.0%} of {len(columns)}"
    return Verdict("tied for best, columns", f"≥ {MIN_TIED_FRACTION:.0%}", measured, fraction >= MIN_TIED_FRACTION)


def _evaluate_lowest_task(task_means: Mapping[str, Mapping[str, Sequence[float]]]) -> Verdict:
    means = {heading: float(np.mean(seeds)) for heading, seeds in task_means[DEFAULT_METHOD].items()}
    lowest = min(means, key=lambda heading: means[heading])
    measured = f"{means[lowest]:.3f} ({lowest})"
    return Verdict("lowest task, mean over seeds", f"≥ {MIN_TASK_MEAN}", measured, means[lowest] >= MIN_TASK_MEAN)


def _evaluate_cheap_rivals(task_means: Mapping[str, Mapping[str, Sequence[float]]]) -> Verdict:
    rivals = [name for name in task_means if name not in (DEFAULT_METHOD, *CONTROLS) and is_cheap(name)]
    leads = {}
    for rival in rivals:
        own_mean, rival_mean = compute_overall_means(task_means, DEFAULT_METHOD, rival)
        leads[rival] = own_mean - rival_mean
    nearest = min(leads, key=lambda name: leads[name])
    criterion = f"lead of the overall mean over every method of at most {MAX_RIVAL_PASSES} passes"
    return Verdict(criterion, "> 0", f"{leads[nearest]:+.3f} ({nearest})", leads[nearest] > 0)


def _evaluate_expensive_rival(columns: Sequence[ClaimColumn]) -> Verdict:
    differences = np.concatenate(
        [
            column.values[DEFAULT_METHOD] - column.values[EXPENSIVE_RIVAL]
            for column in columns
            if EXPENSIVE_RIVAL in column.values
        ]
        or [np.array([np.nan])]
    )
    shared = differences[~np.isnan(differences)]
    criterion = f"overall difference from {EXPENSIVE_RIVAL}, where it applies"
    if not len(shared):
        return Verdict(criterion, "not significantly below 0", "not measured", False)
    _, p_value, _ = compare_paired(shared, np.zeros_like(shared))
    mean = float(shared.mean())
    measured = f"{mean:+.3f}, p = {p_value:.2g}, n = {len(shared)}"
    return Verdict(criterion, "not significantly below 0", measured, mean >= 0 or p_value >= ALPHA)


def write_page(models: Sequence[TrainedModel]) -> None:
    """Write the results page from the stored scores of the models.

    Args:
        models: The models of the claim.
    """
    stored = {model: json.loads(model.scores_path.read_text()) for model in models if model.scores_path.exists()}
    if not stored:
        raise SystemExit("no scores are stored: run `claim.py measure` first")
    zoo_quality = {model.task: _get_quality(content) for model, content in stored.items() if model.is_zoo_model}
    columns, left_out = [], []
    for model, content in stored.items():
        quality = _get_quality(content)
        if quality < MIN_QUALITY_RATIO * zoo_quality.get(model.task, quality):
            left_out.append(f"{model.name}: {content['quality_name']} {quality:.3f}")
            continue
        scores = read_scores(model)
        if DEFAULT_METHOD not in scores or scores[DEFAULT_METHOD].num_measured < model.num_examples:
            left_out.append(f"{model.name}: `{DEFAULT_METHOD}` is not measured on all examples yet")
            continue
        columns += build_claim_columns(model.task, model.seed, scores)
    if not columns:
        raise SystemExit(f"`{DEFAULT_METHOD}` is measured on no model yet: run `claim.py measure` again")
    RESULTS_PAGE.write_text(render_page(columns, left_out, list(stored.values()), models), encoding="utf-8")
    print(RESULTS_PAGE)


def _get_quality(content: Mapping[str, Any]) -> float:
    return float(content["quality"])


def render_page(
    columns: Sequence[ClaimColumn],
    left_out: Sequence[str],
    contents: Sequence[Mapping[str, Any]],
    models: Sequence[TrainedModel],
) -> str:
    """Render the results: verdicts, methods × tasks, and the default's difference from the best in each column.

    Args:
        columns: The columns.
        left_out: Models that are not good enough, each with its figure.
        contents: The stored files.
        models: All models of the claim.
    """
    verdicts = evaluate_claim(columns)
    missing = [model.name for model in models if not model.scores_path.exists()]
    sections = [
        "# Results of the registered claim",
        "[The claim](claim.md) was written before these figures were measured. Average precision of the known evidence "
        "on held-out examples; a column is one task, stream and seed of the training.",
        "\n".join(f"- {line}" for line in _describe_provenance(contents)),
        "## Verdict",
        render_table(
            ["criterion", "required", "measured", "met"],
            [[v.criterion, v.required, v.measured, "yes" if v.is_met else "**no**"] for v in verdicts],
        ),
        "## Methods by task",
        "Mean over seeds, and the smallest and largest seed. `tied`: fraction of the method's columns in which no "
        "other method is significantly better.",
        _render_methods(columns),
        f"## `{DEFAULT_METHOD}` in each column",
        _render_columns(columns),
        "## Left out",
        "\n".join(f"- {line}" for line in [*left_out, *(f"{name}: not measured" for name in missing)]) or "Nothing.",
    ]
    return "\n\n".join(sections) + "\n"


def _describe_provenance(contents: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        f"{label}: {', '.join(sorted({str(content[key]) for content in contents}))}"
        for label, key in (("date", "date"), ("commit", "commit"), ("machine", "machine"))
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
        rows.append([column.heading, str(column.seed), str(count), f"{np.nanmean(values):.3f}", best_cell, tied])
    return render_table(["column", "seed", "n", "mean", "best method (difference)", "tied for best"], rows)
