"""Turn the events of a job into a response, streamed or complete, and errors into JSON of one line."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any

from fastapi import Request, Response
from starlette.exceptions import HTTPException

from clearhead.errors import ClearheadError, InputError
from clearhead.web.cancellation import RunCancelledError, watched_forward_calls
from clearhead.web.scheduler import (
    JobEvent,
    JobScheduler,
    QueueFullError,
    RequestJob,
    WorkItem,
    format_error_message,
    format_timeout_message,
    logger,
)

if TYPE_CHECKING:
    from clearhead.web.model_registry import LoadedModel

#: Last events of a job.
FINAL_EVENTS = ("done", "cancelled", "expired")
#: Time after the deadline in which the job itself may emit `expired`; then the response does.
EXPIRY_GRACE_SECONDS = 0.5


class PendingJobResponse:
    """A job and the response that waits for its results; a client that disconnects cancels the job.

    Args:
        scheduler: Scheduler of the job.
        model_name: Model that the job needs.
        timeout_seconds: Deadline of the job.
        request: Request of the client.
    """

    def __init__(self, scheduler: JobScheduler, model_name: str, timeout_seconds: float, request: Request) -> None:
        loop = asyncio.get_running_loop()
        self.scheduler = scheduler
        self.request = request
        self.event_queue: asyncio.Queue[JobEvent] = asyncio.Queue()

        def emit(event: JobEvent) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self.event_queue.put_nowait, event)

        self.job = RequestJob(model_name, emit, timeout_seconds)

    def submit(self, work_items: Sequence[WorkItem]) -> None:
        """Submit the job with these work items to the scheduler."""
        self.job.work_items.extend(work_items)
        self.scheduler.submit(self.job)

    async def iter_events(self) -> AsyncIterator[JobEvent]:
        """Iterate over the events, up to a final one that is sent before the deadline in any case."""
        try:
            while True:
                remaining_seconds = self.job.timeout_seconds + EXPIRY_GRACE_SECONDS - self.job.elapsed_seconds
                try:
                    event = await asyncio.wait_for(self.event_queue.get(), min(max(remaining_seconds, 0.01), 1.0))
                except TimeoutError:
                    if await self.request.is_disconnected():
                        return
                    if remaining_seconds > 0:
                        continue
                    event = {"event": "expired", "message": format_timeout_message(self.job.timeout_seconds)}
                yield event
                if event["event"] in FINAL_EVENTS:
                    return
        finally:
            self.scheduler.cancel(self.job.id)

    async def iter_ndjson(self) -> AsyncIterator[bytes]:
        """Iterate over the events as lines of JSON."""
        async for event in self.iter_events():
            yield encode_json(event) + b"\n"

    async def collect_results(self) -> dict[str, Any]:
        """Wait for the end of the job and return all results and errors by method.

        Raises:
            InputError: There is no result.
        """
        explanations: dict[str, Any] = {}
        errors: dict[str, str] = {}
        results: dict[str, Any] = {
            "explanations": explanations,
            "errors": errors,
            "comparison": None,
            "image": None,
        }
        async for event in self.iter_events():
            match event["event"]:
                case "explanation":
                    explanations[event["method"]] = event["explanation"]
                    results["image"] = event.get("image") or results["image"]
                case "comparison":
                    results["comparison"] = event["comparison"]
                case "error" | "expired":
                    for method in event.get("methods", ["request"]):
                        errors[method] = event["message"]
        if errors and not explanations:
            raise InputError(next(iter(errors.values())))
        return results

    async def run_function(
        self,
        loaded_model: "LoadedModel",
        function: Callable[[], dict[str, Any]],
        cost: float,
        is_preemptible: bool = False,
    ) -> Response:
        """Run a function that uses a model as a job, and respond with its result.

        Args:
            loaded_model: Model that the function uses.
            function: Function to run in a worker thread.
            cost: Cost in forward passes.
            is_preemptible: Whether the run may be interrupted for other requests and repeated later; only for functions
                that cache what they computed.

        Raises:
            InputError: The function failed, or the job was cancelled or expired.
        """

        def run(work_items: Sequence[WorkItem]) -> None:
            started_at = time.monotonic()

            def on_module_call(num_inputs: int) -> None:
                if self.job.is_abandoned:
                    raise RunCancelledError
                if is_preemptible:
                    self.scheduler.yield_if_contended(work_items[0], started_at)

            try:
                with watched_forward_calls(loaded_model.explainer.adapter.model, on_module_call):
                    self.job.emit({"event": "result", "result": function()})
            except Exception as error:
                if not isinstance(error, ClearheadError):
                    logger.exception("a request failed")
                self.job.emit({"event": "error", "message": format_error_message(error)})

        self.submit([WorkItem(self.job, run, cost)])
        result: dict[str, Any] | None = None
        async for event in self.iter_events():
            if event["event"] in ("error", "expired"):
                raise InputError(event["message"])
            result = event.get("result", result)
        if result is None:
            raise InputError("the request was cancelled")
        return make_json_response(result)


def encode_json(data: Any) -> bytes:
    """Encode as one line of UTF-8 JSON; lone surrogates become question marks."""
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")


def make_json_response(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Make a response with a JSON body; NaN and infinity in the data are errors."""
    return Response(encode_json(data), status, headers, "application/json")


def handle_clearhead_error(request: Request, error: ClearheadError) -> Response:
    """Respond with 422 and the message."""
    return make_json_response({"error": str(error)}, 422)


def handle_queue_full(request: Request, error: QueueFullError) -> Response:
    """Respond with 429 and a Retry-After header."""
    return make_json_response({"error": str(error)}, 429, {"retry-after": str(error.retry_after_seconds)})


def handle_http_exception(request: Request, error: HTTPException) -> Response:
    """Respond with the status of the exception and its message as JSON."""
    return make_json_response({"error": str(error.detail)}, error.status_code, dict(error.headers or {}))


def handle_validation_error(request: Request, error: Any) -> Response:
    """Respond with 422 and up to five validation errors.

    The invalid values are not repeated: they may be long, or not representable in JSON.
    """
    messages = []
    for details in error.errors()[:5]:
        location = ".".join(str(key)[:40] for key in details.get("loc", ()) if key != "body")
        message = str(details.get("msg"))
        messages.append(f"{location}: {message}" if location else message)
    return make_json_response({"error": "; ".join(messages)}, 422)
