"""Write docs/memory.md from the results of `memory_budget.py --keep`.

python benchmarks/memory_page.py benchmarks/results/memory.jsonl
"""

import argparse
import json
from pathlib import Path
from typing import Any

from memory_budget import ALL_METHODS_ROW

from clearhead.engine.memory_budget import parse_bytes
from clearhead.methods.base import METHOD_REGISTRY

PAGE_PATH = Path(__file__).parents[1] / "docs" / "memory.md"
ResultRow = dict[str, Any]

INTRODUCTION_TEMPLATE = """# A memory budget

`ex.explain(inputs, method, memory="2GiB")` (`--memory 2GiB`) stays within the budget: batch sizes are chosen from the
memory use of the first batches. The results are the same up to rounding.

Every method on {inputs} texts of 3 to {longest} words, `{model}`, `memory="{memory}"`, each in a separate process.
**Peak** is the maximum resident set size of the process (RSS, MiB), including its memory before the start (Python,
torch, the model: **before**); the same without a budget is in the next column. **Difference** is the largest difference
of all scores with and without a budget, relative to the largest score. Methods have few steps and evaluations
(`FEWER_STEPS` and `FEWEST_STEPS` in `benchmarks/memory_budget.py`): the budget limits memory, not run time.

The largest peak is **{peak:,.0f} MiB** of {budget:,.0f} MiB ({largest}); the largest difference is {gap:.0e}
({least_equal}).
"""


def read_rows(file: Path) -> list[ResultRow]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def render_page(rows: list[ResultRow]) -> str:
    usual = max(rows, key=lambda row: row["inputs"])
    settings = {name: usual[name] for name in ("model", "inputs", "longest", "memory")}
    rows = [{**row, "name": format_method_name(row, settings["inputs"])} for row in rows]
    compared = [row for row in rows if "gap" in row]
    largest, least_equal = max(rows, key=lambda row: row["peak"]), max(compared, key=lambda row: row["gap"])
    said = INTRODUCTION_TEMPLATE.format(
        **settings,
        peak=largest["peak"],
        budget=parse_bytes(settings["memory"]) / 2**20,
        largest=largest["name"],
        gap=least_equal["gap"],
        least_equal=least_equal["name"],
    )
    lines = ["| method | before | peak | peak without a budget | difference |", "| --- | --- | --- | --- | --- |"]
    for row in sorted(rows, key=lambda row: (row["method"] == ALL_METHODS_ROW, row["method"])):
        cells = [f"{row[name]:,.0f}" if name in row else "–" for name in ("before", "peak", "peak without")]
        gap = f"{row['gap']:.0e}" if "gap" in row else "–"
        lines.append(f"| {' | '.join([row['name'], *cells, gap])} |")
    where: dict[str, list[str]] = {}
    for row in rows:
        where.setdefault(row["machine"], []).append(row["name"])
    most = max(where, key=lambda machine: len(where[machine]))
    others = [f"{', '.join(names)}: {machine}" for machine, names in where.items() if machine != most]
    left = [f"`{name}`" for name in sorted(METHOD_REGISTRY) if name not in {row["method"] for row in rows}]
    absent = f" No figure: {', '.join(left)}." if left else ""
    end = f"“–”: not measured.{absent} Measured on {' – '.join([most, *others])}."
    made = "Made from `benchmarks/results/memory.jsonl` by `benchmarks/memory_page.py`."
    return "\n".join([said, *lines, "", end, "", made, ""])


def format_method_name(row: ResultRow, inputs: int) -> str:
    name = row["method"] if row["method"] == ALL_METHODS_ROW else f"`{row['method']}`"
    return name if row["inputs"] == inputs else f"{name} ({row['inputs']} inputs)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    PAGE_PATH.write_text(render_page(read_rows(parser.parse_args().file)), encoding="utf-8")
    print(PAGE_PATH)


if __name__ == "__main__":
    main()
