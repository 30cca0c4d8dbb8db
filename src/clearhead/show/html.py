"""One self-contained HTML file: no outside address, every token escaped, readable without a script and on paper."""

from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

from clearhead.comparison import Comparison
from clearhead.errors import InputError
from clearhead.files import whole
from clearhead.joint import AnyExplanation
from clearhead.show import cards, views, wording
from clearhead.show.colours import DARK, every_level, hexed, ink, of_level
from clearhead.show.layout import name
from clearhead.show.markup import Markup, data, joined, script, style_sheet, tag


def report(explanations: Any, path: str | Path, title: str | None = None) -> Path:
    """Write several explanations onto one self-contained page.

    explanations: a list of them, or whatever `explain` and `compare` returned, or a list of these
    """
    text = page(_every(explanations), title)
    with whole(path) as partial:
        partial.write_text(text, encoding="utf-8")
    return Path(path)


def _every(given: Any) -> list[AnyExplanation]:
    """All explanations in what `explain` and `compare` return."""
    if isinstance(given, AnyExplanation):
        return [given]
    if isinstance(given, Comparison | Mapping):
        return _every([given[key] for key in given])
    if isinstance(given, Iterable) and not isinstance(given, str):
        return [explanation for part in given for explanation in _every(part)]
    raise InputError(f"expected explanations, but got a {type(given).__name__}")


def page(given: Sequence[AnyExplanation], title: str | None = None) -> str:
    """A whole page. Explanations of one input stand side by side; inputs follow one another."""
    explanations = _every(given)
    if not explanations:
        raise InputError("nothing to show: the list is empty")
    groups = by_input(explanations)
    heading = title or _title(explanations, len(groups))
    sections = [section(group, titled=len(groups) > 1 or title is not None) for group in groups]
    models = sorted({name(str(e.provenance["model"])) for e in explanations if e.provenance.get("model")})
    foot = f"Scores are raw; only colours are scaled, {_scaled(explanations)}."
    return document(" · ".join(["clearhead", *models]), name(heading), sections, foot)


def document(eyebrow: str, title: str, sections: Iterable[Markup], foot: str, styles: str = "") -> str:
    """A page around its sections, that fetches nothing; `styles` are rules of our own beside those of all pages."""
    body = tag(
        "main",
        tag(
            "div",
            tag("p", eyebrow, class_="ch-eyebrow"),
            tag("h1", title),
            *sections,
            tag("p", foot, class_="ch-foot"),
        ),
        class_="clearhead ch-page",
    )
    head = tag("head", *_head(title), style_sheet(styles) if styles else None)
    return f'<!doctype html>\n<html lang="en">{head}<body>{body}{script(_js())}</body></html>\n'


def fragment(explanation: AnyExplanation) -> str:
    """A piece of a page, for notebooks; its styles stay inside it."""
    return _fragment([explanation])


def fragment_of_comparison(comparison: Comparison) -> str:
    """Several methods on one input, side by side, and how far they agree."""
    return _fragment(list(comparison.explanations.values()))


def _fragment(group: list[AnyExplanation]) -> str:
    made = tag("div", section(group, titled=True, machine=False), class_="clearhead ch-fragment")
    return joined(style_sheet(_css()), made, script(_js()))


def by_input(explanations: Iterable[AnyExplanation]) -> list[list[AnyExplanation]]:
    """Explanations of the same units by the same model together, in the order in which inputs first came."""
    groups: dict[Any, list[AnyExplanation]] = {}
    for explanation in explanations:
        units = tuple(part.units for part in explanation.parts.values())
        made_of = (explanation.provenance.get("model"), explanation.provenance.get("input"), units)
        picture = None if explanation.picture is None else explanation.picture.tobytes()
        groups.setdefault((*made_of, picture), []).append(explanation)
    return list(groups.values())


def section(group: Sequence[AnyExplanation], titled: bool, machine: bool = True) -> Markup:
    """Everything about one input."""
    first, named = group[0], labelled(group)
    notes = dict.fromkeys(note for e in group for note in wording.notes(e))
    wide = any(len(wording.streams(e)[0]) > 1 or e.steps is not None for e in group)
    return tag(
        "section",
        tag("h2", wording.heading(first) if _one_target(group) else "Why?") if titled else None,
        tag("div", views.picture(first), _explained(group), cards.prediction(first), class_="ch-about"),
        *(tag("p", note, class_="ch-warn", role="note") for note in notes),
        tag("div", *(cards.card(e, label) for label, e in named.items()), class_=f"ch-methods{' ch-wide' * wide}"),
        cards.agreement(Comparison(named)) if len(named) > 1 else None,
        *(data(e.to_dict(short=True)) for e in group if machine),
        class_="ch-input",
    )


def labelled(group: Sequence[AnyExplanation]) -> dict[str, AnyExplanation]:
    """Each explanation under a name of its own: its method, and its target or a number where that is not enough."""
    named: dict[str, AnyExplanation] = {}
    for explanation in group:
        label = name(explanation.method)
        if not _one_target(group):
            label += f" of {name(str(explanation.target.get('name')))}"
        same = sum(other == label or other.startswith(f"{label} (") for other in named)
        named[f"{label} ({same + 1})" if same else label] = explanation
    return named


def _explained(group: Sequence[AnyExplanation]) -> Markup:
    targets = list(dict.fromkeys(wording.target_line(explanation) for explanation in group))
    return tag("div", tag("p", "Explained", class_="ch-label"), *(tag("p", target) for target in targets))


def _one_target(group: Sequence[AnyExplanation]) -> bool:
    return len({str(explanation.target.get("name")) for explanation in group}) == 1


def _scaled(explanations: Sequence[AnyExplanation]) -> str:
    several = any(len(explanation.parts) > 1 for explanation in explanations)
    return "each method’s by its largest score" + (" in each stream" if several else "")


def _title(explanations: Sequence[AnyExplanation], inputs: int) -> str:
    if inputs == 1:
        return wording.heading(explanations[0]) if _one_target(explanations) else "Why?"
    return f"{inputs} inputs explained"


def _head(title: str) -> Iterable[Markup]:
    # Even if something escaped our escaping, the browser would run no script but ours and fetch nothing.
    digest = b64encode(sha256(_js().encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    yield tag("meta", charset="utf-8")
    yield tag("meta", http_equiv="Content-Security-Policy", content=f"{policy}; base-uri 'none'; form-action 'none'")
    yield tag("meta", name="viewport", content="width=device-width, initial-scale=1")
    yield tag("meta", name="color-scheme", content="light dark")
    yield tag("title", title)
    yield style_sheet(_css())


@cache
def _css() -> str:
    light = "".join(_rule(level, hexed(of_level(level)), "#000") for level in every_level())
    both = "".join(_both(level) for level in every_level())
    return _asset("clearhead.css") + f"{light}\n@supports(color:light-dark(#000,#fff)){{{both}}}"


def _both(level: int) -> str:
    light, dark = of_level(level), of_level(level, DARK)
    inks = (hexed(ink(light)), hexed(ink(dark)))
    return _rule(level, f"light-dark({hexed(light)},{hexed(dark)})", f"light-dark({inks[0]},{inks[1]})")


def _rule(level: int, background: str, text: str) -> str:
    return f".clearhead .{views.level_class(level)}{{--c:{background};--i:{text}}}"


@cache
def _js() -> str:
    return _asset("clearhead.js")


def _asset(file: str) -> str:
    return (files("clearhead.show") / "assets" / file).read_text(encoding="utf-8")
