"""Pictures of a report, as SVG inside the page: curves, and intervals beside their figures."""

from collections.abc import Mapping, Sequence

from clearhead.bench.explaining import CONTROLS
from clearhead.bench.statistics import Interval
from clearhead.show.colours import hexed, oklch
from clearhead.show.markup import Markup, joined, tag

WIDE, HIGH, EDGE = 420, 240, 34

#: Hues that stay apart next to one another; beyond these, lines are dashed.
HUES = (45, 250, 145, 330, 95, 200, 290, 15)
DASHES = (None, "6 3", "2 3", "8 3 2 3")


def look(methods: Sequence[str]) -> dict[str, dict[str, str | None]]:
    """A colour and a dash for each method, controls in grey."""
    made: dict[str, dict[str, str | None]] = {}
    rivals = [method for method in sorted(methods) if method not in CONTROLS]
    for place, method in enumerate(rivals):
        hue, dash = HUES[place % len(HUES)], DASHES[place // len(HUES) % len(DASHES)]
        made[method] = {"stroke": hexed(oklch(0.62, 0.15, hue)), "stroke_dasharray": dash}
    for place, method in enumerate(method for method in CONTROLS if method in methods):
        made[method] = {"stroke": "#8b8e96", "stroke_dasharray": DASHES[1 + place]}
    return made


def curves(title: str, by_method: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> Markup:
    """Lines over a common axis, with their names below."""
    every = [value for _, ups in by_method.values() for value in ups]
    across = [value for along, _ in by_method.values() for value in along]
    low, high = min(0.0, *every), max(1.0, *every)
    left, right = min(across), max(across) if max(across) > min(across) else min(across) + 1

    def x(value: float) -> float:
        return EDGE + (value - left) / (right - left) * (WIDE - EDGE - 18)

    def y(value: float) -> float:
        return HIGH - EDGE + 12 - (value - low) / (high - low) * (HIGH - EDGE - 4)

    looks = look(list(by_method))
    steps = [(low + (high - low) * part / 4) for part in range(5)]
    lines = [_rule(EDGE, y(step), WIDE - 18, f"{step:.2f}") for step in steps]
    marks = [
        tag(
            "text",
            f"{left + (right - left) * part / 4:.2f}",
            x=x(left + (right - left) * part / 4),
            y=HIGH - 4,
            text_anchor="middle",
        )
        for part in range(5)
    ]
    drawn = [
        tag(
            "polyline",
            tag("title", method),
            points=" ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in zip(*by_method[method], strict=True)),
            fill="none",
            stroke_width=2,
            **looks[method],
        )
        for method in by_method
    ]
    picture = tag("svg", *lines, *marks, *drawn, viewBox=f"0 0 {WIDE} {HIGH}", role="img", aria_label=title)
    names = [tag("span", _sample(looks[method]), method) for method in by_method]
    return tag(
        "figure", tag("figcaption", title), picture, tag("div", *names, class_="ch-names-of"), class_="ch-curves"
    )


def _rule(left: float, y: float, right: float, words: str) -> Markup:
    line = tag("line", x1=left, x2=right, y1=f"{y:.1f}", y2=f"{y:.1f}", class_="ch-rule")
    return joined(line, tag("text", words, x=left - 4, y=f"{y + 3:.1f}", text_anchor="end"))


def _sample(how: Mapping[str, str | None]) -> Markup:
    line = tag("line", x1=0, x2=22, y1=5, y2=5, stroke_width=2.5, **how)
    return tag("svg", line, viewBox="0 0 22 10", width=22, height=10, aria_hidden="true")


def whisker(found: Interval, low: float, high: float) -> Markup:
    """A mean with its interval on the scale of its column."""
    span = (high - low) or 1.0
    at = [f"{4 + (value - low) / span * 92:.1f}" for value in (found.low, found.mean, found.high)]
    return tag(
        "svg",
        tag("line", x1=at[0], x2=at[2], y1=6, y2=6, class_="ch-span"),
        tag("circle", cx=at[1], cy=6, r=3, class_="ch-mean"),
        viewBox="0 0 100 12",
        width=100,
        height=12,
        aria_hidden="true",
    )
