import re

import pytest

from clearhead import Explanation, InputError
from clearhead.render.colours import compute_colour_levels, compute_vmax, format_hex_colour, get_level_colour
from clearhead.render.latex import escape_latex
from tests.render.conftest import HOSTILE_STRINGS, make_explanation

_UNESCAPED = {r"\textbackslash{}": "\\", r"\textasciicircum{}": "^", r"\textasciitilde{}": "~", r"\textless{}": "<"}
_UNESCAPED |= {r"\textgreater{}": ">", r"\textbar{}": "|", r"\textquotedbl{}": '"', r"\textasciigrave{}": "`"}
_UNESCAPED |= {r"\textquotesingle{}": "'", "-{}": "-"}


def typeset(source: str) -> str:
    """Return the text that LaTeX would typeset."""
    body = re.sub(r"%\n[ \t]*", "", source.partition("\\noindent%\n")[2])  # what TeX does with a comment
    assert body.endswith("\\par}\n")
    body = body.removesuffix("\\par}\n").replace("\\newline", "\n").replace("\\space", " ").replace("\\par\n", "\n")
    body = re.sub(r"\\chunit\{\w{6}\}\{\w{6}\}\{((?:[^{}\\]|\\.|\{\})*)\}", r"\1", body)
    for escaped, character in _UNESCAPED.items():
        body = body.replace(escaped, character)
    return re.sub(r"\\([{}$&#%_])", r"\1", body)


def test_typeset_latex_equals_the_text(text: dict[str, Explanation]) -> None:
    explanation = text["generic"]
    assert typeset(explanation.latex()).split() == explanation.units.texts[0].split()
    assert "[CLS]" not in explanation.latex() and "[CLS]" in explanation.latex(include_special=True)


def test_unit_colours_equal_score_colours(text: dict[str, Explanation]) -> None:
    explanation = text["attcat"]
    steps = compute_colour_levels(explanation.scores, compute_vmax(explanation))[explanation.units.content_indices()]
    colours = re.findall(r"\\chunit\{(\w{6})\}", explanation.latex())
    assert colours == [format_hex_colour(get_level_colour(int(step)))[1:].upper() for step in steps]


def test_latex_special_characters_are_escaped(hostile: Explanation) -> None:
    for text in (*HOSTILE_STRINGS, "\\input{/etc/passwd}", "a--b ``c''", "^^41"):
        remaining = re.sub(r"\\text\w+\{\}|\\[{}$&#%_]|-\{\}", "", escape_latex(text))
        assert not set(remaining) & set("\\{}$&#%_^~")
    assert "\\input" not in make_explanation(["\\input{x}"], [1.0]).latex()
    assert hostile.latex().count("{") == hostile.latex().count("}") or "\\{" in hostile.latex()


def test_image_explanation_raises(image: dict[str, Explanation]) -> None:
    with pytest.raises(InputError, match="image is not a text"):
        image["generic"].latex()
