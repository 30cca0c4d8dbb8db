"""`clearhead attention`: every head of one input at a glance, and single maps to look at, stream by stream."""

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli import options as opt
from clearhead.cli import output as put
from clearhead.cli.inputs import opened
from clearhead.cli.probe import probed_inputs
from clearhead.data.sources import recognise
from clearhead.errors import InputError, Refusal

if TYPE_CHECKING:
    from clearhead.explainer import Explainer
    from clearhead.probes import AttentionView, StreamsView

EXAMPLES = (
    'clearhead attention "You look extremely confused"',
    'clearhead attention "She hates the book" --head 1.3 --head 4.0 --out maps',
    'clearhead attention "So boring" --beside reviews.csv --limit 100 --out maps',
    'clearhead attention "She asked the doctor about [MASK] back" -m zoo:masked --candidates his,her --out maps',
    'clearhead attention phone -m zoo:spell --stream "prefix -> source" --head 1.0 --out maps',
    "clearhead attention -m zoo:shapes-vqa --example 3 --out maps",
)


@opt.in_groups
def attention(
    read: opt.Read,
    given: opt.Input = None,
    model: opt.Model = None,
    stream: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Of a model with several streams, one map alone: text, or from one to another, as prefix -> source. "
            "Default: all of them.",
        ),
    ] = None,
    head: Annotated[
        list[str] | None,
        typer.Option("--head", metavar="LAYER.HEAD", help="A map to draw, such as 1.3; may be given several times."),
    ] = None,
    beside: Annotated[
        str | None,
        typer.Option(metavar="DATA", help="A table or a folder: say what heads look at on average over it, too."),
    ] = None,
    candidates: Annotated[
        str | None,
        typer.Option(metavar="A,B,…", help="Tell the probabilities of these labels or masked words: his,her."),
    ] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="Of --beside: the first N rows alone.")] = None,
    column: opt.Column = None,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Write overview.png (every head), depth.png (the row that is read, by raw attention, rollout and "
            "flow), graph.png, maps.png (those of --head), attention.html (all of it, to point at) and "
            "attention.json; of several streams, the pictures of each in a folder of its name.",
        ),
    ] = None,
    as_json: opt.Json = False,
) -> None:
    """Look at the attention of one input: what each head looks at, and what the row that is read sees.

    Models with several streams (text and picture, source and prefix) have maps of each, and from one to another.
    """
    if given is None and not read.named and read.example is None:
        raise InputError("nothing to look at: give a text or a picture. See clearhead attention --help")
    if beside is None and (limit is not None or column is not None):
        raise InputError("--limit and --column are for --beside, and none was given")
    if head and out is None:
        raise InputError("--head draws maps: say where they go with --out DIR")
    chosen = [_numbers(words) for words in head or ()]
    put.check_folder(out)
    ex, raw = _one_input(given, model, read)
    others = None if beside is None else probed_inputs(model, [beside], limit, column)[1]
    asked = [] if candidates is None else [word.strip() for word in candidates.split(",")]
    with put.waiting("looking"):
        found = _looked(ex, raw, stream, others, asked)
    maps = _maps(found)
    if chosen and len(maps) > 1:
        raise InputError(f"--head is of one map: say which with --stream: {', '.join(maps)}")
    for layer, number in chosen:
        for own in maps.values():
            own.map(layer, number)
    if out is not None:
        _write(Path(out), found, chosen)
    if as_json:
        put.print_json(found.to_dict())
    else:
        put.console().print(found)


def _one_input(given: str | None, model: str | None, read: opt.Read) -> "tuple[Explainer, dict[str, Any]]":
    """The model, and what it is given by stream."""
    typed = [] if given is None else [recognise(given)]
    if typed and typed[0].kind == "data":
        raise InputError(f"attention is shown for one input, but {given!r} holds many: give them as --beside")
    ex, raws = opened(opt.Loading(model), typed, read)
    if "inputs" in raws:
        raws = {ex.subject.takes[0]: raws["inputs"]}
    if any(len(values) != 1 for values in raws.values()):
        raise InputError("attention is shown for one input: give each stream once")
    return ex, {name: values[0] for name, values in raws.items()}


def _looked(
    ex: "Explainer", raw: dict[str, Any], stream: str | None, others: list[Any] | None, asked: list[str]
) -> "AttentionView | StreamsView":
    from clearhead.probes import by_stream, look, view

    if stream is not None:
        if others or asked:
            raise InputError("--beside and --candidates go with the row that is read: leave out --stream")
        return by_stream(ex, **raw)[" → ".join(re.split(r"\s*(?:→|->)\s*", stream.strip()))]
    if not (others or asked):
        return look(ex, raw)
    try:
        return view(ex, next(iter(raw.values())) if len(raw) == 1 else raw, others, candidates=asked)
    except Refusal as problem:
        raise InputError(f"--beside and --candidates are for models of which one row is read: {problem}") from None


def _maps(found: "AttentionView | StreamsView") -> "dict[str, AttentionView]":
    """By name; what has one map alone needs none."""
    from clearhead.probes import StreamsView

    return found.maps if isinstance(found, StreamsView) else {"": found}


def _write(folder: Path, found: "AttentionView | StreamsView", chosen: list[tuple[int, int]]) -> None:
    from clearhead.render.html import page_of

    for name, own in _maps(found).items():
        place = folder / re.sub(r"\W+", "-", name.replace("→", "to"))
        place.mkdir(exist_ok=True, parents=True)
        for title, figure in _figures(own, chosen).items():
            figure.savefig(place / f"{title}.png", dpi=144)
    (folder / "attention.html").write_text(page_of(found), encoding="utf-8")
    (folder / "attention.json").write_text(json.dumps(found.to_dict(), ensure_ascii=False), encoding="utf-8")
    print(f"wrote {folder}", file=sys.stderr)


def _figures(own: "AttentionView", chosen: list[tuple[int, int]]) -> dict[str, Any]:
    from clearhead.render.mpl import attention as attending

    made = {"overview": attending.overview(own), "depth": attending.by_depth(own)}
    if own.keys is None:  # a layered graph is of units that look at one another
        made["graph"] = attending.graph(own)
    return made | ({"maps": attending.maps(own, chosen)} if chosen else {})


def _numbers(words: str) -> tuple[int, int]:
    try:
        layer, head = (int(word) for word in words.split("."))
    except ValueError:
        raise InputError(f"--head {words!r} must be a layer and a head with a dot between them, such as 1.3") from None
    return layer, head
