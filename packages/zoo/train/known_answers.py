"""Write into the cards of known-answer models, and one page, which methods find what is known to be the reason.

    python benchmarks/truth.py --models logic --count 100 --json build/truth/logic.json
    python packages/zoo/train/known_answers.py --from build/truth/*.json [--page docs/known-answers.md]

The first takes a while on a laptop (every method, model by model), the second none.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from cards import write_pages

import clearhead_zoo
from clearhead.bench.protocol import Measurement
from clearhead.bench.tables import Column, columns, markdown

FIGURES = ("precision", "average precision")
MEASURED = (
    "On {count} held-out examples: the share of the true units among as many units with the highest scores "
    "(precision), and average precision, each with its 95 % bootstrap interval; special tokens and the words that ask "
    "are left out. Where several sets of units are each enough, the one that the method finds best counts. `random` is "
    "chance."
)
HEAD = """# Which methods find the known reason?

Every method of clearhead on the zoo's models whose reasons are known by construction, with the settings that are its
default. {measured} After the dot, the rank; methods that cannot be told apart on these examples (paired Wilcoxon tests,
Holm's correction) share a range of ranks. Rows are in the order of their means over the columns: to read by, not a
ranking. "–": the method does not apply; why not is said by `ex.methods()`.

Made by `make known-answers`.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="measured", type=Path, nargs="+", required=True, help="what truth.py wrote")
    parser.add_argument("--page", type=Path, default=Path("docs/known-answers.md"), help="the page to write")
    options = parser.parse_args()
    read = [row for path in options.measured for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]
    # A model's methods may be measured in several runs; the controls are in each of them.
    rows = list({(row["model"], row["example"], row["method"], row["part"]): row for row in read}.values())
    models = list(dict.fromkeys(row["model"] for row in rows))
    tables = {figure: [c for model in models for c in _columns(model, rows, figure)] for figure in FIGURES}
    for model in models:
        _write_card(model, tables)
    count = max(len(column.examples) for column in tables[FIGURES[0]])
    parts = [HEAD.format(measured=MEASURED.format(count=f"up to {count}"))]
    parts += [f"## {figure.capitalize()}\n\n{markdown(table)}\n" for figure, table in tables.items()]
    options.page.write_text("\n".join(parts), encoding="utf-8")
    print(f"{options.page} and the cards of {', '.join(models)}")


def _columns(model: str, rows: list[dict[str, Any]], figure: str) -> list[Column]:
    own = [Measurement(r["example"], r["method"], r["part"], r["figures"]) for r in rows if r["model"] == model]
    return columns(model, own, f"minimal {figure}")


def _write_card(model: str, tables: dict[str, list[Column]]) -> None:
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    count = 0
    for figure, table in tables.items():
        for column in table:
            if column.name.split(", ")[0] == model:
                part = found.setdefault(column.name.removeprefix(f"{model}, "), {})
                count = max(count, len(column.examples))
                for method, one in column.intervals().items():
                    part.setdefault(method, {})[figure] = [round(x, 3) for x in (one.mean, one.low, one.high)]
    folder = clearhead_zoo.path(model)
    card = clearhead_zoo.card(model)
    ordered = {part: dict(sorted(own.items(), key=_worse)) for part, own in found.items()}
    write_pages(folder, {**card, "truth": {"measured": MEASURED.format(count=count), "found": ordered}})


def _worse(item: tuple[str, dict[str, list[float]]]) -> float:
    return -item[1]["average precision"][0]


if __name__ == "__main__":
    main()
