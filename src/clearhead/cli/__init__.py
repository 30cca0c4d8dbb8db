"""The command line: every command, on top of the public Python API."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

import clearhead
from clearhead.cli import attention as attention_command
from clearhead.cli import bench as bench_command
from clearhead.cli import bias_gender as bias_command
from clearhead.cli import concept as concept_command
from clearhead.cli import convert as convert_command
from clearhead.cli import lecture as lecture_command
from clearhead.cli import options as opt
from clearhead.cli import output as put
from clearhead.cli import probe as probe_command
from clearhead.cli import runtime
from clearhead.cli import serve as serve_command
from clearhead.cli import verify as verify_command
from clearhead.cli.inputs import (
    check_dataset_streams,
    explain_by_input,
    find_dataset,
    load_explainer,
    load_model_and_inputs,
    parse_sources,
)
from clearhead.data.sources import InputDataset
from clearhead.errors import InputError

if TYPE_CHECKING:
    from clearhead.engine.applicability_table import MethodApplicability
    from clearhead.engine.recommendation import Recommendation

app = typer.Typer(
    name="clearhead",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Explain the predictions of Hugging Face Transformers models: which parts of the input they depend on, and "
    "how reliable the explanation is.",
    epilog='Start with: `clearhead explain "You look extremely confused"`',
)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit the process: the entry point of `clearhead`.

    Args:
        arguments: The arguments of the command line, without the program; None for those of the process.

    Raises:
        SystemExit: Always: with 0 after success, otherwise with the code of the error.
    """
    runtime.run_cli(app, arguments)


def _print_version(is_requested: bool) -> None:
    """Print the version and exit; callback of the eager option --version."""
    if is_requested:
        print(f"clearhead {clearhead.__version__}")
        raise typer.Exit()


@app.callback()
def _set_global_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", metavar="", help="Print the version and exit.", is_eager=True, callback=_print_version
        ),
    ] = False,
    show_traceback: Annotated[
        bool, typer.Option("--traceback", metavar="", help="Print the Python traceback of an error.")
    ] = False,
) -> None:
    """Store the options that come before the command; --version has already exited in its callback."""
    runtime.CLI_STATE.show_traceback = show_traceback


def format_examples(*commands: str) -> str:
    """Format example commands for the end of a help text."""
    return "Examples:\n\n" + "\n\n".join(f"    {command}" for command in commands)


@app.command(
    epilog=format_examples(
        'clearhead explain "You look extremely confused"',
        'clearhead explain "I like the movie" --methods generic,grad-sam --target NEGATIVE --html why.html',
        "clearhead explain chelsea --model zoo:pets --against Bengal",
        'clearhead explain --model zoo:pets-clip --text "a photo of a beagle" --image dog.jpg --html why.html',
        "clearhead explain phone --model zoo:spell",
        "clearhead explain --model zoo:shapes-vqa --example 3",
        "clearhead explain reviews.csv --column text --out results",
    ),
)
@opt.flatten_option_groups
def explain(
    input_options: opt.CliInputOptions,
    explain_options: opt.CliExplainOptions,
    model_options: opt.CliExplainModelOptions,
    inputs: opt.InputsArgument = None,
    methods: opt.MethodsOption = None,
    rows: opt.RowsOption = None,
    per: opt.PerOption = None,
    batch_size: opt.BatchSizeOption = 8,
    memory: opt.MemoryOption = None,
    kernel: opt.KernelOption = None,
    words: opt.WordsOption = False,
    sentences: opt.SentencesOption = False,
    html: opt.HtmlOption = None,
    save: opt.SaveOption = None,
    as_json: opt.JsonOption = False,
    column: opt.ColumnOption = None,
    pair_column: opt.PairColumnOption = None,
    image_column: opt.ImageColumnOption = None,
    out: opt.OutOption = None,
    plan: opt.PlanOption = False,
) -> None:
    """Explain a prediction: score every word, patch or frame of the input by its contribution to the target.

    The target is the predicted label, unless --target selects another. High scores support the target; negative scores
    of signed methods count against it. The default method is the recommended one (see clearhead methods).
    """
    sources = parse_sources(*(inputs or ()))
    chosen_methods = opt.parse_method_options(methods, [])
    explain_kwargs = explain_options.build_explain_kwargs()
    explain_kwargs |= {"rows": rows, "per": per, "memory": memory, "kernel": kernel}
    dataset = find_dataset(sources, out, column, pair_column, image_column)
    if dataset is not None:
        single_input_options: dict[str, Any] = {"--html": html, "--save": save, "--pair": input_options.pair}
        single_input_options |= {"--words": words, "--sentences": sentences, "--example": input_options.example}
        single_input_options |= {f"--{stream}": True for stream in input_options.values_by_stream} | {"--plan": plan}
        _reject_single_input_options(single_input_options)
        settings = {**asdict(model_options), **asdict(explain_options), "rows": rows, "per": per}
        settings |= {name: value for name, value in {"memory": memory, "kernel": kernel}.items() if value is not None}
        _explain_dataset(
            dataset,
            Path(str(out)),
            model_options,
            explain_kwargs,
            chosen_methods,
            batch_size,
            settings,
            as_json,
        )
        return
    num_inputs = max([len(sources), *(len(values) for values in input_options.values_by_stream.values()), 1])
    put.check_output_paths(html, save, num_inputs * max(1, len(chosen_methods)))
    explainer, raw_inputs = load_model_and_inputs(model_options, sources, input_options)
    if plan:
        explain_kwargs.pop("memory")  # a budget divides batches while they run
        explain_kwargs |= {"method": chosen_methods or None, "batch_size": batch_size}
        execution_plan = explainer.plan(**raw_inputs, **explain_kwargs)
        put.print_plan(execution_plan, as_json)
        return
    explanations = explain_by_input(
        explainer,
        raw_inputs,
        chosen_methods,
        batch_size=batch_size,
        progress=put.is_interactive() and num_inputs > batch_size,
        **explain_kwargs,
    )
    put.save_explanations(explanations, save)
    merged = [put.merge_units(explanation, words, sentences) for explanation in explanations]
    put.print_explanations(merged, html, as_json)


def _reject_single_input_options(options: Mapping[str, Any]) -> None:
    """Raise `InputError` for the first of these options that is set; they do not apply to data."""
    for name, value in options.items():
        if value not in (None, False):
            raise InputError(
                f"{name} applies only to single inputs: for a table or folder, results are written to --out without "
                "merging tokens, and second texts and images are read from --pair-column and --image-column"
            )


@app.command(
    epilog=format_examples(
        'clearhead compare "You look extremely confused" --methods generic,grad-sam,attention',
        "clearhead compare chelsea --methods generic,rollout --json",
        'clearhead compare --text "a photo of a cat" --image chelsea --methods generic,rollout',
    ),
)
@opt.flatten_option_groups
def compare(
    input_options: opt.CliInputOptions,
    explain_options: opt.CliExplainOptions,
    model_options: opt.CliExplainModelOptions,
    typed_input: opt.InputArgument = None,
    methods: opt.MethodsOption = None,
    memory: opt.MemoryOption = None,
    words: opt.WordsOption = False,
    sentences: opt.SentencesOption = False,
    html: opt.HtmlOption = None,
    as_json: opt.JsonOption = False,
) -> None:
    """Explain one input with several methods and measure their agreement.

    Agreement is Kendall's tau-b between the scores without special tokens: 1 means the same order, 0 no association,
    −1 the reverse order. Default methods: ensemble, generic and grad-sam, or others where these do not apply.
    """
    sources = parse_sources(typed_input)
    if any(source.source_type == "data" for source in sources):
        raise InputError(
            f"compare takes one input, but {typed_input!r} contains several: use clearhead explain {typed_input} --out "
            "DIR"
        )
    put.check_output_paths(html)
    chosen_methods = None if methods is None else opt.parse_method_options(methods, [])
    explain_kwargs = explain_options.build_explain_kwargs()
    explainer, raw_inputs = load_model_and_inputs(model_options, sources, input_options)
    if any(len(values) > 1 for values in raw_inputs.values() if isinstance(values, list)):
        raise InputError("compare takes one input: use each of --text, --image and --audio only once")
    single_input = {stream: values[0] if isinstance(values, list) else values for stream, values in raw_inputs.items()}
    comparison = clearhead.compare(explainer, methods=chosen_methods, **single_input, **explain_kwargs, memory=memory)
    merged = {
        name: put.merge_units(explanation, words, sentences) for name, explanation in comparison.explanations.items()
    }
    comparison = clearhead.Comparison(merged)
    if html is not None:
        put.write_explanations_page(list(merged.values()), html)
    if as_json:
        put.print_json(comparison.to_dict())
    else:
        put.make_console().print(comparison)


@app.command(
    epilog=format_examples(
        'clearhead explain "I like the movie" --save why.safetensors',
        "clearhead show why.safetensors --words --html why.html",
        "clearhead show results --by word",
    ),
)
def show(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Saved explanation, or a folder of them.", show_default=False)
    ],
    words: opt.WordsOption = False,
    sentences: opt.SentencesOption = False,
    html: opt.HtmlOption = None,
    by: Annotated[
        str, typer.Option(metavar="word|label|position", help="For a folder: how to group the scores.")
    ] = "word",
    reduction: Annotated[
        str, typer.Option(metavar="sum|mean", help="For a folder: how to reduce the scores of a group.")
    ] = "sum",
    as_json: opt.JsonOption = False,
) -> None:
    """Show a saved explanation, or aggregate a folder of explanations. Does not require a model."""
    put.check_output_paths(html)
    if file.is_dir():
        if html is not None or words or sentences:
            raise InputError(f"{str(file)!r} is a folder: --html, --words and --sentences are for one explanation")
        if put.print_folder_summary(file, by, reduction, as_json):
            raise typer.Exit(runtime.EXIT_ROWS_FAILED)
        return
    put.print_explanations([put.merge_units(clearhead.load_explanation(file), words, sentences)], html, as_json)


@app.command(
    epilog=format_examples(
        "clearhead methods",
        "clearhead methods --model zoo:sentiment",
    ),
)
@opt.flatten_option_groups
def methods(model_options: opt.CliModelOptions, as_json: opt.JsonOption = False) -> None:
    """List all attribution methods with their cost, requirements and declared properties.

    With --model, the list also shows whether each method applies to that model, and which one is recommended for it.
    Requirements are the tensors that a method records during a pass. Signed methods give negative scores to units that
    count against the target. Below the table, the command prints what each method measures and its limitations.
    """
    from clearhead.methods import METHOD_REGISTRY
    from clearhead.render.methods_table import render_methods_table

    model = model_options.model
    if model is None and model_options != opt.CliModelOptions():
        raise InputError("--device, --dtype and --revision need a model: add --model")
    applicability: dict[str, MethodApplicability] = {}
    recommended: Recommendation | None = None
    names = sorted(METHOD_REGISTRY)
    if model is not None:
        explainer = load_explainer(model_options)
        applicability = {line.name: line for line in explainer.methods()}
        names = list(applicability)  # the recommended method first, controls last
        if any(line.is_recommended for line in applicability.values()):
            recommended = explainer.recommended
    table: list[dict[str, Any]] = []
    for name in names:
        declaration = METHOD_REGISTRY[name].declaration
        line = {
            "method": name,
            "family": declaration.family,
            "signed": declaration.signed,
            "cost": str(declaration.cost),
            "requires": sorted(declaration.requires),
            "supports": sorted(declaration.supports),
            "options": clearhead.Method.option_names(name),
            "depends_on_target": declaration.target == "any",
            "taxonomy": declaration.taxonomy,
            "axioms": list(declaration.axioms),
            "citation": declaration.citation,
            "measures": declaration.measures,
            "misleads": declaration.misleads,
            "guidance": declaration.guidance,
            "note": declaration.note,
        }
        if applicability:
            row = applicability[name]
            line |= {"applies": row.applies, "why_not": row.why_not, "is_recommended": row.is_recommended}
        table.append(line)
    if as_json:
        content = {"schema": "clearhead/methods", "version": 2, "model": model, "methods": table}
        put.print_json(content if recommended is None else {**content, "recommended": asdict(recommended)})
        return
    columns = ["method", "family", "signed", "cost", "requires", "taxonomy"]
    if applicability:
        columns.append("applies")
        for line in table:
            row = applicability[str(line["method"])]
            line["applies"] = row.why_not or row.format_applies()
    put.make_console().print(render_methods_table(columns, table))
    if recommended is not None:
        put.make_console().print(f"\nRecommended: {recommended}")


@app.command(
    epilog=format_examples(
        "clearhead models --json",
    ),
)
def models(as_json: opt.JsonOption = False) -> None:
    """List the small pretrained models of clearhead-zoo with their task, size and measured accuracy."""
    cards = clearhead.zoo_models()
    if as_json:
        put.print_json({"schema": "clearhead/models", "version": 2, "models": cards})
    elif not cards:
        from clearhead.zoo import is_zoo_installed

        reason = "install them with pip install clearhead-zoo"
        if is_zoo_installed():
            reason = "clearhead-zoo is installed, but contains no models"
        print(f"No zoo models: {reason}. Folders and hub names work without it.")
    else:
        put.print_table(
            ["model", "task", "size", "figures", "summary"],
            [put.build_model_row(name, card) for name, card in cards.items()],
        )


app.command(epilog=format_examples(*bench_command.BENCH_EXAMPLES))(bench_command.bench)
app.command(epilog=format_examples(*bench_command.REPORT_EXAMPLES))(bench_command.report)
app.command(epilog=format_examples(*convert_command.CONVERT_EXAMPLES))(convert_command.convert)
app.command(epilog=format_examples(*lecture_command.LECTURE_EXAMPLES))(lecture_command.lecture)
app.command(epilog=format_examples(*attention_command.ATTENTION_EXAMPLES))(attention_command.attention)
app.command(epilog=format_examples(*probe_command.PROBE_EXAMPLES))(probe_command.probe)
app.command(epilog=format_examples(*verify_command.VERIFY_EXAMPLES))(verify_command.verify)
app.command(epilog=format_examples(*serve_command.SERVE_EXAMPLES))(serve_command.serve)


def _add_command_group(
    name: str, help_text: str, subcommands: Mapping[str, tuple[Callable[..., None], Sequence[str]]]
) -> None:
    """Add `clearhead NAME SUBCOMMAND` for each subcommand, given with its examples."""
    group = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown", help=help_text)
    for subcommand, (command, examples) in subcommands.items():
        group.command(subcommand, epilog=format_examples(*examples))(command)
    app.add_typer(group, name=name)


_add_command_group("concept", concept_command.CONCEPT_HELP, concept_command.CONCEPT_SUBCOMMANDS)
_add_command_group("bias", bias_command.BIAS_HELP, bias_command.BIAS_SUBCOMMANDS)


@app.command(epilog=format_examples("clearhead version --json"))
def version(as_json: opt.JsonOption = False) -> None:
    """Print the versions of clearhead and its main dependencies, for bug reports."""
    versions = {"clearhead": clearhead.__version__, "python": sys.version.split()[0]}
    for name in ("torch", "transformers", "clearhead-zoo"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    if as_json:
        put.print_json(versions)
    else:
        print("\n".join(f"{name} {number}" for name, number in versions.items()))


def _explain_dataset(
    dataset: InputDataset,
    out: Path,
    model_options: opt.CliModelOptions,
    explain_kwargs: Mapping[str, Any],
    chosen_methods: Sequence[Any],
    batch_size: int,
    settings: Mapping[str, Any],
    as_json: bool,
) -> None:
    """Explain every row of a data set into a folder; a run that was interrupted is resumed."""
    streams = {dataset.stream}
    if dataset.has_image_column:
        streams = {"text", "image"}
    explainer = load_explainer(model_options, streams)
    check_dataset_streams(dataset, explainer)
    if not chosen_methods:
        attention_options = ("profile", "layers", "heads", "rows", "per", "kernel")
        uses_generic = any(explain_kwargs.get(name) is not None for name in attention_options)
        chosen_methods = [clearhead.Method("generic" if uses_generic else explainer.recommended.method)]
    from clearhead.data.dataset_run import DatasetRun

    adapter = explainer.adapter
    effective_settings = {
        "model": model_options.model or adapter.name,
        "scale": settings["scale"] or adapter.target_scales[0],
        "device": str(adapter.device),
        "dtype": str(adapter.dtype).removeprefix("torch."),
    }
    run = DatasetRun(
        explainer, dataset, out, chosen_methods, explain_kwargs, batch_size, {**settings, **effective_settings}
    )
    try:
        with put.explaining_progress_bar(dataset.num_rows) as advance:

            def advance_or_stop(rows: int) -> None:
                advance(rows)
                if runtime.CLI_STATE.is_interrupted:
                    raise KeyboardInterrupt

            report = run(advance_or_stop)
    except KeyboardInterrupt:
        report = run.report
        num_stored = report.written + report.already_stored
        raise runtime.RunInterruptedError(
            f"interrupted: {num_stored} of {report.rows} rows are stored in {out}; run the same command to resume"
        ) from None
    if as_json:
        put.print_json(report.to_dict())
    else:
        summary = f"{report.written} of {report.rows} rows explained"
        if report.already_stored:
            summary += f", {report.already_stored} were already stored"
        print(f"{summary}: {out / 'index.csv'}")
    if report.failed:
        failed_rows = put.format_count(report.failed, "row")
        runtime.print_error(
            f"{failed_rows} of {report.rows} could not be explained: see {out / 'errors.csv'}", runtime.EXIT_ROWS_FAILED
        )
        raise typer.Exit(runtime.EXIT_ROWS_FAILED)
