"""The words of the command line: options that several verbs share, and how what is typed becomes what the API takes."""

import ast
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from clearhead.errors import InputError

if TYPE_CHECKING:
    from clearhead.explainer import MethodLike

_WHAT, _MODEL, _OUT, _DATA = "What is explained", "Model and run", "Output", "Data: a table or a folder"

Inputs = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="INPUT",
        help="A text; a picture (a file, or chelsea and others of scikit-image); a sound (.wav); a .txt file; or data: "
        "a CSV, TSV or JSONL file, a folder of .txt files or of pictures. Models that take several inputs are given "
        "them by name: --text, --image, --audio.",
        show_default=False,
    ),
]
Input = Annotated[
    str | None,
    typer.Argument(metavar="INPUT", help="A text, a picture, a sound or a .txt file.", show_default=False),
]
Texts = Annotated[
    list[str] | None,
    typer.Option("--text", metavar="TEXT", rich_help_panel=_WHAT, help="A text, whatever file has that name."),
]
Images = Annotated[
    list[str] | None,
    typer.Option("--image", metavar="FILE", rich_help_panel=_WHAT, help="A picture, beside a text or alone."),
]
Audios = Annotated[
    list[str] | None,
    typer.Option("--audio", metavar="FILE", rich_help_panel=_WHAT, help="A sound, beside a text or alone."),
]
Example = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=0,
        rich_help_panel=_WHAT,
        help="A ready example of a zoo model whose true reasons are known, instead of an input.",
    ),
]

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
        help="The label to explain, by name or number (or the masked word). Default: what the model predicts. At one "
        'place of an answer that has many: "step 3" or "step 3 = word", "query 5" of a detector, "token 2 = PER", '
        '"answer start"; "every step" for all of them.',
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
Step = Annotated[
    int | None,
    typer.Option(metavar="N", rich_help_panel=_WHAT, help="The word at one step of what is said, from 0."),
]
Answer = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT", rich_help_panel=_WHAT, help="What a language model is to have said. Default: what it says."
    ),
]
MaxNewTokens = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        rich_help_panel=_WHAT,
        help="How many words it says at most (32); all are then explained, unless --target says otherwise.",
    ),
]
Profile = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", rich_help_panel=_WHAT, help="The settings of an author's released code, quirks included."
    ),
]
Scale = Annotated[
    str | None,
    typer.Option(
        metavar="SCALE",
        rich_help_panel=_WHAT,
        help="Explain the target's logit (default), probability or log-odds (with --against: the logarithm of the "
        "ratio of both probabilities); how alike two inputs are as cosine (default) or logit. Scores differ between "
        "them.",
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
Task = Annotated[
    str | None,
    typer.Option(
        metavar="TASK", rich_help_panel=_MODEL, help="similarity: why two texts are alike (INPUT and --pair)."
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
Memory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE", rich_help_panel=_MODEL, help="What passes may take beside the model, e.g. 2GiB; same result."
    ),
]
Kernel = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        rich_help_panel=_MODEL,
        help="How attention is recorded: materialised, streaming (for long inputs), tiles or triton.",
    ),
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
ImageColumn = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", rich_help_panel=_DATA, help="The column of pictures (paths), for models that take both."
    ),
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
class Read:
    """What is explained, by name."""

    text: Texts = None
    image: Images = None
    audio: Audios = None
    pair: Pair = None
    example: Example = None

    @property
    def named(self) -> dict[str, list[str]]:
        """The streams that were given by name."""
        every = {"text": self.text, "image": self.image, "audio": self.audio}
        return {stream: values for stream, values in every.items() if values}


@dataclass(frozen=True)
class Loading:
    """The options of `clearhead.load`."""

    model: Model = None
    device: Device = None
    dtype: Dtype = None
    revision: Revision = None
    readout: Readout = None
    task: Task = None

    def arguments(self) -> dict[str, Any]:
        typed = {key: value for key, value in asdict(self).items() if key != "model"}
        row = (self.readout or "").removeprefix("-")
        return {**typed, "readout": int(self.readout)} if self.readout and row.isdigit() else typed


@dataclass(frozen=True)
class Asked:
    """The options of `Explainer.explain`, as they were typed."""

    target: Target = None
    against: Against = None
    step: Step = None
    mask: Mask = None
    scale: Scale = None
    answer: Answer = None
    max_new_tokens: MaxNewTokens = None
    profile: Profile = None
    layers: Layers = None
    heads: Heads = None
    max_length: MaxLength = None
    no_truncation: NoTruncation = False
    truncation_side: TruncationSide = None
    seed: Seed = 0

    def arguments(self) -> dict[str, Any]:
        same = ("scale", "answer", "max_new_tokens", "profile", "max_length", "truncation_side", "seed")
        typed = {name: value for name in same if (value := getattr(self, name)) is not None}
        made = {"target": self._target(), "layers": layers(self.layers), "heads": heads(self.heads)}
        return {**typed, **made, "truncation": not self.no_truncation}

    def _target(self) -> Any:
        import clearhead

        placed = _placed(self.target, self.against)
        if self.step is not None:
            if placed is not None:
                raise InputError(f"--step {self.step} and --target {self.target!r} both name a place: leave one out")
            placed = clearhead.Generated(self.step, self.target, self.against)
        if placed is not None:
            if self.mask is not None:
                raise InputError("--mask is for masked words, and not for places of an answer: leave one of them out")
            return placed
        if self.max_new_tokens is not None and self.answer is None and self.target is self.against is None:
            return clearhead.Generated()  # whoever says how much shall be said asks about all of it
        if self.against is not None:
            return clearhead.Contrast(self.target, self.against, self.mask)
        return self.target if self.mask is None else clearhead.MaskedWord(self.target, self.mask)


_EVERY = {"every step": "Generated", "every query": "Query", "every token": "TokenLabel"}
_KINDS = {"step": "Generated", "query": "Query", "token": "TokenLabel", "answer": "Answer"}
_PLACE = re.compile(r"(step|query|token|answer) ([^\s=]+)(?: ?= ?(.+))?")


def _placed(typed: str | None, against: str | None) -> Any:
    """A target at one place of an answer that has many, in words; None for any other.

    >>> _placed("step 3", None), _placed("token 2 = PER", "O"), _placed("step by step", None)
    (Generated(place=3, label=None, against=None), TokenLabel(place=2, label='PER', against='O'), None)
    """
    import clearhead

    words = " ".join((typed or "").split())
    if words in _EVERY:
        return getattr(clearhead, _EVERY[words])(None, None, against)
    found = _PLACE.fullmatch(words)
    if found is None:
        return None
    kind, place, label = found[1], _number(found[2]), found[3]
    possible = {"token": True, "answer": place in ("start", "end")}.get(kind, isinstance(place, int))
    if not possible:
        return None
    return getattr(clearhead, _KINDS[kind])(place, _number(label) if kind == "answer" else label, against)


def _number(typed: str | None) -> Any:
    return int(typed) if typed is not None and typed.lstrip("-").isdigit() else typed


def in_groups(verb: Callable[..., None]) -> Callable[..., None]:
    """A verb some of whose parameters are groups of options: the command line sees every option by itself."""
    given = inspect.signature(verb).parameters
    groups: dict[str, Any] = {n: part.annotation for n, part in given.items() if is_dataclass(part.annotation)}
    flat: dict[str, inspect.Parameter] = {}
    for name, part in given.items():
        own = [part] if name not in groups else [_parameter(option, groups[name]) for option in fields(groups[name])]
        flat |= {one.name: one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own}

    @wraps(verb)
    def call(**typed: Any) -> None:
        made = {name: cls(**{one.name: typed.pop(one.name) for one in fields(cls)}) for name, cls in groups.items()}
        verb(**typed, **made)

    call.__signature__ = inspect.Signature(list(flat.values()))  # type: ignore[attr-defined]
    call.__annotations__ = {name: part.annotation for name, part in flat.items()}
    return call


def _parameter(option: Any, group: Any) -> inspect.Parameter:
    kind = get_type_hints(group, include_extras=True)[option.name]
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=option.default, annotation=kind)


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
