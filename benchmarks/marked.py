"""Tables in pages that are otherwise written by hand: what stands between `<!-- NAME -->` and `<!-- end -->`."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

#: The interval of fewer is not printed.
FEW = 5


def shown(own: Mapping[str, Any] | None, digits: int = 2) -> str:
    """A mean with its interval; a dash where there are too few questions: resampled, they lie too close together."""
    if own is None or not own["count"]:
        return "–"
    if own["low"] is None or own["count"] < FEW:
        return f"– (n = {own['count']})"
    return minus(f"{own['mean']:.{digits}f} [{own['low']:.{digits}f}, {own['high']:.{digits}f}]")


def minus(text: str) -> str:
    return text.replace("-", "−")


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    names = list(head)
    lines = [names, ["---"] * len(names), *(list(row) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write_between(page: Path, made: Mapping[str, str]) -> None:
    text = page.read_text(encoding="utf-8")
    for name, own in made.items():
        before, mark, rest = text.partition(f"<!-- {name} -->")
        if not mark:
            raise SystemExit(f"{page} has no mark <!-- {name} -->")
        after = re.split("<!-- end -->", rest, maxsplit=1)[1]
        text = f"{before}{mark}\n{own}\n<!-- end -->{after}"
    page.write_text(text, encoding="utf-8")
