"""`clearhead attention`: the attention maps of one input, all heads at a glance and single heads, stream by stream."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli import options as opt
from clearhead.cli import output as put
from clearhead.cli.inputs import load_model_and_inputs, parse_sources
from clearhead.cli.probe import load_probe_inputs
from clearhead.errors import InputError, UnsupportedError

if TYPE_CHECKING:
    from clearhead.explainer import Explainer
    from clearhead.probes import AttentionView, MultiStreamAttentionView

ATTENTION_EXAMPLES = (
    'clearhead attention "You look extremely confused"',
    'clearhead attention "She hates the book" --head 1.3 --head 4.0 --out maps',
    'clearhead attention "So boring" --average-over reviews.csv --limit 100 --out maps',
    'clearhead attention "She asked the doctor about [MASK] back" -m zoo:masked --candidates his,her --out maps',
    'clearhead attention phone -m zoo:spell --stream "prefix -> source" --head 1.0 --out maps',
    "clearhead attention -m zoo:shapes-vqa --example 3 --out maps",
)


@opt.flatten_option_groups
def attention(
    input_options: opt.CliInputOptions,
    model_options: opt.CliModelOptions,
    typed_input: opt.InputArgument = None,
    stream: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="For models with several streams: show only one attention map, within a stream (text) or from one "
            "stream to another (prefix -> source). Default: all maps.",
        ),
    ] = None,
    head: Annotated[
        list[str] | None,
        typer.Option(
            "--head",
            metavar="LAYER.HEAD",
            help="Head to draw, such as 1.3 for layer 1, head 3, counting from 0; may be repeated.",
        ),
    ] = None,
    average_over: Annotated[
        str | None,
        typer.Option(
            metavar="DATA",
            help="Table or folder of inputs: also show the attention pattern of each head, averaged over these inputs.",
        ),
    ] = None,
    candidates: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,…",
            help="Print the probabilities of these labels or, at a masked position, these tokens, such as his,her.",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Use only the first N rows of --average-over.")
    ] = None,
    column: opt.ColumnOption = None,
    batch_size: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="Inputs of --average-over per pass; smaller batches need less memory."),
    ] = 16,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Folder for the result files: overview.png (every head), depth.png (the read-out token across layers, "
            "by raw attention, rollout and flow), graph.png, maps.png (the heads selected by --head), attention.html "
            "(everything, interactive) and attention.json; with several streams, the images of each map are written "
            "to a folder named after the map.",
        ),
    ] = None,
    as_json: opt.JsonOption = False,
) -> None:
    """Show the attention weights of one input: for each head, and for the read-out token across layers.

    Models with several streams (text and image, source and prefix) have attention maps within each stream and between
    streams.
    """
    if typed_input is None and not input_options.values_by_stream and input_options.example is None:
        raise InputError("no input: pass a text or an image. See clearhead attention --help")
    if average_over is None and (limit is not None or column is not None):
        raise InputError("--limit and --column need --average-over")
    if head and out is None:
        raise InputError("--head draws attention maps: specify the folder for them with --out DIR")
    chosen_heads = [_parse_layer_and_head(text) for text in head or ()]
    put.check_output_folder(out)
    explainer, raw_input = _load_single_input(typed_input, model_options, input_options)
    reference_inputs = None
    if average_over is not None:
        reference_inputs = load_probe_inputs(model_options, [average_over], limit, column)[1]
    candidate_names = opt.split_names(candidates) or []
    with put.status_spinner("recording attention"):
        view = _compute_requested_view(explainer, raw_input, stream, reference_inputs, candidate_names, batch_size)
    views = _get_views_by_name(view)
    if chosen_heads and len(views) > 1:
        raise InputError(
            f"--head needs one attention map, but there are several: choose with --stream ({', '.join(views)})"
        )
    for layer_index, head_index in chosen_heads:
        for map_view in views.values():
            map_view.get_map(layer_index, head_index)
    if out is not None:
        _write_attention_files(Path(out), view, chosen_heads)
    if as_json:
        put.print_json(view.to_dict())
    else:
        put.make_console().print(view)


def _load_single_input(
    typed_input: str | None, model_options: opt.CliModelOptions, input_options: opt.CliInputOptions
) -> "tuple[Explainer, dict[str, Any]]":
    """Load the model and its one input, by stream."""
    sources = parse_sources(typed_input)
    if sources and sources[0].source_type == "data":
        raise InputError(
            f"attention is shown for one input, but {typed_input!r} contains several: average over them with "
            "--average-over"
        )
    explainer, raw_inputs = load_model_and_inputs(model_options, sources, input_options)
    if "inputs" in raw_inputs:
        raw_inputs = {explainer.adapter.input_names[0]: raw_inputs["inputs"]}
    if any(len(values) != 1 for values in raw_inputs.values()):
        raise InputError("attention is shown for one input: pass one input for each stream")
    return explainer, {name: values[0] for name, values in raw_inputs.items()}


def _compute_requested_view(
    explainer: "Explainer",
    raw_input: dict[str, Any],
    stream: str | None,
    reference_inputs: list[Any] | None,
    candidates: list[str],
    batch_size: int,
) -> "AttentionView | MultiStreamAttentionView":
    """Compute the map named by --stream, the view with averages or candidates, or the default view."""
    from clearhead.probes import compute_attention_view, compute_multi_stream_view, view_attention

    if stream is not None:
        if reference_inputs or candidates:
            raise InputError("--average-over and --candidates need the read-out token of a model: leave out --stream")
        map_name = " → ".join(re.split(r"\s*(?:→|->)\s*", stream.strip()))
        return compute_multi_stream_view(explainer, **raw_input)[map_name]
    if not (reference_inputs or candidates):
        return view_attention(explainer, raw_input)
    single_input: Any = raw_input
    if len(raw_input) == 1:
        (single_input,) = raw_input.values()
    try:
        return compute_attention_view(
            explainer, single_input, reference_inputs, candidates=candidates, batch_size=batch_size
        )
    except UnsupportedError as problem:
        raise InputError(f"--average-over and --candidates are for models with one read-out token: {problem}") from None


def _get_views_by_name(view: "AttentionView | MultiStreamAttentionView") -> "dict[str, AttentionView]":
    """Return the attention maps by name; the only map of a model has an empty name."""
    from clearhead.probes import MultiStreamAttentionView

    if isinstance(view, MultiStreamAttentionView):
        return view.views
    return {"": view}


def _write_attention_files(
    folder: Path, view: "AttentionView | MultiStreamAttentionView", chosen_heads: list[tuple[int, int]]
) -> None:
    """Write the figures of each map as PNG into its own folder, and the view as HTML and JSON."""
    from clearhead.render.html import render_result_page

    for name, map_view in _get_views_by_name(view).items():
        map_folder = folder / re.sub(r"\W+", "-", name.replace("→", "to"))
        map_folder.mkdir(exist_ok=True, parents=True)
        for title, figure in _plot_figures(map_view, chosen_heads).items():
            figure.savefig(map_folder / f"{title}.png", dpi=144)
    (folder / "attention.html").write_text(render_result_page(view), encoding="utf-8")
    (folder / "attention.json").write_text(json.dumps(view.to_dict(), ensure_ascii=False), encoding="utf-8")
    put.report_written(folder)


def _plot_figures(view: "AttentionView", chosen_heads: list[tuple[int, int]]) -> dict[str, Any]:
    """Plot overview and depth, a graph if queries and keys are the same units, and the chosen heads."""
    from clearhead.render.mpl import attention as attention_plots

    figures = {
        "overview": attention_plots.plot_attention_overview(view),
        "depth": attention_plots.plot_attention_by_layer(view),
    }
    if view.key_names is None:  # a layered graph needs the same units as queries and keys
        figures["graph"] = attention_plots.plot_attention_graph(view)
    if chosen_heads:
        figures["maps"] = attention_plots.plot_attention_maps(view, chosen_heads)
    return figures


def _parse_layer_and_head(text: str) -> tuple[int, int]:
    """Parse LAYER.HEAD, such as 1.3."""
    try:
        layer, head = (int(number) for number in text.split("."))
    except ValueError:
        raise InputError(f"--head {text!r} must be a layer and a head separated by a dot, such as 1.3") from None
    return layer, head
