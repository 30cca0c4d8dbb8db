"""What the renderer is given: a result as one JSON document, with the data to draw and the words to say.

Words and layout are made here, where terminal and figures take them from, too; colours, sizes and what answers to the
pointer are the renderer's (`assets/`). No score is computed.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from clearhead.errors import InputError
from clearhead.explanation.aggregation import AggregatedScores
from clearhead.explanation.comparison import Comparison
from clearhead.explanation.explanation import Explanation, to_json_value
from clearhead.explanation.multi_stream import AnyExplanation, MultiStreamExplanation
from clearhead.explanation.otsu_mask import compute_otsu_cutoff
from clearhead.render import images, reproduction, text_labels
from clearhead.render.array_codec import MAX_EMBEDDED_ELEMENTS, MAX_EXACT_ELEMENTS, encode_array
from clearhead.render.colours import compute_vmax
from clearhead.render.text_layout import build_text_lines, escape_invisible, find_unit_layout
from clearhead.units import Units

if TYPE_CHECKING:
    from clearhead.links import AttentionLinks

VIEW_MODEL_VERSION = 2
#: The largest number of audio segments that are drawn.
MAX_AUDIO_SEGMENTS = 400

ViewModel = dict[str, Any]
#: The views that `assets/charts.js` draws.
CHART_VIEW_TYPES = ("line_chart", "bar_chart", "box_chart", "scatter_chart", "heat_map", "image_overlays", "probe")


def build_view_model(
    result: Any, evidence: Collection[int] | None = None, links: "Sequence[AttentionLinks]" = (), **options: Any
) -> ViewModel:
    """Build the view model of a result of clearhead.

    Args:
        result: What `explain`, `compare` or `aggregate` returns, an attention view, a probe result or a verification.
        evidence: Indices of the units that annotators marked; they are drawn under the text of a single input.
        links: Attention between units of two streams of a single input.
        **options: Options of attention views.

    Returns:
        The view model of the result; a page for explanations of several inputs.

    Raises:
        InputError: If the result is of another type.
    """
    from clearhead.probes.attention_view import AttentionView
    from clearhead.probes.cross_attention_view import MultiStreamAttentionView
    from clearhead.probes.probe_result import ProbeResult
    from clearhead.verification import Verification

    if isinstance(result, AttentionView | MultiStreamAttentionView):
        from clearhead.render.views.attention import build_attention_view_model, build_multi_stream_view_model

        return (
            build_attention_view_model(result, **options)
            if isinstance(result, AttentionView)
            else build_multi_stream_view_model(result, **options)
        )
    if isinstance(result, AggregatedScores):
        from clearhead.render.views.aggregate import build_aggregate_view_model

        return build_aggregate_view_model(result)
    if isinstance(result, ProbeResult):
        from clearhead.render.views.aggregate import build_probe_view_model

        return build_probe_view_model(result)
    if isinstance(result, Verification):
        from clearhead.render.views import verification

        return verification.build_verification_view_model(result)
    made = build_input_view_models(flatten_explanations(result), evidence, links)
    return made[0] if len(made) == 1 else build_page_view_model(made, f"{len(made)} inputs explained")


def make_view_model(view_type: str, **fields: Any) -> ViewModel:
    """Make a view model: plain data that the terminal, the static HTML and the script of the page render.

    Args:
        view_type: Name of the view, which selects the renderer.
        **fields: The data of the view.

    Returns:
        The fields, with schema, version and type.
    """
    return {"schema": "clearhead/view", "version": VIEW_MODEL_VERSION, "view": view_type, **fields}


def find_required_modules(view: ViewModel) -> tuple[str, ...]:
    """What any part of a document needs beside the views of explanations (`bundle.EXTRAS`)."""
    return tuple(name for name, views in _VIEW_TYPES_BY_MODULE.items() if _contains_view_type(view, views))


_VIEW_TYPES_BY_MODULE = {"charts": CHART_VIEW_TYPES, "attention": ("attention", "multi_stream_attention")}


def _contains_view_type(given: ViewModel, views: Collection[str]) -> bool:
    inside = [*given.get("children", ()), *given.get("collapsed_children", ())]
    return given["view"] in views or any(_contains_view_type(part, views) for part in inside)


def build_page_view_model(
    sections: Sequence[ViewModel], title: str, eyebrow: str = "clearhead", footer: str = ""
) -> ViewModel:
    """Build a page of several view models, one below the other.

    Args:
        sections: The view models.
        title: Heading and title of the page.
        eyebrow: Small line above the heading.
        footer: Text at the end of the page.

    Returns:
        The view model of the page.
    """
    return make_view_model("page", eyebrow=eyebrow, title=title, footer=footer, children=list(sections))


def flatten_explanations(results: Any) -> list[AnyExplanation]:
    """All explanations in what `explain` and `compare` return."""
    if isinstance(results, AnyExplanation):
        return [results]
    if isinstance(results, Comparison | Mapping):
        return flatten_explanations([results[key] for key in results])
    if isinstance(results, Iterable) and not isinstance(results, str):
        return [explanation for part in results for explanation in flatten_explanations(part)]
    raise InputError(f"expected explanations, but got a {type(results).__name__}")


def group_by_input(explanations: Iterable[AnyExplanation]) -> list[list[AnyExplanation]]:
    """Explanations of the same units by the same model together, in the order in which inputs first came."""
    groups: dict[Any, list[AnyExplanation]] = {}
    for explanation in explanations:
        units = tuple(part.units for part in explanation.by_stream.values())
        made_of = (explanation.provenance.get("model"), explanation.provenance.get("input"), units)
        picture = None if explanation.image is None else explanation.image.tobytes()
        groups.setdefault((*made_of, picture), []).append(explanation)
    return list(groups.values())


def build_input_view_models(
    explanations: Iterable[AnyExplanation],
    evidence: Collection[int] | None = None,
    links: "Sequence[AttentionLinks]" = (),
) -> list[ViewModel]:
    """A document of each input. What is marked or linked belongs to one: of several, it would be drawn under all."""
    groups = group_by_input(explanations)
    if not groups:
        raise InputError("nothing to show: the list is empty")
    if len(groups) > 1 and (evidence or links):
        given = "evidence=" if evidence else "links="
        raise InputError(f"{given} belongs to one input, but {len(groups)} inputs were given: write one page for each")
    return [build_input_view_model(group, evidence, links) for group in groups]


def build_input_view_model(
    group: Sequence[AnyExplanation], evidence: Collection[int] | None = None, links: "Sequence[AttentionLinks]" = ()
) -> ViewModel:
    """Build the view model of one input: the input, the prediction, and a card with the scores of each method.

    Args:
        group: Explanations of the same input.
        evidence: Indices of the units that annotators marked; they are drawn under the text.
        links: Attention between units of two streams.

    Returns:
        The view model.
    """
    first, named = group[0], make_unique_labels(group)
    inputs, rest = text_labels.split_input_streams(first)
    marked = next((part for part in inputs if find_unit_layout(part) == "text"), None)
    comparison = Comparison(named) if len(named) > 1 else None
    return make_view_model(
        "input",
        heading=format_group_heading(group),
        model=escape_invisible(str(first.provenance.get("model") or "")),
        target_descriptions=list(dict.fromkeys(text_labels.format_target_line(explanation) for explanation in group)),
        notes=list(dict.fromkeys(note for e in group for note in text_labels.list_notes(e))),
        prediction=_build_prediction_table(group),
        image=None if first.image is None else build_image_view_model(first.image),
        detections=[
            {"step": step, "label": label, "box": list(box)}
            for step, (label, box) in text_labels.find_detected_boxes(first).items()
        ],
        streams=[
            *(_build_stream(part, evidence if part is marked else None) for part in inputs),
            *({**_build_stream(part), "is_input": False} for part in rest),
        ],
        cards=[_build_method_card(explanation, label) for label, explanation in named.items()],
        agreement=_encode_agreement(comparison) if comparison else [],
        disagreements=text_labels.list_warnings(comparison) if comparison else [],
        links=build_links_view_model(links, first),
    )


def build_links_view_model(links: "Sequence[AttentionLinks]", explanation: AnyExplanation) -> ViewModel | None:
    """Links between streams, with the labels of their units and their boxes in the image."""
    if not links:
        return None
    streams = {
        stream: {
            "title": escape_invisible(stream).capitalize(),
            "labels": [text_labels.format_unit_label(part, place) for place in range(len(part))],
            "boxes": part.units.boxes,
        }
        for stream, part in explanation.by_stream.items()
    }
    return {"directions": [one.to_dict() for one in links], "streams": to_json_value(streams)}


def format_group_heading(group: Sequence[AnyExplanation]) -> str:
    """Format the heading of the explanations of one input: a question about their target; "Why?" for several.

    Args:
        group: Explanations of one input.

    Returns:
        One line.
    """
    return _format_question(group[0]) if _has_single_target(group) else "Why?"


def make_unique_labels(group: Sequence[AnyExplanation]) -> dict[str, AnyExplanation]:
    """Map a label to each explanation of a group, in the order of the group.

    The label is the method if all explanations have the same target, the question ("Why A and not B?") if all have the
    same method, and "METHOD of TARGET" otherwise. Labels that occur again get a number: "METHOD (2)".
    """
    one_method = len({explanation.method for explanation in group}) == 1
    named: dict[str, AnyExplanation] = {}
    for explanation in group:
        label = escape_invisible(explanation.method)
        if not _has_single_target(group):
            label = (
                _format_question(explanation)
                if one_method
                else f"{label} of {escape_invisible(str(explanation.target.get('name')))}"
            )
        same = sum(other == label or other.startswith(f"{label} (") for other in named)
        named[f"{label} ({same + 1})" if same else label] = explanation
    return named


def _format_question(explanation: AnyExplanation) -> str:
    """Why A? Why B? Why A and not B?"""
    target = explanation.target
    one, minus, other = str(target.get("name")).partition(" − ")
    against = target.get("against") or (other if minus and target.get("kind") in _CONTRAST_TARGET_KINDS else None)
    if against is None:
        return text_labels.format_heading(explanation)
    return (
        f"Why {text_labels.truncate_text(escape_invisible(one))} and not "
        f"{text_labels.truncate_text(escape_invisible(str(against)))}?"
    )


_CONTRAST_TARGET_KINDS = ("contrast", "score_difference")


def _has_single_target(group: Sequence[AnyExplanation]) -> bool:
    """Whether all explanations of a group are of the same target."""
    return len({str(explanation.target.get("name")) for explanation in group}) == 1


def _build_prediction_table(group: Sequence[AnyExplanation]) -> ViewModel:
    """The labels with the largest probabilities (or outputs), those that are explained marked."""
    explanation, explained = group[0], {escape_invisible(str(one.target.get("name"))) for one in group}
    top = explanation.prediction.get("top") or ()
    rows: list[ViewModel] = [
        {"label": label, "probability": probability, "text": text, "is_explained": label in explained}
        for label, probability, text in text_labels.list_predictions(explanation)
    ]
    for row, found in zip(rows, top, strict=False):
        row["index"] = found.get("index")
    return {"caption": "Prediction" if explanation.prediction else "Found", "rows": to_json_value(rows)}


def build_image_view_model(pixels: images.RgbArray) -> ViewModel:
    """An image as a page shows it."""
    height, width = images.fit_image_size(*pixels.shape[:2])
    address = images.encode_image_data_url(pixels, height, width)
    return {"src": address, "width": width, "height": height, "is_small": images.is_small_image(pixels)}


def _build_stream(explanation: Explanation, evidence: Collection[int] | None = None) -> ViewModel:
    """The units of one stream: what they are called, and how they lie."""
    units = explanation.units
    made: ViewModel = {
        "stream": units.stream,
        "title": escape_invisible(units.stream).capitalize(),
        "is_input": True,
        "layout": find_unit_layout(explanation),
        "labels": [text_labels.format_unit_label(explanation, place) for place in range(len(units))],
    }
    if made["layout"] == "grid":
        made["size"] = list(reversed(images.compute_display_size(explanation)))  # width, height
    if made["layout"] == "text":
        made |= {
            "lines": _encode_lines(units),
            "is_verbatim": units.offsets is not None,
            "word_level": _build_word_level(units),
        }
        made["containing_words"] = {
            str(place): word for place, word in text_labels.find_containing_words(explanation).items()
        }
    if evidence:
        made["evidence"] = sorted({int(place) for place in evidence if 0 <= place < len(units)})
    return made


def _build_word_level(units: Units) -> ViewModel | None:
    """The same text by words, where pieces of words make that another view."""
    try:
        merged, parents = units.merge("word")
    except InputError:
        return None
    if len(merged) == len(units):
        return None
    labels = [escape_invisible(word) for word in merged.names]
    return {
        "lines": _encode_lines(merged),
        "labels": labels,
        "special": list(merged.special),
        "parents": parents.tolist(),
    }


def _encode_lines(units: Units) -> list[list[list[Any]]]:
    """Each piece as [text], [text, unit] or [text, unit, kind]: x a special token, h one without text, u unseen."""
    return [[_encode_span(piece) for piece in line] for line in build_text_lines(units)] if units.names else []


def _encode_span(piece: Any) -> list[Any]:
    """Encode a piece of the displayed text as [text, unit index or none, kind or none] for the page's renderer."""
    kind = "x" if piece.is_special else "h" if piece.is_empty else "u" if piece.is_unseen else None
    if kind:
        return [piece.text, piece.unit_index, kind]
    return [piece.text] if piece.unit_index is None else [piece.text, piece.unit_index]


def _build_method_card(explanation: AnyExplanation, title: str) -> ViewModel:
    """One method's answer."""
    code, line = reproduction.format_python_snippet(explanation), reproduction.format_cli_command(explanation)
    steps = None
    if explanation.steps is not None:
        titles = text_labels.format_step_titles(explanation)
        steps = [{"name": escape_invisible(s), "title": t} for s, t in zip(explanation.steps, titles, strict=True)]
    return {
        "title": title,
        "method": escape_invisible(explanation.method),
        "guidance": text_labels.format_guidance(explanation),
        "citation": text_labels.format_citation(explanation),
        "warnings": text_labels.list_warnings(explanation),
        "explanation": _drop_encoded_arrays(explanation).to_dict(short=True),
        "steps": steps,
        "streams": {
            stream: _encode_stream_scores(part)
            | _compute_mask_cutoffs(part, bool(text_labels.find_detected_boxes(explanation)))
            for stream, part in explanation.by_stream.items()
        },
        "force_plot": _build_force_plot(explanation),
        "certificate": [list(row) for row in text_labels.format_certificate_rows(explanation)],
        "code_snippets": [escape_invisible_in_code(part) for part in (code, line) if part],
    }


def _drop_encoded_arrays(explanation: AnyExplanation) -> AnyExplanation:
    """Without the arrays that are packed beside it; a small matrix stays, as steps need theirs."""
    if isinstance(explanation, MultiStreamExplanation):
        return MultiStreamExplanation(
            {stream: _drop_stream_arrays(part) for stream, part in explanation.by_stream.items()}
        )
    return _drop_stream_arrays(explanation)


def _drop_stream_arrays(part: Explanation) -> Explanation:
    large = part.matrix is not None and part.matrix.size > MAX_EXACT_ELEMENTS
    return replace(
        part, per_layer=None, per_head=None, factors=None, covariance=None, matrix=None if large else part.matrix
    )


def escape_invisible_in_code(code: str) -> str:
    """Code with nothing invisible in it but its line breaks."""
    return "\n".join(escape_invisible(line) for line in code.split("\n"))


def _encode_stream_scores(part: Explanation) -> ViewModel:
    made: ViewModel = {"is_signed": part.signed, "vmax": compute_vmax(part), "arrays": dict(_iter_encoded_arrays(part))}
    if part.units.kind == "frame":
        made["audio_segments"] = [
            [label, v if np.isfinite(v) else None]
            for label, v in text_labels.summarise_audio_segments(part, MAX_AUDIO_SEGMENTS)
        ]
    return made


def _compute_mask_cutoffs(part: Explanation, found: bool) -> ViewModel:
    """Above which score a pixel is in the mask: of all, and of each object that was found.

    Masks of large pictures are cut at the size that a page shows: each object costs as many pixels.
    """
    if find_unit_layout(part) != "grid" or part.units.grid is None:
        return {}
    kept, grid = part.units.content_indices(), part.units.grid
    size = grid if part.image is None else part.image.shape[:2]
    size = images.fit_image_size(*size) if max(size) > images.MAX_IMAGE_SIDE else size
    has_steps = (
        found and part.steps is not None and part.matrix is not None and part.matrix.size <= MAX_EMBEDDED_ELEMENTS
    )
    steps = part.matrix if has_steps else None

    def cut(scores: np.ndarray) -> float | None:
        return compute_otsu_cutoff(scores[kept].reshape(grid), *size)

    made: ViewModel = {"mask_cutoff": cut(part.scores)}
    return made if steps is None else {**made, "step_mask_cutoffs": [cut(row) for row in steps]}


def _iter_encoded_arrays(part: Explanation) -> Iterable[tuple[str, ViewModel]]:
    """Step × unit or unit × unit, layer × unit, layer × head × unit."""
    matrix, layers, heads = part.matrix, part.per_layer, part.per_head
    if (
        matrix is not None
        and matrix.size <= MAX_EMBEDDED_ELEMENTS
        and (part.steps is not None or len(matrix) == len(part))
    ):
        rows, row_axis = text_labels.format_row_names(part), "step" if part.steps is not None else "row"
        yield "matrix", {**encode_array(matrix, compute_vmax(part, matrix)), "row_names": rows, "row_axis": row_axis}
    if layers is not None and len(layers) > 1 and layers.size <= MAX_EMBEDDED_ELEMENTS:
        names, caption = text_labels.format_layer_names(part, len(layers)), text_labels.format_layer_caption(part)
        yield (
            "per_layer",
            {
                **encode_array(layers, compute_vmax(part, layers)),
                "row_names": names,
                "row_axis": "layer",
                "caption": caption,
            },
        )
    if heads is not None and heads.size <= MAX_EMBEDDED_ELEMENTS:
        names = text_labels.format_layer_names(part, len(heads))
        columns = text_labels.format_head_names(part, heads.shape[1])
        yield (
            "per_head",
            {**encode_array(heads, compute_vmax(part, heads)), "row_names": names, "column_names": columns},
        )


def _build_force_plot(explanation: AnyExplanation) -> ViewModel | None:
    """From where scores add up, and to what; only methods with a base value add up at all."""
    base, value = explanation.base_value, explanation.target.get("value")
    if base is None or value is None or explanation.steps is not None:
        return None
    return to_json_value(
        {
            "base_value": float(base),
            "value": float(value),
            "scale": text_labels.format_scale(explanation.target.get("scale")),
        }
    )


def _encode_agreement(comparison: Comparison) -> list[ViewModel]:
    """Kendall's tau-b between every two cards, stream by stream."""
    return [
        {"stream": escape_invisible(stream).capitalize(), "methods": comparison.methods, "values": to_json_value(tau)}
        for stream, tau in comparison.agreements.items()
    ]
