"""One request to explain, as steps for the queue: what one pass gives first, then method by method, cheapest first."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from clearhead.adapters.base import How
from clearhead.errors import ClearheadError
from clearhead.explanation.comparison import Comparison
from clearhead.render.view_model import document
from clearhead.web.cancellation import Stopped, watching
from clearhead.web.costs import in_order, passes_of, samples_of
from clearhead.web.image_upload import File, as_url, opened
from clearhead.web.limits import Limits
from clearhead.web.model_registry import Held
from clearhead.web.scheduler import Event, Job, Step, log, said
from clearhead.web.schemas import Ask, inputs_of, target_of

if TYPE_CHECKING:
    from clearhead.explainer import Explainer
    from clearhead.explanation.multi_stream import AnyExplanation

#: How often progress is told, in seconds.
OFTEN = 0.2
#: A picture of more pixels than this shares its pass with no other: decoded, all of them are in memory at once.
LARGE = 4_000_000


@dataclass(eq=False)
class Explaining:
    """What one request asked for, and what was found so far.

    file: its picture; it is decoded for each pass and let go after it, so that those who wait take no room
    """

    ask: Ask
    held: Held
    file: File | None
    job: Job
    limits: Limits
    with_view: bool = True
    found: "dict[str, AnyExplanation]" = field(default_factory=dict)

    def steps(self) -> list[Step]:
        groups = in_order(self.ask.methods)
        return [Step(self.job, run, _cost(group), self._alike(group), (self, group)) for group in groups]

    def _alike(self, group: Sequence[str]) -> Any:
        """What requests must share to share a pass: all but input and target."""
        if self.ask.answer is not None or self.ask.example is not None or _cost(group) > passes_of("generic"):
            return None
        if self.file is not None and self.file.pixels > LARGE:
            return None
        return (self.ask.model, tuple(group), self.ask.scale, self.ask.max_new_tokens)

    def arguments(self, ex: "Explainer") -> dict[str, Any]:
        given = inputs_of(self.ask, ex.subject, None if self.file is None else opened(self.file, self.limits))
        return given if len(ex.subject.takes) > 1 else {"inputs": next(iter(given.values()))}

    def take(self, explanations: "Mapping[str, AnyExplanation]") -> None:
        """Hand new results on."""
        for name, one in explanations.items():
            first = not self.found
            self.found[name] = one
            event: Event = {"event": "explanation", "method": name, "explanation": one.to_dict()}
            if first and one.picture is not None:
                event["picture"] = as_url(one.picture)
            self.job.tell(event)
        if len(self.found) > 1:
            told = Comparison(self.found).to_dict()
            del told["explanations"]
            self.job.tell({"event": "comparison", "comparison": told})
        if self.with_view:
            self.job.tell({"event": "view", "view": document(list(self.found.values()))})


def run(steps: Sequence[Step]) -> None:
    """Steps that are alike: requests of equal length share passes."""
    alive = [step for step in steps if not step.job.over]
    if not alive:
        return
    asked: list[Explaining] = [step.about[0] for step in alive]
    methods: list[str] = alive[0].about[1]
    ex = asked[0].held.explainer
    look = _looker(ex, [one.job for one in asked], methods)
    by_length: dict[Any, list[Explaining]] = {}
    for one in asked:
        try:
            by_length.setdefault(_length(one, ex) if len(asked) > 1 else None, []).append(one)
        except Exception as problem:
            one.job.tell({"event": "problem", "methods": methods, "message": said(problem)})
    for group in by_length.values():
        with watching(ex.subject.model, look):
            _explain(ex, group, methods)


def rehearse(held: Held) -> None:
    """Once through everything that an answer needs, so that the first who asks does not wait for imports."""
    ex = held.explainer
    found = ex.explain(ex.subject.example(), method=["generic", "rollout"])
    document(Comparison(found))


def _explain(ex: "Explainer", asked: Sequence[Explaining], methods: list[str]) -> None:
    """Together if that goes well; one by one if not, so that everyone is told what is wrong with their own."""
    for one in asked:
        one.job.tell({"event": "started", "methods": methods})
    try:
        found = _together(ex, asked, methods)
    except Exception as problem:
        if len(asked) > 1:
            for one in asked:
                _explain(ex, [one], methods)
        elif len(methods) > 1:
            for name in methods:
                _explain(ex, asked, [name])
        else:
            if not isinstance(problem, ClearheadError):
                log.exception("explaining failed")
            asked[0].job.tell({"event": "problem", "methods": methods, "message": said(problem)})
        return
    for i, one in enumerate(asked):
        try:
            one.take({name: found[name][i] for name in methods})
        except Exception as problem:  # nobody else's results are lost by it
            log.exception("showing failed")
            one.job.tell({"event": "problem", "methods": methods, "message": said(problem)})


def _together(ex: "Explainer", asked: Sequence[Explaining], methods: list[str]) -> "dict[str, list[AnyExplanation]]":
    given = [one.arguments(ex) for one in asked]
    ask = asked[0].ask
    inputs: dict[str, Any] = {stream: [one[stream] for one in given] for stream in given[0]}
    found: dict[str, list[AnyExplanation]] = ex.explain(
        **inputs,
        method=methods,
        target=[target_of(one.ask, ex.subject) for one in asked],
        scale=ask.scale,
        answer=ask.answer,
        max_new_tokens=ask.max_new_tokens,
        batch_size=len(asked),
    )
    return found


def _length(one: Explaining, ex: "Explainer") -> tuple[int, ...]:
    if len(ex.subject.takes) > 1:
        return (-1, id(one))  # of a text and a picture: alone
    if one.file is not None:
        return (-1,)  # pictures are brought to one size
    given = one.arguments(ex)
    return tuple(sum(map(len, sample.axes.values())) for sample in ex.subject.samples(given["inputs"], How()))


def _looker(ex: "Explainer", jobs: Sequence[Job], methods: Iterable[str]) -> Callable[[int], None]:
    """Tells how far a run has come, and ends it when nobody waits for it any more."""
    began, expected = time.monotonic(), max(samples_of(name) for name in methods)
    done, told = 0, began

    def look(inputs: int) -> None:
        nonlocal done, told
        if all(job.over for job in jobs):
            raise Stopped
        done += inputs
        now = time.monotonic()
        if now - told >= OFTEN:
            told = now
            event = {"event": "progress", "methods": list(methods), "inputs": done // len(jobs), "of": expected}
            for job in jobs:
                job.tell({**event, "seconds": round(now - began, 2)})

    return look


def _cost(group: Sequence[str]) -> float:
    return max(map(passes_of, group))
