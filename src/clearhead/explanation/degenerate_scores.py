"""Warnings about degenerate scores: what is odd about a result, and what to do, in one sentence each.

`check_…` functions return a sentence or None. Those that look at the scores alone are collected by
`find_degenerate_scores`, those that look at the figures which a method measured by `find_measured_problems`.
"""

import unicodedata
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from clearhead.units import TEXT_LEVELS, Units, pluralize_unit

#: Share of the absolute scores on special units. Of 2,250 explanations of the zoo's models by 26 methods, 40 reach it:
#: by `lrp`, `rollout`, `attcat` and `grad-sam`, which do put nearly everything on [CLS] there.
MAX_SPECIAL_SHARE = 0.9
#: Share of the first unit, where it is no special one, and its multiple of the next largest score. In decoders without
#: a token for the start of the text it is the attention sink: on SmolLM2, `generic` gives it 0.42 to 0.56 of the scores
#: and 2.4 to 5.2 times the next one in 8 of 10 prompts. Without a sink, 1 of 110 explanations of the zoo reaches both.
MAX_FIRST_UNIT_SHARE = 0.4
MAX_FIRST_UNIT_MULTIPLE = 2.0
#: Share of a punctuation mark or a line break. In the zoo a delimiter has at most 0.55: the colon before a masked token
#: of code, by `generic`.
MAX_DELIMITER_SHARE = 0.8
#: In shorter texts, such a share of one unit is nothing unusual.
MIN_UNITS_WITH_SINK = 4
#: Spread of the scores of an input, relative to the largest, in units of the model's rounding error: sums over heads
#: and layers round several times. The zoo's smallest spread is 0.004, 4,000 times the tolerance of float32.
FLAT_ROUNDING_ERRORS = 8
#: Largest score relative to the target's value. Smaller ones are below the rounding error of a float32 output, which
#: is 6e-8 of its value. The zoo's smallest is 2e-7, by `attention-gradcam`.
MIN_RELATIVE_SCORE = 1e-8
#: Completeness gap, relative to the largest score. `clearhead.verify` accepts 0.05; on the zoo, integrated gradients
#: have at most 0.03, except for 0.09 to 2.5 on `shapes-detr`, where 50 steps are too few.
MAX_COMPLETENESS_GAP = 0.1
#: The same for methods that estimate their sum from samples, which report its standard error: `gradient-shap` with its
#: 50 samples has 0.3 in the median, so only a sum that misses by more than the largest score is unusual.
MAX_SAMPLED_COMPLETENESS_GAP = 1.0
#: Fraction of the variance of the masked outputs that LIME's linear model leaves unexplained.
MAX_MISFIT = 0.5
#: Share of value zeroing's mixing that passes through layers whose measured distances are rounding errors.
MAX_ROUNDING_SHARE = 0.5

#: Rounding error of 1 in the dtypes that models run in.
_ROUNDING_ERRORS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
#: Methods that do not use the target: another one would change nothing.
_UNTARGETED_METHODS = ("attention", "flow", "rollout", "value-zeroing")
#: Methods whose scores are a product of mixing matrices over the layers.
_LAYER_PRODUCT_METHODS = ("value-zeroing", "rollout")
#: Suggested where special units or a sink hide the other units: their scores do not follow attention weights.
_ALTERNATIVE_METHODS = ("ensemble", "deeplift", "attn-lrp", "integrated-gradients")
#: The option that decides how exact a method is.
_ACCURACY_OPTIONS = {
    "integrated-gradients": "steps=",
    "layer-conductance": "steps=",
    "gradient-shap": "samples=",
    "shap": "evaluations=",
    "kernel-shap": "evaluations=",
    "calibrated": "evaluations=",
    "lime": "evaluations=",
}
#: The longest unit name that is quoted.
_MAX_NAME_CHARS = 24


def find_degenerate_scores(
    scores: Float[np.ndarray, "unit"],
    units: Units,
    target: Mapping[str, Any],
    certificate: Mapping[str, Any],
    provenance: Mapping[str, Any],
) -> list[str]:
    """Return the warnings about the scores of one stream.

    Args:
        scores: One score per unit; NaN for a unit without a score.
        units: The units.
        target: The explained output, as in `Explanation.target`.
        certificate: The results of the checks.
        provenance: How the scores were computed.

    Returns:
        The warnings; none for controls, for streams that are no input, and where no unit has a finite score.
    """
    if provenance.get("family") == "control" or not len(units.content_indices()) or not np.isfinite(scores).any():
        return []
    method = str(provenance.get("method", ""))
    flat = check_flat_scores(scores, units, str(certificate.get("dtype", "float32")), target.get("scale"), method)
    value = target.get("value")
    vanishing = None
    if not flat and isinstance(value, int | float):
        vanishing = check_vanishing_scores(scores, float(value), target.get("scale"))
    warnings = [
        flat,
        vanishing,
        check_special_units(scores, units, method),
        check_first_unit(scores, units, method),
        check_delimiters(scores, units, method),
    ]
    return [warning for warning in warnings if warning]


def find_measured_problems(
    figures: Mapping[str, float], method: str, expected_sum: float | None = None, largest_score: float | None = None
) -> list[str]:
    """Return the warnings about figures that a method measured during its passes.

    Args:
        figures: The figures by name, as in `certificate["checks"]`.
        method: The registry name of the method.
        expected_sum: What the scores should add up to, if known.
        largest_score: The largest absolute score of all streams, if known.

    Returns:
        One sentence per problem; empty if there is none.
    """
    warnings = [
        check_completeness(figures, method, expected_sum, largest_score),
        check_component_completeness(figures),
        check_surrogate_fit(figures),
        check_rounding_share(figures),
    ]
    return [warning for warning in warnings if warning]


def check_special_units(scores: Float[np.ndarray, "unit"], units: Units, method: str = "") -> str | None:
    """Warn if almost all of the absolute scores are on special units, such as [CLS]."""
    shares = _compute_shares(scores)
    special = np.flatnonzero(units.special)
    total = shares[special].sum()
    if total < MAX_SPECIAL_SHARE or len(special) == len(units):
        return None
    strongest = [units.names[i] for i in special[np.argsort(-shares[special], kind="stable")] if shares[i] >= 0.1]
    names = " and ".join(dict.fromkeys(strongest[:2]))
    noun = "special tokens" if names.count(" and ") else "a special token"
    advice = _suggest_single_layers(method) if shares[0] >= MAX_SPECIAL_SHARE else ""
    return (
        f"{_format_share(total)} of the absolute scores are on {noun}, {names}: compare the "
        f"{pluralize_unit(units.kind)} of the input with each other (e.top() leaves special tokens out), or "
        f"{advice or _suggest_methods(method)}."
    )


def check_first_unit(scores: Float[np.ndarray, "unit"], units: Units, method: str = "") -> str | None:
    """Warn if the first token of a text takes most of the absolute scores, as attention sinks of decoders do."""
    if not _is_long_text(units) or units.special[0]:
        return None
    share, *others = _compute_shares(scores)
    if share < MAX_FIRST_UNIT_SHARE or share < MAX_FIRST_UNIT_MULTIPLE * max(others):
        return None
    return (
        f"the first {units.kind}, {_quote_unit(units, 0)}, has {_format_share(share)} of the absolute scores, as the "
        f"attention sink of a decoder does: compare the other {pluralize_unit(units.kind)} with each other, or "
        f"{_suggest_single_layers(method) or _suggest_methods(method)}."
    )


def check_delimiters(scores: Float[np.ndarray, "unit"], units: Units, method: str = "") -> str | None:
    """Warn if one punctuation mark or line break after the first unit takes almost all of the absolute scores."""
    if not _is_long_text(units):
        return None
    shares = _compute_shares(scores)
    largest = int(shares.argmax())
    text = _read_unit(units, largest)
    if not largest or units.special[largest] or shares[largest] < MAX_DELIMITER_SHARE or not _is_delimiter(text):
        return None
    return (
        f"{_quote_unit(units, largest)} has {_format_share(shares[largest])} of the absolute scores, and punctuation "
        f"and line breaks often are attention sinks: compare the other {pluralize_unit(units.kind)} with each other, "
        f"or {_suggest_methods(method)}."
    )


def check_flat_scores(
    scores: Float[np.ndarray, "unit"], units: Units, dtype: str, scale: str | None = None, method: str = ""
) -> str | None:
    """Warn if the scores of all units of the input are equal within rounding. Repetitions of one token may be."""
    content = units.content_indices()
    values = scores[content].astype(float)
    values = values[np.isfinite(values)]
    if len(values) < 2:
        return None
    largest = np.abs(values).max()
    difference = values.max() - values.min()
    is_flat = difference <= FLAT_ROUNDING_ERRORS * _ROUNDING_ERRORS.get(dtype, 2.0**-23) * largest
    if not is_flat or len({units.names[i] for i in content}) < 2:
        return None
    advice = f"the target does not depend on them, or its gradient vanishes: {_suggest_target(scale)}"
    if method in _UNTARGETED_METHODS:
        advice = f"{method} does not use the target: {_suggest_methods(method)}, which do"
    if largest == 0:
        return f"all scores are zero, so the {pluralize_unit(units.kind)} cannot be ranked; {advice}."
    return (
        f"all scores are equal within rounding (they differ by at most {difference:.1g}, the largest is "
        f"{largest:.2g}), so the {pluralize_unit(units.kind)} cannot be ranked; {advice}."
    )


def check_vanishing_scores(scores: Float[np.ndarray, "unit"], value: float, scale: str | None = None) -> str | None:
    """Warn if all scores are smaller than the rounding error of the target's value."""
    largest = float(np.abs(scores[np.isfinite(scores)]).max(initial=0))
    if not 0 < largest < MIN_RELATIVE_SCORE * abs(value):
        return None
    return (
        f"the largest score, {largest:.1g}, is below the rounding error of the target's value, {value:.3g}, so the "
        f"order of the units may be noise; the target hardly depends on the input: {_suggest_target(scale)}."
    )


def check_completeness(
    figures: Mapping[str, float], method: str, expected_sum: float | None = None, largest_score: float | None = None
) -> str | None:
    """Warn if the scores of a method that is complete miss the sum that they should have."""
    gap = figures.get("completeness_gap")
    limit = MAX_SAMPLED_COMPLETENESS_GAP if "standard_error" in figures else MAX_COMPLETENESS_GAP
    # LIME is not complete, and has a figure of its own.
    if gap is None or gap < limit or "misfit" in figures:
        return None
    miss = f"their expected sum by {_format_share(gap)} of the largest score"
    if expected_sum is not None and largest_score is not None:
        miss = f"their expected sum, {expected_sum:.3g}, by {gap * largest_score:.3g}"
    advice = "compare with method='integrated-gradients', or load the model with dtype='float64'"
    if method in _ACCURACY_OPTIONS:
        advice = f"increase {_ACCURACY_OPTIONS[method]}"
    return f"the scores miss {miss} (completeness gap {gap:.2g}), so they do not account for the output: {advice}."


def check_component_completeness(figures: Mapping[str, float]) -> str | None:
    """Warn if a component of a combined method misses the sum that its scores should have."""
    suffix = "_completeness_gap"
    gaps = {name.removesuffix(suffix): gap for name, gap in figures.items() if name.endswith(suffix)}
    component = max(gaps, key=lambda name: gaps[name], default="")
    if not gaps or gaps[component] < MAX_COMPLETENESS_GAP:
        return None
    return (
        f"the scores of the component {component} miss their expected sum by {_format_share(gaps[component])} of the "
        f"largest one (completeness gap {gaps[component]:.2g}), so they do not account for the output: compare "
        "e.components with method='integrated-gradients', or load the model with dtype='float64'."
    )


def check_surrogate_fit(figures: Mapping[str, float]) -> str | None:
    """Warn if LIME's linear model does not fit the outputs of the masked inputs."""
    misfit = figures.get("misfit")
    if misfit is None or misfit < MAX_MISFIT:
        return None
    return (
        f"the linear model of LIME leaves {_format_share(misfit)} of the variance of the masked outputs unexplained: "
        "the output is not linear in the units; increase evaluations=, or use method='kernel-shap'."
    )


def check_rounding_share(figures: Mapping[str, float]) -> str | None:
    """Warn if value zeroing measured rounding errors in place of distances."""
    share = figures.get("rounding_share")
    if share is None or share < MAX_ROUNDING_SHARE:
        return None
    return (
        f"{_format_share(share)} of the mixing passes through a layer where zeroing values moves hidden states by no "
        "more than rounding errors, so the scores may be noise: load the model with dtype='float64', choose other "
        "layers=, or use method='attention'."
    )


def _compute_shares(scores: Float[np.ndarray, "unit"]) -> Float[np.ndarray, "unit"]:
    """The share of each unit in the sum of absolute scores; zeros if all scores are zero."""
    magnitudes = np.abs(scores.astype(float))
    magnitudes[~np.isfinite(magnitudes)] = 0
    return magnitudes / (magnitudes.sum() or 1)


def _is_long_text(units: Units) -> bool:
    """Whether units are those of a text that is long enough for a large share of one of them to be unusual."""
    return units.kind in TEXT_LEVELS and units.boxes is None and len(units) >= MIN_UNITS_WITH_SINK


def _read_unit(units: Units, index: int) -> str:
    """The text of a unit as it was written; its name where the text is not known."""
    if units.offsets is None or not units.texts or units.special[index]:
        return units.names[index]
    start, stop = units.offsets[index]
    return units.texts[units.segments[index] if units.segments else 0][start:stop] or units.names[index]


def _quote_unit(units: Units, index: int) -> str:
    text = _read_unit(units, index)
    text = text.strip() or text
    if len(text) > _MAX_NAME_CHARS:
        text = f"{text[: _MAX_NAME_CHARS - 1]}…"
    return f"“{text}”"


def _is_delimiter(text: str) -> bool:
    """Whether a text has only punctuation and white space, with the markers of byte-level and SentencePiece tokens."""
    return all(sign in "ĠĊ▁" or sign.isspace() or unicodedata.category(sign)[0] == "P" for sign in text)


def _format_share(share: float) -> str:
    """A percentage without decimals, never rounded up to 100 %."""
    if 0.995 <= share < 1:
        return "over 99 %"
    return f"{100 * share:.0f} %"


def _suggest_methods(method: str) -> str:
    first, second = [name for name in _ALTERNATIVE_METHODS if name != method][:2]
    return f"try method={first!r} or {second!r}"


def _suggest_single_layers(method: str) -> str:
    """What to do about a product over the layers of a decoder, whose first token attends to itself alone."""
    if method not in _LAYER_PRODUCT_METHODS:
        return ""
    return (
        "use only the last layer, layers=(-1, None): in a decoder the first token attends only to itself, and the "
        "product over all layers ends there"
    )


def _suggest_target(scale: str | None) -> str:
    """What to explain where the scores of a target say nothing."""
    if scale == "probability":
        return "try scale='logit', whose gradient does not saturate"
    return "try another target=, or method='occlusion'"
