"""`clearhead bench`: methods × protocols on a data set, resumable, stored in a folder of Parquet files."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clearhead.cli import options as opt
from clearhead.cli import output as put
from clearhead.cli import runtime
from clearhead.cli.inputs import disable_bars_for_local_model, report_device_and_dtype
from clearhead.errors import InputError

if TYPE_CHECKING:
    from clearhead.bench.runner import BenchmarkRun

BENCH_EXAMPLES = (
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

REPORT_EXAMPLES = ("clearhead report runs/pets", "clearhead report runs/pets --out paper")


@opt.flatten_option_groups
def bench(
    device_options: opt.CliDeviceOptions,
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            metavar="NAME",
            help="Model: zoo:NAME (see clearhead models), a folder, or a hub name.",
        ),
    ],
    data: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Data set: a name (pets, eraser-movies, hub:OWNER/NAME …), known:TASK for a zoo task with "
            "ground-truth evidence, mosaic:NAME for mosaics of images from two classes, or the path of a table or a "
            "folder of images.",
        ),
    ],
    protocols: Annotated[
        str,
        typer.Option(
            metavar="NAME,…", help="Evaluation protocols, or published presets of protocols, separated by commas."
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="Folder for the result files of the run. Running the same command again resumes an interrupted run.",
        ),
    ],
    methods: Annotated[
        list[str] | None,
        typer.Option(
            "--methods",
            metavar="NAME,…",
            help="Attribution methods, separated by commas; may be repeated. The controls random and position are "
            "always added. Default: ensemble.",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="PROTOCOL.NAME=VALUE",
            help="Setting of a protocol, such as perturb-images.fills=black; may be repeated.",
        ),
    ] = None,
    split: Annotated[str | None, typer.Option(metavar="NAME", help="Split of the data set.")] = None,
    root: Annotated[str | None, typer.Option(metavar="DIR", help="Folder that contains the data sets.")] = None,
    column: opt.ColumnOption = None,
    label_column: Annotated[
        str | None, typer.Option(metavar="NAME", help="Column of labels in a table or in a data set of the hub.")
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            metavar="NAME=VALUE",
            help="Option of the data set, such as each=image for coco; may be repeated.",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="Use only the first N examples.")] = None,
    indices: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="File with the indices of the examples to use, one per line, counting from 0."
        ),
    ] = None,
    merge: Annotated[
        list[Path] | None,
        typer.Option(metavar="RUN", help="Start with a copy of the results of another run; may be repeated."),
    ] = None,
    engine: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Execution engine: local (processes on this machine) or ray (on this machine or a cluster).",
        ),
    ] = "local",
    workers: Annotated[int, typer.Option(metavar="N", min=1, help="Number of worker processes or Ray actors.")] = 2,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Address of the Ray cluster, or auto. Default: start a cluster on this machine."
        ),
    ] = None,
    chunk: Annotated[
        int, typer.Option(metavar="N", min=1, help="Number of examples that are processed and stored together.")
    ] = 16,
    template: Annotated[
        str,
        typer.Option(
            metavar="TEXT",
            help="Zero-shot prompt for dual encoders such as CLIP: {name} is the class name, {name_with_article} the "
            "class name with its article (a pug).",
        ),
    ] = "a photo of {name_with_article}",
    keep: Annotated[
        bool,
        typer.Option(
            "--keep-explanations",
            metavar="",
            help="Also store the explanations (compressed); the report shows some of them.",
        ),
    ] = False,
    batch_size: opt.BatchSizeOption = 8,
    seed: opt.SeedOption = 0,
    as_json: opt.JsonOption = False,
) -> None:
    """Benchmark attribution methods: agreement with known evidence, faithfulness, and other protocols.

    The results are written to Parquet files, with one row per example, method, protocol and setting. A run that is
    resumed or extended computes only the missing chunks of examples. Methods that do not differ significantly share a
    range of ranks.
    """
    from clearhead.bench import time_estimate
    from clearhead.bench.engines import get_engine
    from clearhead.bench.job import BenchmarkJob, parse_setting
    from clearhead.bench.runner import BenchmarkRun
    from clearhead.bench.worker import format_versions

    get_engine(engine, address)  # reports an unknown engine before the model is loaded
    disable_bars_for_local_model(model)
    settings_by_protocol: dict[str, dict[str, object]] = {}
    for text in settings or []:
        protocol_name, setting_name, value = parse_setting(text)
        settings_by_protocol.setdefault(protocol_name, {})[setting_name] = value
    job = BenchmarkJob(
        model=model,
        data=data,
        methods=tuple(str(method) for method in opt.parse_method_options(methods, ["ensemble"])),
        protocols=tuple(name.strip() for name in protocols.split(",") if name.strip()),
        settings=settings_by_protocol,
        split=split,
        root=root,
        options=_collect_data_options(data, column, label_column, options or []),
        limit=limit,
        indices=None if indices is None else _read_indices(indices),
        chunk=chunk,
        batch_size=batch_size,
        seed=seed,
        device=device_options.device,
        dtype=device_options.dtype,
        revision=device_options.revision,
        template=template,
        keep=keep,
    )
    run = BenchmarkRun(job, out)
    for other_run in merge or []:
        run.merge_from(other_run)
    with put.status_spinner("planning"):
        cost = run.estimate_cost()
        expected_time = time_estimate.estimate_time(run, 1 if engine == "local" else workers)
    report_device_and_dtype(run.worker.explainer, model, device_options)
    if not as_json:
        print(*[figure for figure in (cost, expected_time) if figure is not None], sep="; ")
    if cost.num_stale_rows:
        runtime.print_error(
            f"{cost.num_stale_rows:,} rows in {out} were measured with other versions and will be recomputed (current "
            f"versions: {format_versions()})",
            0,
        )
    try:
        with put.explaining_progress_bar(cost.num_examples) as advance:

            def advance_or_stop(examples: int) -> None:
                advance(examples)
                if runtime.CLI_STATE.is_interrupted:
                    raise KeyboardInterrupt

            report = run(engine, workers, advance_or_stop, address)
        if expected_time is not None:
            time_estimate.save_method_seconds(run, expected_time)
    except KeyboardInterrupt:
        raise runtime.RunInterruptedError(
            f"interrupted: run the same command to resume from the results in {out}"
        ) from None
    if as_json:
        put.print_json({**report.to_dict(), "refused": run.collect_failure_reasons()})
    else:
        _print_run(run)
        print(f"chunks: {report.computed} computed, {report.already_stored} already stored; {out / 'table.parquet'}")
    if next(run.store.iter_table_rows(), None) is None:
        runtime.print_error(
            "no measurements were produced; the reasons are listed above (with --json, under refused)",
            runtime.EXIT_ROWS_FAILED,
        )
        raise typer.Exit(runtime.EXIT_ROWS_FAILED)


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a benchmark run.", show_default=False)],
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for the result files. Default: the folder of the run."),
    ] = None,
    as_json: opt.JsonOption = False,
) -> None:
    """Write the report of a benchmark run as HTML (report.html), LaTeX tables (tables.tex) and CSV (tables.csv).

    Does not require the model, the data set or a GPU: the run folder contains all results.
    """
    from clearhead.bench.export import render_csv_table, render_latex_tables
    from clearhead.bench.report_page import render_run_report
    from clearhead.bench.run_results import RunResults
    from clearhead.data.atomic_file import atomic_write

    results = RunResults(run)
    texts = {
        "report.html": render_run_report(results),
        "tables.tex": render_latex_tables(results),
        "tables.csv": render_csv_table(results),
    }
    folder = out or run
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        with atomic_write(folder / name) as partial:
            partial.write_text(text, encoding="utf-8")
    if as_json:
        files = [str(folder / name) for name in texts]
        put.print_json({"schema": "clearhead/bench-report", "version": 1, "files": files})
    else:
        print("\n".join(f"wrote {folder / name}" for name in texts))


def _collect_data_options(
    data: str, column: str | None, label_column: str | None, typed: list[str]
) -> dict[str, str | list[str]]:
    """Return the options of the data set; `--column` is the only entry of `columns` in a data set of the hub."""
    options: dict[str, str | list[str]] = dict(map(_parse_data_option, typed))
    if column is not None and data.startswith("hub:"):
        options["columns"] = [column]
    elif column is not None:
        options["column"] = column
    if label_column is not None:
        options["label_column"] = label_column
    return options


def _parse_data_option(text: str) -> tuple[str, str | list[str]]:
    """Split the text of one --option, NAME=VALUE, into the name and the value.

    The value is a string, or for the options `columns` and `remove` a list of strings that were separated by commas.

    >>> _parse_data_option("each=image"), _parse_data_option("columns=premise,hypothesis")
    (('each', 'image'), ('columns', ['premise', 'hypothesis']))
    """
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise InputError(f"{text!r} is not an option of a data set: write NAME=VALUE, as in each=image")
    if name in ("column", "label_column"):
        raise InputError(
            f"--option {text} is a separate option of the command: write --{name.replace('_', '-')} {value}"
        )
    if name in ("columns", "remove"):  # these options are lists, even of one name
        return name, [item.strip() for item in value.split(",")]
    return name, value


def _read_indices(path: Path) -> tuple[int, ...]:
    """Read example indices separated by white space; an unreadable or empty file raises `InputError`."""
    try:
        indices = tuple(int(line) for line in path.read_text(encoding="utf-8").split())
    except (OSError, ValueError) as problem:
        raise InputError(f"{str(path)!r} is not a list of indices, one per line ({problem})") from None
    if not indices:
        raise InputError(f"{str(path)!r} is empty: list the indices of examples (from 0), one per line")
    return indices


def _print_run(run: "BenchmarkRun") -> None:
    """Print the headline metrics of each protocol, the agreement between columns, and what was not measured."""
    from clearhead.bench.run_results import ProtocolResults
    from clearhead.bench.tables import compute_column_agreement, render_markdown_table, render_metrics_markdown

    failures = run.collect_failure_reasons()
    for settings, (name, protocol) in run.worker.protocols_by_settings.items():
        section = ProtocolResults(name, settings, protocol.settings, protocol, run.load_measurements(settings))
        if not section.measurements and not any(failure.startswith(f"{name}: ") for failure in failures):
            print(f"\nnot measured: {name}: no example meets its requirements")
        for table in (table for metric in section.headline_metrics for table in section.iter_tables(metric)):
            markdown = render_markdown_table(table.columns, table.smaller_is_better)
            print(f"\n{name}: {table.metric} ({table.better_direction} is better)\n\n{markdown}")
            for (first_column, second_column), tau in compute_column_agreement(table.columns).items():
                print(f"\nagreement of the ranking by {first_column} and by {second_column}: Kendall's tau-b {tau:.2f}")
        for metric, by_method in section.compute_dataset_metrics().items():
            print(f"\n{name}: {metric}, computed over all examples\n\n{render_metrics_markdown(by_method)}")
    methods_by_reason: dict[tuple[str, str], list[str]] = {}
    for failure, reason in sorted(failures.items()):
        name, _, method = failure.partition(": ")
        methods_by_reason.setdefault((name, reason), []).append(method)
    for (name, reason), methods in methods_by_reason.items():
        print(f"\nnot measured: {name}: {', '.join(methods)}: {reason}")
    print()
