"""`clearhead probe`: tests of attention as an explanation, as a table with intervals, figures, and a conclusion."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli import options as opt
from clearhead.cli import output as put
from clearhead.cli.inputs import check_dataset_streams, load_explainer, load_model_and_inputs, parse_sources
from clearhead.data.sources import collect_raw_inputs, open_dataset, parse_input_source, read_column
from clearhead.errors import InputError, unknown_value_error

if TYPE_CHECKING:
    from clearhead.explainer import Explainer
    from clearhead.probes import ProbeResult
    from clearhead.probes.fine_tuning import TrainingProgress

PROBE_EXAMPLES = (
    'clearhead probe permutation "You look extremely confused"',
    "clearhead probe permutation reviews.csv --limit 200 --scope S2 --out trial",
    'clearhead probe adversary "I like the movie" --steps 200',
    "clearhead probe heads reviews.csv --column text --limit 50 --json",
    "clearhead probe seeds reviews.csv --label-column label --seeds 5 --fresh 1 --checkpoint-dir runs --out trial",
    "clearhead probe frontier reviews.csv --label-column label --strengths 0,0.001,0.01,0.1 --checkpoint-dir runs",
    "clearhead probe diagnostic reviews.csv --label-column label --guides uniform,base,generic,grad-sam",
)
_TRAINING_OPTIONS = ("steps", "train_batch_size", "learning_rate", "held_out", "label_column", "checkpoint_dir", "seed")
#: The options that each probe accepts.
OPTIONS_BY_PROBE: dict[str, tuple[str, ...]] = {
    "correlation": ("unit", "seed"),
    "permutation": ("scope", "layer", "heads", "draws", "keep", "by_head", "frozen", "candidates", "seed"),
    "adversary": ("scope", "layer", "heads", "steps", "tolerance", "candidates", "seed"),
    "uniform": ("frozen", "candidates", "label_column"),
    "seeds": ("seeds", "fresh", "scope", *_TRAINING_OPTIONS),
    "diagnostic": ("guides", *_TRAINING_OPTIONS),
    "frontier": ("strengths", "seeds", "fresh", "scope", *_TRAINING_OPTIONS),
    "heads": (),
    "skips": (),
}
#: Options whose argument in the Python API has another name.
_API_NAMES = {"train_batch_size": "batch_size", "label_column": "labels"}
#: Probes that train models, and report the progress of the training.
TRAINING_PROBES = ("seeds", "diagnostic", "frontier")


@opt.flatten_option_groups
def probe(
    model_options: opt.CliModelOptions,
    kind: Annotated[
        str, typer.Argument(metavar="PROBE", help=f"Probe to run: {', '.join(OPTIONS_BY_PROBE)}.", show_default=False)
    ],
    inputs: opt.InputsArgument = None,
    scope: Annotated[
        str | None,
        typer.Option(
            metavar="S1|S2|S3|S4",
            help="Attention weights to change: S1, those of the read-out token in the last layer (default); S2, those "
            "of the read-out token in every layer; S3, those of all tokens in --layer; S4, all weights.",
        ),
    ] = None,
    layer: Annotated[int | None, typer.Option(metavar="N", help="For scope S3: the layer, counting from 0.")] = None,
    heads: Annotated[str | None, typer.Option(metavar="N,…", help="Use only these heads, counting from 0.")] = None,
    draws: Annotated[
        int | None, typer.Option(metavar="N", help="permutation: number of random permutations. Default: 100.")
    ] = None,
    keep: Annotated[
        bool,
        typer.Option(
            "--keep",
            metavar="",
            help="permutation: do not permute the weights on special tokens or the weight of each token on itself.",
        ),
    ] = False,
    by_head: Annotated[
        bool,
        typer.Option(
            "--by-head",
            metavar="",
            help="permutation: also permute each head separately, leaving the other heads unchanged.",
        ),
    ] = False,
    candidates: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,…",
            help="Compare only the probabilities of these labels or, at a masked position, of these tokens.",
        ),
    ] = None,
    frozen: Annotated[
        bool,
        typer.Option(
            "--frozen", metavar="", help="Keep the attention weights of later layers at their original values."
        ),
    ] = False,
    steps: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="adversary: number of optimisation steps. Default: 500. Training: number of training steps.",
        ),
    ] = None,
    label_column: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Column of labels in a table. Default for training: the model's own predictions.",
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="seeds and frontier: number of additional random seeds. Default: 5 for seeds, 2 for frontier.",
        ),
    ] = None,
    fresh: Annotated[
        str | None,
        typer.Option(
            metavar="N|all",
            help="seeds and frontier: number of final layers to reinitialise. Default: 0 (only the classification "
            "head).",
        ),
    ] = None,
    strengths: Annotated[
        str | None, typer.Option(metavar="λ,…", help="frontier: weights of the adversarial loss term.")
    ] = None,
    guides: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,…",
            help="diagnostic: sources of the word weights: uniform, own (learned by the classifier), base (attention "
            "of the explained model), adversary (adversarially trained attention), or any attribution method. Default: "
            "uniform,own,base.",
        ),
    ] = None,
    train_batch_size: Annotated[
        int | None, typer.Option(metavar="N", help="Training: number of inputs in a training step. Default: 32.")
    ] = None,
    learning_rate: Annotated[float | None, typer.Option(metavar="X", help="Training: peak learning rate.")] = None,
    held_out: Annotated[
        float | None,
        typer.Option(
            metavar="FRACTION", help="Training: fraction of the inputs to hold out for evaluation. Default: 0.25."
        ),
    ] = None,
    checkpoint_dir: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Training: folder for checkpoints; an interrupted training run is resumed."),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            metavar="TVD",
            help="adversary: maximum change in the prediction, as a total variation distance. Default: 0.05.",
        ),
    ] = None,
    unit: Annotated[
        str | None, typer.Option(metavar="token|word", help="correlation: units that are ranked. Default: word.")
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Random seed. Default: 0.")] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="For a table or folder: use only the first N rows.")
    ] = None,
    column: opt.ColumnOption = None,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Folder for the result files: result.json, page.html, figure.png and report.md."
        ),
    ] = None,
    as_json: opt.JsonOption = False,
) -> None:
    """Test whether attention explains predictions.

    - correlation: compare attention with gradients and leave-one-out.
    - permutation: permute the attention weights.
    - adversary: search for different attention weights that give the same prediction.
    - uniform: replace the attention weights with uniform weights.
    - heads: measure the importance of heads and describe their patterns.
    - skips: measure the contribution of the residual stream.
    - seeds (training): compare the attention of models that differ in the random seed.
    - frontier (training): train models that make the same predictions with different attention.
    - diagnostic (training): train a bag-of-words classifier whose word weights come from attention or an
      attribution method.
    """
    if kind not in OPTIONS_BY_PROBE:
        raise unknown_value_error("probe", kind, OPTIONS_BY_PROBE)
    typed: dict[str, Any] = {
        "scope": scope,
        "layer": layer,
        "heads": _parse_numbers(heads, int, "--heads", "0,3"),
        "draws": draws,
        "steps": steps,
        "tolerance": tolerance,
        "unit": unit,
        "seed": seed,
        "keep": keep or None,
        "frozen": frozen or None,
        "by_head": by_head or None,
        "candidates": opt.split_names(candidates),
        "label_column": label_column,
        "seeds": seeds,
        "train_batch_size": train_batch_size,
        "learning_rate": learning_rate,
        "held_out": held_out,
        "checkpoint_dir": checkpoint_dir,
        "fresh": int(fresh) if fresh is not None and fresh.isdigit() else fresh,
        "strengths": _parse_numbers(strengths, float, "--strengths", "0,0.001,0.1"),
        "guides": opt.split_names(guides),
    }
    arguments = {name: value for name, value in typed.items() if value is not None}
    for name in arguments:
        if name not in OPTIONS_BY_PROBE[kind]:
            raise InputError(
                f"--{name.replace('_', '-')} is not an option of the probe {kind}, which takes "
                f"{_format_option_names(OPTIONS_BY_PROBE[kind])}"
            )
    put.check_output_folder(out)
    explainer, raw_inputs = load_probe_inputs(model_options, inputs, limit, column)
    if label_column is not None:
        arguments["label_column"] = _read_labels(inputs or [], label_column, len(raw_inputs))
    arguments = {_API_NAMES.get(name, name): value for name, value in arguments.items()}
    from clearhead import probes

    progress_context: Any = nullcontext(put.is_interactive())
    if kind in TRAINING_PROBES:
        progress_context = _training_progress_bars()
    with progress_context as progress:
        result: ProbeResult = getattr(probes, f"run_{kind}_probe")(
            explainer, raw_inputs, progress=progress, **arguments
        )
    if out is not None:
        _write_probe_files(result, Path(out))
    if as_json:
        put.print_json(result.to_dict())
    else:
        put.make_console().print(result)


def load_probe_inputs(
    model_options: opt.CliModelOptions, inputs: list[str] | None, limit: int | None, column: str | None
) -> "tuple[Explainer, list[Any]]":
    """Load the model and a list of inputs: those that were typed, or the rows of a data set."""
    sources = parse_sources(*(inputs or ()))
    if any(source.source_type == "data" for source in sources):
        if len(sources) > 1:
            raise InputError(f"a data set must be the only input, but {len(sources)} inputs were given")
        dataset = open_dataset(sources[0].value, column, None, None)
        explainer = load_explainer(model_options, {dataset.stream})
        check_dataset_streams(dataset, explainer)
        rows = islice(dataset.iter_rows(*explainer.adapter.input_names), limit)
        return explainer, collect_raw_inputs(dataset.path, rows)
    if limit is not None or column is not None:
        raise InputError("--limit and --column need data (a table or a folder), but none was given")
    explainer, raw_inputs = load_model_and_inputs(model_options, sources, opt.CliInputOptions())
    if "inputs" not in raw_inputs:
        raise InputError(f"{explainer.adapter.name} takes several streams, but probes need a model with one")
    return explainer, raw_inputs["inputs"]


def _read_labels(inputs: list[str], column: str, count: int) -> list[Any]:
    """Read the first `count` labels of a column; inputs that are not one table raise `InputError`."""
    if len(inputs) != 1 or parse_input_source(inputs[0]).source_type != "data":
        raise InputError("--label-column needs data (a table), but none was given")
    return read_column(inputs[0], column, count)


@contextmanager
def _training_progress_bars() -> "Iterator[TrainingProgress | None]":
    """Show one progress bar per trained model, if standard error is a terminal."""
    if not put.is_interactive():
        yield None
        return
    from rich.progress import Progress, TaskID

    tasks: dict[str, TaskID] = {}
    with Progress(console=put.make_console(stderr=True), transient=True) as bars:

        def show(name: str, fraction: float) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=1.0)
            bars.update(tasks[name], completed=fraction)

        yield show


def _parse_numbers(text: str | None, number_type: type[Any], option: str, example: str) -> list[Any] | None:
    """Parse numbers separated by commas; None, an option that was not given, stays None."""
    if text is None:
        return None
    try:
        return [number_type(number) for number in text.split(",")]
    except ValueError:
        raise InputError(f"{option} {text!r} must be numbers separated by commas, such as {example}") from None


def _format_option_names(names: tuple[str, ...]) -> str:
    """List options as they are typed, or say that the probe has none."""
    return ", ".join(f"--{name.replace('_', '-')}" for name in names) or "no options of its own"


def _write_probe_files(result: "ProbeResult", folder: Path) -> None:
    """Write result.json, page.html, figure.png and report.md into a folder."""
    from clearhead.render.html import render_result_page
    from clearhead.render.mpl.probes import plot_probe

    folder.mkdir(exist_ok=True)
    (folder / "result.json").write_text(json.dumps(result.to_dict(), ensure_ascii=False), encoding="utf-8")
    (folder / "page.html").write_text(render_result_page(result), encoding="utf-8")
    plot_probe(result).savefig(folder / "figure.png", dpi=144)
    (folder / "report.md").write_text(result.to_markdown(), encoding="utf-8")
    put.report_written(folder)
