"""`clearhead attention`: every head of one input at a glance, and single maps to look at."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from clearhead.cli import options as opt
from clearhead.cli import output as put
from clearhead.cli.probe import probed_inputs
from clearhead.errors import InputError

EXAMPLES = (
    'clearhead attention "You look extremely confused"',
    'clearhead attention "She hates the book" --head 1.3 --head 4.0 --out maps',
    'clearhead attention "So boring" --beside reviews.csv --limit 100 --out maps',
    'clearhead attention "She asked the doctor about [MASK] back" -m zoo:masked --candidates his,her --out maps',
)


def attention(
    given: opt.Input = None,
    model: opt.Model = None,
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
            "attention.json.",
        ),
    ] = None,
    as_json: opt.Json = False,
) -> None:
    """Look at the attention of one input: what each head looks at, and what the row that is read sees."""
    if given is None:
        raise InputError("nothing to look at: give a text or a picture. See clearhead attention --help")
    if beside is None and (limit is not None or column is not None):
        raise InputError("--limit and --column are for --beside, and none was given")
    if head and out is None:
        raise InputError("--head draws maps: say where they go with --out DIR")
    chosen = [_numbers(words) for words in head or ()]
    put.check_folder(out)
    ex, (raw, *more) = probed_inputs(model, [given], None, None)
    if more:
        raise InputError(f"attention is shown for one input, but {given!r} holds many: give them as --beside")
    from clearhead.probes import view

    with put.waiting("looking"):
        others = None if beside is None else probed_inputs(model, [beside], limit, column)[1]
        asked = [] if candidates is None else [word.strip() for word in candidates.split(",")]
        found = view(ex, raw, others, candidates=asked)
    for layer, number in chosen:
        found.map(layer, number)
    if out is not None:
        from clearhead.show import attending
        from clearhead.show.html import page_of

        folder = Path(out)
        folder.mkdir(exist_ok=True)
        figures = {"overview": attending.overview(found), "depth": attending.by_depth(found)}
        figures |= {"graph": attending.graph(found)} | ({"maps": attending.maps(found, chosen)} if chosen else {})
        for name, figure in figures.items():
            figure.savefig(folder / f"{name}.png", dpi=144)
        (folder / "attention.html").write_text(page_of(found), encoding="utf-8")
        (folder / "attention.json").write_text(json.dumps(found.to_dict(), ensure_ascii=False), encoding="utf-8")
        print(f"wrote {folder}", file=sys.stderr)
    if as_json:
        put.print_json(found.to_dict())
    else:
        put.console().print(found)


def _numbers(words: str) -> tuple[int, int]:
    try:
        layer, head = (int(word) for word in words.split("."))
    except ValueError:
        raise InputError(f"--head {words!r} must be a layer and a head with a dot between them, such as 1.3") from None
    return layer, head
