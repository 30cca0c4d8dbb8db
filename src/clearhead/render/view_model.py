"""What the renderer is given: a result as one JSON document, with the data to draw and the words to say.

Words and layout are made here, where terminal and figures take them from, too; colours, sizes and what answers to the
pointer are the renderer's (`assets/`). No score is computed.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from clearhead.errors import InputError
from clearhead.explanation.aggregation import Aggregate
from clearhead.explanation.comparison import Comparison
from clearhead.explanation.explanation import Explanation, plain
from clearhead.explanation.multi_stream import AnyExplanation, JointExplanation
from clearhead.explanation.otsu_mask import cut_of
from clearhead.render import images, reproduction, text_labels
from clearhead.render.array_codec import EXACT, LARGEST, packed
from clearhead.render.colours import largest
from clearhead.render.text_layout import lines, name, shape
from clearhead.units import Units

if TYPE_CHECKING:
    from clearhead.links import Links

VERSION = 1
#: How many moments of a sound are drawn beside one another.
MOMENTS = 400

Document = dict[str, Any]
#: The views that `assets/plots.js` draws.
PLOTS = ("curves", "bars", "boxes", "points", "map", "overlays", "probe")


def document(
    result: Any, evidence: Collection[int] | None = None, links: "Sequence[Links]" = (), **options: Any
) -> Document:
    """The document of whatever clearhead returns; several inputs make a page.

    evidence: the places of units that people marked, to be drawn under the text; links: between units of two streams,
    one way or both; either goes with one input alone
    options: those of the kind of result
    """
    from clearhead.probes.attention_view import AttentionView
    from clearhead.probes.cross_attention_view import StreamsView
    from clearhead.probes.probe_result import ProbeResult
    from clearhead.verification import Verification

    if isinstance(result, AttentionView | StreamsView):
        from clearhead.render.views.attention import attention, by_stream

        return attention(result, **options) if isinstance(result, AttentionView) else by_stream(result, **options)
    if isinstance(result, Aggregate):
        from clearhead.render.views.aggregate import aggregate

        return aggregate(result)
    if isinstance(result, ProbeResult):
        from clearhead.render.views.aggregate import probe

        return probe(result)
    if isinstance(result, Verification):
        from clearhead.render.views import verification

        return verification.document(result)
    made = each_input(every(result), evidence, links)
    return made[0] if len(made) == 1 else whole_page(made, f"{len(made)} inputs explained")


def view(kind: str, **parts: Any) -> Document:
    return {"schema": "clearhead/view", "version": VERSION, "view": kind, **parts}


def extras(given: Document) -> tuple[str, ...]:
    """What any part of a document needs beside the views of explanations (`bundle.EXTRAS`)."""
    return tuple(name for name, views in _EXTRAS.items() if _has(given, views))


_EXTRAS = {"plots": PLOTS, "attention": ("attention", "streams")}


def _has(given: Document, views: Collection[str]) -> bool:
    inside = [*given.get("parts", ()), *given.get("more", ())]
    return given["view"] in views or any(_has(part, views) for part in inside)


def whole_page(parts: Sequence[Document], title: str, eyebrow: str = "clearhead", foot: str = "") -> Document:
    """Documents one after another."""
    return view("page", eyebrow=eyebrow, title=title, foot=foot, parts=list(parts))


def every(given: Any) -> list[AnyExplanation]:
    """All explanations in what `explain` and `compare` return."""
    if isinstance(given, AnyExplanation):
        return [given]
    if isinstance(given, Comparison | Mapping):
        return every([given[key] for key in given])
    if isinstance(given, Iterable) and not isinstance(given, str):
        return [explanation for part in given for explanation in every(part)]
    raise InputError(f"expected explanations, but got a {type(given).__name__}")


def by_input(explanations: Iterable[AnyExplanation]) -> list[list[AnyExplanation]]:
    """Explanations of the same units by the same model together, in the order in which inputs first came."""
    groups: dict[Any, list[AnyExplanation]] = {}
    for explanation in explanations:
        units = tuple(part.units for part in explanation.parts.values())
        made_of = (explanation.provenance.get("model"), explanation.provenance.get("input"), units)
        picture = None if explanation.picture is None else explanation.picture.tobytes()
        groups.setdefault((*made_of, picture), []).append(explanation)
    return list(groups.values())


def each_input(
    explanations: Iterable[AnyExplanation], evidence: Collection[int] | None = None, links: "Sequence[Links]" = ()
) -> list[Document]:
    """A document of each input. What is marked or linked belongs to one: of several, it would be drawn under all."""
    groups = by_input(explanations)
    if not groups:
        raise InputError("nothing to show: the list is empty")
    if len(groups) > 1 and (evidence or links):
        given = "evidence=" if evidence else "links="
        raise InputError(f"{given} is of one input, but {len(groups)} were given: make a page of each")
    return [one_input(group, evidence, links) for group in groups]


def one_input(
    group: Sequence[AnyExplanation], evidence: Collection[int] | None = None, links: "Sequence[Links]" = ()
) -> Document:
    """Everything about one input: what it is, what the model says, and each method's answer."""
    first, named = group[0], labelled(group)
    inputs, rest = text_labels.streams(first)
    marked = next((part for part in inputs if shape(part) == "text"), None)
    return view(
        "input",
        heading=heading(group),
        model=name(str(first.provenance.get("model") or "")),
        explained=list(dict.fromkeys(text_labels.target_line(explanation) for explanation in group)),
        notes=list(dict.fromkeys(note for e in group for note in text_labels.notes(e))),
        prediction=_prediction(group),
        picture=None if first.picture is None else picture_of(first.picture),
        found=[
            {"step": step, "label": label, "box": list(box)} for step, (label, box) in text_labels.boxes(first).items()
        ],
        streams=[
            *(_stream(part, evidence if part is marked else None) for part in inputs),
            *({**_stream(part), "input": False} for part in rest),
        ],
        cards=[_card(explanation, label) for label, explanation in named.items()],
        agreement=_agreement(Comparison(named)) if len(named) > 1 else [],
        links=between(links, first),
    )


def between(links: "Sequence[Links]", explanation: AnyExplanation) -> Document | None:
    """Links and what they join: names of units, and where they lie in the picture."""
    if not links:
        return None
    ends = {
        stream: {
            "title": name(stream).capitalize(),
            "labels": [text_labels.unit_label(part, place) for place in range(len(part))],
            "boxes": part.units.boxes,
        }
        for stream, part in explanation.parts.items()
    }
    return {"ways": [one.to_dict() for one in links], "ends": plain(ends)}


def heading(group: Sequence[AnyExplanation]) -> str:
    return _question(group[0]) if _one_target(group) else "Why?"


def labelled(group: Sequence[AnyExplanation]) -> dict[str, AnyExplanation]:
    """Each explanation under a name of its own: its method, or its target where that is what differs; else a number."""
    one_method = len({explanation.method for explanation in group}) == 1
    named: dict[str, AnyExplanation] = {}
    for explanation in group:
        label = name(explanation.method)
        if not _one_target(group):
            label = _question(explanation) if one_method else f"{label} of {name(str(explanation.target.get('name')))}"
        same = sum(other == label or other.startswith(f"{label} (") for other in named)
        named[f"{label} ({same + 1})" if same else label] = explanation
    return named


def _question(explanation: AnyExplanation) -> str:
    """Why A? Why B? Why A and not B?"""
    target = explanation.target
    one, minus, other = str(target.get("name")).partition(" − ")
    against = target.get("against") or (other if minus and target.get("kind") in _DIFFERENCES else None)
    if against is None:
        return text_labels.heading(explanation)
    return f"Why {text_labels.short(name(one))} and not {text_labels.short(name(str(against)))}?"


_DIFFERENCES = ("contrast", "difference of scores")


def _one_target(group: Sequence[AnyExplanation]) -> bool:
    return len({str(explanation.target.get("name")) for explanation in group}) == 1


def _prediction(group: Sequence[AnyExplanation]) -> Document:
    """The labels with the largest probabilities (or outputs), those that are explained marked."""
    explanation, explained = group[0], {name(str(one.target.get("name"))) for one in group}
    top = explanation.prediction.get("top") or ()
    rows: list[Document] = [
        {"label": label, "share": share, "said": said, "chosen": label in explained}
        for label, share, said in text_labels.predictions(explanation)
    ]
    for row, found in zip(rows, top, strict=False):
        row["index"] = found.get("index")
    return {"caption": "Prediction" if explanation.prediction else "Found", "rows": plain(rows)}


def picture_of(pixels: images.Pixels) -> Document:
    """A picture as a page shows it."""
    height, width = images.fitted(*pixels.shape[:2])
    address = images.picture_address(pixels, height, width)
    return {"src": address, "width": width, "height": height, "small": images.is_small(pixels)}


def _stream(explanation: Explanation, evidence: Collection[int] | None = None) -> Document:
    """The units of one stream: what they are called, and how they lie."""
    units = explanation.units
    made: Document = {
        "stream": units.stream,
        "title": name(units.stream).capitalize(),
        "input": True,
        "shape": shape(explanation),
        "labels": [text_labels.unit_label(explanation, place) for place in range(len(units))],
    }
    if made["shape"] == "grid":
        made["size"] = list(reversed(images.size(explanation)))  # width, height
    if made["shape"] == "text":
        made |= {"lines": _lines(units), "as_written": units.offsets is not None, "words": _words(units)}
        made["inside"] = {str(place): word for place, word in text_labels.words_of(explanation).items()}
    if evidence:
        made["evidence"] = sorted({int(place) for place in evidence if 0 <= place < len(units)})
    return made


def _words(units: Units) -> Document | None:
    """The same text by words, where pieces of words make that another view."""
    try:
        merged, parents = units.merged("word")
    except InputError:
        return None
    if len(merged) == len(units):
        return None
    labels = [name(word) for word in merged.names]
    return {"lines": _lines(merged), "labels": labels, "special": list(merged.special), "parents": parents.tolist()}


def _lines(units: Units) -> list[list[list[Any]]]:
    """Each piece as [text], [text, unit] or [text, unit, kind]: x a special token, h one without text, u unseen."""
    return [[_piece(piece) for piece in line] for line in lines(units)] if units.names else []


def _piece(piece: Any) -> list[Any]:
    kind = "x" if piece.special else "h" if piece.hidden else "u" if piece.unseen else None
    if kind:
        return [piece.text, piece.unit, kind]
    return [piece.text] if piece.unit is None else [piece.text, piece.unit]


def _card(explanation: AnyExplanation, title: str) -> Document:
    """One method's answer."""
    code, line = reproduction.snippet(explanation), reproduction.command(explanation)
    steps = None
    if explanation.steps is not None:
        titles = text_labels.step_titles(explanation)
        steps = [{"name": name(s), "title": t} for s, t in zip(explanation.steps, titles, strict=True)]
    return {
        "title": title,
        "method": name(explanation.method),
        "citation": text_labels.method_line(explanation),
        "explanation": _light(explanation).to_dict(short=True),
        "steps": steps,
        "streams": {
            stream: _scored(part) | _cuts(part, bool(text_labels.boxes(explanation)))
            for stream, part in explanation.parts.items()
        },
        "force": _force(explanation),
        "certificate": [list(row) for row in text_labels.certificate_rows(explanation)],
        "recipe": [name_lines(part) for part in (code, line) if part],
    }


def _light(explanation: AnyExplanation) -> AnyExplanation:
    """Without the arrays that are packed beside it; a small matrix stays, as steps need theirs."""
    if isinstance(explanation, JointExplanation):
        return JointExplanation({stream: _lighter(part) for stream, part in explanation.parts.items()})
    return _lighter(explanation)


def _lighter(part: Explanation) -> Explanation:
    large = part.matrix is not None and part.matrix.size > EXACT
    return replace(part, per_layer=None, per_head=None, factors=None, matrix=None if large else part.matrix)


def name_lines(code: str) -> str:
    """Code with nothing invisible in it but its line breaks."""
    return "\n".join(name(line) for line in code.split("\n"))


def _scored(part: Explanation) -> Document:
    made: Document = {"signed": part.signed, "full": largest(part), "arrays": dict(_arrays(part))}
    if part.units.kind == "frame":
        made["moments"] = [[label, v if np.isfinite(v) else None] for label, v in text_labels.moments(part, MOMENTS)]
    return made


def _cuts(part: Explanation, found: bool) -> Document:
    """Above which score a pixel is in the mask: of all, and of each object that was found.

    Masks of large pictures are cut at the size that a page shows: each object costs as many pixels.
    """
    if shape(part) != "grid" or part.units.grid is None:
        return {}
    kept, grid = part.units.drop_special(), part.units.grid
    size = grid if part.picture is None else part.picture.shape[:2]
    size = images.fitted(*size) if max(size) > images.LONGEST else size
    has_steps = found and part.steps is not None and part.matrix is not None and part.matrix.size <= LARGEST
    steps = part.matrix if has_steps else None

    def cut(scores: np.ndarray) -> float | None:
        return cut_of(scores[kept].reshape(grid), *size)

    made: Document = {"cut": cut(part.scores)}
    return made if steps is None else {**made, "cuts": [cut(row) for row in steps]}


def _arrays(part: Explanation) -> Iterable[tuple[str, Document]]:
    """Step × unit or unit × unit, layer × unit, layer × head × unit."""
    matrix, layers, heads = part.matrix, part.per_layer, part.per_head
    if matrix is not None and matrix.size <= LARGEST and (part.steps is not None or len(matrix) == len(part)):
        rows, corner = text_labels.row_names(part), "step" if part.steps is not None else "row"
        yield "matrix", {**packed(matrix, largest(part, matrix)), "rows": rows, "corner": corner}
    if layers is not None and len(layers) > 1 and layers.size <= LARGEST:
        names, caption = text_labels.layer_names(part, len(layers)), text_labels.layer_caption(part)
        yield "layers", {**packed(layers, largest(part, layers)), "rows": names, "corner": "layer", "caption": caption}
    if heads is not None and heads.size <= LARGEST:
        names = text_labels.layer_names(part, len(heads))
        columns = text_labels.head_names(part, heads.shape[1])
        yield "heads", {**packed(heads, largest(part, heads)), "rows": names, "columns": columns}


def _force(explanation: AnyExplanation) -> Document | None:
    """From where scores add up, and to what; only methods with a base value add up at all."""
    base, value = explanation.base_value, explanation.target.get("value")
    if base is None or value is None or explanation.steps is not None:
        return None
    return plain({"base": float(base), "value": float(value), "scale": explanation.target.get("scale")})


def _agreement(comparison: Comparison) -> list[Document]:
    """Kendall's tau-b between every two cards, stream by stream."""
    return [
        {"stream": name(stream).capitalize(), "methods": comparison.methods, "values": plain(tau)}
        for stream, tau in comparison.agreements.items()
    ]
