"""Assets of the JavaScript renderer: ES modules for the web server; one script and style sheet for standalone pages."""

import json
import re
from functools import cache
from importlib.resources import files

from clearhead.render.colours import (
    COLOUR_LEVELS_PER_SIGN,
    DARK_THEME,
    LIGHT_THEME,
    choose_text_colour,
    format_hex_colour,
    get_level_colour,
    iter_colour_levels,
)

#: Modules in the order of their dependencies; the last one is the entry point.
JS_MODULES = (
    "palette.js",
    "dom.js",
    "format.js",
    "colour.js",
    "tooltip.js",
    "matrix.js",
    "bars.js",
    "text.js",
    "image.js",
    "links.js",
    "input_view.js",
    "attention.js",
    "tables.js",
    "charts.js",
    "clearhead.js",
)
ASSET_NAMES = (*JS_MODULES, "clearhead.css")
#: Modules that only some pages need, and the exports that replace them on other pages.
OPTIONAL_MODULE_STUBS = {"charts": "{ CHARTS: {} }", "attention": "{}"}
_IMPORT_PATTERN = re.compile(r'^import \{ ([\w, ]+) \} from "\./([\w.]+)";\n', re.M)
_EXPORT_PATTERN = re.compile(r"^export (?=(?:async )?(?:const|function|class) (\w+))", re.M)


def read_asset(name: str) -> bytes:
    """Read an asset.

    Args:
        name: One of `ASSET_NAMES`.

    Returns:
        The content of the file.

    Raises:
        KeyError: If there is no such asset.
    """
    if name not in ASSET_NAMES:
        raise KeyError(name)
    return _read_asset_text(name).encode()


def get_asset_media_type(name: str) -> str:
    """Return "text/css" for style sheets and "text/javascript" for everything else.

    Args:
        name: Name of the file.

    Returns:
        The value of the header Content-Type.
    """
    return "text/css" if name.endswith(".css") else "text/javascript"


@cache
def get_style_sheet() -> str:
    """Return the style sheet of all pages."""
    return _read_asset_text("clearhead.css")


@cache
def build_script(optional_modules: tuple[str, ...] = tuple(OPTIONAL_MODULE_STUBS)) -> str:
    """Bundle all modules into one script, each in its own function; it renders the data found in the page.

    Args:
        optional_modules: The optional modules to include. A page without charts and attention heads is a quarter
            smaller without them.
    """
    stubs = {f"{name}.js": stub for name, stub in OPTIONAL_MODULE_STUBS.items() if name not in optional_modules}
    modules = "\n".join(
        f'modules["{name}"] = {stubs[name]};' if name in stubs else _wrap_module(name) for name in JS_MODULES
    )
    return f'"use strict";(() => {{\nconst modules = {{}};\n{modules}\nmodules["clearhead.js"].start();\n}})();\n'


def _wrap_module(name: str) -> str:
    """Turn an ES module into a function that returns its exports, without comments and indentation."""
    source = _IMPORT_PATTERN.sub(r'const { \1 } = modules["\2"];\n', _read_asset_text(name))
    exported = ", ".join(_EXPORT_PATTERN.findall(source))
    lines = (line.strip() for line in _EXPORT_PATTERN.sub("", source).split("\n"))
    body = "\n".join(line for line in lines if line and not line.startswith("//"))
    return f'modules["{name}"] = (() => {{\n{body}\nreturn {{ {exported} }};\n}})();'


@cache
def _read_asset_text(name: str) -> str:
    """Read an asset of the package; palette.js is generated from the colour map instead."""
    if name == "palette.js":
        return _build_palette_module()
    return (files("clearhead.render") / "assets" / name).read_text(encoding="utf-8")


def _build_palette_module() -> str:
    """The colour map of terminal and figures, level by level, as a JavaScript module."""
    lines = [f"export const LEVELS = {COLOUR_LEVELS_PER_SIGN};"]
    for name, theme in _THEMES_BY_NAME.items():
        backgrounds = [get_level_colour(level, theme) for level in iter_colour_levels()]
        hex_colours = [format_hex_colour(background) for background in backgrounds]
        hex_text_colours = [format_hex_colour(choose_text_colour(background)) for background in backgrounds]
        lines.append(f"export const {name} = {json.dumps(hex_colours)};")
        lines.append(f"export const INK_ON_{name} = {json.dumps(hex_text_colours)};")
    return "\n".join([*lines, ""])


_THEMES_BY_NAME = {"LIGHT": LIGHT_THEME, "DARK": DARK_THEME}
