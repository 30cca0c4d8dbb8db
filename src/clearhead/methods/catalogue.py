"""Generate the methods page of the documentation from the declarations and docstrings of the methods.

python -m clearhead.methods.catalogue > docs/methods.md
"""

import sys

from clearhead.methods.base import METHOD_REGISTRY, AttributionMethod, Declaration, Method

CATALOGUE_INTRODUCTION = """\
# Methods

This page is generated from the declarations in `src/clearhead/methods` (`make docs`); a test compares the two.
Axioms are tested on models with known results. `clearhead.verify("generic", ex)` (`clearhead verify generic`) measures
the declared properties of a method, and the invariants of all methods, on your model.

Cost is the number of inputs that run through the model, forward and backward, to explain one target of one input with
the default options. It includes the clean pass, which runs the unchanged input.

| method | family | scores | depends on the target | cost | options | taxonomy |
| --- | --- | --- | --- | --- | --- | --- |
"""


def format_table_row(declaration: Declaration) -> str:
    """Return the Markdown table row of one method."""
    options = ", ".join(f"`{name}=`" for name in sorted(declaration.supports)) or "–"
    cells = (
        f"[`{declaration.name}`](#{declaration.name})",
        declaration.family,
        "signed" if declaration.signed else "not negative",
        "yes" if declaration.target == "any" else "no",
        str(declaration.cost),
        options,
        declaration.taxonomy,
    )
    return "| " + " | ".join(cells) + " |"


def format_method_section(method: type[AttributionMethod]) -> str:
    """Return the Markdown section of one method: the docstring of its module, options, requirements and source."""
    declaration = method.declaration
    module = sys.modules[method.__module__]
    lines = [f"## {declaration.name}", "", (module.__doc__ or "").strip(), ""]
    if declaration.guidance:
        lines += [declaration.guidance, ""]
    options = Method.option_names(declaration.name)
    if options:
        lines += ["Options: " + ", ".join(f"`{name}={getattr(method, name)!r}`" for name in options) + ".", ""]
    requirements = ", ".join(sorted(name.replace("_", " ") for name in declaration.requires)) or "nothing"
    lines += [f"Requires: {requirements}.", ""]
    if declaration.axioms:
        lines += [f"Axioms (tested): {'; '.join(declaration.axioms)}.", ""]
    if declaration.citation != "–":
        lines += [f"Source: {declaration.citation}.", ""]
    if declaration.note:
        lines += [f"Note: {declaration.note}", ""]
    return "\n".join(lines)


def render_catalogue() -> str:
    """Return the whole page: a table of the methods of clearhead, then one section per method."""
    builtin_methods = [
        METHOD_REGISTRY[name]
        for name in sorted(METHOD_REGISTRY)
        if METHOD_REGISTRY[name].__module__.startswith("clearhead.")
    ]
    table = "\n".join(format_table_row(method.declaration) for method in builtin_methods)
    return (
        CATALOGUE_INTRODUCTION + table + "\n\n" + "\n".join(format_method_section(method) for method in builtin_methods)
    )


if __name__ == "__main__":
    print(render_catalogue(), end="")
