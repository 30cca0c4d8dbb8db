"""`clearhead bench`: methods × protocols on a data set, resumable, into a folder of Parquet files."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clearhead.cli import options as opt
from clearhead.cli import output as put
from clearhead.cli import runtime
from clearhead.cli.inputs import without_bars
from clearhead.errors import InputError

if TYPE_CHECKING:
    from clearhead.bench.runner import Run

EXAMPLES = (
    "clearhead bench --model zoo:logic --data known:logic --methods generic,grad-sam --protocols truth --out runs/a",
    "clearhead bench --model zoo:pets --data pets --root data --protocols perturb-images,segmentation --limit 100 "
    "--set perturb-images.fills=black,blur --out runs/pets",
    "clearhead bench --model zoo:rationale --data eraser-movies --split test --root data --protocols rationales,eraser "
    "--out runs/movies",
    "clearhead bench --model zoo:pets-clip --data pets --root data --protocols bi-clip --limit 50 --keep-explanations "
    "--out runs/clip",
    "clearhead bench --model zoo:pets --data pets --root data --protocols perturb-images --engine ray --workers 4 "
    "--address auto --out runs/pets",
)

REPORTS = ("clearhead report runs/pets", "clearhead report runs/pets --out paper")


def bench(
    model: Annotated[str, typer.Option("--model", "-m", metavar="NAME", help="zoo:NAME, a folder, or a hub name.")],
    data: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="A data set by name (pets, eraser-movies, hub:OWNER/NAME …), known:TASK for a task of the zoo with "
            "known answers, mosaic:NAME for pictures of two classes side by side, or the path of a table or a folder "
            "of pictures.",
        ),
    ],
    protocols: Annotated[
        str, typer.Option(metavar="NAME,…", help="What is measured; published settings go by their names, too.")
    ],
    out: Annotated[
        Path, typer.Option(metavar="RUN", help="The folder of the run. The same command goes on where it stopped.")
    ],
    methods: Annotated[
        str, typer.Option(metavar="NAME,…", help="The methods; random and position are always among them.")
    ] = "generic",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PROTOCOL.NAME=VALUE", help="A setting of a protocol; may be given again."),
    ] = None,
    split: Annotated[str | None, typer.Option(metavar="NAME", help="Which part of the data.")] = None,
    root: Annotated[str | None, typer.Option(metavar="DIR", help="The folder that holds data sets.")] = None,
    options: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            metavar="NAME=VALUE",
            help="How the data are read, as label_column=stars for a table of your own; may be given again.",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="Only the first N examples.")] = None,
    indices: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Only the examples with these numbers (from 0), one a line.")
    ] = None,
    merge: Annotated[
        list[Path] | None,
        typer.Option(metavar="RUN", help="Take over what another run has measured first; may be given again."),
    ] = None,
    engine: Annotated[
        str, typer.Option(metavar="NAME", help="local, processes on this machine, or ray, here or on a cluster.")
    ] = "local",
    workers: Annotated[int, typer.Option(metavar="N", min=1, help="How many processes, or actors of Ray.")] = 2,
    address: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="The Ray cluster (or auto); without it, one is started here."),
    ] = None,
    chunk: Annotated[int, typer.Option(metavar="N", min=1, help="Examples that are computed and stored at once.")] = 16,
    template: Annotated[
        str,
        typer.Option(metavar="TEXT", help="The caption of a class, for CLIP and its kin: {one} is a pug, {name} pug."),
    ] = "a photo of {one}",
    keep: Annotated[
        bool, typer.Option("--keep-explanations", help="Store explanations, too, compressed; the report shows some.")
    ] = False,
    batch_size: opt.BatchSize = 8,
    seed: opt.Seed = 0,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    as_json: opt.Json = False,
) -> None:
    """Measure how true and how faithful explanations are.

    Results are Parquet files, one row for each example, method, protocol and setting. A run that was stopped, or asked
    for more, computes the chunks of examples that are missing, and no other. A method's rank is shown only as far as
    the examples decide it.
    """
    from clearhead.bench import time_estimate
    from clearhead.bench.engines import engine as engine_named
    from clearhead.bench.job import Job, setting
    from clearhead.bench.runner import Run
    from clearhead.bench.worker import versions

    engine_named(engine, address)  # an unknown one is told before the model is opened
    without_bars(model)
    chosen: dict[str, dict[str, object]] = {}
    for text in settings or []:
        name, what, value = setting(text)
        chosen.setdefault(name, {})[what] = value
    job = Job(
        model=model,
        data=data,
        methods=tuple(str(method) for method in opt.methods([methods], [])),
        protocols=tuple(name.strip() for name in protocols.split(",") if name.strip()),
        settings=chosen,
        split=split,
        root=root,
        options=dict(map(_option, options or [])),
        limit=limit,
        indices=None if indices is None else _numbers(indices),
        chunk=chunk,
        batch_size=batch_size,
        seed=seed,
        device=device,
        dtype=dtype,
        template=template,
        keep=keep,
    )
    run = Run(job, out)
    for other in merge or []:
        run.take(other)
    with put.waiting("planning"):
        cost = run.cost()
        expected = time_estimate.predicted(run, 1 if engine == "local" else workers)
    if not as_json:
        print(cost if expected is None else f"{cost}; {expected}")
    if cost.outdated:
        said = f"{cost.outdated:,} rows in {out} were measured with other versions, and are computed anew"
        runtime.say(f"{said} (now: {versions()})", 0)
    try:
        with put.progress(cost.examples) as advance:

            def advance_or_stop(examples: int) -> None:
                advance(examples)
                if runtime.STATE.interrupted:
                    raise KeyboardInterrupt

            report = run(engine, workers, advance_or_stop, address)
        if expected is not None:
            time_estimate.keep(run, expected)
    except KeyboardInterrupt:
        raise runtime.Stopped(f"interrupted: the same command goes on with what is in {out}") from None
    if as_json:
        put.print_json({**report.to_dict(), "refused": run.refused()})
    else:
        _show(run)
        print(f"chunks: {report.computed} computed, {report.there_before} there before; {out / 'table.parquet'}")
    if next(run.store.table(), None) is None:
        runtime.say("nothing could be measured; why is said above, and with --json under refused", runtime.ROWS_FAILED)
        raise typer.Exit(runtime.ROWS_FAILED)


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the three files go. Default: into the run's folder.")
    ] = None,
    as_json: opt.Json = False,
) -> None:
    """Write a finished run as one HTML page (report.html), a LaTeX table (tables.tex) and a CSV table (tables.csv).

    No model, no data and no GPU is needed: everything is in the run's folder.
    """
    from clearhead.bench.export import csv_text, latex_text
    from clearhead.bench.report_page import page
    from clearhead.bench.run_results import Finished
    from clearhead.data.atomic_file import whole

    found = Finished(run)
    texts = {"report.html": page(found), "tables.tex": latex_text(found), "tables.csv": csv_text(found)}
    folder = out or run
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        with whole(folder / name) as partial:
            partial.write_text(text, encoding="utf-8")
    if as_json:
        put.print_json({"schema": "clearhead/bench-report", "version": 1, "files": [str(folder / n) for n in texts]})
    else:
        print("\n".join(f"wrote {folder / name}" for name in texts))


def _option(text: str) -> tuple[str, str | list[str]]:
    """
    >>> _option("label_column=stars"), _option("columns=premise,hypothesis")
    (('label_column', 'stars'), ('columns', ['premise', 'hypothesis']))
    """
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise InputError(f"{text!r} is no option of data: write NAME=VALUE, as label_column=stars")
    # those that name several are taken as lists, also where one is named
    return name, [part.strip() for part in value.split(",")] if name in ("columns", "remove") else value


def _numbers(path: Path) -> tuple[int, ...]:
    try:
        found = tuple(int(line) for line in path.read_text(encoding="utf-8").split())
    except (OSError, ValueError) as problem:
        raise InputError(f"{str(path)!r} does not list numbers, one a line ({problem})") from None
    if not found:
        raise InputError(f"{str(path)!r} is empty: list the numbers of examples (from 0), one a line")
    return found


def _show(run: "Run") -> None:
    """The headline of each protocol, and how far its parts agree; what is no mean over examples; what is missing."""
    from clearhead.bench.run_results import Section
    from clearhead.bench.tables import agreement_of_parts, markdown, plain

    refused = run.refused()
    for settings, (name, protocol) in run.worker.protocols.items():
        section = Section(name, settings, protocol.settings, protocol, run.measurements(settings))
        if not section.measurements and not any(what.startswith(f"{name}: ") for what in refused):
            print(f"\nnot measured: {name}: none of the examples has what its settings ask for")
        for table in (table for figure in section.headline for table in section.tables(figure)):
            shown = markdown(table.columns, table.smaller_is_better)
            print(f"\n{name}: {table.figure} ({table.better} is better)\n\n{shown}")
            for (one, other), tau in agreement_of_parts(table.columns).items():
                print(f"\n{one} and {other} put methods in one order: Kendall's tau-b {tau:.2f}")
        for part, by_method in section.overall().items():
            print(f"\n{name}: {part}, over all examples at once\n\n{plain(by_method)}")
    reasons: dict[tuple[str, str], list[str]] = {}
    for what, why in sorted(refused.items()):
        name, _, method = what.partition(": ")
        reasons.setdefault((name, why), []).append(method)
    for (name, why), methods in reasons.items():
        print(f"\nnot measured: {name}: {', '.join(methods)}: {why}")
    print()
