"""`clearhead probe`: attention put to the test, as a table with intervals, figures, and what follows from them."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli import options as opt
from clearhead.cli import output as put
from clearhead.cli.inputs import check_data, load, opened
from clearhead.data.sources import cells_of, open_dataset, recognise, whole
from clearhead.errors import InputError, unknown

if TYPE_CHECKING:
    from clearhead.explainer import Explainer
    from clearhead.probes import ProbeResult
    from clearhead.probes.fine_tuning import Bar

EXAMPLES = (
    'clearhead probe permutation "You look extremely confused"',
    "clearhead probe permutation reviews.csv --limit 200 --scope S2 --out trial",
    'clearhead probe adversary "I like the movie" --steps 200',
    "clearhead probe heads reviews.csv --column text --limit 50 --json",
    "clearhead probe seeds reviews.csv --labels label --seeds 5 --fresh 1 --runs runs --out trial",
    "clearhead probe frontier reviews.csv --labels label --strengths 0,0.001,0.01,0.1 --runs runs",
    "clearhead probe diagnostic reviews.csv --labels label --guides uniform,base,generic,grad-sam",
)
#: What each probe can be told.
OPTIONS: dict[str, tuple[str, ...]] = {
    "correlation": ("unit", "seed"),
    "permutation": ("scope", "layer", "heads", "draws", "keep", "by_head", "frozen", "candidates", "seed"),
    "adversary": ("scope", "layer", "heads", "steps", "tolerance", "candidates", "seed"),
    "uniform": ("frozen", "candidates", "labels"),
    "seeds": ("seeds", "fresh", "scope", "steps", "batch", "rate", "held_out", "labels", "runs", "seed"),
    "diagnostic": ("guides", "steps", "batch", "rate", "held_out", "labels", "runs", "seed"),
    "frontier": (
        "strengths",
        "seeds",
        "fresh",
        "scope",
        "steps",
        "batch",
        "rate",
        "held_out",
        "labels",
        "runs",
        "seed",
    ),
    "heads": (),
    "skips": (),
}
#: Those that train, and so show what is being trained.
TRAINING = ("seeds", "diagnostic", "frontier")


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
    steps: Annotated[
        int | None, typer.Option(metavar="N", help="adversary: steps of search. Default: 500. Training: steps of it.")
    ] = None,
    labels: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help="Data: the column with the labels. Training without it learns the model's own answers.",
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(metavar="N", help="How many other seeds. Default: 5; frontier: 2.")
    ] = None,
    fresh: Annotated[
        str | None,
        typer.Option(metavar="N|all", help="seeds: so many of the last layers start anew. Default: 0, the head alone."),
    ] = None,
    strengths: Annotated[
        str | None, typer.Option(metavar="λ,…", help="frontier: strengths of the adversaries.")
    ] = None,
    guides: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,…",
            help="diagnostic: uniform, own, base, adversary, or any method. Default: uniform,own,base.",
        ),
    ] = None,
    batch: Annotated[int | None, typer.Option(metavar="N", help="Training: inputs in a step. Default: 32.")] = None,
    rate: Annotated[float | None, typer.Option(metavar="X", help="Training: the highest learning rate.")] = None,
    held_out: Annotated[
        float | None, typer.Option(metavar="SHARE", help="Training: the share to measure on. Default: 0.25.")
    ] = None,
    runs: Annotated[
        str | None, typer.Option(metavar="DIR", help="Training: keep runs there; a run that was cut goes on.")
    ] = None,
    tolerance: Annotated[
        float | None, typer.Option(metavar="TVD", help="adversary: how far an answer may move. Default: 0.05.")
    ] = None,
    unit: Annotated[str | None, typer.Option(metavar="token|word", help="correlation. Default: word.")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="For what is drawn at random. Default: 0.")] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="Of data: the first N rows alone.")] = None,
    column: opt.Column = None,
    out: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Write result.json, page.html, figure.png and report.md into this folder."),
    ] = None,
    as_json: opt.Json = False,
) -> None:
    """Put attention to the test: is the answer made from it, and does it agree with other evidence?

    correlation with gradients and leaving out; permutation of weights; an adversary's weights with the same answer;
    uniform weights; heads by importance and pattern; skips, the share that goes past attention. With training: seeds,
    whose attention is compared; frontier, models that answer the same and attend elsewhere; diagnostic, a classifier
    without context that is told where to look.
    """
    if kind not in OPTIONS:
        raise unknown("probe", kind, OPTIONS)
    numbers = None if heads is None else _numbers(heads, int, "--heads", "0,3")
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
    told |= {"labels": labels, "seeds": seeds, "batch": batch, "rate": rate, "held_out": held_out, "runs": runs}
    told["fresh"] = int(fresh) if fresh is not None and fresh.isdigit() else fresh
    told["strengths"] = None if strengths is None else _numbers(strengths, float, "--strengths", "0,0.001,0.1")
    told["guides"] = None if guides is None else [word.strip() for word in guides.split(",")]
    given = {name: value for name, value in told.items() if value is not None}
    for name in given:
        if name not in OPTIONS[kind]:
            raise InputError(f"--{name.replace('_', '-')} is not for {kind}, which takes {_listed(OPTIONS[kind])}")
    put.check_folder(out)
    ex, raws = probed_inputs(model, inputs, limit, column)
    if labels is not None:
        given["labels"] = _labels(inputs or [], labels, len(raws))
    if runs is not None:
        given["folder"] = given.pop("runs")
    from clearhead import probes

    with _bars() if kind in TRAINING else nullcontext(put.talks()) as progress:
        result: ProbeResult = getattr(probes, kind)(ex, raws, progress=progress, **given)
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
        return ex, whole(data.path, islice(data.rows(*ex.subject.takes), limit))
    if limit is not None or column is not None:
        raise InputError("--limit and --column are for data (a table or a folder), and none was given")
    ex, raws = opened(opt.Loading(model), given, opt.Read())
    if "inputs" not in raws:
        raise InputError(f"{ex.subject.name} takes several streams, and probes are for models of one")
    return ex, raws["inputs"]


def _labels(inputs: list[str], column: str, count: int) -> list[Any]:
    if len(inputs) != 1 or recognise(inputs[0]).kind != "data":
        raise InputError("--labels is for data (a table), and none was given")
    return cells_of(inputs[0], column, count)


@contextmanager
def _bars() -> "Iterator[Bar | None]":
    """A bar for each run, where a person is watching."""
    if not put.talks():
        yield None
        return
    from rich.progress import Progress, TaskID

    tasks: dict[str, TaskID] = {}
    with Progress(console=put.console(stderr=True), transient=True) as bars:

        def show(name: str, share: float) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=1.0)
            bars.update(tasks[name], completed=share)

        yield show


def _numbers(words: str, kind: type[Any], option: str, such_as: str) -> list[Any]:
    try:
        return [kind(word) for word in words.split(",")]
    except ValueError:
        raise InputError(f"{option} {words!r} must be numbers with commas between them, such as {such_as}") from None


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names) or "no options of its own"


def _write(result: "ProbeResult", folder: Path) -> None:
    from clearhead.render.html import page_of
    from clearhead.render.mpl.probes import plot

    folder.mkdir(exist_ok=True)
    (folder / "result.json").write_text(json.dumps(result.to_dict(), ensure_ascii=False), encoding="utf-8")
    (folder / "page.html").write_text(page_of(result), encoding="utf-8")
    plot(result).savefig(folder / "figure.png", dpi=144)
    (folder / "report.md").write_text(result.markdown(), encoding="utf-8")
    print(f"wrote {folder}", file=sys.stderr)
