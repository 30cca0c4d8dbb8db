"""From the events of a job to an answer, line by line or in one piece; and errors as one clear line."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any

from fastapi import Request, Response
from starlette.exceptions import HTTPException

from clearhead.errors import ClearheadError, InputError
from clearhead.web.cancellation import Stopped, watching
from clearhead.web.scheduler import Event, Full, Job, Queue, Step, log, said, too_long

if TYPE_CHECKING:
    from clearhead.web.model_registry import Held

#: The events after which nothing comes.
LAST = ("done", "cancelled", "expired")
#: How long past its promise a job may say so itself; then the answer does.
GRACE = 0.5


class Answer:
    """One job and whoever waits for it. When they are gone, the job is cancelled."""

    def __init__(self, queue: Queue, model: str, seconds: float, request: Request) -> None:
        loop = asyncio.get_running_loop()
        self.queue, self.request = queue, request
        self.events: asyncio.Queue[Event] = asyncio.Queue()

        def tell(event: Event) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self.events.put_nowait, event)

        self.job = Job(model, tell, seconds)

    def submit(self, steps: Sequence[Step]) -> None:
        self.job.steps.extend(steps)
        self.queue.submit(self.job)

    async def told(self) -> AsyncIterator[Event]:
        """Every event up to the last, which comes in the promised time whatever happens."""
        try:
            while True:
                left = self.job.seconds + GRACE - self.job.waited
                try:
                    event = await asyncio.wait_for(self.events.get(), min(max(left, 0.01), 1.0))
                except TimeoutError:
                    if await self.request.is_disconnected():
                        return
                    if left > 0:
                        continue
                    event = {"event": "expired", "message": too_long(self.job.seconds)}
                yield event
                if event["event"] in LAST:
                    return
        finally:
            self.queue.cancel(self.job.id)

    async def lines(self) -> AsyncIterator[bytes]:
        async for event in self.told():
            yield encoded(event) + b"\n"

    async def whole(self) -> dict[str, Any]:
        """All that was found, by method, and what went wrong."""
        found: dict[str, Any] = {}
        problems: dict[str, str] = {}
        made: dict[str, Any] = {"comparison": None, "picture": None}
        async for event in self.told():
            match event["event"]:
                case "explanation":
                    found[event["method"]] = event["explanation"]
                    made["picture"] = event.get("picture") or made["picture"]
                case "comparison":
                    made["comparison"] = event["comparison"]
                case "problem" | "expired":
                    problems |= dict.fromkeys(event.get("methods", ["request"]), event["message"])
        if problems and not found:
            raise InputError(next(iter(problems.values())))
        return {"explanations": found, "problems": problems, **made}

    async def computed(
        self, held: "Held", make: Callable[[], dict[str, Any]], cost: float, gives_way: bool = False
    ) -> Response:
        """What one function makes of a model, run in its turn.

        gives_way: it makes room for others and begins anew; what it found before is kept where it looks first
        """

        def run(steps: Sequence[Step]) -> None:
            began = time.monotonic()

            def look(inputs: int) -> None:
                if self.job.over:
                    raise Stopped
                if gives_way:
                    self.queue.give_way(steps[0], began)

            try:
                with watching(held.explainer.subject.model, look):
                    self.job.tell({"event": "made", "made": make()})
            except Exception as problem:
                if not isinstance(problem, ClearheadError):
                    log.exception("a request failed")
                self.job.tell({"event": "problem", "message": said(problem)})

        self.submit([Step(self.job, run, cost)])
        made: dict[str, Any] | None = None
        async for event in self.told():
            if event["event"] in ("problem", "expired"):
                raise InputError(event["message"])
            made = event.get("made", made)
        if made is None:
            raise InputError("the request was cancelled")
        return json_of(made)


def encoded(data: Any) -> bytes:
    """JSON in one line; half of a pair of surrogates, which no text can hold, becomes a question mark."""
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")


def json_of(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encoded(data), status, headers, "application/json")


def refuse(request: Request, problem: ClearheadError) -> Response:
    return json_of({"error": str(problem)}, 422)


def turn_away(request: Request, full: Full) -> Response:
    return json_of({"error": str(full)}, 429, {"retry-after": str(full.retry_after)})


def failed(request: Request, problem: HTTPException) -> Response:
    return json_of({"error": str(problem.detail)}, problem.status_code, dict(problem.headers or {}))


def invalid(request: Request, problem: Any) -> Response:
    """What is wrong with a request, without repeating it: it may be long, or hold what no answer can."""
    lines = []
    for one in problem.errors()[:5]:
        where = ".".join(str(part)[:40] for part in one.get("loc", ()) if part != "body")
        lines.append(f"{where}: {one.get('msg')}" if where else str(one.get("msg")))
    return json_of({"error": "; ".join(lines)}, 422)
