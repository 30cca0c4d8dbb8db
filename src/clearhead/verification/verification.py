"""`clearhead.verify`: promise by promise, what was measured, what is allowed, and whether it holds."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from clearhead.engine.batching import followed
from clearhead.errors import InputError, Refusal
from clearhead.explanation.explanation import plain
from clearhead.methods.base import Method, methods_of
from clearhead.verification.checks import CHECKS, Case, Check, NotHere, unmeasured
from clearhead.verification.example_inputs import inputs_for
from clearhead.verification.model_state import state_of

if TYPE_CHECKING:
    from clearhead.explainer import Explainer, MethodLike

Says = Literal["holds", "does not hold", "cannot be asked"]
#: In the place of a method: every one that applies.
ALL = "all"


@dataclass(frozen=True)
class Line:
    """One promise of one method: what was measured, what is allowed, and what follows."""

    method: str
    what: str
    says: Says
    measured: float | None = None
    bound: float | None = None
    #: Why it cannot be asked here, or what was found.
    why: str = ""


@dataclass(frozen=True)
class Verification:
    """What was measured of one or several methods on one model, promise by promise."""

    model: str
    inputs: int
    rows: tuple[Line, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing was found that does not hold."""
        return not self.failed

    @property
    def failed(self) -> list[Line]:
        return [row for row in self.rows if row.says == "does not hold"]

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(row.method for row in self.rows))

    @property
    def summary(self) -> str:
        """All of it in one sentence."""
        held, broken = (sum(row.says == says for row in self.rows) for says in ("holds", "does not hold"))
        left = len(self.rows) - held - broken
        told = [f"{held} hold", f"{broken} {'does' if broken == 1 else 'do'} not"]
        return f"{len(self.rows)} promises: " + ", ".join([*told, *([f"{left} cannot be asked here"] if left else [])])

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; a figure that is not finite is null."""
        return {
            "schema": "clearhead/verification",
            "version": 1,
            "model": self.model,
            "inputs": self.inputs,
            "ok": self.ok,
            "rows": [plain(asdict(row)) for row in self.rows],
        }

    def __rich__(self) -> Any:
        from clearhead.render.views.verification import render

        return render(self)

    def _repr_html_(self) -> str:
        from clearhead.render.html import fragment

        return fragment(self)


def verify(
    method: "MethodLike | Sequence[MethodLike]",
    ex: "Explainer",
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
    """Measure on inputs of this model what a method declares, and what the laws promise of every method.

    method: a name or `Method`, several of them, or "all" for those that apply
    inputs, text, image, audio, regions: as `explain` takes them; by default one that the model takes (a ready example
    where the zoo has one)
    options: others of `explain`, such as answer or scale

    >>> clearhead.verify("generic", clearhead.load("zoo:sentiment")).ok  # doctest: +SKIP
    True
    """
    for name in ("profile", "kernel", "batch_size", "target"):
        if name in options:
            raise InputError(f"verify takes no {name}=: laws bind a method's own settings, for every target and batch")
    given = {"inputs": inputs, "text": text, "image": image, "audio": audio, "regions": regions}
    if all(value is None for value in given.values()):
        given = {"inputs": None, **inputs_for(ex)}
    raws, _ = ex._normalised(**given)
    cases = [Case(ex, one, raws, seed, options) for one in _methods(method, ex)]
    rows: list[Line] = []
    for case, check in followed([(case, check) for case in cases for check in CHECKS], progress, "verifying"):
        if check is CHECKS[0]:
            case.before = state_of(ex.subject.model)
        if check.asked_of(case):
            rows.append(_line(case, check))
        if check is CHECKS[-1]:
            told = unmeasured(case.method)
            rows += [Line(str(case.method), axiom, "cannot be asked", why=why) for axiom, why in told]
    return Verification(ex.subject.name, len(raws), tuple(rows))


def _methods(given: "MethodLike | Sequence[MethodLike]", ex: "Explainer") -> list[Method]:
    if isinstance(given, str) and given == ALL:
        found = [line.name for line in ex.methods() if line.applies]
        if not found:
            raise Refusal(f"no method applies to {ex.subject.name}: {ex.methods()[0].why_not}")
        return [Method(name) for name in found]
    return list(dict.fromkeys(methods_of(given)))


def _line(case: Case, check: Check) -> Line:
    try:
        found = check.measure(case)
    except NotHere as reason:
        return Line(str(case.method), check.what, "cannot be asked", why=str(reason))
    says: Says = "holds" if found.holds else "does not hold"
    why = found.found
    if not found.holds and check.axiom and case.method.own_options:
        why = "with these options; it is declared of the method's own settings"
    return Line(str(case.method), check.what, says, found.figure, found.bound, why)
