"""Options that few calls of `Explainer.explain` need: how inputs are read, and how passes are run."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypedDict, TypeVar, Unpack

from clearhead.adapters.base import InputOptions
from clearhead.errors import InputError, unknown_value_error
from clearhead.methods.base import Method
from clearhead.targets import TargetLike

#: "streaming" is a tiled pass with the fastest kernel for the hardware, "tiles" and "triton" with this kernel.
ATTENTION_KERNELS = ("materialised", "streaming", "tiles", "triton")
OptionsT = TypeVar("OptionsT", InputOptions, "ComputeOptions")

#: Keywords of `explain` whose field in `InputOptions` has another name.
INPUT_FIELD_NAMES = {"tokens": "unit_names"}


@dataclass(frozen=True)
class ComputeOptions:
    """How the passes of a call are run. No option changes the scores, except the seed.

    Args:
        batch_size: Maximum number of inputs per batch.
        memory: Memory budget of the passes, without the model itself, e.g. "2GiB". Inputs, integration steps and
            targets are split into smaller batches as needed; the result is the same.
        kernel: How attention is recorded: "materialised" (full attention matrices, for short inputs) or "streaming"
            (memory grows linearly with the length), which runs as "tiles" in torch or as "triton" on a GPU. None
            chooses by input length and hardware.
        checkpoint: Whether a tiled pass uses activation checkpointing: each layer is recomputed in the backward pass,
            so that only one layer is in memory. (In encoder–decoders, generic and rollout also keep the queries, keys
            and values of each layer.) None chooses by length. True without `kernel` implies "streaming".
        seed: Seed of methods that draw random numbers.
        progress: True for a progress bar over batches, or a function such as `tqdm.tqdm`.

    Raises:
        InputError: An option is invalid, or two contradict each other.

    Example:
        >>> ComputeOptions(batch_size=32, memory="2GiB").batch_size
        32
    """

    batch_size: int = 8
    memory: str | int | None = None
    kernel: str | None = None
    checkpoint: bool | None = None
    seed: int = 0
    progress: bool | Callable[[list[Any]], Iterable[Any]] = False

    def __post_init__(self) -> None:
        if self.kernel is not None and self.kernel not in ATTENTION_KERNELS:
            raise unknown_value_error("kernel", self.kernel, ATTENTION_KERNELS)
        if self.checkpoint not in (None, True, False):
            raise InputError(f"checkpoint={self.checkpoint!r} is not valid: pass True or False, or leave it out")
        if self.kernel == "materialised" and self.checkpoint:
            raise InputError("checkpoint=True needs a tiled pass: kernel='materialised' keeps the maps of every layer")
        if self.batch_size < 1:
            raise InputError(f"batch_size={self.batch_size} is not valid: it must be at least 1")


class ExplainOptions(TypedDict, total=False):
    """The keywords of `Explainer.explain` that are fields of `InputOptions` and `ComputeOptions`, and these two.

    Attributes:
        max_new_tokens: Maximum number of generated tokens.
        max_length: Maximum number of tokens of a text.
        truncation: Whether longer texts are truncated; if False, they are refused.
        truncation_side: "left" or "right".
        tokens: Names of the units of given model inputs.
        batch_size: Maximum number of inputs per batch.
        memory: Memory budget of the passes, e.g. "2GiB".
        kernel: How attention is recorded, one of `ATTENTION_KERNELS`.
        checkpoint: Whether a tiled pass uses activation checkpointing.
        seed: Seed of methods that draw random numbers.
        progress: True for a progress bar over batches, or a function such as `tqdm.tqdm`.
        input_options: Defaults of the options of inputs.
        compute_options: Defaults of the options of passes.
    """

    max_new_tokens: int
    max_length: int | None
    truncation: bool
    truncation_side: str | None
    tokens: Sequence[str] | Sequence[Sequence[str]] | None
    batch_size: int
    memory: str | int | None
    kernel: str | None
    checkpoint: bool | None
    seed: int
    progress: bool | Callable[[list[Any]], Iterable[Any]]
    input_options: InputOptions
    compute_options: ComputeOptions


@dataclass(frozen=True)
class ExplainRequest:
    """The arguments of one call of `Explainer.explain`, as they were given.

    Attributes:
        inputs: The unnamed inputs.
        method: One or several methods; None for the recommended one.
        target: One target for all inputs, or a list with one for each.
        streams: The named inputs: `text`, `image`, `audio` and `regions`; None where there is none.
        scale: Scale of the target value; None for the adapter's default.
        profile: Name of an author's settings.
        method_options: `layers`, `heads` and `rows`, for all methods that have no option of their own.
        per: "head" to keep the contribution of every head.
        input_options: How inputs are read.
        compute_options: How passes are run.
    """

    inputs: Any
    method: str | Method | Sequence[str | Method] | None
    target: TargetLike | Sequence[TargetLike]
    streams: dict[str, Any]
    scale: str | None
    profile: str | None
    method_options: dict[str, Any]
    per: str | None
    input_options: InputOptions
    compute_options: ComputeOptions

    @property
    def has_attention_options(self) -> bool:
        """Whether an option is set that only applies to methods that read attention."""
        options = [
            *self.method_options.values(),
            self.per,
            self.compute_options.kernel,
            self.compute_options.checkpoint,
        ]
        return any(option is not None for option in options)


def make_request(
    function_name: str,
    inputs: Any,
    method: str | Method | Sequence[str | Method] | None,
    target: TargetLike | Sequence[TargetLike],
    *,
    text: Any = None,
    image: Any = None,
    audio: Any = None,
    regions: Any = None,
    answer: Any = None,
    scale: str | None = None,
    profile: str | None = None,
    layers: tuple[int | None, int | None] | None = None,
    heads: Sequence[int] | None = None,
    rows: str | None = None,
    per: str | None = None,
    **options: Unpack[ExplainOptions],
) -> ExplainRequest:
    """Collect the arguments of `Explainer.explain`, which documents them.

    A keyword takes precedence over the field of an option object.

    Args:
        function_name: The function that received the arguments, for the error.
        inputs: As in `explain`, like all that follow.
        method: As in `explain`.
        target: As in `explain`.
        text: As in `explain`.
        image: As in `explain`.
        audio: As in `explain`.
        regions: As in `explain`.
        answer: As in `explain`.
        scale: As in `explain`.
        profile: As in `explain`.
        layers: As in `explain`.
        heads: As in `explain`.
        rows: As in `explain`.
        per: As in `explain`.
        **options: As in `explain`.

    Returns:
        The arguments as given, with the option objects filled in.

    Raises:
        TypeError: A keyword is unknown.
        InputError: An option is invalid.

    Example:
        >>> request = make_request("explain", "A film", "generic", None, max_length=128, seed=3)
        >>> request.input_options.max_length, request.compute_options.seed
        (128, 3)
    """
    keywords: dict[str, Any] = dict(options)
    unknown = sorted(keywords.keys() - ExplainOptions.__annotations__.keys())
    if unknown:
        accepted = ", ".join(ExplainOptions.__annotations__)
        raise TypeError(f"{function_name}() got an unexpected keyword argument {unknown[0]!r}; options: {accepted}")
    input_options = _pop_object(keywords, "input_options", InputOptions())
    compute_options = _pop_object(keywords, "compute_options", ComputeOptions())
    compute_names = {field.name for field in fields(ComputeOptions)} & keywords.keys()
    compute_options = replace(compute_options, **{name: keywords.pop(name) for name in sorted(compute_names)})
    input_keywords = {INPUT_FIELD_NAMES.get(name, name): value for name, value in keywords.items()}
    input_options = replace(input_options, continuation=answer, **input_keywords)
    return ExplainRequest(
        inputs,
        method,
        target,
        streams={"text": text, "image": image, "audio": audio, "regions": regions},
        scale=scale,
        profile=profile,
        method_options={"layers": layers, "heads": heads, "rows": rows},
        per=per,
        input_options=input_options,
        compute_options=compute_options,
    )


def _pop_object(keywords: dict[str, Any], name: str, default: OptionsT) -> OptionsT:
    """Remove an option object from the keywords and return it, or the default."""
    options = keywords.pop(name, default)
    if not isinstance(options, type(default)):
        raise InputError(f"{name}= must be {type(default).__name__}(…), not {options!r}")
    return options
