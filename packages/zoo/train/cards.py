"""Model cards of the zoo: `card.json` for programs and `README.md` for readers.

The card contains a SHA-256 of every file that its figures depend on. Training scripts write it; `make test` compares it
with the files, and `make test-slow` measures the figures again. If a file changed and the figures did not:

    python packages/zoo/train/cards.py packages/zoo/src/clearhead_zoo/models/sentiment
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

from clearhead.data.atomic_file import atomic_write

#: The files that `write_card_files` writes.
WRITTEN = ("card.json", "README.md")


def write_json(path: Path, content: Any) -> None:
    with atomic_write(path) as partial:
        partial.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_card(folder: Path, card_facts: dict[str, Any]) -> dict[str, Any]:
    """Complete the facts with size, parameter count and checksums of the files as stored, and write both cards."""
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    shapes = [entry["shape"] for name, entry in header.items() if name != "__metadata__"]
    card = {
        **card_facts,
        "parameters": sum(_count_elements(shape) for shape in shapes),
        "bytes": len(content),
        "sha256": checksums(folder),
    }
    write_card_files(folder, card)
    return card


def checksums(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of a model except the cards themselves, by file name."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name not in WRITTEN)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def write_card_files(folder: Path, card: dict[str, Any]) -> None:
    (folder / "README.md").write_text(_format_readme(card), encoding="utf-8")
    write_json(folder / "card.json", card)  # last: a folder with a card is complete


def _count_elements(shape: list[int]) -> int:
    product = 1
    for side in shape:
        product *= side
    return product


def _format_readme(card: dict[str, Any]) -> str:
    figures = "\n".join(f"| {name} | {value} |" for name, value in card["figures"].items())
    return f"""# zoo:{card["name"]}

{card["summary"]}

| | |
| --- | --- |
| task | {card["task"]} |
| architecture | {card["architecture"]} |
| labels | {len(card["labels"])}: {", ".join(card["labels"])} |
| parameters | {card["parameters"]:,}, float16, {card["bytes"] / 1e6:.1f} MB |
| licence | {card["licence"]} |
| data | {card["data"]} |
| trained by | `{card["command"]}` |

## Figures, measured on the files in this folder

| | |
| --- | --- |
{figures}

{card["measured"]}
{_format_evidence_table(card)}
## Intended use

{card["use"]}
"""


def _format_evidence_table(card: dict[str, Any]) -> str:
    """Methods × input streams: how well each method finds the ground-truth evidence, where that was measured."""
    if "truth" not in card:
        return ""
    found = card["truth"]["found"]
    methods = list(dict.fromkeys(method for part in found.values() for method in part))
    names = [f"{part}: " if len(found) > 1 else "" for part in found]
    head = "".join(f" {name}precision | {name}average precision |" for name in names)
    rows = [f"| {m} |" + "".join(_format_figure_cells(part.get(m, {})) for part in found.values()) for m in methods]
    return f"""
## Which methods find the ground-truth evidence

{card["truth"]["measured"]}

| method |{head}
| --- |{" --- | --- |" * len(found)}
{chr(10).join(rows)}
"""


def _format_figure_cells(own: dict[str, list[float | None]]) -> str:
    return "".join(f" {_format_figure(own.get(name))} |" for name in ("precision", "average precision"))


def _format_figure(figures: list[float | None] | None) -> str:
    """A mean and its interval; a single example has no interval."""
    if figures is None:
        return "–"
    mean, low, high = figures
    return f"{mean:.2f} (no interval)" if low is None else f"{mean:.2f} [{low:.2f}, {high:.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write checksums, size and parameter count of models to their cards.")
    parser.add_argument("folders", nargs="+", type=Path, help="folders of models that have a card.json")
    for folder in parser.parse_args().folders:
        write_card(folder, json.loads((folder / "card.json").read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
