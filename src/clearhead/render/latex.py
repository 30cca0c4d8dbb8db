"""Coloured text for a paper: a piece of LaTeX that needs the xcolor package and nothing else."""

import re

from clearhead.errors import InputError
from clearhead.explanation.explanation import Explanation
from clearhead.render.colours import NO_SCORE, hexed, ink, largest, levels, of_level
from clearhead.render.text_layout import Piece, lines, shape

_SIGNS = {
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
#: Written out, because TeX drops spaces at the beginning of a line.
_SPACE, _BREAK = "\\space%\n", "\\newline%\n"
_RUNS = re.compile(r"\s+|\S+")
_HEAD = r"% needs \usepackage[T1]{fontenc}, \usepackage{textcomp} and \usepackage{xcolor}"
_UNIT = r"\newcommand{\chunit}[3]{\colorbox[HTML]{#1}{\textcolor[HTML]{#2}{\strut #3}}\allowbreak}"


def latex(explanation: Explanation, special: bool = False) -> str:
    r"""The text as it was written, each unit on its colour; lines of the text stay lines.

    special: also what the model added, such as [CLS]

    >>> print(escaped("50% of a_b"))
    50\% of a\_b
    """
    if shape(explanation) != "text":
        raise InputError(
            f"{explanation.stream} is no text, so it has no coloured LaTeX: use e.plot() and save it as a PDF"
        )
    steps = levels(explanation.scores, largest(explanation))
    made = []
    for line in lines(explanation.units):
        pieces = [_piece(piece, None if piece.unit is None else int(steps[piece.unit]), special) for piece in line]
        made.append("".join(pieces))
    body = "\\par\n".join(made)
    return f"{_HEAD}\n{{\\setlength{{\\fboxsep}}{{0.8pt}}%\n{_UNIT}%\n\\noindent%\n{body}\\par}}\n"


def _piece(piece: Piece, level: int | None, special: bool) -> str:
    if piece.special and not special:
        return ""
    if level is None:
        return _spaced(piece.text)
    if not piece.text:
        return ""
    background = of_level(level)
    colours = "".join(f"{{{hexed(rgb)[1:].upper()}}}" for rgb in (background, ink(background)))
    text = escaped(piece.text.strip())
    text = rf"\texttt{{{text}}}" if piece.special else rf"\textit{{{text}}}" if level == NO_SCORE else text
    before, after = (_SPACE if piece.text[:1].isspace() else ""), (_SPACE if piece.text[-1:].isspace() else "")
    return f"{before}\\chunit{colours}{{{text}}}%\n{after}" if text else _SPACE


def _spaced(text: str) -> str:
    """What lies between units; a line break of the text is one in the paper."""
    return "".join(
        _BREAK if "\n" in part else _SPACE if part.isspace() else escaped(part) for part in _RUNS.findall(text)
    )


def escaped(text: str) -> str:
    """Text in which LaTeX finds no command."""
    return "".join(_SIGNS.get(sign, sign) for sign in text)
