"""From what was typed to a model, and to what it is called with: inputs alone, streams by name, data, examples."""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import clearhead
from clearhead.cli import options as opt
from clearhead.cli import output as put
from clearhead.data.sources import Dataset, Given, as_picture, as_sound, open_dataset
from clearhead.errors import InputError

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

#: The zoo's model for what was given.
DEFAULT_MODELS = {
    frozenset({"text"}): "zoo:sentiment",
    frozenset({"image"}): "zoo:pets",
    frozenset({"text", "image"}): "zoo:pets-clip",
}


def load(loading: opt.Loading, streams: Iterable[str] = ("text",)) -> "Explainer":
    """The model that was named or, by default, the zoo's for what was given."""
    name = loading.model or _default_model(frozenset(streams))
    with put.waiting(f"loading {name}"):
        without_bars(name)
        return clearhead.load(name, **loading.arguments())


def without_bars(name: str) -> None:
    """transformers draws no bars for a model of which nothing is downloaded."""
    if name.startswith("zoo:") or os.path.isdir(name):
        import transformers

        transformers.logging.disable_progress_bar()


def _default_model(streams: frozenset[str]) -> str:
    if streams not in DEFAULT_MODELS:
        raise InputError(f"no model of the zoo takes {_listed(sorted(streams))}: name one with --model")
    return DEFAULT_MODELS[streams]


def opened(loading: opt.Loading, given: Sequence[Given], read: opt.Read) -> "tuple[Explainer, dict[str, Any]]":
    """The model, and what `explain` is called with: a list of inputs, or one for each stream by name."""
    if read.example is not None:
        if given or read.named or read.pair is not None:
            raise InputError("--example is an input of its own: leave out INPUT, --text, --image, --audio and --pair")
        found = _example(loading.model, read.example)
        return load(loading), {stream: [value] for stream, value in found.items()}
    kinds = {"text": lambda words: Given("text", words), "image": as_picture, "audio": as_sound}
    named = {stream: [kinds[stream](words) for words in values] for stream, values in read.named.items()}
    if not given and not named:
        raise InputError("nothing to explain: give a text, a picture or a sound. See clearhead explain --help")
    ex = load(loading, {*(one.stream for one in given), *named})
    takes, name = ex.subject.takes, ex.subject.name
    every = _by_stream(given, named, takes, name)
    raws: dict[str, Any] = {stream: [_raw(one, stream, name) for one in ones] for stream, ones in every.items()}
    if read.pair is not None:
        if "text" not in takes:
            raise InputError(f"--pair is for models that read two texts; this one takes {put.plural(takes[0])}")
        raws["text"] = [(text, read.pair) for text in raws.get("text", ())]
    return ex, {"inputs": raws[takes[0]]} if len(takes) == 1 else _together(raws)


def _by_stream(
    given: Sequence[Given], named: Mapping[str, list[Given]], takes: Sequence[str], name: str
) -> dict[str, list[Given]]:
    """What was given without a name belongs to the one stream that has no input yet."""
    for stream in named:
        if stream not in takes:
            raise InputError(f"{name} takes {_listed(takes)}: leave out --{stream}")
    if not given:
        return dict(named)
    missing = [stream for stream in takes if stream not in named and stream != "regions"]
    if len(missing) != 1:
        options = " ".join(f"--{stream} …" for stream in takes if stream != "regions")
        raise InputError(f"{name} takes {_listed(takes)}: give each of them once, {options}")
    return {**named, missing[0]: list(given)}


def _together(raws: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Lists of one length, which go together pair by pair; one alone goes with each."""
    longest = max(len(values) for values in raws.values())
    if any(len(values) not in (1, longest) for values in raws.values()):
        counted = _listed([f"{len(values)} times --{stream}" for stream, values in raws.items()])
        raise InputError(f"inputs go together pair by pair, but there are {counted}")
    return {stream: values * (longest // len(values)) for stream, values in raws.items()}


def _raw(one: Given, stream: str, name: str) -> Any:
    """An input as the model takes it; a name such as chelsea is a picture for one model and a word for another."""
    if stream == "image":
        if one.stream != "image":
            raise InputError(f"{name} takes pictures, but {one.words!r:.60} is no picture file")
        return one.picture()
    if stream == "audio":
        if one.kind != "sound":
            raise InputError(f"{name} takes sounds, but {one.words!r:.60} is no sound file (.wav)")
        return one.sound()
    if one.kind in ("picture", "sound"):
        raise InputError(
            f"{name} takes texts, but {one.words!r} is a {one.kind}: choose another --model (zoo:pets takes pictures), "
            f"or say --text {one.words!r} if you mean the words"
        )
    return one.text()


def _example(model: str | None, number: int) -> dict[str, Any]:
    from clearhead.zoo import has_zoo

    if model is None or not model.startswith("zoo:") or not has_zoo():
        raise InputError("--example is for models of the zoo: say which with --model zoo:NAME")
    from clearhead_zoo.examples import example

    try:
        found: dict[str, Any] = example(model.removeprefix("zoo:"), number)
    except LookupError as problem:
        raise InputError(str(problem.args[0])) from None
    return found


def data_among(
    given: Sequence[Given], out: str | None, column: str | None, pair_column: str | None, image_column: str | None
) -> Dataset | None:
    """The data set among the inputs, if that is what they are."""
    tables = [one for one in given if one.kind == "data"]
    if not tables:
        columns = {"--column": column, "--pair-column": pair_column, "--image-column": image_column}
        for name, value in {"--out": out, **columns}.items():
            if value is not None:
                raise InputError(f"{name} is for data (a table or a folder), and none was given; --save keeps a result")
        return None
    if len(given) > 1:
        raise InputError(f"{tables[0].words!r} is data, which goes alone: {len(given)} inputs were given")
    if out is None:
        raise InputError(f"{tables[0].words!r} holds many inputs: say where the results go with --out DIR")
    return open_dataset(tables[0].words, column, pair_column, image_column)


def check_data(data: Dataset, ex: "Explainer") -> None:
    """Whether the model takes what the data hold."""
    takes, name, where = ex.subject.takes, ex.subject.name, str(data.path)
    if data.with_pictures:
        if not {"text", "image"} <= set(takes):
            raise InputError(f"{name} takes {_listed(takes)}: leave out --image-column")
    elif len(takes) > 1:
        raise InputError(f"{name} takes {_listed(takes)}: give a table, and say where its pictures are: --image-column")
    elif data.stream == "image" and takes != ("image",):
        raise InputError(f"{name} takes {put.plural(takes[0])}, but {where!r} is a folder of pictures")
    elif data.kind == "texts" and takes != ("text",):
        raise InputError(f"{name} takes {put.plural(takes[0])}, but {where!r} is a folder of texts")


def _listed(names: Sequence[str]) -> str:
    return " and ".join(names)
