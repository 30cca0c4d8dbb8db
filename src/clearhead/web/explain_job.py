"""Explain requests as work items: methods that share one pass first, then the others one by one, cheapest first."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from clearhead import RECOMMENDED_METHOD
from clearhead.adapters.base import InputOptions
from clearhead.errors import ClearheadError
from clearhead.explanation.comparison import Comparison
from clearhead.render.view_model import build_view_model
from clearhead.web.cancellation import RunCancelledError, watched_forward_calls
from clearhead.web.image_upload import UploadedImage, decode_uploaded_image, encode_png_data_url
from clearhead.web.limits import Limits
from clearhead.web.method_groups import estimate_num_inputs, estimate_passes, group_by_cost
from clearhead.web.model_registry import LoadedModel
from clearhead.web.scheduler import JobEvent, RequestJob, WorkItem, format_error_message, logger
from clearhead.web.schemas import ExplainRequest, build_explain_inputs, build_target

if TYPE_CHECKING:
    from clearhead.explainer import Explainer
    from clearhead.explanation.multi_stream import AnyExplanation

#: Interval of progress events, in seconds.
PROGRESS_INTERVAL_SECONDS = 0.2
#: Larger images are not batched: all decoded images of a batch are in memory at once.
MAX_BATCHED_IMAGE_PIXELS = 4_000_000


@dataclass(eq=False)
class ExplainJob:
    """One explain request and its results.

    Attributes:
        request: The request.
        loaded_model: Model to explain.
        image_upload: Encoded image of the request. It is decoded for each pass and released afterwards, so that waiting
            requests take little memory.
        job: Job that receives the events.
        limits: Limits of the server.
        include_view: Whether to send view events, for the page.
        explanations: Results by method.
    """

    request: ExplainRequest
    loaded_model: LoadedModel
    image_upload: UploadedImage | None
    job: RequestJob
    limits: Limits
    include_view: bool = True
    explanations: "dict[str, AnyExplanation]" = field(default_factory=dict)

    def make_work_items(self) -> list[WorkItem]:
        """Split the request into work items, cheapest first."""
        return [
            WorkItem(
                self.job, run_explain_batch, _estimate_group_passes(group), self._make_batch_key(group), (self, group)
            )
            for group in group_by_cost(self.request.methods)
        ]

    def _make_batch_key(self, group: Sequence[str]) -> Any:
        """Return the properties that requests must have in common to share a pass; None if this one cannot share."""
        if (
            self.request.answer is not None
            or self.request.example is not None
            or _estimate_group_passes(group) > estimate_passes(RECOMMENDED_METHOD)
        ):
            return None
        if self.image_upload is not None and self.image_upload.num_pixels > MAX_BATCHED_IMAGE_PIXELS:
            return None
        return (self.request.model, tuple(group), self.request.scale, self.request.max_new_tokens)

    def build_inputs(self, explainer: "Explainer") -> dict[str, Any]:
        """Decode the image and build the arguments of `explain`."""
        image = None if self.image_upload is None else decode_uploaded_image(self.image_upload, self.limits)
        inputs = build_explain_inputs(self.request, explainer.adapter, image)
        if len(explainer.adapter.input_names) > 1:
            return inputs
        return {"inputs": next(iter(inputs.values()))}

    def emit_results(self, explanations: "Mapping[str, AnyExplanation]") -> None:
        """Emit events for new explanations, and for the comparison and view of all explanations so far."""
        for name, explanation in explanations.items():
            event: JobEvent = {"event": "explanation", "method": name, "explanation": explanation.to_dict()}
            if not self.explanations and explanation.image is not None:
                event["image"] = encode_png_data_url(explanation.image)
            self.explanations[name] = explanation
            self.job.emit(event)
        if len(self.explanations) > 1:
            comparison = Comparison(self.explanations).to_dict()
            del comparison["explanations"]
            self.job.emit({"event": "comparison", "comparison": comparison})
        if self.include_view:
            self.job.emit({"event": "view", "view": build_view_model(list(self.explanations.values()))})


def run_explain_batch(work_items: Sequence[WorkItem]) -> None:
    """Run work items with the same batch key; requests of equal input length share passes."""
    active_items = [item for item in work_items if not item.job.is_abandoned]
    if not active_items:
        return
    explain_jobs: list[ExplainJob] = [item.payload[0] for item in active_items]
    methods: list[str] = active_items[0].payload[1]
    explainer = explain_jobs[0].loaded_model.explainer
    on_module_call = _make_progress_callback([explain_job.job for explain_job in explain_jobs], methods)
    jobs_by_length: dict[Any, list[ExplainJob]] = {}
    for explain_job in explain_jobs:
        try:
            length = _compute_input_length(explain_job, explainer) if len(explain_jobs) > 1 else None
            jobs_by_length.setdefault(length, []).append(explain_job)
        except Exception as error:
            _emit_error(explain_job, methods, error)
    for batch in jobs_by_length.values():
        with watched_forward_calls(explainer.adapter.model, on_module_call):
            _explain_with_fallback(explainer, batch, methods)


def warm_up_model(loaded_model: LoadedModel) -> None:
    """Explain and draw an example, so that the first request does not wait for imports."""
    explainer = loaded_model.explainer
    explanations = explainer.explain(explainer.adapter.make_example_input(), method=["generic", "rollout"])
    build_view_model(Comparison(explanations))


def _emit_error(explain_job: ExplainJob, methods: Sequence[str], error: Exception) -> None:
    """Send the client an event with the message of an error and the methods that it affects."""
    explain_job.job.emit({"event": "error", "methods": methods, "message": format_error_message(error)})


def _explain_with_fallback(explainer: "Explainer", explain_jobs: Sequence[ExplainJob], methods: list[str]) -> None:
    """Explain the batch; on failure retry each request, then each method, so that each gets its own error."""
    for explain_job in explain_jobs:
        explain_job.job.emit({"event": "started", "methods": methods})
    try:
        explanations = _explain_batch(explainer, explain_jobs, methods)
    except Exception as error:
        if len(explain_jobs) > 1:
            for explain_job in explain_jobs:
                _explain_with_fallback(explainer, [explain_job], methods)
        elif len(methods) > 1:
            for name in methods:
                _explain_with_fallback(explainer, explain_jobs, [name])
        else:
            if not isinstance(error, ClearheadError):
                logger.exception("explaining failed")
            _emit_error(explain_jobs[0], methods, error)
        return
    for index, explain_job in enumerate(explain_jobs):
        try:
            explain_job.emit_results({name: explanations[name][index] for name in methods})
        except Exception as error:  # the results of the other requests are still sent
            logger.exception("rendering failed")
            _emit_error(explain_job, methods, error)


def _explain_batch(
    explainer: "Explainer", explain_jobs: Sequence[ExplainJob], methods: list[str]
) -> "dict[str, list[AnyExplanation]]":
    """Explain all requests in one batch; returns explanations by method, in the order of the requests."""
    inputs_by_job = [explain_job.build_inputs(explainer) for explain_job in explain_jobs]
    inputs: dict[str, Any] = {stream: [values[stream] for values in inputs_by_job] for stream in inputs_by_job[0]}
    request = explain_jobs[0].request  # all share scale, answer and max_new_tokens, see `_make_batch_key`
    explanations: dict[str, list[AnyExplanation]] = explainer.explain(
        **inputs,
        method=methods,
        target=[build_target(explain_job.request, explainer.adapter) for explain_job in explain_jobs],
        scale=request.scale,
        answer=request.answer,
        max_new_tokens=request.max_new_tokens,
        batch_size=len(explain_jobs),
    )
    return explanations


def _compute_input_length(explain_job: ExplainJob, explainer: "Explainer") -> tuple[int, ...]:
    """Return a key that is equal for inputs that fit into one batch without padding."""
    if len(explainer.adapter.input_names) > 1:
        return (-1, id(explain_job))  # text and image together are not batched
    if explain_job.image_upload is not None:
        return (-1,)  # images are resized to the model's input size
    inputs = explain_job.build_inputs(explainer)
    samples = explainer.adapter.make_samples(inputs["inputs"], InputOptions())
    return tuple(sum(map(len, sample.axes.values())) for sample in samples)


def _make_progress_callback(jobs: Sequence[RequestJob], methods: Iterable[str]) -> Callable[[int], None]:
    """Make a callback for `watched_forward_calls` that emits progress, and cancels when all requests are abandoned."""
    started_at = time.monotonic()
    expected_inputs = max(estimate_num_inputs(name) for name in methods)
    total_inputs = 0
    reported_at = started_at

    def on_module_call(num_inputs: int) -> None:
        nonlocal total_inputs, reported_at
        if all(job.is_abandoned for job in jobs):
            raise RunCancelledError
        total_inputs += num_inputs
        current_time = time.monotonic()
        if current_time - reported_at >= PROGRESS_INTERVAL_SECONDS:
            reported_at = current_time
            for job in jobs:
                job.emit(
                    {
                        "event": "progress",
                        "methods": list(methods),
                        "num_inputs": total_inputs // len(jobs),
                        "expected_inputs": expected_inputs,
                        "elapsed_seconds": round(current_time - started_at, 2),
                    }
                )

    return on_module_call


def _estimate_group_passes(group: Sequence[str]) -> int:
    """Estimate the passes of methods that share them: as many as the most expensive one needs."""
    return max(map(estimate_passes, group))
