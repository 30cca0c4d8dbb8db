"""`clearhead probe`: attention put to the test, as a table with intervals, figures, and what follows from them."""

import json
import sys
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli import options as opt
from clearhead.cli import output as put
from clearhead.cli.inputs import check_data, load, opened
from clearhead.datasets import open_dataset, recognise
from clearhead.errors import InputError, unknown

if TYPE_CHECKING:
    from clearhead.explainer import Explainer
    from clearhead.probes import ProbeResult

EXAMPLES = (
    'clearhead probe permutation "You look extremely confused"',
    "clearhead probe permutation reviews.csv --limit 200 --scope S2 --out trial",
    'clearhead probe adversary "I like the movie" --steps 200',
    "clearhead probe heads reviews.csv --column text --limit 50 --json",
)
#: What each probe can be told.
OPTIONS: dict[str, tuple[str, ...]] = {
    "correlation": ("unit", "seed"),
    "permutation": ("scope", "layer", "heads", "draws", "keep", "by_head", "frozen", "candidates", "seed"),
    "adversary": ("scope", "layer", "heads", "steps", "tolerance", "candidates", "seed"),
    "uniform": ("frozen", "candidates"),
    "heads": (),
    "skips": (),
}


def probe(
    kind: Annotated[str, typer.Argument(metavar="PROBE", help=f"One of {', '.join(OPTIONS)}.", show_default=False)],
    inputs: opt.Inputs = None,
    model: opt.Model = None,
    scope: Annotated[
        str | None,
        typer.Option(
            metavar="S1|S2|S3|S4",
            help="S1 the row that is read in the last layer (default), S2 that row in every layer, S3 all rows of "
            "--layer, S4 everything.",
        ),
    ] = None,
    layer: Annotated[int | None, typer.Option(metavar="N", help="For scope S3: the layer, from 0.")] = None,
    heads: Annotated[str | None, typer.Option(metavar="N,…", help="These heads alone, from 0.")] = None,
    draws: Annotated[int | None, typer.Option(metavar="N", help="permutation: how often. Default: 100.")] = None,
    keep: Annotated[
        bool, typer.Option("--keep", metavar="", help="permutation: leave weights on special tokens and itself.")
    ] = False,
    by_head: Annotated[
        bool, typer.Option("--by-head", metavar="", help="permutation: every head of every layer by itself, too.")
    ] = False,
    candidates: Annotated[
        str | None,
        typer.Option(metavar="A,B,…", help="Compare the probabilities of these labels or masked words alone."),
    ] = None,
    frozen: Annotated[
        bool, typer.Option("--frozen", metavar="", help="Pin the attention of later layers to what it was.")
    ] = False,
    steps: Annotated[int | None, typer.Option(metavar="N", help="adversary: steps of search. Default: 500.")] = None,
    tolerance: Annotated[
        float | None, typer.Option(metavar="TVD", help="adversary: how far an answer may move. Default: 0.05.")
    ] = None,
    unit: Annotated[str | None, typer.Option(metavar="token|word", help="correlation. Default: word.")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="For what is drawn at random. Default: 0.")] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="Of data: the first N rows alone.")] = None,
    column: opt.Column = None,
    out: Annotated[
        str | None, typer.Option(metavar="DIR", help="Write result.json, figure.png and report.md into this folder.")
    ] = None,
    as_json: opt.Json = False,
) -> None:
    """Put attention to the test: is the answer made from it, and does it agree with other evidence?

    correlation with gradients and leaving out; permutation of weights; an adversary's weights with the same answer;
    uniform weights; heads by importance and pattern; skips, the share that goes past attention.
    """
    if kind not in OPTIONS:
        raise unknown("probe", kind, OPTIONS)
    numbers = None if heads is None else _numbers(heads)
    told: dict[str, Any] = {
        "scope": scope,
        "layer": layer,
        "heads": numbers,
        "draws": draws,
        "steps": steps,
        "tolerance": tolerance,
    }
    told |= {"unit": unit, "seed": seed, "keep": keep or None, "frozen": frozen or None, "by_head": by_head or None}
    told["candidates"] = None if candidates is None else [word.strip() for word in candidates.split(",")]
    given = {name: value for name, value in told.items() if value is not None}
    for name in given:
        if name not in OPTIONS[kind]:
            raise InputError(f"--{name.replace('_', '-')} is not for {kind}, which takes {_listed(OPTIONS[kind])}")
    put.check_folder(out)
    ex, raws = probed_inputs(model, inputs, limit, column)
    from clearhead import probes

    result: ProbeResult = getattr(probes, kind)(ex, raws, progress=put.talks(), **given)
    if out is not None:
        _write(result, Path(out))
    if as_json:
        put.print_json(result.to_dict())
    else:
        put.console().print(result)


def probed_inputs(
    model: str | None, inputs: list[str] | None, limit: int | None, column: str | None
) -> "tuple[Explainer, list[Any]]":
    given = [recognise(one) for one in inputs or ()]
    if any(one.kind == "data" for one in given):
        if len(given) > 1:
            raise InputError(f"data go alone, but {len(given)} inputs were given")
        data = open_dataset(given[0].words, column, None, None)
        ex = load(opt.Loading(model), {data.stream})
        check_data(data, ex)
        rows = list(islice(data.rows(*ex.subject.takes), limit))
        for row in rows:
            if row.problem is not None:
                raise InputError(f"row {row.id} of {given[0].words!r} cannot be probed: {row.problem}")
        return ex, [row.raw for row in rows]
    if limit is not None or column is not None:
        raise InputError("--limit and --column are for data (a table or a folder), and none was given")
    ex, raws = opened(opt.Loading(model), given, opt.Read())
    if "inputs" not in raws:
        raise InputError(f"{ex.subject.name} takes several streams, and probes are for models of one")
    return ex, raws["inputs"]


def _numbers(words: str) -> list[int]:
    try:
        return [int(word) for word in words.split(",")]
    except ValueError:
        raise InputError(f"--heads {words!r} must be numbers with commas between them, such as 0,3") from None


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names) or "no options of its own"


def _write(result: "ProbeResult", folder: Path) -> None:
    from clearhead.show.probing import plot

    folder.mkdir(exist_ok=True)
    (folder / "result.json").write_text(json.dumps(result.to_dict(), ensure_ascii=False), encoding="utf-8")
    plot(result).savefig(folder / "figure.png", dpi=144)
    (folder / "report.md").write_text(result.markdown(), encoding="utf-8")
    print(f"wrote {folder}", file=sys.stderr)
