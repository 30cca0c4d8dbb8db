"""Methods with components, which are run as methods of the call: combined ones, and those that have a prior."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from clearhead.capture.checks.self_test import SelfTest
from clearhead.engine.capabilities import ModelCapabilities
from clearhead.engine.method_run import MethodResult, MethodRun
from clearhead.engine.target_batch import TargetBatch
from clearhead.methods._combined import CombinedMethod
from clearhead.methods.base import METHOD_REGISTRY, Method, MethodScores
from clearhead.methods.pass_type import PassType


@dataclass(frozen=True)
class MethodSelection:
    """The methods of a call, and those that are run for them.

    Attributes:
        requested: The methods whose explanations are returned.
        pass_methods: The methods whose passes are run: each method once, with components in place of combined methods.
        components: The components that apply to the model, of each method that has components.
        omitted: For each of these methods, why other components do not apply, by their name.
    """

    requested: list[Method]
    pass_methods: list[Method]
    components: dict[Method, list[Method]] = field(default_factory=dict)
    omitted: dict[Method, dict[str, str]] = field(default_factory=dict)


def select_methods(capabilities: ModelCapabilities, methods: Sequence[Method]) -> MethodSelection:
    """Add the components that apply to the model; they replace combined methods, which have no passes of their own.

    Args:
        capabilities: What is known about the model, after its self-test.
        methods: The requested methods, which apply to the model.
    """
    components: dict[Method, list[Method]] = {}
    omitted: dict[Method, dict[str, str]] = {}
    pass_methods: dict[Method, None] = {}
    for method in methods:
        if method.pass_type is not PassType.COMBINED:
            pass_methods[method] = None
        if not method.components:
            continue
        reasons = {component: capabilities.find_unsupported_reason(component) for component in method.components}
        components[method] = [component for component, reason in reasons.items() if reason is None]
        omitted[method] = {component.name: reason for component, reason in reasons.items() if reason is not None}
        pass_methods |= dict.fromkeys(components[method])
    return MethodSelection(list(methods), list(pass_methods), components, omitted)


def collect_requested(
    selection: MethodSelection,
    batch: TargetBatch,
    self_test: SelfTest,
    method_runs: Sequence[MethodRun],
    results: Sequence[MethodResult],
) -> tuple[list[MethodRun], list[MethodResult]]:
    """Return run and result of each requested method, from those of the methods that were run."""
    by_method = {run.method: (run, result) for run, result in zip(method_runs, results, strict=True)}
    for method, components in selection.components.items():
        if method.pass_type is not PassType.COMBINED:
            method_run, result = by_method[method]
            by_method[method] = (method_run, _add_components(method_run, result))
            continue
        combined_run = MethodRun(method, batch, self_test)
        for component in components:
            combined_run.add_component(by_method[component][0])
        by_method[method] = (combined_run, _combine(combined_run, {c.name: by_method[c][1] for c in components}))
    requested = [by_method[method] for method in selection.requested]
    return [run for run, _ in requested], [result for _, result in requested]


def _add_components(method_run: MethodRun, result: MethodResult) -> MethodResult:
    """Add the scores of the components to those of a method with its own passes."""
    by_name = method_run.component_results
    scores = {
        stream: replace(stream_scores, components={name: r.scores[stream].scores[:, 0] for name, r in by_name.items()})
        for stream, stream_scores in result.scores.items()
    }
    return replace(result, scores=scores)


def _combine(combined_run: MethodRun, results: Mapping[str, MethodResult]) -> MethodResult:
    """Combine the scores of the components; each keeps its own, and its diagnostics, beside the combined ones."""
    method_class = cast(type[CombinedMethod], METHOD_REGISTRY[combined_run.method.name])
    component_scores = {
        name: {stream: scores.scores for stream, scores in result.scores.items()} for name, result in results.items()
    }
    valid_masks = {stream: method.unit_context.valid_mask for stream, method in combined_run.per_stream.items()}
    combined = method_class.combine(component_scores, valid_masks)
    return MethodResult(
        {
            stream: MethodScores(
                scores,
                components={name: component_scores[name][stream][:, 0] for name in results},
                diagnostics={
                    f"{name}_{diagnostic}": values
                    for name, result in results.items()
                    for diagnostic, values in (result.scores[stream].diagnostics or {}).items()
                },
            )
            for stream, scores in combined.items()
        },
        next(iter(results.values())).values,
    )
