"""`clearhead lecture`: Grad-SAM compared with SHAP on five sentences, as a table and one figure."""

from pathlib import Path
from typing import Annotated

import typer

import clearhead
from clearhead.cli import options as opt
from clearhead.cli import output as put
from clearhead.cli.inputs import load_explainer
from clearhead.errors import InputError

LECTURE_EXAMPLES = (
    "clearhead lecture",
    "clearhead lecture --figure lecture.png",
    'clearhead lecture "A wonderful film" "What a waste of time" --json',
)
FIGURE_SUFFIXES = (".png", ".svg", ".pdf")


@opt.flatten_option_groups
def lecture(
    model_options: opt.CliModelOptions,
    sentences: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SENTENCE",
            help="Sentences to explain. Default: five built-in sentences from a lecture on explaining text "
            "classifiers.",
            show_default=False,
        ),
    ] = None,
    figure: Annotated[
        str | None, typer.Option(metavar="FILE", help="Draw the comparison as one figure (.png, .svg or .pdf).")
    ] = None,
    as_json: opt.JsonOption = False,
) -> None:
    """Compare Grad-SAM with SHAP: token rankings, rank correlation without special tokens, and the score of [CLS].

    The predicted class of each sentence is explained. The column "SHAP, as in the lecture" reproduces the notebook
    of a lecture: it explains class 1 (counting from 0), regardless of the prediction.
    """
    put.check_output_paths(figure, option="--figure")
    if figure is not None and Path(figure).suffix.lower() not in FIGURE_SUFFIXES:
        raise InputError(f"--figure {figure!r} must end in one of {', '.join(FIGURE_SUFFIXES)}")
    explainer = load_explainer(model_options)
    with put.status_spinner("explaining"):
        result = clearhead.run_lecture(explainer, sentences) if sentences else clearhead.run_lecture(explainer)
    if figure is not None:
        result.plot().savefig(figure, dpi=144)
        put.report_written(figure)
    if as_json:
        put.print_json(result.to_dict())
    else:
        put.make_console().print(result)
