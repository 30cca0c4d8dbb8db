"""Loading of the model and of its inputs from what was typed: a single input, inputs by stream, data, zoo examples."""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import clearhead
from clearhead.cli import options as opt
from clearhead.cli import output as put
from clearhead.cli import runtime
from clearhead.data.sources import (
    InputDataset,
    InputSource,
    open_dataset,
    parse_audio_source,
    parse_image_source,
    parse_input_source,
)
from clearhead.errors import InputError

if TYPE_CHECKING:
    from clearhead.explainer import Explainer
    from clearhead.explanation.multi_stream import AnyExplanation

#: The default model by the streams of the input.
DEFAULT_MODELS_BY_STREAMS = {
    frozenset({"text"}): "zoo:sentiment",
    frozenset({"image"}): "zoo:pets",
    frozenset({"text", "image"}): "zoo:pets-clip",
}


def load_explainer(model_options: opt.CliModelOptions, streams: Iterable[str] = ("text",)) -> "Explainer":
    """Load the named model, by default a zoo model for these streams, and report its device and dtype."""
    name = model_options.model or _choose_default_model(frozenset(streams))
    with put.status_spinner(f"loading {name}"):
        disable_bars_for_local_model(name)
        explainer = clearhead.load(name, **model_options.build_load_kwargs())
    report_device_and_dtype(explainer, name, model_options)
    return explainer


def explain_by_input(
    explainer: "Explainer", raw_inputs: Mapping[str, Any], methods: Sequence[Any], **explain_kwargs: Any
) -> "list[AnyExplanation]":
    """Explain lists of inputs, and return the explanations input by input, each by all methods.

    Args:
        explainer: The explainer.
        raw_inputs: The inputs, as `explain` takes them.
        methods: The methods; none for the recommended one.
        **explain_kwargs: Further arguments of `explain`.
    """
    if not methods:
        explanations: list[AnyExplanation] = explainer.explain(**raw_inputs, **explain_kwargs)
        return explanations
    by_method = explainer.explain(**raw_inputs, method=list(methods), **explain_kwargs)
    return [explanation for of_input in zip(*by_method.values(), strict=True) for explanation in of_input]


def report_device_and_dtype(explainer: "Explainer", name: str, device_options: opt.CliDeviceOptions) -> None:
    """Print the device and dtype of a model on standard error, where one was chosen by default; not with --json."""
    if runtime.CLI_STATE.prints_json:
        return
    if device_options.device == "auto" or device_options.dtype is None:
        dtype = str(explainer.adapter.dtype).removeprefix("torch.")
        put.print_note(f"{name}: device {explainer.adapter.device}, dtype {dtype} (see --device and --dtype)")


def disable_bars_for_local_model(model_name: str) -> None:
    """Turn off the progress bars of transformers for a model that needs no download."""
    if model_name.startswith("zoo:") or os.path.isdir(model_name):
        import transformers

        transformers.logging.disable_progress_bar()


def _choose_default_model(streams: frozenset[str]) -> str:
    """Return the zoo model that takes exactly these streams, or raise `InputError`."""
    if streams not in DEFAULT_MODELS_BY_STREAMS:
        raise InputError(f"there is no default model for {_join_names(sorted(streams))}: choose a model with --model")
    return DEFAULT_MODELS_BY_STREAMS[streams]


def parse_sources(*typed: str | None) -> list[InputSource]:
    """Recognise typed inputs; None, for an input that was not given, is skipped."""
    return [parse_input_source(value) for value in typed if value is not None]


def load_model_and_inputs(
    model_options: opt.CliModelOptions, sources: Sequence[InputSource], input_options: opt.CliInputOptions
) -> "tuple[Explainer, dict[str, Any]]":
    """Load the model and the inputs; these are a list under "inputs", or one list for each stream by name."""
    if input_options.example is not None:
        if sources or input_options.values_by_stream or input_options.pair is not None:
            raise InputError(
                "--example already selects the input: leave out INPUT, --text, --image, --audio and --pair"
            )
        example = _load_zoo_example(model_options.model, input_options.example)
        return load_explainer(model_options), {stream: [value] for stream, value in example.items()}
    parsers = {
        "text": lambda text: InputSource("text", text),
        "image": parse_image_source,
        "audio": parse_audio_source,
    }
    named = {
        stream: [parsers[stream](value) for value in values]
        for stream, values in input_options.values_by_stream.items()
    }
    if not sources and not named:
        raise InputError("nothing to explain: pass a text, an image or an audio file. See clearhead explain --help")
    explainer = load_explainer(model_options, {*(source.stream for source in sources), *named})
    input_names = explainer.adapter.input_names
    model_name = explainer.adapter.name
    raw_inputs: dict[str, Any] = {
        stream: [_load_raw_input(source, stream, model_name) for source in stream_sources]
        for stream, stream_sources in _assign_to_streams(sources, named, input_names, model_name).items()
    }
    if input_options.pair is not None:
        if "text" not in input_names:
            raise InputError(
                f"--pair is for models that take two texts; this model takes {put.pluralize_stream(input_names[0])}"
            )
        raw_inputs["text"] = [(text, input_options.pair) for text in raw_inputs.get("text", ())]
    if len(input_names) == 1:
        return explainer, {"inputs": raw_inputs[input_names[0]]}
    return explainer, _repeat_to_equal_length(raw_inputs)


def _assign_to_streams(
    sources: Sequence[InputSource],
    named: Mapping[str, list[InputSource]],
    input_names: Sequence[str],
    model_name: str,
) -> dict[str, list[InputSource]]:
    """Assign positional inputs to the one stream that has no input by name."""
    for stream in named:
        if stream not in input_names:
            raise InputError(f"{model_name} takes {_join_names(input_names)}: leave out --{stream}")
    if not sources:
        return dict(named)
    missing = [stream for stream in input_names if stream not in named and stream != "regions"]
    if len(missing) != 1:
        options = " ".join(f"--{stream} …" for stream in input_names if stream != "regions")
        raise InputError(f"{model_name} takes {_join_names(input_names)}: pass each of them once, {options}")
    return {**named, missing[0]: list(sources)}


def _repeat_to_equal_length(raw_inputs: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Bring the streams to one length: a stream with a single value is combined with every value of the others."""
    longest = max(len(values) for values in raw_inputs.values())
    if any(len(values) not in (1, longest) for values in raw_inputs.values()):
        counts = _join_names([f"{len(values)} for --{stream}" for stream, values in raw_inputs.items()])
        raise InputError(
            f"inputs are paired by position, but there are {counts}: pass equal numbers, or a single input to combine "
            "with all of them"
        )
    return {stream: values * (longest // len(values)) for stream, values in raw_inputs.items()}


def _load_raw_input(source: InputSource, stream: str, model_name: str) -> Any:
    """Load an input for a stream; chelsea, for example, is an image for one model and a word for another."""
    if stream == "image":
        if source.stream != "image":
            raise InputError(f"{model_name} takes images, but {source.value!r:.60} is not an image file")
        return source.load_image()
    if stream == "audio":
        if source.source_type != "audio":
            raise InputError(f"{model_name} takes audio, but {source.value!r:.60} is not an audio file (.wav)")
        return source.load_audio()
    if source.source_type in ("image", "audio"):
        file_type = {"image": "an image", "audio": "an audio file"}[source.source_type]
        raise InputError(
            f"{model_name} takes texts, but {source.value!r} is {file_type}: choose another --model (zoo:pets takes "
            f"images), or use --text {source.value!r} to explain the name as text"
        )
    return source.load_text()


def _load_zoo_example(model: str | None, number: int) -> dict[str, Any]:
    """Generate example `number` of a zoo model's task, as inputs by stream."""
    from clearhead.zoo import is_zoo_installed

    if model is None or not model.startswith("zoo:") or not is_zoo_installed():
        raise InputError("--example applies only to models of the zoo: specify one with --model zoo:NAME")
    from clearhead_zoo.examples import make_example_input

    try:
        example: dict[str, Any] = make_example_input(model.removeprefix("zoo:"), number)
    except LookupError as problem:
        raise InputError(str(problem.args[0])) from None
    return example


def find_dataset(
    sources: Sequence[InputSource],
    out: str | None,
    column: str | None,
    pair_column: str | None,
    image_column: str | None,
) -> InputDataset | None:
    """Open the data set among the inputs; None for single inputs."""
    datasets = [source for source in sources if source.source_type == "data"]
    if not datasets:
        options = {"--out": out, "--column": column, "--pair-column": pair_column, "--image-column": image_column}
        for name, value in options.items():
            if value is not None:
                raise InputError(
                    f"{name} needs data (a table or a folder), but none was given; to store a single result, use --save"
                )
        return None
    path = datasets[0].value
    if len(sources) > 1:
        raise InputError(f"{path!r} is a data set and must be the only input, but {len(sources)} inputs were given")
    if out is None:
        raise InputError(f"{path!r} contains several inputs: specify a folder for the results with --out DIR")
    return open_dataset(path, column, pair_column, image_column)


def check_dataset_streams(dataset: InputDataset, explainer: "Explainer") -> None:
    """Raise if the model does not take the streams of the data set."""
    input_names = explainer.adapter.input_names
    model_name = explainer.adapter.name
    path = str(dataset.path)
    if dataset.has_image_column:
        if not {"text", "image"} <= set(input_names):
            raise InputError(f"{model_name} takes {_join_names(input_names)}: leave out --image-column")
    elif len(input_names) > 1:
        raise InputError(
            f"{model_name} takes {_join_names(input_names)}: use a table, and specify its column of images with "
            "--image-column"
        )
    elif dataset.stream == "image" and input_names != ("image",):
        raise InputError(
            f"{model_name} takes {put.pluralize_stream(input_names[0])}, but {path!r} is a folder of images"
        )
    elif dataset.source_type == "texts" and input_names != ("text",):
        raise InputError(
            f"{model_name} takes {put.pluralize_stream(input_names[0])}, but {path!r} is a folder of texts"
        )


def _join_names(names: Sequence[str]) -> str:
    """Join all names with "and", for messages."""
    return " and ".join(names)
