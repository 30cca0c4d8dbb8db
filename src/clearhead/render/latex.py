"""Coloured text as LaTeX for papers; it needs the packages fontenc, textcomp and xcolor."""

import re

from clearhead.errors import InputError
from clearhead.explanation.explanation import Explanation
from clearhead.render.colours import (
    NO_SCORE_LEVEL,
    choose_text_colour,
    compute_colour_levels,
    compute_vmax,
    format_hex_colour,
    get_level_colour,
)
from clearhead.render.text_layout import TextSpan, build_text_lines, find_unit_layout

_LATEX_ESCAPES = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "-": "-{}",  # two of them would become a dash
    "`": r"\textasciigrave{}",
    "'": r"\textquotesingle{}",
}
#: An explicit command, because TeX drops spaces at the beginning of a line.
_LATEX_SPACE = "\\space%\n"
_LATEX_LINE_BREAK = "\\newline%\n"
_WHITESPACE_RUN_PATTERN = re.compile(r"\s+|\S+")
_REQUIRED_PACKAGES_COMMENT = r"% needs \usepackage[T1]{fontenc}, \usepackage{textcomp} and \usepackage{xcolor}"
_UNIT_MACRO = r"\newcommand{\chunit}[3]{\colorbox[HTML]{#1}{\textcolor[HTML]{#2}{\strut #3}}\allowbreak}"


def render_latex_text(explanation: Explanation, include_special: bool = False) -> str:
    """Render a text as LaTeX, each unit on its colour; line breaks are kept.

    Args:
        explanation: An explanation whose units are parts of a text.
        include_special: Whether to include tokens that the model added, such as [CLS].

    Returns:
        The LaTeX source.

    Raises:
        InputError: If the units are not parts of a text.
    """
    if find_unit_layout(explanation) != "text":
        raise InputError(
            f"{explanation.stream} is not a text, so it has no coloured LaTeX: use e.plot() and save it as a PDF"
        )
    levels = compute_colour_levels(explanation.scores, compute_vmax(explanation))
    lines = []
    for line in build_text_lines(explanation.units):
        formatted = [
            _format_span(span, None if span.unit_index is None else int(levels[span.unit_index]), include_special)
            for span in line
        ]
        lines.append("".join(formatted))
    body = "\\par\n".join(lines)
    return (
        f"{_REQUIRED_PACKAGES_COMMENT}\n{{\\setlength{{\\fboxsep}}{{0.8pt}}%\n{_UNIT_MACRO}%\n\\noindent%\n"
        f"{body}\\par}}\n"
    )


def _format_span(span: TextSpan, level: int | None, include_special: bool) -> str:
    """A unit on its colour, or the text between units if there is no level."""
    if span.is_special and not include_special:
        return ""
    if level is None:
        return _format_gap(span.text)
    if not span.text:
        return ""
    text = escape_latex(span.text.strip())
    if span.is_special:
        text = rf"\texttt{{{text}}}"
    elif level == NO_SCORE_LEVEL:
        text = rf"\textit{{{text}}}"
    if not text:
        return _LATEX_SPACE
    background = get_level_colour(level)
    colours = "".join(
        f"{{{format_hex_colour(rgb)[1:].upper()}}}" for rgb in (background, choose_text_colour(background))
    )
    leading_space = _LATEX_SPACE if span.text[:1].isspace() else ""
    trailing_space = _LATEX_SPACE if span.text[-1:].isspace() else ""
    return f"{leading_space}\\chunit{colours}{{{text}}}%\n{trailing_space}"


def _format_gap(text: str) -> str:
    """The text between units, with its line breaks."""
    return "".join(map(_format_gap_run, _WHITESPACE_RUN_PATTERN.findall(text)))


def _format_gap_run(run: str) -> str:
    """Format a run of text between units: white space as a LaTeX line break or space, the rest escaped."""
    if "\n" in run:
        return _LATEX_LINE_BREAK
    if run.isspace():
        return _LATEX_SPACE
    return escape_latex(run)


def escape_latex(text: str) -> str:
    r"""Escape all characters that have a meaning in LaTeX.

    Example:
        >>> print(escape_latex("50% of a_b"))
        50\% of a\_b
    """
    return "".join(_LATEX_ESCAPES.get(character, character) for character in text)
