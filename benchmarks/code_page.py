"""Write the tables of docs/code-models.md from code-models.json and code-guidance.json in docs/figures.

    python benchmarks/code_page.py [--page docs/code-models.md]

The script replaces the text between its marks; the discussion is written by hand.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from marked import format_interval, render_table, replace_marked_sections

from clearhead.explanation.json_keys import to_snake_case
from clearhead.studies.code.syntax import TOKEN_CLASSES

TASK_TITLES = {
    "java": "Java, masked tokens",
    "python": "Python, masked tokens",
    "pairs": "Python, clones",
    "translation": "Java to C#",
}
METHOD_ORDER = ("saliency", "integrated-gradients", "gradient-shap", "deeplift", "deeplift-shap")
StudyResults = dict[str, Any]


def render_summary(results: StudyResults) -> str:
    """The questions, the accuracy of the model, and the detection of wrong answers."""

    def row(name: str, cell: Any) -> list[str]:
        return [name, *(cell(own) for own in results.values())]

    def detector(name: str) -> Any:
        return lambda own: format_interval(own["detector"] and own["detector"]["auroc"][to_snake_case(name)], 3)

    rows = [
        row("model", lambda own: own["model"]),
        row("questions", lambda own: str(own["questions"])),
        row("right", lambda own: format_interval(own["accuracy"], 3)),
        row(
            "heads × classes that differ, right against wrong (q < 0.05)",
            lambda own: (
                "–" if own["tested_cells"] is None else f"{len(own['attention_differences'])} of {own['tested_cells']}"
            ),
        ),
        row(
            "methods × classes that differ",
            lambda own: _count_significant(own["attribution_differences"]),
        ),
        *(row(f"AUROC of {one}", detector(one)) for one in ("confidence", "length", "syntax", "syntax and confidence")),
        row(
            "gain of both over confidence",
            lambda own: format_interval(own["detector"] and own["detector"]["auroc_gain"], 3),
        ),
        row(
            "heads × classes changed by fine-tuning",
            lambda own: "–" if own["changed_cells"] is None else f"{own['changed_cells']} of {own['compared_cells']}",
        ),
    ]
    return render_table(["", *(TASK_TITLES[name] for name in results)], rows)


def _count_significant(lines: list[StudyResults]) -> str:
    tested = [line for line in lines if line["q_value"] is not None]
    return f"{sum(line['q_value'] < 0.05 for line in tested)} of {len(tested)}" if tested else "–"


def list_present_classes(results: StudyResults) -> list[str]:
    there = {line["class"] for own in results.values() for line in own["by_class"]}
    return [name for name in TOKEN_CLASSES if name in there]


def render_attention_by_class(results: StudyResults) -> str:
    """Attention received by class."""
    lines = {name: {line["class"]: line for line in own["by_class"]} for name, own in results.items()}
    rows = [
        [one, *(format_interval(own[one]["received_attention"] if one in own else None) for own in lines.values())]
        for one in list_present_classes(results)
    ]
    return render_table(["attention received", *(TASK_TITLES[name] for name in results)], rows)


def render_attribution_by_class(results: StudyResults) -> str:
    """Attribution by class, one table per kind of question."""
    parts = []
    for name, own in results.items():
        methods = [method for method in (*METHOD_ORDER, "generic") if method in own["by_class"][0]]
        rows = [[line["class"], *(format_interval(line[method]) for method in methods)] for line in own["by_class"]]
        parts.append(render_table([TASK_TITLES[name], *methods], rows))
    return "\n\n".join(parts)


def render_guidance(rows: list[StudyResults]) -> str:
    """With and without guidance: accuracy, and the share of attention on the class before and after."""
    strengths = sorted({row["strength"] for row in rows})
    figures = list(rows[0]["after"])

    def cell(strength: float, figure: str, when: str) -> str:
        values = [row[when][figure] for row in rows if row["strength"] == strength]
        return f"{np.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"

    lines = [
        [figure, cell(strengths[0], figure, "before"), *(cell(s, figure, "after") for s in strengths)]
        for figure in figures
    ]
    return render_table(["mean (range) over seeds", "before", *(f"after, λ {s:g}" for s in strengths)], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, default=Path("docs/code-models.md"))
    options = parser.parse_args()
    figures = options.page.parent / "figures"
    found = json.loads((figures / "code-models.json").read_text(encoding="utf-8"))
    guided = json.loads((figures / "code-guidance.json").read_text(encoding="utf-8"))
    made = {
        "summary": render_summary(found),
        "by class": render_attention_by_class(found),
        "families": render_attribution_by_class(found),
        "guidance": render_guidance(guided),
    }
    replace_marked_sections(options.page, made)


if __name__ == "__main__":
    main()
