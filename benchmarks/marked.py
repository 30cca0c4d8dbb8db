"""Tables in pages that are otherwise written by hand: replaces the text between `<!-- NAME -->` and `<!-- end -->`."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

#: The interval of fewer is not printed.
MIN_COUNT_FOR_INTERVAL = 5


def format_interval(interval: Mapping[str, Any] | None, digits: int = 2) -> str:
    """A mean with its interval; a dash where there are too few questions: resampled, they lie too close together."""
    if interval is None or not interval["count"]:
        return "–"
    if interval["low"] is None or interval["count"] < MIN_COUNT_FOR_INTERVAL:
        return f"– (n = {interval['count']})"
    return use_minus_sign(
        f"{interval['mean']:.{digits}f} [{interval['low']:.{digits}f}, {interval['high']:.{digits}f}]"
    )


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
