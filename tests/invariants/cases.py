"""What the laws run over: every registered method with all its options, on every subject.

Explanations are computed on demand, one method on one subject at a time, and kept: the laws of one method cost what
this method costs.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import cache
from typing import Any, Literal, get_args, get_origin

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import clearhead
from clearhead import Explainer, Explanation, Method, UnsupportedError
from clearhead.adapters import InputOptions
from clearhead.capture.session import switched_attention_implementation
from clearhead.capture.tape import UNIT_ALIGNED_REQUIREMENTS
from clearhead.methods import METHOD_REGISTRY
from tests import models

METHODS = tuple(sorted(METHOD_REGISTRY))
#: Those that one recorded pass is enough for.
FROM_TAPE = tuple(name for name in METHODS if METHOD_REGISTRY[name].declaration.pass_type == "tape")
SUBJECTS = models.SUBJECTS
TEXT_SUBJECTS = tuple(subject for subject in SUBJECTS if not subject.endswith("/image"))

#: Subjects whose attention does not run over their units: one ground on which a method may refuse here.
WINDOWED = ("swin/image",)
#: Architectures that ignore transformers' attention interface, so that their values are not seen: the other one.
VALUES_HIDDEN = ("deberta/",)

#: Methods that would take long: the laws hold for any budget, so they are asked of a small one.
BUDGETS = {name: {"evaluations": 100} for name in ("kernel-shap", "lime", "shap")}
BUDGETS |= {name: {"samples": 3} for name in ("deeplift-shap", "gradient-shap", "smoothgrad")}
BUDGETS |= {
    name: {"steps": 3}
    for name in ("integrated-gradients", "layer-conductance", "beyond-intuition-head", "beyond-intuition-token", "tam")
}

Results = dict[str, list[Explanation]]


def explainer(subject: str, dtype: torch.dtype = torch.float64) -> Explainer:
    return _explainer(subject, dtype)


@cache  # which tells a default from the same value given
def _explainer(subject: str, dtype: torch.dtype) -> Explainer:
    """Its recorder is tested on the same input whoever asks first: the certificate says what that test found."""
    ex = models.explainer(subject, dtype)
    ex.explain(models.inputs(subject), method="position")
    return ex


@cache  # a method reads the types of its options each time it is made
def variants(name: str) -> tuple[Method, ...]:
    """A method with its defaults, and with each of its options changed: what is declared is what is tested."""
    budget = BUDGETS.get(name, {})
    has, found = METHOD_REGISTRY[name].declaration.supports, [Method(name, **budget)]
    if "layers" in has:
        found += [Method(name, **budget, layers=(1, None)), Method(name, **budget, layers=(0, 2))]
    if "heads" in has:
        found.append(Method(name, **budget, heads=(0, 2), layers=(None, None)))
    if "rows" in has:
        found += [Method(name, **budget, rows="all"), Method(name, **budget, rows="all", layers=(1, 3))]
    for field in fields(METHOD_REGISTRY[name]):
        if field.name == "unit_context" or "of authors" in field.metadata:
            continue
        if field.type is bool:
            found.append(Method(name, **budget, **{field.name: not field.default}))
        elif get_origin(field.type) is Literal:
            others = [value for value in get_args(field.type) if value != field.default]
            found += [Method(name, **budget, **{field.name: value}) for value in others]
    return tuple(found)


def of_each_kind(subject: str) -> list[str]:
    """One method of each kind that applies: the kind decides which passes run and how."""
    by_kind: dict[str, str] = {}
    for name in applying(subject):
        by_kind.setdefault(METHOD_REGISTRY[name].declaration.pass_type, name)
    return list(by_kind.values())


def with_few(names: Iterable[str]) -> list[Method]:
    """Methods by name, asked of a small budget where they have one."""
    return [Method(name, **BUDGETS.get(name, {})) for name in names]


def applying(subject: str) -> list[str]:
    """The methods that must work on this subject."""
    return [name for name in METHODS if applies(name, subject)]


def explain_arguments(subject: str, methods: Iterable[str]) -> dict[str, Any]:
    """Arguments of `explain` for every variant of these methods, with scores per head where a method has them."""
    asked = [variant for name in methods for variant in variants(name)]
    has_heads = any(variant.declaration.has_head_contributions for variant in asked)
    return {"method": asked, "per": "head" if has_heads and subject not in WINDOWED else None}


def everything(subject: str) -> dict[str, Any]:
    """Every variant of every method that applies, in one call."""
    return explain_arguments(subject, applying(subject))


def applies(name: str, subject: str) -> bool:
    """Whether a method must work here; where it must not, it has to refuse and say why."""
    asks = METHOD_REGISTRY[name].declaration.requires
    if subject.startswith(VALUES_HIDDEN) and asks & {"values", "output_projection"}:
        return False
    return not (subject in WINDOWED and asks & UNIT_ALIGNED_REQUIREMENTS)


def refusal_of(name: str, subject: str) -> str:
    """The text of the refusal, which must be a reason that names method and model."""
    ex = explainer(subject)
    try:
        ex.explain(models.inputs(subject)[0], method=name)
    except UnsupportedError as refusal:
        text = str(refusal)
    else:
        raise AssertionError(f"{name} explained {subject}, whose attention does not run over its units")
    model = type(ex.adapter.model).__name__
    assert text.startswith(f"{name} cannot explain {ex.adapter.name}: "), text
    reason = text.split(": ", 1)[1]
    assert model in reason and len(reason.split()) >= 8, f"not a reason: {text}"
    return reason


def batched(subject: str, method: str, dtype: torch.dtype = torch.float64) -> Results:
    """Every variant of one method, all inputs in one batch."""
    return _batched(subject, method, dtype)


@cache
def _batched(subject: str, method: str, dtype: torch.dtype) -> Results:
    return explainer(subject, dtype).explain(models.inputs(subject), **explain_arguments(subject, [method]))


def single(subject: str, method: str, dtype: torch.dtype = torch.float64) -> Results:
    """The same, one input at a time."""
    return _single(subject, method, dtype)


@cache
def _single(subject: str, method: str, dtype: torch.dtype) -> Results:
    ex, arguments = explainer(subject, dtype), explain_arguments(subject, [method])
    per_input = [ex.explain(raw, **arguments) for raw in models.inputs(subject)]
    return {variant: [results[variant] for results in per_input] for variant in per_input[0]}


def size(results: Results) -> float:
    """The largest score that one method gives on the subject's inputs, whatever its options."""
    return max(float(np.abs(e.scores).max()) for explanations in results.values() for e in explanations)


def assert_all_alike(
    got: Mapping[str, list[Explanation]],
    subject: str,
    dtype: torch.dtype = torch.float64,
    reference: Callable[[str, str, torch.dtype], Results] = single,
) -> None:
    """Results for all inputs of a subject, in their order, are those of one input at a time (or of `reference`)."""
    for variant, explanations in got.items():
        method = explanations[0].provenance["method"]
        expected = reference(subject, method, dtype)
        within, largest = allowed(method, subject, dtype), size(expected)
        for e, alone in zip(explanations, expected[variant], strict=True):
            assert_alike(e, alone, within, largest)


def model_inputs(subject: str, extra: int = 0) -> dict[str, torch.Tensor]:
    """All inputs of a subject as one mapping; texts are padded to the longest, and `extra` further."""
    ex = clearhead.load(explainer(subject).adapter.model, explainer(subject).adapter.processor)
    if subject.endswith("/image"):
        return dict(ex.adapter.processor(images=models.inputs(subject), return_tensors="pt"))
    processor = ex.adapter.processor
    longest = max(len(ids) for ids in processor(models.inputs(subject))["input_ids"])
    padded = processor(models.inputs(subject), padding="max_length", max_length=longest + extra, return_tensors="pt")
    return dict(padded)


def collated(ex: Explainer, raws: list[Any]) -> dict[str, torch.Tensor]:
    """The batch that the model is called with."""
    return ex.adapter.collate([sample for raw in raws for sample in ex.adapter.make_samples(raw, InputOptions())])


class _Float32(TorchDispatchMode):
    """Notices sums that run in float32 inside a float64 model."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        summing = ("softmax", "mm", "layer_norm", "mean", "sum", "rsqrt")
        if isinstance(out, torch.Tensor) and out.dtype == torch.float32:
            self.seen |= any(word in str(func) for word in summing)
        return out


@cache
def tolerance(subject: str, dtype: torch.dtype = torch.float64) -> float:
    """1e-9 in float64; 1e-5 in float32, and where the model's own eager code sums in float32 all the same: torch's
    kernel does not, nor does the recorder then, but replicas and tiles are eager."""
    if dtype == torch.float32:
        return 1e-5
    ex = explainer(subject)
    batch = collated(ex, models.inputs(subject)[:1])
    with torch.no_grad(), switched_attention_implementation(ex.adapter.model, "eager"), _Float32() as watch:
        ex.adapter.model(**batch)
    return 1e-5 if watch.seen else 1e-9


def allowed(method: str, subject: str, dtype: torch.dtype = torch.float64) -> float:
    """What rounding may do to this method's scores."""
    return amplified(method, tolerance(subject, dtype))


def amplified(method: str, within: float) -> float:
    """Methods by rules that amplify rounding compute in float64, whatever the format of a model."""
    declaration = METHOD_REGISTRY[method].declaration
    wide = declaration.pass_type == "rules" and declaration.rounding_amplification > 1
    return (
        max(within, 1e-9 * declaration.rounding_amplification) if wide else within * declaration.rounding_amplification
    )


def gap(one: Any, other: Any, size: float = 0.0) -> float:
    """The largest difference, relative to the largest entry (or to `size`); NaN never passes for a number."""
    one, other = np.asarray(one, dtype=float), np.asarray(other, dtype=float)
    assert one.shape == other.shape, f"shapes {one.shape} and {other.shape}"
    assert np.isfinite(one).all() and np.isfinite(other).all(), "scores must be finite"
    largest = np.abs(other).max(initial=size)
    return float(np.abs(one - other).max(initial=0.0) / largest) if largest else float(np.abs(one).max(initial=0.0))


def assert_alike(one: Explanation, other: Explanation, within: float, size: float = 0.0) -> None:
    """The same explanation up to rounding: scores, matrix, shares of layers and heads, target and prediction.

    `size`: how large this method's scores get. Some are zero in theory, and only rounding is left of them (a gradient
    that has passed a layer norm sums to zero, and is orthogonal to its input); that is measured on the method's scale.
    """
    assert one.tokens == other.tokens and one.units.special == other.units.special
    for part in ("scores", "matrix", "per_layer", "per_head", "base_value"):
        mine, yours = getattr(one, part), getattr(other, part)
        assert (mine is None) == (yours is None), f"{one.method}: {part} is there in one and not in the other"
        if mine is not None:
            found = gap(mine, yours, size)
            assert found <= within, f"{one.method}: {part} differs by {found:.1e}, allowed {within:.0e}"
    assert_alike_said(one.target, other.target, within)
    assert_alike_said(one.prediction, other.prediction, within)


def assert_alike_said(one: Any, other: Any, within: float) -> None:
    """Two descriptions (target, prediction) with equal words and numbers that differ by rounding alone."""
    if isinstance(one, Mapping):
        assert one.keys() == other.keys()
        for key in one:
            assert_alike_said(one[key], other[key], within)
    elif isinstance(one, list):
        assert len(one) == len(other)
        for mine, yours in zip(one, other, strict=True):
            assert_alike_said(mine, yours, within)
    elif isinstance(one, float):
        assert abs(one - other) <= 10 * within * max(abs(other), 1)
    else:
        assert one == other
