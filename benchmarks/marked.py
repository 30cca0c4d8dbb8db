"""Tables in pages that are otherwise written by hand: replaces the text between `<!-- NAME -->` and `<!-- end -->`."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def format_interval(interval: Mapping[str, Any] | None, digits: int = 2) -> str:
    """A mean with its interval and its count; a dash where there is no interval."""
    if interval is None or not interval["count"]:
        return "–"
    if interval["low"] is None:
        return f"– (n = {interval['count']})"
    bounds = f"{interval['low']:.{digits}f}, {interval['high']:.{digits}f}"
    return use_minus_sign(f"{interval['mean']:.{digits}f} [{bounds}], n = {interval['count']}")


def use_minus_sign(text: str) -> str:
    return text.replace("-", "−")


def render_table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    names = list(head)
    lines = [names, ["---"] * len(names), *(list(row) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def replace_marked_sections(page: Path, sections: Mapping[str, str]) -> None:
    text = page.read_text(encoding="utf-8")
    for name, own in sections.items():
        before, mark, rest = text.partition(f"<!-- {name} -->")
        if not mark:
            raise SystemExit(f"{page} has no mark <!-- {name} -->")
        after = re.split("<!-- end -->", rest, maxsplit=1)[1]
        text = f"{before}{mark}\n{own}\n<!-- end -->{after}"
    page.write_text(text, encoding="utf-8")
