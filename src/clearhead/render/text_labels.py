"""What an explanation says in words and figures, the same in a terminal, a figure and a page."""

from collections.abc import Mapping
from math import floor, isfinite, isnan, log10
from typing import Any

import numpy as np

from clearhead.explanation.explanation import Explanation
from clearhead.explanation.multi_stream import AnyExplanation
from clearhead.render.text_layout import name
from clearhead.units import Box

NO_SCORE = "no score"
#: How much of a long answer stands in a heading.
LONG = 80


def number(value: float | None, digits: int = 4) -> str:
    """A figure by its significant digits, with a real minus.

    >>> number(-0.0123456), number(float("nan")), number(12.0)
    ('−0.01235', 'no score', '12')
    """
    if value is None or isnan(value):
        return NO_SCORE
    return f"{value:.{digits}g}".replace("-", "−")


def aligned(value: float, full: float) -> str:
    """A score to three digits of the largest one, so that columns of them line up.

    >>> aligned(-0.5, 12.3), aligned(0.000123, 0.02)
    ('−0.5', '0.0001')
    """
    if isnan(value) or not isfinite(value):
        return NO_SCORE if isnan(value) else number(value)
    digits = 2 - floor(log10(full))
    if not 0 <= digits <= 7:
        return f"{value:.2e}".replace("-", "−")
    text = f"{value:.{digits}f}"
    return text.removeprefix("-") if float(text) == 0 else text.replace("-", "−")


def percent(share: float) -> str:
    """A probability; never rounded to a certainty that it is not.

    >>> percent(0.9713), percent(0.99999), percent(1e-6)
    ('97.1\\xa0%', '> 99.9\\xa0%', '< 0.1\\xa0%')
    """
    if 0.9995 <= share < 1:
        return "> 99.9\u00a0%"
    if 0 < share < 0.0005:
        return "< 0.1\u00a0%"
    return f"{100 * share:.1f}\u00a0%"


def unit_label(explanation: Explanation, place: int) -> str:
    """What a unit is called in a list: its name, and for a patch where it lies."""
    raw = explanation.units.names[place]
    if explanation.units.grid is not None and not explanation.units.special[place]:
        row, _, column = raw.partition(",")
        return f"row {row}, column {column}" if column else name(raw)
    return name(raw)


def words_of(explanation: Explanation) -> dict[int, str]:
    """The word around each unit that is only a piece of one."""
    units = explanation.units
    if units.kind != "token" or units.grid is not None or units.offsets is None:
        return {}
    words, parents = units.merged("word")
    sizes = np.bincount(parents, minlength=len(words))
    return {place: name(words.names[word]) for place, word in enumerate(parents) if sizes[word] > 1}


def streams(explanation: AnyExplanation) -> tuple[list[Explanation], list[Explanation]]:
    """The streams that are input, and those that are only part of the model, such as a detector's queries."""
    inputs: list[Explanation] = []
    rest: list[Explanation] = []
    for part in explanation.parts.values():
        (inputs if len(part.units.drop_special()) else rest).append(part)
    return (inputs, rest) if inputs else (rest, [])


def row_names(explanation: Explanation) -> list[str]:
    """What the rows of the matrix stand for: steps, or the units themselves."""
    if explanation.steps is not None:
        return [name(step) for step in explanation.steps]
    return [unit_label(explanation, place) for place in range(len(explanation))]


def described(explanation: AnyExplanation) -> list[Mapping[str, Any]]:
    """The steps of the target, each by itself; the target alone where there are none."""
    return list(explanation.target.get("steps") or [explanation.target])


def boxes(explanation: AnyExplanation) -> dict[int, tuple[str, Box]]:
    """What was found where: the name and the box of each step that has one."""
    return {
        place: (name(str(step.get("label", step.get("name")))), tuple(step["box"]))
        for place, step in enumerate(described(explanation))
        if step.get("box") is not None
    }


def strongest(explanation: Explanation, count: int) -> list[int]:
    """The units with the largest |score|, the largest first; special ones left out if there are others."""
    kept = explanation.units.drop_special()
    kept = kept if len(kept) else np.arange(len(explanation))
    sizes = np.nan_to_num(np.abs(explanation.scores[kept]), nan=-1.0)
    return [int(i) for i in kept[np.argsort(-sizes, kind="stable")][:count]]


def short(text: str, most: int = LONG) -> str:
    """
    >>> short("a long answer", 9)
    'a long a…'
    """
    return text if len(text) <= most else f"{text[: most - 1]}…"


def heading(explanation: AnyExplanation) -> str:
    what = short(name(str(explanation.target.get("name", "this"))))
    return f"Why “{what}”?" if explanation.target.get("kind") == "similarity" else f"Why {what}?"


def step_titles(explanation: AnyExplanation) -> list[str]:
    """What is said about each step under the pointer: its name and value, and how sure the model is."""
    steps = described(explanation)
    if len(steps) != len(explanation.steps or ()):
        return [name(step) for step in explanation.steps or ()]
    return [
        f"{name(str(step.get('name')))}: {name(str(step.get('scale') or 'value'))} {number(step.get('value'))}"
        + (f", {percent(step['probability'])}" if step.get("probability") is not None else "")
        for step in steps
    ]


def target_line(explanation: AnyExplanation) -> str:
    """Which number was explained: name, scale, value, and whether it is what the model predicted."""
    target, prediction = explanation.target, explanation.prediction
    measures = "value" in prediction and prediction.get("label") != "similarity"
    scale, value = target.get("scale"), target.get("value")
    scale = "output" if measures and scale == "logit" else scale
    what = short(name(str(target.get("name"))))
    said = f"{scale} of {what}" if scale else what
    if target.get("kind") == "similarity":
        said = f"{scale} with “{what}”"
    said += f" = {number(float(value))}" if value is not None else ""
    kind = str(target.get("kind") or "")
    kind = _MEASURES.get(kind, kind) if measures else kind
    if target.get("mask") is not None:
        return f"{said}, {_AT_MASK.get(kind, kind)} at mask {target['mask']}"
    if target.get("place") is not None:
        return f"{said}, {_AT_PLACE.get(kind, kind + ' at')} {target['place']}"
    if kind == "several":
        return f"{said}, the sum of {len(target.get('steps') or ())} {'objects' if boxes(explanation) else 'steps'}"
    kind = _KINDS.get(kind, kind)
    return f"{said}, {kind}" if kind else said


_KINDS = {
    "predicted": "the predicted class",
    "label": "the class asked for",
    "contrast": "a contrast",
    "masked word": "the masked word",
    "callable": "a function of the output",
    "similarity": "how alike the two are",
}
#: The same at one place of an answer that has many; the place follows.
_AT_PLACE = {
    "generated word": "the word at step",
    "detection": "what is found by query",
    "token label": "the label of token",
    "answer": "the answer’s",
    "contrast": "a contrast at",
}
#: The same where the classes are the words of a vocabulary.
_AT_MASK = {"predicted": "the predicted word", "masked word": "the word asked for", "contrast": "a contrast of words"}
#: The same for a model that measures instead of classifying.
_MEASURES = {"predicted": "what the model measures", "label": "the measure asked for"}


def predictions(explanation: AnyExplanation) -> list[tuple[str, float | None, str]]:
    """The labels with the largest probabilities, or the objects found: name, share, and the share as text.

    A model that measures has no shares, only its outputs.
    """
    rows: list[tuple[str, float | None, str]] = []
    found = [step for step in explanation.target.get("steps") or () if step.get("probability") is not None]
    for row in explanation.prediction.get("top") or found:
        share = row.get("probability")
        label = name(str(row.get("label", row.get("name"))))
        rows.append((label, share, number(row.get("logit")) if share is None else percent(share)))
    return rows


def truncation(explanation: AnyExplanation) -> str | None:
    """A sentence if the model did not see the whole input."""
    count = explanation.certificate.get("truncated_tokens") or 0
    if not count:
        return None
    tokens = "1 token was" if count == 1 else f"{count} tokens were"
    return f"{tokens} cut off: the model never saw them, and nothing here speaks of them."


def notes(explanation: AnyExplanation) -> list[str]:
    """What must be known to read the scores: that the input was cut, that no such object was found …"""
    said = [step.get("note") for step in (explanation.target.get("steps") or [explanation.target])]
    return [note for note in dict.fromkeys([truncation(explanation), *said]) if note]


def method_line(explanation: AnyExplanation) -> str:
    citation = explanation.provenance.get("citation")
    return "" if citation in (None, "", "–") else str(citation)


def certificate_line(explanation: AnyExplanation) -> str:
    """What was checked, in one line."""
    certificate = explanation.certificate
    parts = []
    if certificate.get("capture_error") is not None:
        parts.append(f"capture error {number(float(certificate['capture_error']), 2)}")
    if certificate.get("dtype"):
        device = f" on {certificate['device']}" if certificate.get("device") else ""
        parts.append(f"{certificate['dtype']}{device}")
    if certificate.get("readout"):
        parts.append(f"read-out {certificate['readout']}{' (checked)' if certificate.get('readout_checked') else ''}")
    cut = certificate.get("truncated_tokens")
    if cut is not None:
        parts.append(f"{cut} tokens cut off" if cut else "nothing cut off")
    return " · ".join(parts)


def certificate_rows(explanation: AnyExplanation) -> list[tuple[str, str]]:
    """Everything that was checked, with what the scores add up from where the method has that."""
    rows = [(_spoken(key), _said(value)) for key, value in explanation.certificate.items()]
    if explanation.base_value is not None:
        rows.insert(0, ("base value", number(float(explanation.base_value), 6)))
    model, kind = explanation.provenance.get("model"), explanation.provenance.get("model_class")
    if model:
        rows.insert(0, ("model", name(str(model) if kind in (None, model) else f"{model} ({kind})")))
    return rows


def _spoken(key: str) -> str:
    return name(key.replace("_", " ").replace("readout", "read-out"))


def _said(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{_spoken(str(key))} {_said(part)}" for key, part in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "–"
    return number(value, 3) if isinstance(value, float) else name(str(value))


def layer_names(explanation: Explanation, count: int) -> list[str]:
    """The layers that were read, as the model counts them."""
    first, stop = explanation.provenance.get("layers") or (0, count)
    return [str(layer) for layer in (range(first, stop) if stop - first == count else range(count))]


def head_names(explanation: Explanation, count: int) -> list[str]:
    """The heads that were read, as the model counts them."""
    heads = explanation.provenance.get("heads") or ()
    return [str(head) for head in (heads if len(heads) == count else range(count))]


def layer_caption(explanation: Explanation) -> str:
    depths = explanation.provenance.get("parts") == "depths"
    return "Scores read after each layer" if depths else "What each layer adds to the scores"


def moments(explanation: Explanation, most: int) -> list[tuple[str, float]]:
    """Frames of a sound in at most so many moments: from when to when, and the strongest score in it."""
    names, scores = explanation.units.names, explanation.scores
    size = -(-len(names) // most)
    found = []
    for start in range(0, len(names), size):
        stop = min(start + size, len(names))
        inside = scores[start:stop].astype(float)
        strongest = inside[int(np.argmax(np.nan_to_num(np.abs(inside), nan=-1.0)))]
        first, last = name(names[start]), name(names[stop - 1])
        found.append((first if size == 1 else f"{first} … {last}", float(strongest)))
    return found
