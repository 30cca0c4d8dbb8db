"""The words of the command line: options that several verbs share, and how what is typed becomes what the API takes."""

import ast
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.errors import InputError

if TYPE_CHECKING:
    from clearhead.explainer import MethodLike

_WHAT, _MODEL, _OUT, _DATA = "What is explained", "Model and run", "Output", "Data: a table or a folder"

Inputs = Annotated[
    list[str],
    typer.Argument(
        metavar="INPUT",
        help="A text; a picture (a file, or chelsea and others of scikit-image); a .txt file; or data: a CSV, "
        "TSV or JSONL file, a folder of .txt files or of pictures.",
        show_default=False,
    ),
]
Input = Annotated[str, typer.Argument(metavar="INPUT", help="A text, a picture or a .txt file.", show_default=False)]

Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="NAME",
        rich_help_panel=_MODEL,
        help="zoo:NAME (see clearhead models), a folder, or a hub name. Default: zoo:sentiment for texts, zoo:pets for "
        "pictures.",
    ),
]
Methods = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        metavar="NAME,…",
        rich_help_panel=_WHAT,
        help="One method or several, which then share one pass; options in brackets: grad-sam(received=True). "
        "clearhead methods lists them.",
    ),
]
Target = Annotated[
    str | None,
    typer.Option(
        metavar="LABEL",
        rich_help_panel=_WHAT,
        help="The label to explain, by name or number (or the masked word). Default: what the model predicts.",
    ),
]
Against = Annotated[
    str | None,
    typer.Option(metavar="LABEL", rich_help_panel=_WHAT, help="Why the target and not this label: their difference."),
]
Mask = Annotated[
    int | None,
    typer.Option(metavar="N", rich_help_panel=_WHAT, help="Which masked position, where there are several; from 0."),
]
Scale = Annotated[
    str,
    typer.Option(
        metavar="SCALE",
        rich_help_panel=_WHAT,
        help="Explain the target's logit, probability or log-odds. Scores differ between them.",
    ),
]
Layers = Annotated[
    str | None,
    typer.Option(
        metavar="FROM:TO",
        rich_help_panel=_WHAT,
        help="Only these layers, half-open, negative from the end: -4: are the last four, :3 the first three.",
    ),
]
Heads = Annotated[
    str | None, typer.Option(metavar="N,…", rich_help_panel=_WHAT, help="Only these heads, counted from 0.")
]
Rows = Annotated[
    str | None,
    typer.Option(
        metavar="all", rich_help_panel=_WHAT, help="all: the scores of every row, not only of the one that is read out."
    ),
]
Per = Annotated[
    str | None, typer.Option(metavar="head", rich_help_panel=_WHAT, help="head: keep every head's share of the scores.")
]
Pair = Annotated[
    str | None,
    typer.Option(metavar="TEXT", rich_help_panel=_WHAT, help="The second text, for models that read two."),
]
AsText = Annotated[
    bool,
    typer.Option("--text", metavar="", rich_help_panel=_WHAT, help="INPUT is a text, whatever file has that name."),
]
MaxLength = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, rich_help_panel=_WHAT, help="Cut texts to N tokens. Default: the model's limit."),
]
TruncationSide = Annotated[
    str | None,
    typer.Option(metavar="left|right", rich_help_panel=_WHAT, help="Where a text that is too long loses tokens."),
]
NoTruncation = Annotated[
    bool,
    typer.Option(
        "--no-truncation", metavar="", rich_help_panel=_WHAT, help="Refuse texts that are too long, do not cut."
    ),
]
Revision = Annotated[
    str | None, typer.Option(metavar="REV", rich_help_panel=_MODEL, help="Branch, tag or commit of a hub model.")
]
Readout = Annotated[
    str | None,
    typer.Option(
        metavar="ROW",
        rich_help_panel=_MODEL,
        help="Which row speaks for the target, for models that clearhead does not know: first, last, mean … or its "
        "number.",
    ),
]
Device = Annotated[str | None, typer.Option(metavar="DEVICE", rich_help_panel=_MODEL, help="cpu, cuda, cuda:1, mps.")]
Dtype = Annotated[
    str | None,
    typer.Option(metavar="DTYPE", rich_help_panel=_MODEL, help="float32 (default), float64, float16 or bfloat16."),
]
Seed = Annotated[int, typer.Option(metavar="N", rich_help_panel=_MODEL, help="For methods that draw random numbers.")]
BatchSize = Annotated[
    int, typer.Option(metavar="N", min=1, rich_help_panel=_MODEL, help="Inputs in one pass; fewer need less memory.")
]
Words = Annotated[
    bool, typer.Option("--words", metavar="", rich_help_panel=_OUT, help="Word pieces merged into words.")
]
Sentences = Annotated[
    bool, typer.Option("--sentences", metavar="", rich_help_panel=_OUT, help="Units merged into sentences.")
]
Html = Annotated[
    str | None, typer.Option(metavar="FILE", rich_help_panel=_OUT, help="Write one page that opens without a network.")
]
Save = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|DIR",
        rich_help_panel=_OUT,
        help="Keep the result: a .safetensors file or, for several, a folder. clearhead show opens it again.",
    ),
]
Column = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        rich_help_panel=_DATA,
        help="The column that holds the texts (for a model of pictures: their paths). Default: text, or the only one.",
    ),
]
PairColumn = Annotated[
    str | None, typer.Option(metavar="NAME", rich_help_panel=_DATA, help="The column of second texts.")
]
Out = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        rich_help_panel=_DATA,
        help="The folder for one result file per row, index.csv and errors.csv. The same command goes on where it "
        "stopped.",
    ),
]
Json = Annotated[
    bool, typer.Option("--json", metavar="", rich_help_panel=_OUT, help="JSON on standard output, and nothing else.")
]


@dataclass(frozen=True)
class Loading:
    """The options of `clearhead.load`."""

    model: str | None
    device: str | None = None
    dtype: str | None = None
    revision: str | None = None
    readout: str | None = None

    def arguments(self) -> dict[str, Any]:
        typed = {key: value for key, value in asdict(self).items() if key != "model"}
        row = (self.readout or "").removeprefix("-")
        return {**typed, "readout": int(self.readout)} if self.readout and row.isdigit() else typed


@dataclass(frozen=True)
class Asked:
    """The options of `Explainer.explain`, as they were typed."""

    target: str | None
    against: str | None
    mask: int | None
    scale: str
    layers: str | None
    heads: str | None
    rows: str | None
    per: str | None
    max_length: int | None
    truncation: bool
    truncation_side: str | None
    seed: int

    def arguments(self) -> dict[str, Any]:
        typed = asdict(self)
        for gone in ("target", "against", "mask"):
            typed.pop(gone)
        return {**typed, "target": self._target(), "layers": layers(self.layers), "heads": heads(self.heads)}

    def _target(self) -> Any:
        import clearhead

        if self.against is not None:
            return clearhead.Contrast(self.target, self.against, self.mask)
        return self.target if self.mask is None else clearhead.MaskedWord(self.target, self.mask)


def methods(typed: Sequence[str] | None, default: Sequence[str]) -> "list[MethodLike]":
    """The methods that were asked for, each once.

    >>> [str(method) for method in methods(["generic, grad-sam(received=True)", "generic"], [])]
    ['generic', 'grad-sam(received=True)']
    """
    # A comma inside brackets belongs to an option.
    parts = [part.strip() for word in typed or default for part in re.split(r",(?![^(]*\))", word)]
    return list(dict.fromkeys(_method(part) for part in parts if part))


def _method(typed: str) -> "MethodLike":
    import clearhead

    name, bracket, inside = typed.partition("(")
    try:
        call = ast.parse(f"f({inside}" if bracket else "f()", mode="eval").body
        assert isinstance(call, ast.Call) and not call.args
        options = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError, AssertionError):
        raise InputError(
            f"cannot read the method {typed!r}: write its name, or NAME(option=value), as in grad-sam(received=True)"
        ) from None
    return clearhead.Method(name.strip(), **options)


def layers(typed: str | None) -> tuple[int | None, int | None] | None:
    """Half-open, as in a slice; one number is one layer.

    >>> layers("-4:"), layers(":3"), layers("2"), layers("-1")
    ((-4, None), (None, 3), (2, 3), (-1, None))
    """
    if typed is None:
        return None
    first, colon, last = typed.partition(":")
    try:
        start, stop = (int(part) if part.strip() else None for part in (first, last))
    except ValueError:
        start, colon = None, ""
    if colon:
        return start, stop
    if start is None:
        raise InputError(f"--layers {typed!r} is not a range: write FROM:TO, as in -4: (the last four) or 0:6")
    return start, start + 1 or None


def heads(typed: str | None) -> list[int] | None:
    """
    >>> heads("0, 3")
    [0, 3]
    """
    if typed is None:
        return None
    try:
        return [int(part) for part in typed.split(",")]
    except ValueError:
        raise InputError(f"--heads {typed!r} is no list of heads: write numbers, as in 0,3") from None
