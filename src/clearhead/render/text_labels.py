"""Labels and captions of an explanation: the same text in the terminal, in figures and on HTML pages."""

from collections.abc import Mapping
from math import floor, isfinite, isnan, log10
from typing import Any

import numpy as np

from clearhead.explanation.comparison import Comparison
from clearhead.explanation.explanation import Explanation
from clearhead.explanation.multi_stream import AnyExplanation
from clearhead.render.text_layout import escape_invisible
from clearhead.units import Box

NO_SCORE_TEXT = "no score"
#: The longest target name in a heading.
MAX_HEADING_CHARS = 80


def format_number(value: float | None, digits: int = 4) -> str:
    """Format a number by its significant digits, with a typographic minus.

    Args:
        value: The number; None and NaN give "no score".
        digits: The number of significant digits.

    Example:
        >>> format_number(-0.0123456), format_number(float("nan")), format_number(12.0)
        ('−0.01235', 'no score', '12')
    """
    if value is None or isnan(value):
        return NO_SCORE_TEXT
    return f"{value:.{digits}g}".replace("-", "−")


def format_aligned_number(value: float, max_abs_value: float) -> str:
    """Format a score to three significant digits of the largest score, so that columns of scores line up.

    Args:
        value: The score.
        max_abs_value: The largest absolute score of the column.

    Returns:
        The number, with a proper minus sign; in scientific notation where the largest score is tiny or huge.

    Example:
        >>> format_aligned_number(-0.5, 12.3), format_aligned_number(0.000123, 0.02)
        ('−0.5', '0.0001')
    """
    if not isfinite(value):
        return format_number(value)
    digits = 2 - floor(log10(max_abs_value))
    if not 0 <= digits <= 7:
        return f"{value:.2e}".replace("-", "−")
    text = f"{value:.{digits}f}"
    if float(text) == 0:
        return text.removeprefix("-")
    return text.replace("-", "−")


def format_score(explanation: Explanation, unit_index: int, max_abs_value: float) -> str:
    """Format the score of a unit, with the half-width of its interval if it has one.

    Args:
        explanation: The explanation.
        unit_index: Index of the unit.
        max_abs_value: The largest absolute score of the column.
    """
    text = format_aligned_number(float(explanation.scores[unit_index]), max_abs_value)
    if explanation.intervals is None:
        return text
    low, high = explanation.intervals[unit_index]
    return f"{text} ± {format_aligned_number(float(high - low) / 2, max_abs_value)}"


def format_scores_title(explanation: Explanation, title: str) -> str:
    """Add the level of the intervals to the title of a table of scores.

    Args:
        explanation: The explanation.
        title: The title without it.
    """
    if explanation.intervals is None:
        return title
    return f"{title} ± {100 * explanation.provenance['interval_level']:.0f} % interval"


def format_percent(probability: float) -> str:
    """Format a probability as a percentage; it is never rounded to 0 % or 100 %.

    Example:
        >>> format_percent(0.9713), format_percent(0.99999), format_percent(1e-6)
        ('97.1\\xa0%', '> 99.9\\xa0%', '< 0.1\\xa0%')
    """
    if 0.9995 <= probability < 1:
        return "> 99.9\u00a0%"
    if 0 < probability < 0.0005:
        return "< 0.1\u00a0%"
    return f"{100 * probability:.1f}\u00a0%"


def format_unit_label(explanation: Explanation, unit_index: int) -> str:
    """Return the name of a unit; for an image patch, its row and column."""
    name = explanation.units.names[unit_index]
    if explanation.units.grid is not None and not explanation.units.special[unit_index]:
        row, _, column = name.partition(",")
        if column:
            return f"row {row}, column {column}"
    return escape_invisible(name)


def find_containing_words(explanation: Explanation) -> dict[int, str]:
    """Return the whole word of each unit that is a subword token, by unit index."""
    units = explanation.units
    if units.kind != "token" or units.grid is not None or units.offsets is None:
        return {}
    words, word_indices = units.merge("word")
    num_tokens = np.bincount(word_indices, minlength=len(words))
    return {i: escape_invisible(words.names[word]) for i, word in enumerate(word_indices) if num_tokens[word] > 1}


def split_input_streams(explanation: AnyExplanation) -> tuple[list[Explanation], list[Explanation]]:
    """Return the streams that are inputs, and those that belong to the model, such as a detector's queries.

    If no stream is an input, all of them are returned as inputs.
    """
    inputs: list[Explanation] = []
    model_streams: list[Explanation] = []
    for stream in explanation.by_stream.values():
        if len(stream.units.content_indices()):
            inputs.append(stream)
        else:
            model_streams.append(stream)
    if not inputs:
        return model_streams, []
    return inputs, model_streams


def format_row_names(explanation: Explanation) -> list[str]:
    """Return the names of the rows of a score matrix: the steps of the target, or the units."""
    if explanation.steps is not None:
        return [escape_invisible(step) for step in explanation.steps]
    return [format_unit_label(explanation, index) for index in range(len(explanation))]


def get_target_steps(explanation: AnyExplanation) -> list[Mapping[str, Any]]:
    """Return the steps of the target, or the target itself if it has none."""
    return list(explanation.target.get("steps") or [explanation.target])


def find_detected_boxes(explanation: AnyExplanation) -> dict[int, tuple[str, Box]]:
    """Return the label and the box of each detected object, by step index."""
    return {
        index: (escape_invisible(str(step.get("label", step.get("name")))), tuple(step["box"]))
        for index, step in enumerate(get_target_steps(explanation))
        if step.get("box") is not None
    }


def find_top_units(explanation: Explanation, count: int) -> list[int]:
    """Return the indices of the units with the largest |score|, largest first.

    Special tokens are skipped unless there are no other units.

    Args:
        explanation: The explanation.
        count: How many indices to return at most.
    """
    candidates = explanation.units.content_indices()
    if not len(candidates):
        candidates = np.arange(len(explanation))
    magnitudes = np.nan_to_num(np.abs(explanation.scores[candidates]), nan=-1.0)
    return [int(i) for i in candidates[np.argsort(-magnitudes, kind="stable")][:count]]


def truncate_text(text: str, max_chars: int = MAX_HEADING_CHARS) -> str:
    """Shorten a text to a number of characters, the last of which is an ellipsis.

    Example:
        >>> truncate_text("a long answer", 9)
        'a long a…'
    """
    return text if len(text) <= max_chars else f"{text[: max_chars - 1]}…"


def format_heading(explanation: AnyExplanation) -> str:
    """Return the heading of an explanation: a question about its target."""
    name = truncate_text(escape_invisible(str(explanation.target.get("name", "this"))))
    if explanation.target.get("kind") == "similarity":
        return f"Why “{name}”?"
    return f"Why {name}?"


def format_step_titles(explanation: AnyExplanation) -> list[str]:
    """Return the tooltip of each step: its name, its value, and the probability that the model gives it."""
    steps = get_target_steps(explanation)
    if len(steps) != len(explanation.steps or ()):
        return [escape_invisible(step) for step in explanation.steps or ()]
    return [_format_step_title(step) for step in steps]


def _format_step_title(step: Mapping[str, Any]) -> str:
    """Format a target step as name, scale and value, and its probability if there is one."""
    name = escape_invisible(str(step.get("name")))
    scale = escape_invisible(format_scale(step.get("scale")))
    title = f"{name}: {scale} {format_number(step.get('value'))}"
    if step.get("probability") is None:
        return title
    return f"{title}, {format_percent(step['probability'])}"


def format_scale(scale: str | None) -> str:
    """Return the name of a target's scale; "value" for a function of the output and for a difference of two scales."""
    return "value" if scale in (None, "as_returned") else str(scale)


def format_target_line(explanation: AnyExplanation) -> str:
    """Describe the explained target: scale, name, value, and whether it is the model's prediction."""
    target = explanation.target
    is_regression = "value" in explanation.prediction and explanation.prediction.get("label") != "similarity"
    text = _format_target_value(target, is_regression)
    kind = str(target.get("kind") or "")
    if is_regression:
        kind = _REGRESSION_TARGET_DESCRIPTIONS.get(kind, kind)
    if target.get("mask") is not None:
        return f"{text}, {_MASKED_TARGET_DESCRIPTIONS.get(kind, kind)} at mask {target['mask']}"
    if target.get("position") is not None:
        return f"{text}, {_POSITION_TARGET_DESCRIPTIONS.get(kind, kind + ' at')} {target['position']}"
    if kind == "multiple":
        noun = "objects" if find_detected_boxes(explanation) else "steps"
        return f"{text}, the sum of {len(target.get('steps') or ())} {noun}"
    description = _TARGET_DESCRIPTIONS.get(kind, kind)
    if not description:
        return text
    return f"{text}, {description}"


def _format_target_value(target: Mapping[str, Any], is_regression: bool) -> str:
    """The scale, the name and the value of a target."""
    scale = target.get("scale")
    if is_regression and scale == "logit":
        scale = "output"
    name = truncate_text(escape_invisible(str(target.get("name"))))
    text = name
    if target.get("kind") == "similarity":
        text = f"{scale} with “{name}”"
    elif scale:
        text = f"{format_scale(scale)} of {name}"
    if target.get("value") is None:
        return text
    return f"{text} = {format_number(float(target['value']))}"


_TARGET_DESCRIPTIONS = {
    "predicted": "the predicted class",
    "label": "the requested class",
    "contrast": "a contrast",
    "masked_token": "the masked token",
    "callable": "a function of the output",
    "score_difference": "a difference of scores",
    "similarity": "the similarity of both inputs",
}
#: The descriptions of targets at one position of the output; the position follows.
_POSITION_TARGET_DESCRIPTIONS = {
    "generated_token": "the token generated at step",
    "detection": "the object detected by query",
    "token_label": "the label of token",
    "answer": "the answer’s",
    "contrast": "a contrast at",
}
#: The descriptions of targets at a masked position.
_MASKED_TARGET_DESCRIPTIONS = {
    "predicted": "the predicted token",
    "masked_token": "the requested token",
    "contrast": "a contrast of tokens",
}
#: The descriptions of targets of a regression model.
_REGRESSION_TARGET_DESCRIPTIONS = {"predicted": "the predicted value", "label": "the requested value"}


def list_predictions(explanation: AnyExplanation) -> list[tuple[str, float | None, str]]:
    """List the labels with the largest probabilities, or the detected objects.

    Returns:
        For each of them its name, its probability, and the probability as text. A regression model has no
        probabilities: they are None, and the text is the output.
    """
    predictions: list[tuple[str, float | None, str]] = []
    detected = [step for step in explanation.target.get("steps") or () if step.get("probability") is not None]
    for row in explanation.prediction.get("top") or detected:
        label = escape_invisible(str(row.get("label", row.get("name"))))
        probability = row.get("probability")
        if probability is None:
            predictions.append((label, None, format_number(row.get("logit"))))
        else:
            predictions.append((label, probability, format_percent(probability)))
    return predictions


def format_truncation_note(explanation: AnyExplanation) -> str | None:
    """Return a sentence about truncated tokens, or None if the model received the whole input."""
    count = explanation.certificate.get("truncated_tokens") or 0
    if not count:
        return None
    if count == 1:
        return "1 token was truncated: the model did not receive it, and it has no score."
    return f"{count} tokens were truncated: the model did not receive them, and they have no scores."


def list_notes(explanation: AnyExplanation) -> list[str]:
    """List notes that are needed to interpret the scores: a truncated input, no detected object of a class …"""
    step_notes = [step.get("note") for step in get_target_steps(explanation)]
    return [note for note in dict.fromkeys([format_truncation_note(explanation), *step_notes]) if note]


def list_warnings(result: AnyExplanation | Comparison) -> list[str]:
    """List the warnings of an explanation, or those about the agreement of a comparison, for display."""
    return [escape_invisible(warning) for warning in result.warnings]


def format_guidance(explanation: AnyExplanation) -> str:
    """Return what the scores measure and when they mislead, or an empty string."""
    return str(explanation.provenance.get("guidance", ""))


def format_citation(explanation: AnyExplanation) -> str:
    """Return the citation of the method, or an empty string."""
    citation = explanation.provenance.get("citation")
    return "" if citation in (None, "", "–") else str(citation)


def format_certificate_line(explanation: AnyExplanation) -> str:
    """Summarise the certificate in one line: capture error, dtype, device, read-out, passes, truncated tokens."""
    certificate = explanation.certificate
    facts = []
    if certificate.get("capture_error") is not None:
        facts.append(f"capture error {format_number(float(certificate['capture_error']), 2)}")
    if certificate.get("dtype"):
        device = f" on {certificate['device']}" if certificate.get("device") else ""
        facts.append(f"{certificate['dtype']}{device}")
    if certificate.get("readout"):
        checked = " (checked)" if certificate.get("readout_checked") else ""
        facts.append(f"read-out {certificate['readout']}{checked}")
    if reason := explanation.provenance.get("stopped_because"):
        facts.append(f"{certificate['checks']['evaluations']:.0f} masked inputs: {reason}")
    num_truncated = certificate.get("truncated_tokens")
    if num_truncated:
        facts.append(f"{num_truncated} tokens truncated")
    elif num_truncated is not None:
        facts.append("no tokens truncated")
    return " · ".join(facts)


def format_certificate_rows(explanation: AnyExplanation) -> list[tuple[str, str]]:
    """Return the model, the base value (if the method has one) and every entry of the certificate, as name and text."""
    rows = [
        (_format_certificate_key(key), _format_certificate_value(value))
        for key, value in explanation.certificate.items()
    ]
    if explanation.base_value is not None:
        rows.insert(0, ("base value", format_number(float(explanation.base_value), 6)))
    model = explanation.provenance.get("model")
    model_class = explanation.provenance.get("model_class")
    if model:
        name = str(model) if model_class in (None, model) else f"{model} ({model_class})"
        rows.insert(0, ("model", escape_invisible(name)))
    return rows


def _format_certificate_key(key: str) -> str:
    """Turn a key into words: underscores become spaces, "readout" becomes "read-out"."""
    return escape_invisible(key.replace("_", " ").replace("readout", "read-out"))


def _format_certificate_value(value: Any) -> str:
    """Format a value in words: yes or no, – for None, floats to 3 digits, mappings key by key, "none" for no items."""
    if isinstance(value, Mapping):
        return ", ".join(
            f"{_format_certificate_key(str(key))} {_format_certificate_value(item)}" for key, item in value.items()
        )
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "–"
    if isinstance(value, float):
        return format_number(value, 3)
    if isinstance(value, list | tuple):
        return " ".join(map(_format_certificate_value, value)) or "none"
    return escape_invisible(str(value))


def format_layer_names(explanation: Explanation, num_layers: int) -> list[str]:
    """Return the names of the explained layers, with the model's numbering."""
    first, stop = explanation.provenance.get("layers") or (0, num_layers)
    if stop - first != num_layers:
        return [str(layer) for layer in range(num_layers)]
    return [str(layer) for layer in range(first, stop)]


def format_head_names(explanation: Explanation, num_heads: int) -> list[str]:
    """Return the names of the explained heads, with the model's numbering."""
    heads = explanation.provenance.get("heads") or ()
    if len(heads) != num_heads:
        heads = range(num_heads)
    return [str(head) for head in heads]


def format_layer_caption(explanation: Explanation) -> str:
    """Return the caption of scores by layer: cumulative scores, or contributions of single layers."""
    if explanation.provenance.get("layer_scores") == "depths":
        return "Scores after each layer"
    return "Contribution of each layer to the scores"


def summarise_audio_segments(explanation: Explanation, max_segments: int) -> list[tuple[str, float]]:
    """Group audio frames into segments, and return the time range and the strongest score of each.

    Args:
        explanation: An explanation whose units are audio frames.
        max_segments: The largest number of segments.
    """
    names = explanation.units.names
    frames_per_segment = -(-len(names) // max_segments)
    segments = []
    for start in range(0, len(names), frames_per_segment):
        stop = min(start + frames_per_segment, len(names))
        scores = explanation.scores[start:stop].astype(float)
        strongest = scores[int(np.argmax(np.nan_to_num(np.abs(scores), nan=-1.0)))]
        time_range = escape_invisible(names[start])
        if frames_per_segment > 1:
            time_range = f"{time_range} … {escape_invisible(names[stop - 1])}"
        segments.append((time_range, float(strongest)))
    return segments
