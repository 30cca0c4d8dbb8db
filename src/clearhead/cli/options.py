"""Options that several commands share, and the conversion of typed values to the arguments of the Python API."""

import ast
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from clearhead.cli import runtime
from clearhead.errors import InputError

if TYPE_CHECKING:
    from clearhead.explainer import MethodLike

_EXPLAIN_PANEL = "Input, target and method"
_MODEL_PANEL = "Model and computation"
_OUTPUT_PANEL = "Output"
_DATA_PANEL = "Data (a table or a folder)"

InputsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="INPUT",
        help="A text; an image (a file, or the name of an example image from scikit-image, such as chelsea); an audio "
        "file (.wav); a .txt file; or data: a CSV, TSV or JSONL file, or a folder of .txt files or of images. For "
        "models with several inputs, use --text, --image and --audio.",
        show_default=False,
    ),
]
InputArgument = Annotated[
    str | None,
    typer.Argument(metavar="INPUT", help="A text, an image, an audio file or a .txt file.", show_default=False),
]
TextOption = Annotated[
    list[str] | None,
    typer.Option(
        "--text", metavar="TEXT", rich_help_panel=_EXPLAIN_PANEL, help="Input text (never treated as a file name)."
    ),
]
ImageOption = Annotated[
    list[str] | None,
    typer.Option(
        "--image", metavar="FILE", rich_help_panel=_EXPLAIN_PANEL, help="Input image, alone or together with a text."
    ),
]
AudioOption = Annotated[
    list[str] | None,
    typer.Option(
        "--audio",
        metavar="FILE",
        rich_help_panel=_EXPLAIN_PANEL,
        help="Input audio (.wav), alone or together with a text.",
    ),
]
ExampleOption = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=0,
        rich_help_panel=_EXPLAIN_PANEL,
        help="Use built-in example N as the input, for zoo models with known evidence.",
    ),
]

ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="NAME",
        rich_help_panel=_MODEL_PANEL,
        help="Model: zoo:NAME (see clearhead models), a folder, or a hub name. Default: a zoo model that suits the "
        "command and the input, such as zoo:sentiment for text and zoo:pets for images.",
    ),
]
MethodsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--methods",
        metavar="NAME,…",
        rich_help_panel=_EXPLAIN_PANEL,
        help="Attribution methods, separated by commas; may be repeated. Options are written in parentheses: "
        "grad-sam(received=True). Methods share forward and backward passes. To list all methods, run clearhead "
        "methods.",
    ),
]
TargetOption = Annotated[
    str | None,
    typer.Option(
        metavar="LABEL",
        rich_help_panel=_EXPLAIN_PANEL,
        help="Label to explain, by name or index (for a masked language model: the token). Default: the predicted "
        'label. For one position of an output sequence: "step 3" or "step 3 = token" (generated text), "query 5" '
        '(detection), "token 2 = PER" (token labels), "answer start" (answer spans); "every step", "every query" '
        'and "every token" explain all positions.',
    ),
]
AgainstOption = Annotated[
    str | None,
    typer.Option(
        metavar="LABEL",
        rich_help_panel=_EXPLAIN_PANEL,
        help="Contrastive explanation: explain the difference between the target and this label.",
    ),
]
MaskOption = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        rich_help_panel=_EXPLAIN_PANEL,
        help="Masked position to explain, if the text has several, counting from 0.",
    ),
]
StepOption = Annotated[
    int | None,
    typer.Option(
        metavar="N", rich_help_panel=_EXPLAIN_PANEL, help="Generation step whose token is explained, counting from 0."
    ),
]
AnswerOption = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        rich_help_panel=_EXPLAIN_PANEL,
        help="Output text to explain, for generative models. Default: the text that the model generates.",
    ),
]
MaxNewTokensOption = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        rich_help_panel=_EXPLAIN_PANEL,
        help="Maximum number of generated tokens. Default: 32. All of them are explained unless --target selects one.",
    ),
]
ProfileOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        rich_help_panel=_EXPLAIN_PANEL,
        help="Reproduce the settings of a method's reference implementation, including its quirks.",
    ),
]
ScaleOption = Annotated[
    str | None,
    typer.Option(
        metavar="SCALE",
        rich_help_panel=_EXPLAIN_PANEL,
        help="Quantity to explain: the target's logit (default), probability or log-odds (with --against: the log "
        "ratio of the two probabilities); for the similarity of two inputs, cosine (default) or logit. Scores differ "
        "between scales.",
    ),
]
LayersOption = Annotated[
    str | None,
    typer.Option(
        metavar="FROM:TO",
        rich_help_panel=_EXPLAIN_PANEL,
        help="Use only the layers in this half-open range, counting from 0, or from the end if negative: "
        '"-4:" selects the last four layers, ":3" the first three.',
    ),
]
HeadsOption = Annotated[
    str | None,
    typer.Option(metavar="N,…", rich_help_panel=_EXPLAIN_PANEL, help="Use only these heads, counting from 0."),
]
RowsOption = Annotated[
    str | None,
    typer.Option(
        metavar="all",
        rich_help_panel=_EXPLAIN_PANEL,
        help="all: compute scores for every token position, not only for the read-out position.",
    ),
]
PerOption = Annotated[
    str | None,
    typer.Option(
        metavar="head", rich_help_panel=_EXPLAIN_PANEL, help="head: report the contribution of every head separately."
    ),
]
PairOption = Annotated[
    str | None,
    typer.Option(metavar="TEXT", rich_help_panel=_EXPLAIN_PANEL, help="Second text, for models that take text pairs."),
]
MaxLengthOption = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        rich_help_panel=_EXPLAIN_PANEL,
        help="Truncate texts to N tokens. Default: the model's limit.",
    ),
]
TruncationSideOption = Annotated[
    str | None,
    typer.Option(
        metavar="left|right",
        rich_help_panel=_EXPLAIN_PANEL,
        help="Side on which texts that are too long are truncated.",
    ),
]
NoTruncationOption = Annotated[
    bool,
    typer.Option(
        "--no-truncation",
        metavar="",
        rich_help_panel=_EXPLAIN_PANEL,
        help="Reject texts that are too long instead of truncating them.",
    ),
]
RevisionOption = Annotated[
    str | None,
    typer.Option(metavar="REV", rich_help_panel=_MODEL_PANEL, help="Branch, tag or commit of a hub model."),
]
ReadoutOption = Annotated[
    str | None,
    typer.Option(
        metavar="POSITION",
        rich_help_panel=_MODEL_PANEL,
        help="Token position that the classifier reads: first, last, mean, or an index. Required for architectures "
        "that clearhead does not recognise.",
    ),
]
TaskOption = Annotated[
    str | None,
    typer.Option(
        metavar="TASK",
        rich_help_panel=_MODEL_PANEL,
        help="similarity: explain the similarity of two texts (INPUT and --pair) under a text encoder.",
    ),
]
DeviceOption = Annotated[
    str,
    typer.Option(
        metavar="DEVICE",
        rich_help_panel=_MODEL_PANEL,
        help="auto (a CUDA GPU if available, otherwise the CPU), cpu, cuda, cuda:1 or mps.",
    ),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        metavar="DTYPE",
        rich_help_panel=_MODEL_PANEL,
        help="float32, float64, float16, bfloat16, or auto (as stored). Default: float32 for models with fewer than "
        "one billion parameters that are stored in half precision, otherwise as stored.",
    ),
]
SeedOption = Annotated[int, typer.Option(metavar="N", rich_help_panel=_MODEL_PANEL, help="Random seed.")]
BatchSizeOption = Annotated[
    int,
    typer.Option(
        metavar="N", min=1, rich_help_panel=_MODEL_PANEL, help="Inputs per pass; a smaller batch needs less memory."
    ),
]
MemoryOption = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        rich_help_panel=_MODEL_PANEL,
        help="Memory budget for activations, such as 2GiB. Does not change the results.",
    ),
]
KernelOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        rich_help_panel=_MODEL_PANEL,
        help="Attention kernel for recorded passes: materialised, streaming (for long inputs), tiles or triton.",
    ),
]
PlanOption = Annotated[
    bool,
    typer.Option(
        "--plan",
        metavar="",
        rich_help_panel=_OUTPUT_PANEL,
        help="Print the planned passes, and why each is needed, without running them. (The model runs only for its "
        "self-test and, if the output text is not given, to generate it.)",
    ),
]
WordsOption = Annotated[
    bool, typer.Option("--words", metavar="", rich_help_panel=_OUTPUT_PANEL, help="Merge tokens into words.")
]
SentencesOption = Annotated[
    bool, typer.Option("--sentences", metavar="", rich_help_panel=_OUTPUT_PANEL, help="Merge tokens into sentences.")
]
HtmlOption = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        rich_help_panel=_OUTPUT_PANEL,
        help="Write the result as a self-contained HTML page, which needs no network connection.",
    ),
]
SaveOption = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|DIR",
        rich_help_panel=_OUTPUT_PANEL,
        help="Save the explanation as a .safetensors file, or several explanations in a folder. To display them, run "
        "clearhead show.",
    ),
]
ColumnOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        rich_help_panel=_DATA_PANEL,
        help="Column of input texts (for image models: of image paths). Default: the column named text, or the only "
        "column.",
    ),
]
LabelColumnOption = Annotated[
    str | None, typer.Option(metavar="NAME", rich_help_panel=_DATA_PANEL, help="Column of labels.")
]
PairColumnOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", rich_help_panel=_DATA_PANEL, help="Column of second texts, for models that take text pairs."
    ),
]
ImageColumnOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        rich_help_panel=_DATA_PANEL,
        help="Column of image paths, for models that take a text and an image.",
    ),
]
OutOption = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        rich_help_panel=_DATA_PANEL,
        help="Folder for the result files: one explanation per row, index.csv and errors.csv. Running the same "
        "command again resumes an interrupted run.",
    ),
]
JsonOption = Annotated[
    bool,
    typer.Option("--json", metavar="", rich_help_panel=_OUTPUT_PANEL, help="Print only JSON to standard output."),
]


@dataclass(frozen=True)
class CliInputOptions:
    """Inputs given by stream name."""

    text: TextOption = None
    image: ImageOption = None
    audio: AudioOption = None
    pair: PairOption = None
    example: ExampleOption = None

    @property
    def values_by_stream(self) -> dict[str, list[str]]:
        """Typed values of the streams that were given by name."""
        by_stream = {"text": self.text, "image": self.image, "audio": self.audio}
        return {stream: values for stream, values in by_stream.items() if values}


@dataclass(frozen=True)
class CliDeviceOptions:
    """Options of every command that loads a model, without the name of the model."""

    device: DeviceOption = "auto"
    dtype: DtypeOption = None
    revision: RevisionOption = None

    def with_model(self, model: str | None) -> "CliModelOptions":
        """Return the options that load this model."""
        return CliModelOptions(device=self.device, dtype=self.dtype, revision=self.revision, model=model)


@dataclass(frozen=True)
class _CliModelName:
    model: ModelOption = None


@dataclass(frozen=True)
class CliModelOptions(CliDeviceOptions, _CliModelName):  # the last base class comes first in the help
    """Options of a command that loads one model."""

    def build_load_kwargs(self) -> dict[str, Any]:
        """Return the keyword arguments of `clearhead.load`."""
        return {name: value for name, value in asdict(self).items() if name != "model"}


@dataclass(frozen=True)
class CliExplainModelOptions(CliModelOptions):
    """Options of a command that loads any model, of an unknown architecture too: all options of `clearhead.load`."""

    readout: ReadoutOption = None
    task: TaskOption = None

    def build_load_kwargs(self) -> dict[str, Any]:
        """Return arguments of `clearhead.load`; a --readout of digits becomes an integer."""
        kwargs = super().build_load_kwargs()
        if self.readout and self.readout.removeprefix("-").isdigit():
            kwargs["readout"] = int(self.readout)
        return kwargs


@dataclass(frozen=True)
class CliExplainOptions:
    """Options of `Explainer.explain`, as typed."""

    target: TargetOption = None
    against: AgainstOption = None
    step: StepOption = None
    mask: MaskOption = None
    scale: ScaleOption = None
    answer: AnswerOption = None
    max_new_tokens: MaxNewTokensOption = None
    profile: ProfileOption = None
    layers: LayersOption = None
    heads: HeadsOption = None
    max_length: MaxLengthOption = None
    no_truncation: NoTruncationOption = False
    truncation_side: TruncationSideOption = None
    seed: SeedOption = 0

    def build_explain_kwargs(self) -> dict[str, Any]:
        """Return the keyword arguments of `Explainer.explain`."""
        unchanged = ("scale", "answer", "max_new_tokens", "profile", "max_length", "truncation_side", "seed")
        kwargs = {name: value for name in unchanged if (value := getattr(self, name)) is not None}
        kwargs["target"] = self._build_target()
        kwargs["layers"] = parse_layer_range(self.layers)
        kwargs["heads"] = parse_head_list(self.heads)
        kwargs["truncation"] = not self.no_truncation
        return kwargs

    def _build_target(self) -> Any:
        """Combine --target, --against, --step, --mask and --max-new-tokens to a target; refuse conflicts."""
        import clearhead

        position_target = _parse_position_target(self.target, self.against)
        if self.step is not None:
            if position_target is not None:
                raise InputError(
                    f"--step {self.step} and --target {self.target!r} both select a position: leave out one of them"
                )
            position_target = clearhead.GeneratedToken(self.step, self.target, self.against)
        if position_target is not None:
            if self.mask is not None:
                raise InputError(
                    "--mask selects a masked token and cannot be combined with another position: leave out one of them"
                )
            return position_target
        if self.max_new_tokens is not None and self.answer is None and self.target is self.against is None:
            return clearhead.GeneratedToken()  # a request for N new tokens is a request to explain all of them
        if self.against is not None:
            return clearhead.Contrast(self.target, self.against, self.mask)
        if self.mask is not None:
            return clearhead.MaskedToken(self.target, self.mask)
        return self.target


_ALL_POSITIONS_TARGETS = {"every step": "GeneratedToken", "every query": "DetectionQuery", "every token": "TokenLabel"}
_POSITION_TARGETS = {
    "step": "GeneratedToken",
    "query": "DetectionQuery",
    "token": "TokenLabel",
    "answer": "AnswerSpan",
}
_POSITION_PATTERN = re.compile(r"(step|query|token|answer) ([^\s=]+)(?: ?= ?(.+))?")


def _parse_position_target(typed: str | None, against: str | None) -> Any:
    """Parse a target at one position of a sequence output; None for any other target.

    >>> _parse_position_target("token 2 = PER", "O")
    TokenLabel(position=2, label='PER', against='O')
    >>> _parse_position_target("step by step", None)
    """
    import clearhead

    text = " ".join((typed or "").split())
    if text in _ALL_POSITIONS_TARGETS:
        return getattr(clearhead, _ALL_POSITIONS_TARGETS[text])(None, None, against)
    match = _POSITION_PATTERN.fullmatch(text)
    if match is None:
        return None
    target_type = match[1]
    position = _parse_int_or_text(match[2])
    label: Any = match[3]
    if target_type == "answer":
        if position not in ("start", "end"):
            return None
        label = _parse_int_or_text(label)
    elif target_type != "token" and not isinstance(position, int):
        return None
    return getattr(clearhead, _POSITION_TARGETS[target_type])(position, label, against)


def _parse_int_or_text(typed: str | None) -> Any:
    """Convert digits (with or without a minus sign) to an integer; any other text stays text."""
    if typed is not None and typed.lstrip("-").isdigit():
        return int(typed)
    return typed


def flatten_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Turn dataclass parameters of a command into one command-line option per field."""
    parameters = inspect.signature(command).parameters
    groups: dict[str, Any] = {
        name: parameter.annotation for name, parameter in parameters.items() if is_dataclass(parameter.annotation)
    }
    flat: dict[str, inspect.Parameter] = {}
    for name, parameter in parameters.items():
        options = [parameter]
        if name in groups:
            options = [_make_option_parameter(option, groups[name]) for option in fields(groups[name])]
        flat |= {option.name: option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in options}

    @wraps(command)
    def call(**typed: Any) -> None:
        runtime.CLI_STATE.prints_json = bool(typed.get("as_json"))
        grouped = {
            name: group(**{option.name: typed.pop(option.name) for option in fields(group)})
            for name, group in groups.items()
        }
        command(**typed, **grouped)

    call.__signature__ = inspect.Signature(list(flat.values()))  # type: ignore[attr-defined]
    call.__annotations__ = {name: parameter.annotation for name, parameter in flat.items()}
    return call


def _make_option_parameter(option: Any, group: Any) -> inspect.Parameter:
    """Return the keyword-only parameter for one dataclass field: its name, its default and its annotation for Typer.

    Args:
        option: A field of the dataclass.
        group: The dataclass, from which the annotation of the field is resolved.
    """
    annotation = get_type_hints(group, include_extras=True)[option.name]
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=option.default, annotation=annotation)


def parse_method_options(texts: Sequence[str] | None, default: Sequence[str]) -> "list[MethodLike]":
    """Parse the values of --methods; a method that is named twice is returned once.

    >>> [str(method) for method in parse_method_options(["generic, grad-sam(received=True)", "generic"], [])]
    ['generic', 'grad-sam(received=True)']
    """
    # A comma inside brackets belongs to an option of a method.
    names = [name.strip() for text in texts or default for name in re.split(r",(?![^(]*\))", text)]
    methods = list(dict.fromkeys(_parse_method(name) for name in names if name))
    if texts and not methods:
        raise InputError("no method was given: --methods takes names separated by commas")
    return methods


def _parse_method(typed: str) -> "MethodLike":
    """Parse NAME or NAME(option=value, …) to a `clearhead.Method`; the values are Python literals."""
    import clearhead

    name, bracket, arguments = typed.partition("(")
    call_source = "f()"
    if bracket:
        call_source = f"f({arguments}"
    try:
        call = ast.parse(call_source, mode="eval").body
        assert isinstance(call, ast.Call) and not call.args
        options = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError, AssertionError):
        raise InputError(
            f"cannot parse the method {typed!r}: write its name, or NAME(option=value), as in grad-sam(received=True)"
        ) from None
    return clearhead.Method(name.strip(), **options)


def split_names(text: str | None) -> list[str] | None:
    """Split names that are separated by commas."""
    if text is None:
        return None
    return [name.strip() for name in text.split(",")]


def parse_layer_range(text: str | None) -> tuple[int | None, int | None] | None:
    """Parse a half-open range of layers, as in a slice; a single number selects one layer.

    >>> parse_layer_range("-4:"), parse_layer_range(":3"), parse_layer_range("2"), parse_layer_range("-1")
    ((-4, None), (None, 3), (2, 3), (-1, None))
    """
    if text is None:
        return None
    first, colon, last = text.partition(":")
    try:
        start, stop = (int(bound) if bound.strip() else None for bound in (first, last))
    except ValueError:
        start, colon = None, ""
    if colon:
        return start, stop
    if start is None:
        raise InputError(f"--layers {text!r} is not a range: write FROM:TO, as in -4: (the last four) or 0:6")
    return start, start + 1 or None


def parse_head_list(text: str | None) -> list[int] | None:
    """Parse head indices separated by commas.

    >>> parse_head_list("0, 3")
    [0, 3]
    """
    if text is None:
        return None
    try:
        return [int(head) for head in text.split(",")]
    except ValueError:
        raise InputError(f"--heads {text!r} is not a list of heads: write indices, as in 0,3") from None
