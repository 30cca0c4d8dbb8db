import re

import pytest

from clearhead import Explanation, InputError
from clearhead.render.colours import compute_colour_levels, compute_vmax, format_hex_colour, get_level_colour
from clearhead.render.latex import escape_latex
from tests.render.conftest import NASTY, made

_BACK = {r"\textbackslash{}": "\\", r"\textasciicircum{}": "^", r"\textasciitilde{}": "~", r"\textless{}": "<"}
_BACK |= {r"\textgreater{}": ">", r"\textbar{}": "|", r"\textquotedbl{}": '"', r"\textasciigrave{}": "`"}
_BACK |= {r"\textquotesingle{}": "'", "-{}": "-"}


def read(source: str) -> str:
    """The text that LaTeX would set."""
    body = re.sub(r"%\n[ \t]*", "", source.partition("\\noindent%\n")[2])  # what TeX does with a comment
    assert body.endswith("\\par}\n")
    body = body.removesuffix("\\par}\n").replace("\\newline", "\n").replace("\\space", " ").replace("\\par\n", "\n")
    body = re.sub(r"\\chunit\{\w{6}\}\{\w{6}\}\{((?:[^{}\\]|\\.|\{\})*)\}", r"\1", body)
    for made_up, sign in _BACK.items():
        body = body.replace(made_up, sign)
    return re.sub(r"\\([{}$&#%_])", r"\1", body)


def test_the_text_can_be_read_back(text: dict[str, Explanation]) -> None:
    explanation = text["generic"]
    assert read(explanation.latex()).split() == explanation.units.texts[0].split()
    assert "[CLS]" not in explanation.latex() and "[CLS]" in explanation.latex(include_special=True)


def test_each_unit_has_its_colour(text: dict[str, Explanation]) -> None:
    explanation = text["attcat"]
    steps = compute_colour_levels(explanation.scores, compute_vmax(explanation))[explanation.units.content_indices()]
    found = re.findall(r"\\chunit\{(\w{6})\}", explanation.latex())
    assert found == [format_hex_colour(get_level_colour(int(step)))[1:].upper() for step in steps]


def test_no_text_is_a_command(nasty: Explanation) -> None:
    for sign in (*NASTY, "\\input{/etc/passwd}", "a--b ``c''", "^^41"):
        left = re.sub(r"\\text\w+\{\}|\\[{}$&#%_]|-\{\}", "", escape_latex(sign))
        assert not set(left) & set("\\{}$&#%_^~")
    assert "\\input" not in made(["\\input{x}"], [1.0]).latex()
    assert nasty.latex().count("{") == nasty.latex().count("}") or "\\{" in nasty.latex()


def test_a_picture_has_no_text(image: dict[str, Explanation]) -> None:
    with pytest.raises(InputError, match="image is not a text"):
        image["generic"].latex()
