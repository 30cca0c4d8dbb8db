"""`clearhead.verify`: runs every check on every method and collects measurements, bounds and results."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from clearhead.engine.batching import with_progress
from clearhead.errors import InputError, UnsupportedError
from clearhead.explanation.explanation import to_json_value
from clearhead.methods.base import Method, parse_methods
from clearhead.verification.checks import (
    CHECKS,
    NotApplicableError,
    VerificationCase,
    VerificationCheck,
    iter_unmeasured_axioms,
)
from clearhead.verification.example_inputs import find_example_inputs
from clearhead.verification.model_state import snapshot_model_state

if TYPE_CHECKING:
    from clearhead.explainer import Explainer, MethodLike

CheckStatus = Literal["passed", "failed", "not_applicable"]
#: Stands for every method that applies to the model.
ALL_METHODS = "all"


@dataclass(frozen=True)
class CheckResult:
    """Result of one check of one method.

    Attributes:
        method: The method with its options.
        property: The checked property, in words.
        status: "passed", "failed" or "not_applicable".
        measured: The measured value, if any.
        bound: The largest value with which the property holds.
        reason: Details of a violation, or the reason why the check does not apply.
    """

    method: str
    property: str
    status: CheckStatus
    measured: float | None = None
    bound: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Verification:
    """Results of all checks of one or several methods on one model.

    Attributes:
        model_name: Name of the model.
        num_inputs: Number of inputs.
        results: One result per method and check.
    """

    model_name: str
    num_inputs: int
    results: tuple[CheckResult, ...]

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return not self.failed

    @property
    def failed(self) -> list[CheckResult]:
        """The results of the failed checks."""
        return [result for result in self.results if result.status == "failed"]

    @property
    def methods(self) -> list[str]:
        """Names of the verified methods with their options, each once, in the order of the call."""
        return list(dict.fromkeys(result.method for result in self.results))

    @property
    def summary(self) -> str:
        """The numbers of checks that passed, failed and do not apply."""
        num_passed = sum(result.status == "passed" for result in self.results)
        num_failed = len(self.failed)
        num_not_applicable = len(self.results) - num_passed - num_failed
        summary = f"{len(self.results)} checks: {num_passed} passed, {num_failed} failed"
        if num_not_applicable:
            summary += f", {num_not_applicable} not applicable"
        return summary

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form; non-finite numbers become null.

        Returns:
            A dict of plain Python values.

        Example:
            >>> Verification("zoo:sentiment", 5, ()).to_dict()["ok"]
            True
        """
        return {
            "schema": "clearhead/verification",
            "version": 2,
            "model": self.model_name,
            "inputs": self.num_inputs,
            "ok": self.ok,
            "results": [to_json_value(asdict(result)) for result in self.results],
        }

    def __rich__(self) -> Any:
        from clearhead.render.views.verification import render_verification

        return render_verification(self)

    def _repr_html_(self) -> str:
        """Return an HTML fragment, which notebooks display."""
        from clearhead.render.html import render_notebook_html

        return render_notebook_html(self)


def verify(
    method: "MethodLike | Sequence[MethodLike]",
    explainer: "Explainer",
    inputs: Any = None,
    *,
    text: Any = None,
    image: Any = None,
    audio: Any = None,
    regions: Any = None,
    seed: int = 0,
    progress: bool | Callable[[list[Any]], Iterable[Any]] = False,
    **options: Any,
) -> Verification:
    """Check on a model whether methods have the properties that they declare, and those required of every method.

    Args:
        method: A method name or `Method`, a list of them, or "all" for every method that applies.
        explainer: The explainer of the model.
        inputs: The inputs, as in `Explainer.explain`. Default: an example that the model takes.
        text: Input text by name.
        image: Input image by name.
        audio: Input audio by name.
        regions: Precomputed image regions by name.
        seed: Seed of methods that draw random numbers.
        progress: True for a progress bar over the checks, or a function such as `tqdm.tqdm`.
        **options: Further options of `Explainer.explain`, such as `answer` or `scale`.

    Returns:
        The measurement, bound and result of every check.

    Raises:
        InputError: If an option is not allowed, or an input or method is invalid.
        UnsupportedError: If a method cannot be applied to this model.

    Example:
        >>> clearhead.verify("generic", clearhead.load("zoo:sentiment")).ok  # doctest: +SKIP
        True
    """
    for name in ("profile", "kernel", "batch_size", "target"):
        if name in options:
            raise InputError(
                f"verify takes no {name}=: properties are checked with a method's own settings, and hold for every "
                "target and batch"
            )
    streams = {"inputs": inputs, "text": text, "image": image, "audio": audio, "regions": regions}
    if all(value is None for value in streams.values()):
        streams = {"inputs": None, **find_example_inputs(explainer)}
    raw_inputs, _ = explainer._normalise_inputs(**streams)
    methods = _resolve_methods(method, explainer)
    cases = [VerificationCase(explainer, verified_method, raw_inputs, seed, options) for verified_method in methods]
    results: list[CheckResult] = []
    for case, check in with_progress([(case, check) for case in cases for check in CHECKS], progress, "verifying"):
        if check is CHECKS[0]:
            case.initial_state = snapshot_model_state(explainer.adapter.model)
        if check.applies_to(case):
            results.append(_run_check(case, check))
        if check is CHECKS[-1]:
            results += [
                CheckResult(str(case.method), axiom, "not_applicable", reason=reason)
                for axiom, reason in iter_unmeasured_axioms(case.method)
            ]
    return Verification(explainer.adapter.name, len(raw_inputs), tuple(results))


def _resolve_methods(method: "MethodLike | Sequence[MethodLike]", explainer: "Explainer") -> list[Method]:
    """Parse methods, each once; "all" stands for those that apply to the model."""
    if not isinstance(method, str) or method != ALL_METHODS:
        return list(dict.fromkeys(parse_methods(method)))
    applicability = explainer.methods()
    names = [row.name for row in applicability if row.applies]
    if not names:
        raise UnsupportedError(f"no method applies to {explainer.adapter.name}: {applicability[0].why_not}")
    return [Method(name) for name in names]


def _run_check(case: VerificationCase, check: VerificationCheck) -> CheckResult:
    """Run one check; that it does not apply to this case is a result, too."""
    try:
        measurement = check.measure(case)
    except NotApplicableError as reason:
        return CheckResult(str(case.method), check.description, "not_applicable", reason=str(reason))
    status: CheckStatus = "passed"
    details = measurement.details
    if not measurement.holds:
        status = "failed"
        if check.axiom and case.method.constructor_kwargs:
            details = "with these options; the property is declared for the method's default settings"
    return CheckResult(str(case.method), check.description, status, measurement.value, measurement.bound, details)
