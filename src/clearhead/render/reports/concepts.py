"""HTML reports of concept tests (`clearhead concept`) and of the gender-axis study (`clearhead bias gender`)."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead.render.report_blocks import (
    build_panel,
    build_report_page,
    build_section,
    build_table,
    format_report_cell,
    write_report_page,
)
from clearhead.render.view_model import ViewModel
from clearhead.render.views import concepts
from clearhead.stats import ConfidenceInterval

if TYPE_CHECKING:
    from clearhead.concepts.directions import Directions
    from clearhead.concepts.tcav import TcavResult
    from clearhead.studies.gender.axis_maps import AxisMaps
    from clearhead.studies.gender.study import AxisStudy, SentenceSetResult

LAYER_QUALITY_NOTE = (
    "The direction of each layer was computed without the held-out words and evaluated on them. Accuracy: how often "
    "the sign of the score is that of the class. The sign of an eigenvector is arbitrary: here all point to the first "
    "side, so a change of sign between layers is never a finding."
)
MAP_SIMILARITY_NOTE = (
    "Both maps are made absolute and normalised to length one. The line is the distance of two independent profiles of "
    "the same lengths: only values below it, with a small p, show similarity."
)
RANKING_NOTE = (
    "Mean reciprocal rank of the listed words by |score| (1: always first). Controls: attention alone, and words in "
    "random order (chance)."
)
PRONOUN_NOTE = (
    "Probabilities at the first mask of each sentence; “apart” is |ln p(a)/p(b)|; “bias” is the log ratio minus that "
    "of the same sentence with the filler also masked. “change” is “apart” after the removal minus “apart” before it, "
    "with its p-value."
)
TCAV_NOTE = (
    "The fraction of inputs whose output increases towards the concept, mean over random negative sets, with its "
    "exact binomial interval. A star marks a score that differs from the scores of random concepts and from one half, "
    "after Holm’s correction over concepts and layers. A cross marks a concept that could not be distinguished from "
    "random inputs."
)


def write_tcav_report(result: "TcavResult", path: str | Path) -> Path:
    """Write the HTML report of a TCAV result and return its path.

    Args:
        result: The result.
        path: The HTML file; an existing one is replaced.

    Returns:
        The path.
    """
    return write_report_page(path, build_tcav_report(result))


def build_tcav_report(result: "TcavResult") -> ViewModel:
    """Build the report of a TCAV result: scores of concepts, relative scores, and sensitivity maps.

    Args:
        result: The result.

    Returns:
        The page.
    """
    columns = ["concept", "layer", "TCAV", "interval", "accuracy", "mean S", "mean |S|", "effect", "p (random)"]
    columns += ["p (½)", "p (Holm)", "significant"]
    rows = [
        [
            test.concept,
            test.layer,
            test.score,
            f"{format_report_cell(test.low)} to {format_report_cell(test.high)}",
            test.accuracy,
            test.magnitude,
            test.strength,
            test.effect,
            test.p_random,
            test.p_half,
            test.corrected,
            test.rejection_reason or test.is_significant,
        ]
        for test in result.concept_tests
    ]
    layers = list(result.relative_scores)
    sections = [
        build_section(
            "Does the concept influence the class?",
            build_panel(concepts.make_tcav_chart(result.concept_tests, result.target)),
            build_table(columns, rows),
            note=TCAV_NOTE,
        ),
    ]
    if len(result.sensitivity_maps) > 1:
        relative_charts = [concepts.make_relative_tcav_chart(result.relative_scores[layer], layer) for layer in layers]
        sections.append(
            build_section("Concept against concept", build_panel(*relative_charts), note="TCAV(A, B) = 1 − TCAV(B, A).")
        )
    panels = [build_panel(*concepts.make_sensitivity_charts(result, layer)) for layer in layers]
    sections.append(
        build_section(
            "Where in the input",
            *panels,
            note="g·v of every unit, where v is the mean vector of each concept; negative values point away from it.",
        )
    )
    return build_report_page(
        f"clearhead · {result.model}", f"Concepts for {result.target}", sections, _format_settings(result.settings)
    )


def write_directions_report(
    directions: "Directions", model: str, path: str | Path, settings: Mapping[str, Any]
) -> Path:
    """Write the HTML report of concept directions by layer.

    Args:
        directions: The directions.
        model: The name of the model.
        path: The file to write.
        settings: The settings, for the footer.

    Returns:
        The path of the file.
    """
    names = next(iter(directions.values())).names
    sections = [_build_layer_section(directions)]
    title = f"From {names[1]} to {names[0]}"
    return write_report_page(
        path, build_report_page(f"clearhead · {model}", title, sections, _format_settings(settings))
    )


def write_ablation_report(
    costs: Mapping[str, Mapping[str, ConfidenceInterval]], model: str, path: str | Path, settings: Mapping[str, Any]
) -> Path:
    """Write the HTML report of the cost of removing a direction.

    Args:
        costs: The cost by metric, of each way to remove the direction.
        model: The name of the model.
        path: The file to write.
        settings: The settings, for the footer.

    Returns:
        The path of the file.
    """
    sections = [build_section("Cost of the removal on the model’s own task", _build_cost_table(costs))]
    return write_report_page(
        path, build_report_page(f"clearhead · {model}", "Without the direction", sections, _format_settings(settings))
    )


def write_axis_report(study: "AxisStudy", path: str | Path) -> Path:
    """Write the HTML report of a gender-axis study and return its path.

    Args:
        study: The study.
        path: The HTML file; an existing one is replaced.

    Returns:
        The path.
    """
    return write_report_page(path, build_axis_report(study))


def build_axis_report(study: "AxisStudy") -> ViewModel:
    """Build the report: layers, similarity of maps, ranks, pronouns, costs, pairs of people, maps.

    Args:
        study: The study.

    Returns:
        The page; sections without data are left out.
    """
    sections: list[ViewModel | None] = [_build_layer_section(study.directions)]
    if study.set_results:
        sections.append(_build_similarity_section(study))
    sections.append(_build_ranking_section(study))
    if study.set_results:
        sections.append(_build_pronoun_section(study))
    if study.costs:
        note = "The loss at masked words of held-out sentences, before and after."
        sections.append(build_section("Cost of the removal", _build_cost_table(study.costs), note=note))
    if study.people_scores:
        sections.append(_build_people_section(study))
    sections.append(_build_maps_section("own sentences", study.shown_maps))
    sections += [_build_maps_section(result.name, result.shown) for result in study.set_results]
    title = f"{study.names[0]} and {study.names[1]}, layer by layer"
    settings = {**study.settings, "word pairs": study.num_pairs, "sentences": study.num_occurrences}
    return build_report_page(f"clearhead · {study.model}", title, sections, _format_settings(settings))


def _build_people_section(study: "AxisStudy") -> ViewModel:
    """Tabulate the scores of subject and object, and count the texts with the expected signs."""
    columns = ("text", "dr subject", "dr object", "dr difference", "attdr difference")
    rows = [[line[column] for column in columns] for line in study.people_scores]
    num_expected = sum(line["dr subject"] > 0 > line["dr object"] for line in study.people_scores)
    note = (
        f"Scores summed over layers. {num_expected} of {len(rows)} have the subject on the first side and the object "
        "on the second; all of them are listed."
    )
    return build_section("Subject and object", build_table(columns, rows), note=note)


def _build_layer_section(directions: "Directions") -> ViewModel:
    """Plot and tabulate the held-out accuracy and effect size of the direction of each layer."""
    rows = [[line["layer"], line["accuracy"], line["effect"], line["count"]] for line in directions.to_table()]
    figures = build_panel(*concepts.make_direction_charts(directions))
    return build_section(
        "By layer",
        figures,
        build_table(["layer", "accuracy", "effect size", "held out"], rows),
        note=LAYER_QUALITY_NOTE,
    )


def _build_similarity_section(study: "AxisStudy") -> ViewModel:
    """Tabulate and plot how similar AttCAT and DR maps are in each sentence set, compared with chance."""
    columns = ["set", "sentences", "cosine", "Euclid/√n", "Manhattan/n", "haversine", "p", "Spearman", "Kendall"]
    rows = []
    for result in study.set_results:
        similarity = result.similarity
        if similarity is None:
            continue
        distances = [
            f"{format_report_cell(distance)} (chance {format_report_cell(similarity.chance[name])})"
            for name, distance in similarity.distances.items()
        ]
        rows.append([result.name, result.count, *distances, similarity.p, similarity.spearman, similarity.kendall])
    figure = build_panel(concepts.make_map_similarity_chart(study.set_results))
    return build_section("Are AttCAT and DR similar?", figure, build_table(columns, rows), note=MAP_SIMILARITY_NOTE)


def _build_ranking_section(study: "AxisStudy") -> ViewModel:
    """Tabulate how high each map ranks the listed words, in running text and in each sentence set."""
    columns = ["sentences", "AttDR", "DR", "attention alone", "chance", "AttDR − DR", "p", "share of filler", "largest"]
    rows: list[list[Any]] = []
    for name, ranks, share, largest in [
        ("running text", study.rank_comparison, None, None),
        *((result.name, result.ranks, result.share, _format_largest_count(result)) for result in study.set_results),
    ]:
        if ranks is not None:
            cells = [ranks[key] for key in ("attdr", "dr", "attention", "chance", "difference", "p")]
            rows.append([name, *cells, share, largest])
    return build_section("Does AttDR rank the listed words first?", build_table(columns, rows), note=RANKING_NOTE)


def _format_largest_count(result: "SentenceSetResult") -> str | None:
    """Format in how many sentences the filler contributes most; None if no sentence has a filler."""
    return f"{result.largest} of {result.share.count}" if result.share else None


def _build_pronoun_section(study: "AxisStudy") -> ViewModel:
    """Tabulate and plot the probabilities of both words at the mask, with and without the axis."""
    first_word, second_word = study.compared_words
    columns = ["set", "removed", "p(first)", "p(second)", "apart", "leaning", "bias", "size of bias", "change", "p"]
    keys = ("first", "second", "apart", "leaning", "bias", "size of bias")
    rows = []
    for result in study.set_results:
        for removal, statistics in result.pronouns.items():
            change = result.changes.get(removal, (None, None))
            rows.append([result.name, removal or "nothing", *(statistics[key] for key in keys), *change])
    figures = [concepts.make_ablation_chart(study.set_results)]
    if any(result.pronouns[""]["bias"].count for result in study.set_results):
        figures.append(concepts.make_ablation_chart(study.set_results, "size of bias"))
    note = (
        f"{PRONOUN_NOTE} First and second are {first_word} and {second_word}, or the words of the set if it has its "
        "own (the stereotypical one first)."
    )
    return build_section(
        "At the mask, with and without the axis", build_panel(*figures), build_table(columns, rows), note=note
    )


def _build_maps_section(name: str, maps_by_text: "Mapping[str, AxisMaps]") -> ViewModel | None:
    """Show the maps of each text in a panel of its own; None without texts."""
    if not maps_by_text:
        return None
    panels = [build_panel(*concepts.make_axis_map_charts(text, axis_maps)) for text, axis_maps in maps_by_text.items()]
    return build_section(f"Maps: {name}", *panels, note="Each map is divided by its norm.")


def _build_cost_table(costs: Mapping[str, Mapping[str, ConfidenceInterval]]) -> ViewModel:
    """Build a table with a row for each removal and a column for each measure."""
    metrics = list(next(iter(costs.values())))
    return build_table(["removed", *metrics], [[removal, *values.values()] for removal, values in costs.items()])


def _format_settings(settings: Mapping[str, Any]) -> str:
    """Format the settings as names and values, for the line at the end of the page."""
    return ", ".join(f"{name} {format_report_cell(value)}" for name, value in settings.items()) + "."
