"""The command line: one verb a line of the README, the words of the API, nothing but the public API behind it."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

import clearhead
from clearhead.cli import attention as attending
from clearhead.cli import bench as benchmark
from clearhead.cli import bias_gender as biasing
from clearhead.cli import concept as conceiving
from clearhead.cli import convert as converting
from clearhead.cli import lecture as lecturing
from clearhead.cli import options as opt
from clearhead.cli import output as put
from clearhead.cli import probe as probing
from clearhead.cli import runtime as process
from clearhead.cli import serve as serving
from clearhead.cli import verify as verifying
from clearhead.cli.inputs import check_data, data_among, load, opened
from clearhead.data.sources import Dataset, recognise
from clearhead.errors import InputError

app = typer.Typer(
    name="clearhead",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Which parts of the input made a Transformer say that, and how sure are we?",
    epilog='Begin with: `clearhead explain "You look extremely confused"`',
)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """The entry point: runs one command and ends the process."""
    process.run(app, arguments)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"clearhead {clearhead.__version__}")
        raise typer.Exit()


@app.callback()
def _every_verb(
    version: Annotated[
        bool, typer.Option("--version", metavar="", help="Show the version.", is_eager=True, callback=_print_version)
    ] = False,
    show_traceback: Annotated[
        bool, typer.Option("--traceback", metavar="", help="Show where an error came from, not only what it says.")
    ] = False,
) -> None:
    process.STATE.shows_traceback = show_traceback


def examples(*commands: str) -> str:
    return "Examples:\n\n" + "\n\n".join(f"    {command}" for command in commands)


@app.command(
    epilog=examples(
        'clearhead explain "You look extremely confused"',
        'clearhead explain "I like the movie" --method generic,grad-sam --target NEGATIVE --html why.html',
        "clearhead explain chelsea --model zoo:pets --against Bengal",
        'clearhead explain --model zoo:pets-clip --text "a photo of a beagle" --image dog.jpg --html why.html',
        "clearhead explain phone --model zoo:spell",
        "clearhead explain --model zoo:shapes-vqa --example 3",
        "clearhead explain reviews.csv --column text --out results",
    ),
)
@opt.in_groups
def explain(
    read: opt.Read,
    asked: opt.Asked,
    loading: opt.Loading,
    inputs: opt.Inputs = None,
    method: opt.Methods = None,
    rows: opt.Rows = None,
    per: opt.Per = None,
    batch_size: opt.BatchSize = 8,
    memory: opt.Memory = None,
    kernel: opt.Kernel = None,
    words: opt.Words = False,
    sentences: opt.Sentences = False,
    html: opt.Html = None,
    save: opt.Save = None,
    as_json: opt.Json = False,
    column: opt.Column = None,
    pair_column: opt.PairColumn = None,
    image_column: opt.ImageColumn = None,
    out: opt.Out = None,
) -> None:
    """Say which parts of the input made the model answer as it did.

    Each word or patch gets a score for the target (by default the predicted label): the higher, the more it spoke for
    it. Scores of signed methods below zero speak against it.
    """
    given = [recognise(one) for one in inputs or ()]
    arguments = {**asked.arguments(), "rows": rows, "per": per, "memory": memory, "kernel": kernel}
    chosen = opt.methods(method, ["generic"])
    data = data_among(given, out, column, pair_column, image_column)
    if data is not None:
        single = {
            **{"--html": html, "--save": save, "--pair": read.pair, "--words": words, "--sentences": sentences},
            **{"--example": read.example, **{f"--{stream}": True for stream in read.named}},
        }
        for name, value in single.items():
            if value not in (None, False):
                raise InputError(
                    f"{name} is for single inputs: the results of data go to --out as the method gave them, pairs to "
                    "--pair-column, pictures to --image-column"
                )
        about = {**asdict(loading), **asdict(asked), "rows": rows, "per": per}
        about |= {name: value for name, value in {"memory": memory, "kernel": kernel}.items() if value is not None}
        _explain_data(data, Path(str(out)), loading, arguments, chosen, batch_size, about, as_json)
        return
    count = max([len(given), *(len(values) for values in read.named.values()), 1])
    put.check_places(html, save, count * len(chosen))
    ex, raws = opened(loading, given, read)
    by_method = ex.explain(
        **raws, method=chosen, batch_size=batch_size, progress=put.talks() and count > batch_size, **arguments
    )
    explanations = [of_input for row in zip(*by_method.values(), strict=True) for of_input in row]
    put.save(explanations, save)
    put.show([put.merged(e, words, sentences) for e in explanations], html, as_json)


@app.command(
    epilog=examples(
        'clearhead compare "You look extremely confused" --method generic,grad-sam,attention',
        "clearhead compare chelsea --method generic,rollout --json",
        'clearhead compare --text "a photo of a cat" --image chelsea --method generic,rollout',
    ),
)
@opt.in_groups
def compare(
    read: opt.Read,
    asked: opt.Asked,
    loading: opt.Loading,
    given: opt.Input = None,
    method: opt.Methods = None,
    memory: opt.Memory = None,
    words: opt.Words = False,
    sentences: opt.Sentences = False,
    html: opt.Html = None,
    as_json: opt.Json = False,
) -> None:
    """Explain one input by several methods and say how far they agree.

    Agreement is Kendall's tau-b between the scores, special tokens left out: 1 is the same order, 0 none in common, −1
    the reverse. Without --method: generic, grad-sam and attcat, or others where these do not apply.
    """
    one = [recognise(words) for words in ([] if given is None else [given])]
    if any(part.kind == "data" for part in one):
        raise InputError(f"compare takes one input, but {given!r} holds many: use clearhead explain {given} --out DIR")
    put.check_places(html)
    chosen = None if method is None else opt.methods(method, [])
    arguments = asked.arguments()
    ex, raws = opened(loading, one, read)
    if any(len(values) > 1 for values in raws.values() if isinstance(values, list)):
        raise InputError("compare takes one input: give each of --text, --image and --audio once")
    alone = {stream: values[0] if isinstance(values, list) else values for stream, values in raws.items()}
    comparison = clearhead.compare(ex, methods=chosen, **alone, **arguments, memory=memory)
    merged = {name: put.merged(e, words, sentences) for name, e in comparison.explanations.items()}
    comparison = clearhead.Comparison(merged)
    if html is not None:
        put.write_page(list(merged.values()), html)
    if as_json:
        put.print_json(comparison.to_dict())
    else:
        put.console().print(comparison)


@app.command(
    epilog=examples(
        'clearhead explain "I like the movie" --save why.safetensors',
        "clearhead show why.safetensors --words --html why.html",
        "clearhead show results --by word",
    ),
)
def show(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A saved explanation, or a folder of them.", show_default=False)
    ],
    words: opt.Words = False,
    sentences: opt.Sentences = False,
    html: opt.Html = None,
    by: Annotated[
        str, typer.Option(metavar="word|label|position", help="For a folder: what scores are put together by.")
    ] = "word",
    how: Annotated[str, typer.Option(metavar="sum|mean", help="For a folder: how they are put together.")] = "sum",
    as_json: opt.Json = False,
) -> None:
    """Open a saved explanation again, or say what matters most in a folder of them. No model is needed."""
    put.check_places(html)
    if file.is_dir():
        if html is not None or words or sentences:
            raise InputError(f"{str(file)!r} is a folder: --html, --words and --sentences are for one explanation")
        if put.show_folder(file, by, how, as_json):
            raise typer.Exit(process.ROWS_FAILED)
        return
    put.show([put.merged(clearhead.open_explanation(file), words, sentences)], html, as_json)


@app.command(
    epilog=examples(
        "clearhead methods",
        "clearhead methods --model zoo:sentiment",
    ),
)
def methods(model: opt.Model = None, as_json: opt.Json = False) -> None:
    """List the methods: what each costs, asks for and promises.

    What a method asks for is recorded in the pass. Signed scores can speak against the target.
    """
    from clearhead.methods import REGISTRY
    from clearhead.render.methods_table import render

    applies = {} if model is None else {line.name: line for line in load(opt.Loading(model)).methods()}
    table: list[dict[str, Any]] = []
    for name in sorted(REGISTRY):
        told = REGISTRY[name].declaration
        line = {
            "method": name,
            "family": told.family,
            "signed": told.signed,
            "cost": told.cost,
            "asks": sorted(told.asks),
            "has": sorted(told.has),
            "options": clearhead.Method.option_names(name),
            "depends_on_target": told.target == "any",
            "taxonomy": told.taxonomy,
            "axioms": list(told.axioms),
            "citation": told.citation,
            "note": told.note,
        }
        if applies:
            line |= {"applies": applies[name].applies, "why_not": applies[name].why_not}
        table.append(line)
    if as_json:
        put.print_json({"schema": "clearhead/methods", "version": 1, "model": model, "methods": table})
        return
    columns = ["method", "family", "signed", "cost", "asks", "taxonomy", *(["applies"] if applies else [])]
    put.console().print(render(columns, [{**line, "applies": line.get("why_not") or "yes"} for line in table]))


@app.command(
    epilog=examples(
        "clearhead models --json",
    ),
)
def models(as_json: opt.Json = False) -> None:
    """List the small trained models that come with clearhead-zoo: size, task, measured accuracy."""
    cards = clearhead.models()
    if as_json:
        put.print_json({"schema": "clearhead/models", "version": 1, "models": cards})
    elif not cards:
        from clearhead.zoo import has_zoo

        empty = "clearhead-zoo is installed, but holds no models"
        why = empty if has_zoo() else "pip install clearhead-zoo brings some"
        print(f"No zoo models here: {why}. Folders and hub names work without it.")
    else:
        put.print_table(["model", "task", "size", "figures", "summary"], [put.of_card(*item) for item in cards.items()])


app.command(epilog=examples(*benchmark.EXAMPLES))(benchmark.bench)
app.command(epilog=examples(*benchmark.REPORTS))(benchmark.report)
app.command(epilog=examples(*converting.EXAMPLES))(converting.convert)
app.command(epilog=examples(*lecturing.EXAMPLES))(lecturing.lecture)
app.command(epilog=examples(*attending.EXAMPLES))(attending.attention)
app.command(epilog=examples(*probing.EXAMPLES))(probing.probe)
app.command(epilog=examples(*verifying.EXAMPLES))(verifying.verify)
app.command(epilog=examples(*serving.EXAMPLES))(serving.serve)


def _group(name: str, words: str, verbs: Mapping[str, tuple[Callable[..., None], Sequence[str]]]) -> None:
    """Verbs of one noun: clearhead NAME VERB."""
    group = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown", help=words)
    for verb, (command, commands) in verbs.items():
        group.command(verb, epilog=examples(*commands))(command)
    app.add_typer(group, name=name)


_group("concept", conceiving.HELP, conceiving.VERBS)
_group("bias", biasing.HELP, biasing.VERBS)


@app.command(epilog=examples("clearhead version --json"))
def version(as_json: opt.Json = False) -> None:
    """Show the versions that a report of a fault should name."""
    found = {"clearhead": clearhead.__version__, "python": sys.version.split()[0]}
    for name in ("torch", "transformers", "clearhead-zoo"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    if as_json:
        put.print_json(found)
    else:
        print("\n".join(f"{name} {number}" for name, number in found.items()))


def _explain_data(
    data: Dataset,
    out: Path,
    loading: opt.Loading,
    arguments: Mapping[str, Any],
    chosen: Sequence[Any],
    batch_size: int,
    about: Mapping[str, Any],
    as_json: bool,
) -> None:
    streams = {"text", "image"} if data.with_pictures else {data.stream}
    ex = load(loading, streams)
    check_data(data, ex)
    from clearhead.data.dataset_run import Run

    effective = {"model": loading.model or ex.subject.name, "scale": about["scale"] or ex.subject.scales[0]}
    run = Run(ex, data, out, chosen, arguments, batch_size, {**about, **effective})
    try:
        with put.progress(data.count) as advance:

            def advance_or_stop(rows: int) -> None:
                advance(rows)
                if process.STATE.interrupted:
                    raise KeyboardInterrupt

            report = run(advance_or_stop)
    except KeyboardInterrupt:
        report = run.report
        done = report.written + report.there_before
        raise process.Stopped(
            f"interrupted: {done} of {report.rows} rows are in {out}; the same command goes on from there"
        ) from None
    if as_json:
        put.print_json(report.to_dict())
    else:
        before = f", {report.there_before} were there before" if report.there_before else ""
        print(f"{report.written} of {report.rows} rows explained{before}: {out / 'index.csv'}")
    if report.failed:
        rows = "1 row" if report.failed == 1 else f"{report.failed} rows"
        process.say(
            f"{rows} of {report.rows} could not be explained: {out / 'errors.csv'} says why", process.ROWS_FAILED
        )
        raise typer.Exit(process.ROWS_FAILED)
