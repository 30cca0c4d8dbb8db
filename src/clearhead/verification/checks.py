"""Checks of declared properties and invariants, and the functions that measure them. `CHECKS` lists them all."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from clearhead.capture.checks.self_test import RELATIVE_TOLERANCE_BY_DTYPE
from clearhead.capture.recorder import Recorder
from clearhead.errors import ClearheadError
from clearhead.explanation.multi_stream import AnyExplanation
from clearhead.methods.base import METHOD_REGISTRY, Method
from clearhead.methods.pass_type import PassType
from clearhead.targets import Contrast, GeneratedToken
from clearhead.verification.example_inputs import make_longer_input, make_reversed_input, takes_text_input
from clearhead.verification.metrics import compute_max_abs_score, compute_relative_gap, get_target_value
from clearhead.verification.model_state import snapshot_model_state

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

#: Allowed rounding error of scores relative to the largest, by dtype of the weights: the tolerance of the recorder's
#: self-test. Tiny models need less. In trained models, sums of large numbers leave small scores, and some models
#: compute their norms in float32 for any dtype.
ROUNDING_TOLERANCE = RELATIVE_TOLERANCE_BY_DTYPE
#: Allowed completeness gap of an integral that is approximated by a sum: "within 5%" (Sundararajan, Taly & Yan, 2017,
#: section 5).
PATH_COMPLETENESS_TOLERANCE = 0.05
#: Axioms that can only be tested on constructed models with known attributions; clearhead's own tests do that.
UNMEASURABLE_AXIOMS = (
    "exact on linear models",
    "exact on additive games",
    "zero for units without effect",
    "implementation invariant",
)


class NotApplicableError(Exception):
    """A check does not apply to this method on this model; the message gives the reason."""


@dataclass(frozen=True)
class CheckMeasurement:
    """A measured value with its bound.

    Attributes:
        value: The measured value.
        bound: The largest value with which the property holds.
        details: What was found, where the value is not self-explanatory.
    """

    value: float
    bound: float
    details: str = ""

    @property
    def holds(self) -> bool:
        """Whether the value is within the bound."""
        return self.value <= self.bound


@dataclass
class VerificationCase:
    """One method on one model with its inputs. Explanations used by several checks are cached.

    Attributes:
        explainer: The explainer of the model.
        method: The method.
        raw_inputs: The inputs.
        seed: Seed of methods that draw random numbers.
        options: Further options of `Explainer.explain`.
        initial_state: Snapshot of the model before the first check.
    """

    explainer: "Explainer"
    method: Method
    raw_inputs: list[Any]
    seed: int
    options: dict[str, Any]
    initial_state: dict[str, Any] = field(default_factory=dict)

    def explain(self, raw_inputs: Sequence[Any], **overrides: Any) -> list[AnyExplanation]:
        """Explain inputs in one batch."""
        arguments = {"method": self.method, "seed": self.seed, **self.options, **overrides}
        explanations: list[AnyExplanation] = self.explainer.explain(
            list(raw_inputs), batch_size=max(len(raw_inputs), 1), **arguments
        )
        return explanations

    def explain_individually(self, **overrides: Any) -> list[AnyExplanation]:
        """Explain every input in a batch of its own."""
        return [explanation for raw_input in self.raw_inputs for explanation in self.explain([raw_input], **overrides)]

    @cached_property
    def individual_explanations(self) -> list[AnyExplanation]:
        """The explanation of every input in a batch of its own."""
        return self.explain_individually()

    @property
    def rounding_tolerance(self) -> float:
        """Allowed rounding error. Rule-based methods that amplify rounding errors compute in float64 for any dtype."""
        declaration = self.method.declaration
        tolerance = ROUNDING_TOLERANCE.get(self.explainer.adapter.dtype, 1e-4)
        if declaration.pass_type is PassType.MODIFIED_BACKWARD and declaration.rounding_amplification > 1:
            return max(tolerance, 1e-9 * declaration.rounding_amplification)
        return tolerance * declaration.rounding_amplification

    def measure_difference(
        self, explanations: Sequence[AnyExplanation], references: Sequence[AnyExplanation]
    ) -> CheckMeasurement:
        """Measure the difference of explanations that must be equal up to rounding.

        Args:
            explanations: The explanations to compare.
            references: The expected explanations.

        Returns:
            The largest relative gap, with the rounding tolerance as bound.

        Raises:
            NotApplicableError: If the scores are too close to zero to be compared.
        """
        gap = max(compute_relative_gap(*pair) for pair in zip(explanations, references, strict=True))
        if gap > self.rounding_tolerance:
            relative_scores = [
                compute_max_abs_score(reference) / max(abs(get_target_value(reference)), 1) for reference in references
            ]
            if max(relative_scores) < 1e-6:
                raise NotApplicableError("its scores are almost zero on this input: only rounding error remains")
        return CheckMeasurement(gap, self.rounding_tolerance)


@dataclass(frozen=True)
class VerificationCheck:
    """A checked property: its description, which methods must have it, and how it is measured.

    Attributes:
        description: The property in words.
        measure: Measures the property for a method on a model.
        axiom: The axiom that methods declare. If empty, `is_declared` decides.
        is_declared: Whether the property is declared for a case.
    """

    description: str
    measure: Callable[[VerificationCase], CheckMeasurement]
    axiom: str = ""
    is_declared: Callable[[VerificationCase], bool] = lambda case: True

    def applies_to(self, case: VerificationCase) -> bool:
        """Return whether the method of a case must have the property."""
        if self.axiom:
            return self.axiom in case.method.declaration.axioms
        return self.is_declared(case)


# Declared axioms ------------------------------------------------------------------------------------------------------


def _compute_completeness_gap(case: VerificationCase) -> float:
    """Compute the largest relative gap between the sum of scores and the target's value minus the base value.

    The gap reported in the certificate counts as well.
    """
    certified = [e.certificate.get("checks", {}).get("completeness_gap") for e in case.individual_explanations]
    gaps = [float(gap) for gap in certified if gap is not None]
    for e in case.individual_explanations:
        if e.base_value is not None:
            total = e.base_value + sum(float(stream.scores.sum()) for stream in e.by_stream.values())
            gaps.append(float(abs(total - get_target_value(e)) / max(compute_max_abs_score(e), 1e-30)))
    if not gaps:
        raise NotApplicableError(
            "it reports neither a base value nor a completeness gap, so there is no sum to compare"
        )
    return max(gaps)


def measure_completeness(case: VerificationCase) -> CheckMeasurement:
    """Measure the gap between the sum of scores and target minus base value, relative to the largest score."""
    gap = _compute_completeness_gap(case)
    if case.method.pass_type is PassType.PATH:
        return CheckMeasurement(gap, PATH_COMPLETENESS_TOLERANCE)
    return CheckMeasurement(gap, case.rounding_tolerance)


def measure_completeness_in_limit(case: VerificationCase) -> CheckMeasurement:
    """Measure the completeness gap with four times the steps, which must at most be half as large."""
    return CheckMeasurement(
        _compute_completeness_gap(_with_more_steps(case, 4)),
        max(_compute_completeness_gap(case) / 2, case.rounding_tolerance),
    )


def measure_step_convergence(case: VerificationCase) -> CheckMeasurement:
    """Measure the error of the numerical integral: how much the scores change with twice the steps."""
    explanations = _with_more_steps(case, 2).individual_explanations
    errors = [float(e.certificate["checks"]["step_doubling_error"]) for e in explanations]
    return CheckMeasurement(max(errors), PATH_COMPLETENESS_TOLERANCE)


def _with_more_steps(case: VerificationCase, factor: int) -> VerificationCase:
    """Return the case with `factor` times the steps of its method."""
    steps = case.method.get_option("steps", getattr(METHOD_REGISTRY[case.method.name], "steps", None))
    if steps is None:
        raise NotApplicableError("it has no option steps= to increase")
    method = Method(case.method.name, **{**dict(case.method.options), "steps": factor * steps})
    return VerificationCase(case.explainer, method, case.raw_inputs, case.seed, case.options)


def measure_row_sums(case: VerificationCase) -> CheckMeasurement:
    """Measure how far the sum of scores is from one."""
    if any(len(e.by_stream) > 1 for e in case.individual_explanations):
        raise NotApplicableError("the row is split over several streams")
    return _measure_deviation_from_one(case)


def measure_relevance_conservation(case: VerificationCase) -> CheckMeasurement:
    """Measure how far the sum of relevance is from one."""
    if case.explainer.adapter.input_names != ("text",):
        raise NotApplicableError(
            "the relevance of model parts that are not input units, such as a class token, belongs to no unit; only "
            "text models have no such parts"
        )
    return _measure_deviation_from_one(case)


def _measure_deviation_from_one(case: VerificationCase) -> CheckMeasurement:
    """Measure the largest difference between a sum of scores and one."""
    deviations = [abs(total - 1) for e in case.individual_explanations for total in _compute_row_sums(e)]
    return CheckMeasurement(max(deviations), case.rounding_tolerance)


def _compute_row_sums(e: AnyExplanation) -> list[float]:
    """Compute the sum of scores for each target."""
    streams = list(e.by_stream.values())
    if e.steps is None:
        return [sum(float(stream.scores.sum()) for stream in streams)]
    row_sums = [stream.matrix.sum(1) for stream in streams if stream.matrix is not None]
    return [float(total) for total in np.sum(row_sums, axis=0)]


# Invariants, and other parts of a declaration -------------------------------------------------------------------------


def measure_layer_sums(case: VerificationCase) -> CheckMeasurement:
    """Measure how far the layers' contributions, added up, or the scores of the last depth are from the scores."""
    are_contributions = case.method.declaration.layer_scores == "contributions"
    gaps = []
    for e in case.individual_explanations:
        for stream in e.by_stream.values():
            if stream.per_layer is None:
                continue
            combined = stream.per_layer.sum(0) if are_contributions else stream.per_layer[-1]
            gaps.append(np.abs(combined - stream.scores).max() / max(compute_max_abs_score(e), 1e-30))
    if not gaps:
        raise NotApplicableError("contributions of layers are not kept for several targets, rows or streams")
    return CheckMeasurement(float(max(gaps)), case.rounding_tolerance)


def measure_determinism(case: VerificationCase) -> CheckMeasurement:
    """Measure the difference of a repeated explanation, with another state of torch's global random generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.seed + 1)
        repeated = case.explain_individually()
    bound = 0.0
    if case.explainer.adapter.device.type != "cpu":  # the order of sums on a GPU may vary
        bound = case.rounding_tolerance
    return CheckMeasurement(max(map(compute_relative_gap, repeated, case.individual_explanations)), bound)


def measure_batch_invariance(case: VerificationCase) -> CheckMeasurement:
    """Measure the difference between explanations in a batch and individual ones."""
    companions = []
    if len(case.raw_inputs) == 1:
        companions = [make_reversed_input(case.raw_inputs[0], takes_text_input(case.explainer.adapter))]
    batched, _ = _explain_in_batch_with(case, companions)
    return case.measure_difference(batched, case.individual_explanations)


def measure_padding_invariance(case: VerificationCase) -> CheckMeasurement:
    """Measure the difference between explanations that were padded in a batch and individual ones."""
    longest = max(case.raw_inputs, key=lambda raw_input: len(str(raw_input)))
    longer_input = make_longer_input(case.explainer.adapter, longest)
    if longer_input is None:
        raise NotApplicableError("this input cannot be made longer: only texts are padded")
    batched, companions = _explain_in_batch_with(case, [longer_input])
    if all(len(explanation) >= len(companions[0]) for explanation in case.individual_explanations):
        raise NotApplicableError("a longer input is truncated to the length of this one, so nothing is padded")
    return case.measure_difference(batched, case.individual_explanations)


def _explain_in_batch_with(
    case: VerificationCase, companions: Sequence[Any]
) -> tuple[list[AnyExplanation], list[AnyExplanation]]:
    """Explain the inputs in one batch with companions; return the explanations of both."""
    try:
        explanations = case.explain([*case.raw_inputs, *companions])
    except ClearheadError as error:
        raise NotApplicableError(f"there is no batch with another input: {error}") from None
    batched = explanations[: len(case.individual_explanations)]
    change = max(
        abs(get_target_value(e) - get_target_value(individual)) / max(abs(get_target_value(individual)), 1)
        for e, individual in zip(batched, case.individual_explanations, strict=True)
    )
    if change > ROUNDING_TOLERANCE.get(case.explainer.adapter.dtype, 1e-4):
        raise NotApplicableError(
            f"the model's own output depends on the other inputs of its batch (it changes by {change:.1g})"
        )
    return batched, explanations[len(batched) :]


def measure_target_linearity(case: VerificationCase) -> CheckMeasurement:
    """Measure how far the scores of a contrast are from the difference of the two labels' scores."""
    raw_input = case.raw_inputs[0]
    e = case.individual_explanations[0]
    if e.target["scale"] == "log-odds" and not case.explainer.adapter.multi_label:
        raise NotApplicableError(
            "the log-odds of one class against another are not the difference of the two classes' log-odds"
        )
    first, second = _find_top_two_labels(e)
    targets: tuple[Any, ...] = (first, second, Contrast(first, second))
    if e.target["kind"] == "generated_token":
        position = e.target["position"]
        targets = (
            GeneratedToken(position, first),
            GeneratedToken(position, second),
            GeneratedToken(position, first, second),
        )
    try:
        of_first, of_second, of_contrast = (case.explain([raw_input], target=target)[0] for target in targets)
    except ClearheadError as error:
        raise NotApplicableError(f"no contrast of two labels can be explained: {error}") from None
    scale = max(compute_max_abs_score(of_first), compute_max_abs_score(of_second), 1e-30)
    gap = max(
        float(np.abs(of_first[stream].scores - of_second[stream].scores - of_contrast[stream].scores).max())
        for stream in of_first.by_stream
    )
    return CheckMeasurement(gap / scale, case.rounding_tolerance)


def measure_target_independence(case: VerificationCase) -> CheckMeasurement:
    """Measure the difference between the explanations of two targets."""
    e = case.individual_explanations[0]
    try:
        other_target = case.explain([case.raw_inputs[0]], target=_find_top_two_labels(e)[1])[0]
    except ClearheadError as error:
        raise NotApplicableError(f"no other target can be explained: {error}") from None
    return CheckMeasurement(compute_relative_gap(other_target, e), 0.0)


def _find_top_two_labels(e: AnyExplanation) -> tuple[int, int]:
    """Return the predicted label and the second most likely one."""
    indices = [row["index"] for row in e.prediction.get("top", ())]
    if len(indices) < 2:
        raise NotApplicableError("there is no second label")
    return indices[0], indices[1]


def measure_negative_scores(case: VerificationCase) -> CheckMeasurement:
    """Measure the most negative score, of layers and matrix rows too, which must be zero for unsigned methods."""
    lowest = min(
        float(array.min())
        for e in case.individual_explanations
        for stream in e.by_stream.values()
        for array in (stream.scores, stream.matrix, stream.per_layer)
        if array is not None
    )
    return CheckMeasurement(max(0.0, -lowest), 0.0)


def measure_capture_error(case: VerificationCase) -> CheckMeasurement:
    """Measure the difference between the recorded pass and the model's own."""
    errors = [e.certificate[name] for e in case.individual_explanations for name in ("capture_error", "rebuild_error")]
    return CheckMeasurement(
        max(float(error) for error in errors if error is not None),
        RELATIVE_TOLERANCE_BY_DTYPE.get(case.explainer.adapter.dtype, 1e-4),
    )


def measure_tiling_difference(case: VerificationCase) -> CheckMeasurement:
    """Measure the difference between tiled and materialised attention."""
    rows = max(1, len(case.individual_explanations[0]) // 3)  # several tiles, however short the input is
    try:
        with _tile_rows(case.explainer.recorder, rows):
            tiled = case.explain_individually(kernel="streaming")
    except ClearheadError as error:
        raise NotApplicableError(str(error)) from None
    return case.measure_difference(tiled, case.explain_individually(kernel="materialised"))


@contextmanager
def _tile_rows(recorder: Recorder, rows: int) -> Iterator[None]:
    """Set the number of queries per tile."""
    previous_rows = recorder.tile_rows
    recorder.tile_rows = rows
    try:
        yield
    finally:
        recorder.tile_rows = previous_rows


def measure_model_changes(case: VerificationCase) -> CheckMeasurement:
    """Count the properties of the model that the explanations left changed."""
    state = snapshot_model_state(case.explainer.adapter.model)
    changed = [name for name, value in state.items() if value != case.initial_state[name]]
    return CheckMeasurement(float(len(changed)), 0.0, ", ".join(changed))


# All checks -----------------------------------------------------------------------------------------------------------


CHECKS = (
    VerificationCheck(
        "scores add up to the target's value minus the base value", measure_completeness, axiom="complete"
    ),
    VerificationCheck(
        "scores add up more closely with more steps",
        measure_completeness_in_limit,
        axiom="complete in the limit",
    ),
    VerificationCheck("scores add up to one", measure_row_sums, axiom="rows sum to one"),
    VerificationCheck(
        "relevance is conserved: scores add up to one", measure_relevance_conservation, axiom="conserves relevance"
    ),
    VerificationCheck(
        "scores do not change with twice the steps",
        measure_step_convergence,
        is_declared=lambda case: "step_doubling_error" in case.individual_explanations[0].certificate.get("checks", {}),
    ),
    VerificationCheck(
        "no score is negative",
        measure_negative_scores,
        is_declared=lambda case: not case.individual_explanations[0].provenance["signed"],
    ),
    VerificationCheck(
        "contributions of layers add up to the scores",
        measure_layer_sums,
        is_declared=lambda case: case.method.declaration.layer_scores is not None,
    ),
    VerificationCheck(
        "scores of a contrast are the difference of the two labels' scores",
        measure_target_linearity,
        is_declared=lambda case: bool(case.individual_explanations[0].provenance["linear_in_target"]),
    ),
    VerificationCheck(
        "scores do not depend on the target",
        measure_target_independence,
        is_declared=lambda case: case.method.declaration.target == "none",
    ),
    VerificationCheck("same scores when repeated", measure_determinism),
    VerificationCheck("same scores in a batch", measure_batch_invariance),
    VerificationCheck("same scores when padded", measure_padding_invariance),
    VerificationCheck(
        "same scores with tiled and materialised attention",
        measure_tiling_difference,
        is_declared=lambda case: (
            bool(case.method.declaration.requires) and METHOD_REGISTRY[case.method.name].tile_passes > 0
        ),
    ),
    VerificationCheck(
        "the recorded pass equals the model's own",
        measure_capture_error,
        is_declared=lambda case: bool(case.method.declaration.requires),
    ),
    VerificationCheck("the model is unchanged", measure_model_changes),  # last, so that it covers all other checks
)


def iter_unmeasured_axioms(method: Method) -> Iterable[tuple[str, str]]:
    """Yield the declared axioms of a method that no check measures.

    Args:
        method: The method.

    Yields:
        Pairs of axiom and reason.
    """
    measured = {check.axiom for check in CHECKS}
    for axiom in method.declaration.axioms:
        if axiom in UNMEASURABLE_AXIOMS:
            yield axiom, "it can only be tested on models with known attributions, as clearhead's own tests do"
        elif axiom not in measured:
            yield axiom, "no check measures it: see clearhead.verification.checks.CHECKS"
