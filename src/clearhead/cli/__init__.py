"""The command line: one verb a line of the README, the words of the API, nothing but the public API behind it."""

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

import clearhead
from clearhead.cli import options as opt
from clearhead.cli import output as put
from clearhead.cli import process as process
from clearhead.datasets import Dataset, Given, open_dataset, recognise
from clearhead.errors import InputError

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

DEFAULT_MODELS = {"text": "zoo:sentiment", "image": "zoo:pets"}

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
        "clearhead explain reviews.csv --column text --out results",
    ),
)
def explain(
    inputs: opt.Inputs,
    method: opt.Methods = None,
    target: opt.Target = None,
    against: opt.Against = None,
    scale: opt.Scale = "logit",
    layers: opt.Layers = None,
    heads: opt.Heads = None,
    rows: opt.Rows = None,
    per: opt.Per = None,
    mask: opt.Mask = None,
    pair: opt.Pair = None,
    as_text: opt.AsText = False,
    max_length: opt.MaxLength = None,
    no_truncation: opt.NoTruncation = False,
    truncation_side: opt.TruncationSide = None,
    model: opt.Model = None,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    revision: opt.Revision = None,
    readout: opt.Readout = None,
    seed: opt.Seed = 0,
    batch_size: opt.BatchSize = 8,
    words: opt.Words = False,
    sentences: opt.Sentences = False,
    html: opt.Html = None,
    save: opt.Save = None,
    as_json: opt.Json = False,
    column: opt.Column = None,
    pair_column: opt.PairColumn = None,
    out: opt.Out = None,
) -> None:
    """Say which parts of the input made the model answer as it did.

    Each word or patch gets a score for the target (by default the predicted label): the higher, the more it spoke for
    it. Scores of signed methods below zero speak against it.
    """
    loading = opt.Loading(model, device, dtype, revision, readout)
    asked = opt.Asked(
        target, against, mask, scale, layers, heads, rows, per, max_length, not no_truncation, truncation_side, seed
    )
    given = [recognise(one, as_text) for one in inputs]
    data = _data(given, column, pair_column, out)
    if data is not None:
        single = {"--html": html, "--save": save, "--pair": pair, "--words": words, "--sentences": sentences}
        for name, value in single.items():
            if value not in (None, False):
                raise InputError(
                    f"{name} is for single inputs: the results of data go to --out as the method gave them, pairs to "
                    "--pair-column"
                )
        _explain_data(data, Path(str(out)), loading, asked, method, batch_size, as_json)
        return
    chosen = opt.methods(method, ["generic"])
    put.check_places(html, save, len(given) * len(chosen))
    arguments = asked.arguments()
    ex = _load(loading, given)
    raws = [_raw(one, ex, pair) for one in given]
    by_method = ex.explain(
        raws, method=chosen, batch_size=batch_size, progress=put.talks() and len(raws) > batch_size, **arguments
    )
    explanations = [of_input for row in zip(*by_method.values(), strict=True) for of_input in row]
    put.save(explanations, save)
    put.show([put.merged(e, words, sentences) for e in explanations], html, as_json)


@app.command(
    epilog=examples(
        'clearhead compare "You look extremely confused" --method generic,grad-sam,attention',
        "clearhead compare chelsea --method generic,rollout --json",
    ),
)
def compare(
    given: opt.Input,
    method: opt.Methods = None,
    target: opt.Target = None,
    against: opt.Against = None,
    scale: opt.Scale = "logit",
    layers: opt.Layers = None,
    heads: opt.Heads = None,
    mask: opt.Mask = None,
    pair: opt.Pair = None,
    as_text: opt.AsText = False,
    max_length: opt.MaxLength = None,
    no_truncation: opt.NoTruncation = False,
    truncation_side: opt.TruncationSide = None,
    model: opt.Model = None,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    revision: opt.Revision = None,
    readout: opt.Readout = None,
    seed: opt.Seed = 0,
    words: opt.Words = False,
    sentences: opt.Sentences = False,
    html: opt.Html = None,
    as_json: opt.Json = False,
) -> None:
    """Explain one input by several methods and say how far they agree.

    Agreement is Kendall's tau-b between the scores, special tokens left out: 1 is the same order, 0 none in common, −1
    the reverse. Without --method: generic, grad-sam and attcat.
    """
    one = recognise(given, as_text)
    if one.kind == "data":
        raise InputError(f"compare takes one input, but {given!r} holds many: use clearhead explain {given} --out DIR")
    put.check_places(html)
    chosen = opt.methods(method, ["generic", "grad-sam", "attcat"])
    loading = opt.Loading(model, device, dtype, revision, readout)
    asked = opt.Asked(
        target, against, mask, scale, layers, heads, None, None, max_length, not no_truncation, truncation_side, seed
    )
    arguments = asked.arguments()
    ex = _load(loading, [one])
    comparison = clearhead.compare(ex, _raw(one, ex, pair), chosen, **arguments)
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

    applies = {} if model is None else {line.name: line for line in _load(opt.Loading(model), []).methods()}
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
        }
        if applies:
            line |= {"applies": applies[name].applies, "why_not": applies[name].why_not}
        table.append(line)
    if as_json:
        put.print_json({"schema": "clearhead/methods", "version": 1, "model": model, "methods": table})
        return
    columns = ["method", "family", "signed", "cost", "asks", "taxonomy", *(["applies"] if applies else [])]
    put.print_table(columns, [{**line, "applies": line.get("why_not") or "yes"} for line in table])


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
        from clearhead.loading import has_zoo

        empty = "clearhead-zoo is installed, but holds no models"
        why = empty if has_zoo() else "pip install clearhead-zoo brings some"
        print(f"No zoo models here: {why}. Folders and hub names work without it.")
    else:
        put.print_table(["model", "task", "size", "figures", "summary"], [put.of_card(*item) for item in cards.items()])


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


def _load(loading: opt.Loading, given: Sequence[Given], stream: str = "text") -> "Explainer":
    """The model that was named or, by default, the zoo's for what was given."""
    if any(one.kind in ("picture", "named picture") for one in given):
        stream = "image"
    name = loading.model or DEFAULT_MODELS[stream]
    with put.waiting(f"loading {name}"):
        if name.startswith("zoo:") or os.path.isdir(name):
            import transformers

            transformers.logging.disable_progress_bar()  # nothing is downloaded
        return clearhead.load(name, **loading.arguments())


def _raw(one: Given, ex: "Explainer", pair: str | None) -> Any:
    """An input as the model takes it; a name such as chelsea is a picture for one model and a word for another."""
    if ex.subject.stream == "image":
        if one.kind in ("text", "text file"):
            raise InputError(f"{ex.subject.name} takes pictures, but {one.words!r:.60} is no picture file")
        if pair is not None:
            raise InputError("--pair is for models that read two texts; this one takes pictures")
        return one.picture()
    if one.kind == "picture":
        raise InputError(
            f"{ex.subject.name} takes texts, but {one.words!r} is a picture: choose another --model (zoo:pets takes "
            "pictures), or add --text if you mean the words"
        )
    return one.text() if pair is None else (one.text(), pair)


def _data(given: Sequence[Given], column: str | None, pair_column: str | None, out: str | None) -> Dataset | None:
    """The data set among the inputs, if that is what they are."""
    tables = [one for one in given if one.kind == "data"]
    if not tables:
        for name, value in (("--out", out), ("--column", column), ("--pair-column", pair_column)):
            if value is not None:
                raise InputError(f"{name} is for data (a table or a folder), and none was given; --save keeps a result")
        return None
    if len(given) > 1:
        raise InputError(f"{tables[0].words!r} is data, which goes alone: {len(given)} inputs were given")
    if out is None:
        raise InputError(f"{tables[0].words!r} holds many inputs: say where the results go with --out DIR")
    return open_dataset(tables[0].words, column, pair_column)


def _explain_data(
    data: Dataset,
    out: Path,
    loading: opt.Loading,
    asked: opt.Asked,
    method: Sequence[str] | None,
    batch_size: int,
    as_json: bool,
) -> None:
    chosen = opt.methods(method, ["generic"])
    arguments = asked.arguments()
    ex = _load(loading, [], data.stream)
    if data.stream == "image" and ex.subject.stream != "image":
        raise InputError(f"{ex.subject.name} takes texts, but {str(data.path)!r} is a folder of pictures")
    if data.kind == "texts" and ex.subject.stream == "image":
        raise InputError(f"{ex.subject.name} takes pictures, but {str(data.path)!r} is a folder of texts")
    from clearhead.runs import Run

    about = {**asdict(loading), "model": loading.model or DEFAULT_MODELS[data.stream], **asdict(asked)}
    run = Run(ex, data, out, chosen, arguments, batch_size, about)
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
