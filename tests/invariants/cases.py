"""Cases of the invariant tests: every registered method with all its options, on every subject.

Explanations are computed on demand, one method on one subject at a time, and cached.
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
from clearhead.methods import METHOD_REGISTRY, PassType
from tests import models

METHODS = tuple(sorted(METHOD_REGISTRY))
#: Those that need one recorded pass only.
FROM_TAPE = tuple(name for name in METHODS if METHOD_REGISTRY[name].declaration.pass_type is PassType.TAPE)
SUBJECTS = models.SUBJECTS
TEXT_SUBJECTS = tuple(subject for subject in SUBJECTS if not subject.endswith("/image"))

#: Subjects whose attention is not over their units, for which a method may be unsupported.
WINDOWED = ("swin/image",)
#: Architectures that ignore transformers' attention interface, so that their values cannot be captured.
VALUES_HIDDEN = ("deberta/",)

#: Subjects without position embeddings of their units, which a method may need.
WITHOUT_POSITIONS = ("swin/image", "beit/image", "dinov2-registers/image")

#: Small budgets for slow methods: the invariants hold for any budget.
BUDGETS = {name: {"evaluations": 100} for name in ("kernel-shap", "lime", "shap")}
BUDGETS["calibrated"] = {"evaluations": 24}
BUDGETS |= {name: {"samples": 3} for name in ("deeplift-shap", "gradient-shap", "smoothgrad")}
BUDGETS |= {
    name: {"steps": 3}
    for name in ("integrated-gradients", "layer-conductance", "beyond-intuition-head", "beyond-intuition-token", "tam")
}

Results = dict[str, list[Explanation]]


def explainer(subject: str, dtype: torch.dtype = torch.float64) -> Explainer:
    return _explainer(subject, dtype)


@cache  # not on `explainer`: a cache treats a default and the same explicit value as different
def _explainer(subject: str, dtype: torch.dtype) -> Explainer:
    """The self-test always runs on the same input, since the certificate contains its result."""
    ex = models.explainer(subject, dtype)
    ex.explain(models.inputs(subject), method="position")
    return ex


@cache  # creating a method reads the types of its options each time
def variants(name: str) -> tuple[Method, ...]:
    """A method with its defaults, and with each of its declared options changed."""
    budget = BUDGETS.get(name, {})
    supported, methods = METHOD_REGISTRY[name].declaration.supports, [Method(name, **budget)]
    if "layers" in supported:
        methods += [Method(name, **budget, layers=(1, None)), Method(name, **budget, layers=(0, 2))]
    if "heads" in supported:
        methods.append(Method(name, **budget, heads=(0, 2), layers=(None, None)))
    if "rows" in supported:
        methods += [Method(name, **budget, rows="all"), Method(name, **budget, rows="all", layers=(1, 3))]
    for field in fields(METHOD_REGISTRY[name]):
        if field.name == "unit_context" or "of authors" in field.metadata:
            continue
        if field.type is bool:
            methods.append(Method(name, **budget, **{field.name: not field.default}))
        elif get_origin(field.type) is Literal:
            others = [value for value in get_args(field.type) if value != field.default]
            methods += [Method(name, **budget, **{field.name: value}) for value in others]
    return tuple(methods)


def one_method_per_pass_type(subject: str) -> list[str]:
    """One applicable method of each pass type."""
    by_kind: dict[str, str] = {}
    for name in applying(subject):
        by_kind.setdefault(METHOD_REGISTRY[name].declaration.pass_type, name)
    return list(by_kind.values())


def with_few(names: Iterable[str]) -> list[Method]:
    """Methods by name, with a small budget where they have one."""
    return [Method(name, **BUDGETS.get(name, {})) for name in names]


def applying(subject: str) -> list[str]:
    """The methods that must support this subject."""
    return [name for name in METHODS if applies(name, subject)]


def explain_arguments(subject: str, methods: Iterable[str]) -> dict[str, Any]:
    """Arguments of `explain` for every variant of these methods, with scores per head where a method has them."""
    selected = [variant for name in methods for variant in variants(name)]
    has_heads = any(variant.declaration.has_head_contributions for variant in selected)
    return {"method": selected, "per": "head" if has_heads and subject not in WINDOWED else None}


def all_explain_arguments(subject: str) -> dict[str, Any]:
    """Every variant of every method that applies, in one call."""
    return explain_arguments(subject, applying(subject))


def applies(name: str, subject: str) -> bool:
    """Whether a method must support the subject; otherwise it has to raise an error with a reason."""
    requirements = METHOD_REGISTRY[name].declaration.requires
    if subject.startswith(VALUES_HIDDEN) and requirements & {"values", "output_projection"}:
        return False
    if subject in WITHOUT_POSITIONS and "position_x_gradient" in requirements:
        return False
    return not (subject in WINDOWED and requirements & UNIT_ALIGNED_REQUIREMENTS)


def unsupported_reason(name: str, subject: str) -> str:
    """The reason of the UnsupportedError, which must name method and model."""
    ex = explainer(subject)
    try:
        ex.explain(models.inputs(subject)[0], method=name)
    except UnsupportedError as error:
        text = str(error)
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
    """Every variant of one method, one input at a time."""
    return _single(subject, method, dtype)


@cache
def _single(subject: str, method: str, dtype: torch.dtype) -> Results:
    ex, arguments = explainer(subject, dtype), explain_arguments(subject, [method])
    per_input = [ex.explain(raw, **arguments) for raw in models.inputs(subject)]
    return {variant: [results[variant] for results in per_input] for variant in per_input[0]}


def size(results: Results) -> float:
    """The largest score of one method on the subject's inputs, over all options."""
    return max(float(np.abs(e.scores).max()) for explanations in results.values() for e in explanations)


def assert_all_alike(
    results: Mapping[str, list[Explanation]],
    subject: str,
    dtype: torch.dtype = torch.float64,
    reference: Callable[[str, str, torch.dtype], Results] = single,
) -> None:
    """Assert that results for all inputs of a subject, in order, equal those of `reference` (one input at a time)."""
    for variant, explanations in results.items():
        method = explanations[0].provenance["method"]
        expected = reference(subject, method, dtype)
        rtol, largest = method_tolerance(method, subject, dtype), size(expected)
        for e, expected_explanation in zip(explanations, expected[variant], strict=True):
            assert_alike(e, expected_explanation, rtol, largest)


def model_inputs(subject: str, extra: int = 0) -> dict[str, torch.Tensor]:
    """All inputs of a subject as one mapping; texts are padded to the longest plus `extra` tokens."""
    ex = clearhead.load(explainer(subject).adapter.model, explainer(subject).adapter.processor)
    if subject.endswith("/image"):
        return dict(ex.adapter.processor(images=models.inputs(subject), return_tensors="pt"))
    processor = ex.adapter.processor
    longest = max(len(ids) for ids in processor(models.inputs(subject))["input_ids"])
    padded = processor(models.inputs(subject), padding="max_length", max_length=longest + extra, return_tensors="pt")
    return dict(padded)


def collated(ex: Explainer, raws: list[Any]) -> dict[str, torch.Tensor]:
    """The batch of model inputs."""
    return ex.adapter.collate([sample for raw in raws for sample in ex.adapter.make_samples(raw, InputOptions())])


class _Float32(TorchDispatchMode):
    """Detects reductions that run in float32 inside a float64 model."""

    found_float32 = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        reductions = ("softmax", "mm", "layer_norm", "mean", "sum", "rsqrt")
        if isinstance(out, torch.Tensor) and out.dtype == torch.float32:
            self.found_float32 |= any(name in str(func) for name in reductions)
        return out


@cache
def tolerance(subject: str, dtype: torch.dtype = torch.float64) -> float:
    """1e-9 in float64; 1e-5 in float32, and where the model's eager code reduces in float32 even in a float64 model:
    torch's kernel and the recorder do not, but replicas and tiles use the eager code."""
    if dtype == torch.float32:
        return 1e-5
    ex = explainer(subject)
    batch = collated(ex, models.inputs(subject)[:1])
    with torch.no_grad(), switched_attention_implementation(ex.adapter.session.topology, "eager"), _Float32() as watch:
        ex.adapter.model(**batch)
    return 1e-5 if watch.found_float32 else 1e-9


def method_tolerance(method: str, subject: str, dtype: torch.dtype = torch.float64) -> float:
    """The tolerance for this method's scores."""
    return amplified(method, tolerance(subject, dtype))


def amplified(method: str, rtol: float) -> float:
    """The tolerance times the method's rounding amplification; rule-based methods that amplify compute in float64."""
    declaration = METHOD_REGISTRY[method].declaration
    is_float64 = declaration.pass_type is PassType.MODIFIED_BACKWARD and declaration.rounding_amplification > 1
    return (
        max(rtol, 1e-9 * declaration.rounding_amplification)
        if is_float64
        else rtol * declaration.rounding_amplification
    )


def gap(actual: Any, expected: Any, size: float = 0.0) -> float:
    """The largest difference, relative to the largest entry (or to `size`); raises for NaN."""
    actual, expected = np.asarray(actual, dtype=float), np.asarray(expected, dtype=float)
    assert actual.shape == expected.shape, f"shapes {actual.shape} and {expected.shape}"
    assert np.isfinite(actual).all() and np.isfinite(expected).all(), "scores must be finite"
    largest = np.abs(expected).max(initial=size)
    return (
        float(np.abs(actual - expected).max(initial=0.0) / largest)
        if largest
        else float(np.abs(actual).max(initial=0.0))
    )


def assert_alike(actual: Explanation, expected: Explanation, rtol: float, size: float = 0.0) -> None:
    """Assert equality up to rounding of scores, matrix, contributions of layers and heads, target and prediction.

    `size`: the scale of this method's scores. Some scores are zero in theory and consist of rounding only (a gradient
    after a layer norm sums to zero and is orthogonal to its input); their error is relative to the method's scale.
    """
    assert actual.tokens == expected.tokens and actual.units.special == expected.units.special
    for field in ("scores", "matrix", "per_layer", "per_head", "base_value"):
        value, reference = getattr(actual, field), getattr(expected, field)
        assert (value is None) == (reference is None), f"{actual.method}: {field} is None in only one of them"
        if value is not None:
            error = gap(value, reference, size)
            assert error <= rtol, f"{actual.method}: {field} differs by {error:.1e}, allowed {rtol:.0e}"
    assert_metadata_alike(actual.target, expected.target, rtol)
    assert_metadata_alike(actual.prediction, expected.prediction, rtol)


def assert_metadata_alike(actual: Any, expected: Any, rtol: float) -> None:
    """Assert that two nested descriptions (target, prediction) have equal strings, and numbers up to rounding."""
    if isinstance(actual, Mapping):
        assert actual.keys() == expected.keys()
        for key in actual:
            assert_metadata_alike(actual[key], expected[key], rtol)
    elif isinstance(actual, list):
        assert len(actual) == len(expected)
        for item, reference in zip(actual, expected, strict=True):
            assert_metadata_alike(item, reference, rtol)
    elif isinstance(actual, float):
        assert abs(actual - expected) <= 10 * rtol * max(abs(expected), 1)
    else:
        assert actual == expected
