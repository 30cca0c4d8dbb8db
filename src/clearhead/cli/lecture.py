"""`clearhead lecture`: Grad-SAM beside SHAP on five sentences, as a table and one figure."""

import sys
from pathlib import Path
from typing import Annotated

import typer

import clearhead
from clearhead.cli import options as opt
from clearhead.cli import output as put
from clearhead.cli.inputs import load
from clearhead.errors import InputError

EXAMPLES = (
    "clearhead lecture",
    "clearhead lecture --out lecture.png",
    'clearhead lecture "A wonderful film" "What a waste of time" --json',
)
#: What figures can be written as.
FIGURES = (".png", ".svg", ".pdf")


def lecture(
    sentences: Annotated[
        list[str] | None,
        typer.Argument(metavar="SENTENCE", help="Sentences. Default: the five of the lecture.", show_default=False),
    ] = None,
    model: opt.Model = None,
    out: Annotated[
        str | None, typer.Option(metavar="FILE", help="Draw it all as one figure: .png, .svg or .pdf.")
    ] = None,
    as_json: opt.Json = False,
) -> None:
    """Put Grad-SAM beside SHAP: rankings, rank correlation without special tokens, what becomes of [CLS].

    The predicted class of each sentence is explained. "SHAP, as in the lecture" explains class 1, counted from 0,
    whatever is predicted.
    """
    put.check_places(out, option="--out")
    if out is not None and Path(out).suffix.lower() not in FIGURES:
        raise InputError(f"--out {out!r} must end in one of {', '.join(FIGURES)}")
    ex = load(opt.Loading(model))
    with put.waiting("explaining"):
        found = clearhead.lecture(ex, sentences) if sentences else clearhead.lecture(ex)
    if out is not None:
        found.plot().savefig(out, dpi=144)
        print(f"wrote {out}", file=sys.stderr)
    if as_json:
        put.print_json(found.to_dict())
    else:
        put.console().print(found)
