"""The renderer's files: as ES modules for a server, as one script and one style sheet for a page that stands alone."""

import json
import re
from functools import cache
from importlib.resources import files

from clearhead.render.colours import DARK, LEVELS, LIGHT, every_level, hexed, ink, of_level

#: Modules in the order in which they need one another; the last is the one that others import.
MODULES = (
    "palette.js",
    "dom.js",
    "format.js",
    "colour.js",
    "tip.js",
    "matrix.js",
    "bars.js",
    "text.js",
    "picture.js",
    "links.js",
    "card.js",
    "attention.js",
    "figures.js",
    "plots.js",
    "clearhead.js",
)
NAMES = (*MODULES, "clearhead.css")
#: Modules that only some pages need, and what stands in their place elsewhere.
EXTRAS = {"plots": "{ PLOTS: {} }", "attention": "{}"}
_IMPORT = re.compile(r'^import \{ ([\w, ]+) \} from "\./([\w.]+)";\n', re.M)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:const|function|class) (\w+))", re.M)


def read(name: str) -> bytes:
    """One file by its name; KeyError for any other."""
    if name not in NAMES:
        raise KeyError(name)
    return _text(name).encode()


def media_type(name: str) -> str:
    return "text/css" if name.endswith(".css") else "text/javascript"


@cache
def style() -> str:
    return _text("clearhead.css")


@cache
def script(extras: tuple[str, ...] = tuple(EXTRAS)) -> str:
    """All modules as one script, each in a function of its own, which draws what it finds in the page.

    extras: what it can draw beside explanations; a page without plots and heads is a quarter smaller without them
    """
    left_out = {f"{name}.js": empty for name, empty in EXTRAS.items() if name not in extras}
    parts = (f'modules["{name}"] = {left_out[name]};' if name in left_out else _wrapped(name) for name in MODULES)
    made = "\n".join(parts)
    return f'"use strict";(() => {{\nconst modules = {{}};\n{made}\nmodules["clearhead.js"].start();\n}})();\n'


def _wrapped(name: str) -> str:
    source = _IMPORT.sub(r'const { \1 } = modules["\2"];\n', _text(name))
    exported = ", ".join(_EXPORT.findall(source))
    lines = (line.strip() for line in _EXPORT.sub("", source).split("\n"))
    body = "\n".join(line for line in lines if line and not line.startswith("//"))
    return f'modules["{name}"] = (() => {{\n{body}\nreturn {{ {exported} }};\n}})();'


@cache
def _text(name: str) -> str:
    if name == "palette.js":
        return _palette()
    return (files("clearhead.render") / "assets" / name).read_text(encoding="utf-8")


def _palette() -> str:
    """The one colour map, level by level, as the terminal and the figures have it."""
    made = {theme: [of_level(level, own) for level in every_level()] for theme, own in _THEMES.items()}
    lines = [f"export const LEVELS = {LEVELS};"]
    for theme, colours in made.items():
        lines.append(f"export const {theme} = {json.dumps([hexed(colour) for colour in colours])};")
        lines.append(f"export const INK_ON_{theme} = {json.dumps([hexed(ink(colour)) for colour in colours])};")
    return "\n".join([*lines, ""])


_THEMES = {"LIGHT": LIGHT, "DARK": DARK}
