"""The tables of docs/code-models.md, from code-models.json and code-guidance.json in docs/figures.

    python benchmarks/code_page.py [--page docs/code-models.md]

What stands between its marks is written anew; the reading of it is written by hand.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from marked import shown, table, write_between

from clearhead.studies.code.syntax import CLASSES

NAMES = {
    "java": "Java, masked tokens",
    "python": "Python, masked tokens",
    "pairs": "Python, clones",
    "translation": "Java to C#",
}
FAMILIES = ("saliency", "integrated-gradients", "gradient-shap", "deeplift", "deeplift-shap")
Found = dict[str, Any]


def summary(found: Found) -> str:
    """What was asked, how often the model is right, and what tells right from wrong."""

    def row(name: str, cell: Any) -> list[str]:
        return [name, *(cell(own) for own in found.values())]

    def detector(name: str) -> Any:
        return lambda own: shown(own["detector"] and own["detector"]["auroc"][name], 3)

    rows = [
        row("model", lambda own: own["model"]),
        row("questions", lambda own: str(own["questions"])),
        row("right", lambda own: shown(own["accuracy"], 3)),
        row(
            "heads × classes that differ, right against wrong (q < 0.05)",
            lambda own: (
                "–" if own["tested cells"] is None else f"{len(own['wrong against right'])} of {own['tested cells']}"
            ),
        ),
        row(
            "methods × classes that differ",
            lambda own: _differing(own["attribution, wrong against right"]),
        ),
        *(row(f"AUROC of {one}", detector(one)) for one in ("confidence", "length", "syntax", "syntax and confidence")),
        row(
            "gain of both over confidence",
            lambda own: shown(own["detector"] and own["detector"]["gain over confidence"], 3),
        ),
        row(
            "heads × classes changed by fine-tuning",
            lambda own: "–" if own["changed cells"] is None else f"{own['changed cells']} of {own['compared cells']}",
        ),
    ]
    return table(["", *(NAMES[name] for name in found)], rows)


def _differing(lines: list[Found]) -> str:
    tested = [line for line in lines if line["q"] is not None]
    return f"{sum(line['q'] < 0.05 for line in tested)} of {len(tested)}" if tested else "–"


def classes(found: Found) -> list[str]:
    there = {line["class"] for own in found.values() for line in own["classes"]}
    return [name for name in CLASSES if name in there]


def by_class(found: Found) -> str:
    """Attention received by class."""
    lines = {name: {line["class"]: line for line in own["classes"]} for name, own in found.items()}
    rows = [
        [one, *(shown(own[one]["attention received"] if one in own else None) for own in lines.values())]
        for one in classes(found)
    ]
    return table(["attention received", *(NAMES[name] for name in found)], rows)


def families(found: Found) -> str:
    """Attribution by class, a table for each kind of question."""
    parts = []
    for name, own in found.items():
        methods = [method for method in (*FAMILIES, "generic") if method in own["classes"][0]]
        rows = [[line["class"], *(shown(line[method]) for method in methods)] for line in own["classes"]]
        parts.append(table([NAMES[name], *methods], rows))
    return "\n\n".join(parts)


def guidance(rows: list[Found]) -> str:
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
    return table(["mean (range) over seeds", "before", *(f"after, λ {s:g}" for s in strengths)], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, default=Path("docs/code-models.md"))
    options = parser.parse_args()
    figures = options.page.parent / "figures"
    found = json.loads((figures / "code-models.json").read_text(encoding="utf-8"))
    guided = json.loads((figures / "code-guidance.json").read_text(encoding="utf-8"))
    made = {
        "summary": summary(found),
        "by class": by_class(found),
        "families": families(found),
        "guidance": guidance(guided),
    }
    write_between(options.page, made)


if __name__ == "__main__":
    main()
