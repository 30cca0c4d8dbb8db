"""The table of methods for the documentation, generated from what the methods declare.

python -m clearhead.methods.catalogue > docs/methods.md
"""

import sys

from clearhead.methods.base import REGISTRY, Declaration, Fold, Method

INTRODUCTION = """\
# Methods

This page is generated from the declarations in `src/clearhead/methods` (`make docs`); a test holds it to them.
Axioms are tested on models with known answers; `clearhead.verify("generic", ex)` (`clearhead verify generic`) measures
on your model what a method declares and what is promised of every method.

| method | family | scores | depends on the target | cost | has | taxonomy |
| --- | --- | --- | --- | --- | --- | --- |
"""


def row(declaration: Declaration) -> str:
    has = ", ".join(f"`{name}=`" for name in sorted(declaration.has)) or "–"
    cells = (
        f"[`{declaration.name}`](#{declaration.name})",
        declaration.family,
        "signed" if declaration.signed else "not negative",
        "yes" if declaration.target == "any" else "no",
        declaration.cost,
        has,
        declaration.taxonomy,
    )
    return "| " + " | ".join(cells) + " |"


def section(method: type[Fold]) -> str:
    """One method: its formula as its file states it, its options, its source."""
    declaration = method.declaration
    module = sys.modules[method.__module__]
    lines = [f"## {declaration.name}", "", (module.__doc__ or "").strip(), ""]
    options = Method.option_names(declaration.name)
    if options:
        lines += ["Options: " + ", ".join(f"`{name}={getattr(method, name)!r}`" for name in options) + ".", ""]
    lines += [f"Asks for: {', '.join(sorted(a.replace('_', ' ') for a in declaration.asks)) or 'nothing'}.", ""]
    if declaration.axioms:
        lines += [f"Axioms (tested): {'; '.join(declaration.axioms)}.", ""]
    if declaration.citation != "–":
        lines += [f"Source: {declaration.citation}.", ""]
    if declaration.note:
        lines += [f"Note: {declaration.note}", ""]
    return "\n".join(lines)


def markdown() -> str:
    ours = [REGISTRY[name] for name in sorted(REGISTRY) if REGISTRY[name].__module__.startswith("clearhead.")]
    table = "\n".join(row(method.declaration) for method in ours)
    return INTRODUCTION + table + "\n\n" + "\n".join(section(method) for method in ours)


if __name__ == "__main__":
    print(markdown(), end="")
