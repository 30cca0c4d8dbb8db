"""The renderer's assets: served files, and the bundle of a standalone page."""

import re
from importlib.resources import files

import pytest

from clearhead.render import bundle
from clearhead.render.colours import (
    COLOUR_LEVELS_PER_SIGN,
    DARK_THEME,
    LIGHT_THEME,
    NO_SCORE_LEVEL,
    format_hex_colour,
    get_level_colour,
)


def test_assets_are_complete_and_other_paths_raise() -> None:
    folder = files("clearhead.render") / "assets"
    assert {file.name for file in folder.iterdir()} | {"palette.js"} == set(bundle.ASSET_NAMES)
    assert all(bundle.read_asset(name) for name in bundle.ASSET_NAMES)
    assert (
        bundle.get_asset_media_type("clearhead.css") == "text/css"
        and bundle.get_asset_media_type("dom.js") == "text/javascript"
    )
    for name in ("../html.py", "", "nothing.js", "/etc/passwd"):
        with pytest.raises(KeyError):
            bundle.read_asset(name)


def test_js_modules_import_only_exports_of_earlier_modules() -> None:
    exported: dict[str, set[str]] = {}
    for name in bundle.JS_MODULES:
        source = bundle.read_asset(name).decode()
        for names, other in re.findall(r'^import \{(.*?)\} from "\./([\w.]+)";', source, re.M):
            assert other in exported, f"{name} imports {other}, which comes later"
            assert {imported.strip() for imported in names.split(",")} <= exported[other], (
                f"{name} imports from {other}"
            )
        assert len(re.findall("^import ", source, re.M)) == len(
            re.findall(r'^import \{ [\w, ]+ \} from "\./', source, re.M)
        )
        exported[name] = set(re.findall(r"^export (?:async )?(?:const|function|class) (\w+)", source, re.M))


def test_bundle_size_is_bounded() -> None:
    assert sum(len(bundle.read_asset(name)) for name in bundle.ASSET_NAMES) < 160_000
    assert len(bundle.build_script()) + len(bundle.get_style_sheet()) < 135_000
    assert len(bundle.build_script(())) + len(bundle.get_style_sheet()) < 97_000


def test_bundle_uses_no_html_injection_or_network_api() -> None:
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        "fetch(",
        "XMLHttpRequest",
        "import(",
    ):
        assert word not in bundle.build_script()
    assert "</script" not in bundle.build_script().lower() and "http" not in bundle.build_script().replace(
        "http://www.w3.org/2000/svg", ""
    )


def test_js_palette_equals_python_palette() -> None:
    source = bundle.read_asset("palette.js").decode()
    for theme, name in ((LIGHT_THEME, "LIGHT"), (DARK_THEME, "DARK")):
        (listed,) = re.findall(rf"^export const {name} = \[(.*)\];", source, re.M)
        colours = [colour.strip(' "') for colour in listed.split(",")]
        for level in (-COLOUR_LEVELS_PER_SIGN, 0, 7, COLOUR_LEVELS_PER_SIGN, NO_SCORE_LEVEL):
            assert colours[level + COLOUR_LEVELS_PER_SIGN] == format_hex_colour(get_level_colour(level, theme))
