"""The ASGI application: the page and its JSON API."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

import clearhead
from clearhead.errors import ClearheadError
from clearhead.probes import view_attention
from clearhead.web import result_files
from clearhead.web.attention_cache import AttentionCache
from clearhead.web.explain_job import ExplainJob, warm_up_model
from clearhead.web.image_upload import UploadedImage, decode_uploaded_image
from clearhead.web.limits import Limits
from clearhead.web.middleware import SecurityMiddleware
from clearhead.web.model_registry import LoadedModel, ModelRegistry, ProgressWrapper, list_zoo_model_names
from clearhead.web.openapi import EVENT_STREAM_RESPONSE, ROUTE_SCHEMAS, build_openapi_schema, build_responses
from clearhead.web.responses import (
    PendingJobResponse,
    handle_clearhead_error,
    handle_http_exception,
    handle_queue_full,
    handle_validation_error,
    make_json_response,
)
from clearhead.web.scheduler import JobScheduler, QueueFullError
from clearhead.web.schemas import (
    ExplainRequest,
    ExportRequest,
    InputRequest,
    RenderRequest,
    build_explain_inputs,
    check_request,
    take_image_upload,
)
from clearhead.web.static_files import serve_asset, serve_page_file

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

IndexParam = Annotated[int, Query(ge=0, lt=10_000)]
#: Cost in forward passes of checking which methods apply to a model.
APPLICABILITY_COST_PASSES = 50.0
#: Cost in forward passes of the attention view of an input.
ATTENTION_COST_PASSES = 8.0


def make_app(
    models: "Sequence[str] | Mapping[str, Explainer] | None" = None,
    *,
    limits: Limits | None = None,
    token: str | None = None,
    allowed_hosts: Sequence[str] = (),
    wrap_progress: ProgressWrapper = list,
) -> SecurityMiddleware:
    """Create the page and its API as an ASGI application.

    Args:
        models: Names of the models to serve, or explainers by name; by default the models of the zoo.
        limits: Limits on requests and on the queue.
        token: Token that requests must send (`Authorization: Bearer …`); none by default.
        allowed_hosts: Host names that the server accepts, in addition to IP addresses and localhost.
        wrap_progress: Function that wraps the names while the models are loaded, such as `tqdm`.

    Returns:
        The application with its security checks.

    Raises:
        InputError: There is no model to serve, or a model cannot be loaded.

    Example:
        >>> uvicorn.run(make_app(["zoo:sentiment"]))  # doctest: +SKIP
    """
    limits = limits or Limits()
    if models is None:
        models = list_zoo_model_names()
    endpoints = ApiEndpoints(ModelRegistry(models, wrap_progress), limits)
    app = FastAPI(
        title="clearhead",
        version=clearhead.__version__,
        openapi_url="/api/openapi.json",
        docs_url=None,  # FastAPI's documentation pages load scripts from a CDN
        redoc_url=None,
        lifespan=endpoints.lifespan,
    )
    app.include_router(endpoints.build_router())
    handlers = {
        ClearheadError: handle_clearhead_error,
        QueueFullError: handle_queue_full,
        RequestValidationError: handle_validation_error,
        HTTPException: handle_http_exception,
    }
    for error_class, handler in handlers.items():
        app.add_exception_handler(error_class, handler)  # type: ignore[arg-type]
    model_names = list(endpoints.registry.loaded_models)
    app.openapi = partial(build_openapi_schema, app, model_names)  # type: ignore[method-assign]
    return SecurityMiddleware(app, limits, token, allowed_hosts)


class ApiEndpoints:
    """Endpoints of the API. Everything that runs a model goes through the scheduler.

    Args:
        registry: The loaded models.
        limits: Limits on requests, queue and caches.
    """

    def __init__(self, registry: ModelRegistry, limits: Limits) -> None:
        self.registry = registry
        self.limits = limits
        self.scheduler = JobScheduler(limits)
        self.attention_cache = AttentionCache(limits.max_cached_map_bytes)

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Run the scheduler while the application runs, and warm up the first model."""
        first_model = next(iter(self.registry.loaded_models.values()))
        self.scheduler.background_tasks.append((first_model.name, partial(warm_up_model, first_model)))
        self.scheduler.start()
        try:
            yield
        finally:
            await run_in_threadpool(self.scheduler.stop)

    def build_router(self) -> APIRouter:
        """Register all routes."""
        router = APIRouter()
        get = partial(router.add_api_route, methods=["GET"])
        post = partial(router.add_api_route, methods=["POST"])
        for path in ("/", "/{name}"):
            get(path, serve_page_file, include_in_schema=False)
        get("/assets/{name}", serve_asset, include_in_schema=False)
        get("/api/about", self.about, responses=build_responses())
        get("/api/models", self.models, responses=build_responses())
        get("/api/model", self.model, responses=build_responses(422, 429))
        post("/api/explain", self.explain, responses=build_responses(413, 422, 429, ok_response=EVENT_STREAM_RESPONSE))
        post(
            "/api/explanations",
            self.explanations,
            responses=build_responses(413, 422, 429, ok_response=ROUTE_SCHEMAS["explanations"]),
        )
        post("/api/attention", self.attention, responses=build_responses(413, 422, 429))
        get("/api/heads/{key}", self.head, responses=build_responses(404, 422, ok_response=ROUTE_SCHEMAS["head"]))
        post(
            "/api/open",
            self.open,
            responses=build_responses(413, 422, ok_response=ROUTE_SCHEMAS["open"]),
            openapi_extra=ROUTE_SCHEMAS["file_upload"],
        )
        post("/api/view", self.view, responses=build_responses(413, 422))
        post("/api/export", self.export, responses=build_responses(413, 422, ok_response=ROUTE_SCHEMAS["export"]))
        router.add_api_route("/api/jobs/{job}", self.cancel, methods=["DELETE"], responses=build_responses(404))
        return router

    # The docstrings of the endpoints are their descriptions in the OpenAPI document.

    async def about(self) -> Response:
        """Return the version, the limits, and the number of requests that run or wait."""
        return make_json_response(
            {
                "version": clearhead.__version__,
                "limits": self.limits.to_dict(),
                "num_pending_requests": len(self.scheduler.jobs),
            }
        )

    async def models(self) -> Response:
        """List the models that can be requested."""
        return make_json_response({"models": self.registry.list_summaries()})

    async def model(self, request: Request, name: str, check_methods: bool = True) -> Response:
        """Describe the inputs and outputs of a model, and the methods that can explain it, cheapest first.

        With `check_methods=false`, methods are not run on the model, and `applies` is null where it is not known yet.
        """
        loaded_model = self.registry[name]
        if not check_methods or loaded_model.method_rows is not None:  # no model pass is needed
            return make_json_response(await run_in_threadpool(loaded_model.describe, False))
        return await self._make_pending_response(request, name).run_function(
            loaded_model, loaded_model.describe, APPLICABILITY_COST_PASSES, is_preemptible=True
        )

    async def explain(self, request: Request, explain_request: ExplainRequest) -> Response:
        """Explain one input and stream the results as NDJSON, one event per line, cheapest method first.

        To cancel a request, close it, or send `DELETE /api/jobs/{id}` with the id of its first line.
        """
        pending_response = await self._submit_explain_job(request, explain_request, include_view=True)
        return StreamingResponse(pending_response.iter_ndjson(), media_type="application/x-ndjson")

    async def explanations(self, request: Request, explain_request: ExplainRequest) -> Response:
        """Explain one input and return all results at once."""
        pending_response = await self._submit_explain_job(request, explain_request, include_view=False)
        return make_json_response(await pending_response.collect_results())

    async def attention(self, request: Request, input_request: InputRequest) -> Response:
        """Return the attention of all heads on one input, as the page draws it."""
        loaded_model, image_upload = await self._admit_request(input_request)

        def build_view() -> dict[str, Any]:
            explainer = loaded_model.explainer
            image = None if image_upload is None else decode_uploaded_image(image_upload, self.limits)
            inputs = build_explain_inputs(input_request, explainer.adapter, image)
            return self.attention_cache.cache_and_build_view(
                view_attention(explainer, inputs, self.limits.max_attention_units)
            )

        return await self._make_pending_response(request, input_request.model).run_function(
            loaded_model, build_view, ATTENTION_COST_PASSES
        )

    async def head(
        self, key: str, layer: IndexParam, head: IndexParam, name: Annotated[str, Query(max_length=200)] = ""
    ) -> Response:
        """Return the full-resolution map of one head: one byte per weight, its square root, row by row.

        `key` is the `maps_key` value of `POST /api/attention`; `name` is the name of the map, if there are several.
        """
        try:
            content = await run_in_threadpool(self.attention_cache.get_head_map, key, name, layer, head)
        except KeyError:
            raise HTTPException(
                404, "no such head, or its map is no longer cached: request the attention again"
            ) from None
        return Response(content, media_type="application/octet-stream")

    async def open(self, request: Request) -> Response:
        """Open a saved explanation: the bytes of a .safetensors or .json file."""
        content = await request.body()
        explanations = await run_in_threadpool(result_files.parse_explanations_file, content, self.limits)

        def encode() -> dict[str, Any]:
            view_model = result_files.build_explanations_view_model(explanations)
            return {**result_files.encode_explanations(explanations), "view": view_model}

        return make_json_response(await run_in_threadpool(encode))

    async def view(self, render_request: RenderRequest) -> Response:
        """Return several explanations side by side, as the page draws them."""
        explanations = await run_in_threadpool(result_files.decode_explanations, render_request, self.limits)
        view_model = await run_in_threadpool(result_files.build_explanations_view_model, explanations)
        return make_json_response({"view": view_model})

    async def export(self, export_request: ExportRequest) -> Response:
        """Return explanations as a file: a self-contained HTML page, or safetensors."""
        explanations = await run_in_threadpool(result_files.decode_explanations, export_request, self.limits)
        encode, media_type = {
            "html": (result_files.encode_html, "text/html"),
            "safetensors": (result_files.encode_safetensors, "application/octet-stream"),
        }[export_request.format]
        content = await run_in_threadpool(encode, explanations)
        headers = {"content-disposition": f'attachment; filename="explanation.{export_request.format}"'}
        return Response(content, media_type=media_type, headers=headers)

    async def cancel(self, job: str) -> Response:
        """Cancel a request by the id of its first line."""
        if not self.scheduler.cancel(job):
            raise HTTPException(404, "there is no such request, or it is finished")
        return make_json_response({"cancelled": job})

    async def _submit_explain_job(
        self, request: Request, explain_request: ExplainRequest, include_view: bool
    ) -> PendingJobResponse:
        """Check the request, queue its work items, and return the response that waits for their results."""
        loaded_model, image_upload = await self._admit_request(explain_request)
        pending_response = self._make_pending_response(request, explain_request.model)
        explain_job = ExplainJob(
            explain_request, loaded_model, image_upload, pending_response.job, self.limits, include_view
        )
        pending_response.submit(explain_job.make_work_items())
        return pending_response

    async def _admit_request(self, input_request: InputRequest) -> tuple[LoadedModel, UploadedImage | None]:
        """Check a request and return its model and image; images of waiting requests are not decoded yet."""
        check_request(input_request, self.limits)
        self.scheduler.check_capacity()
        loaded_model = self.registry[input_request.model]
        return loaded_model, await run_in_threadpool(take_image_upload, input_request, self.limits)

    def _make_pending_response(self, request: Request, model_name: str) -> PendingJobResponse:
        """Create a job with the server's time limit and its response; nothing is queued yet."""
        return PendingJobResponse(self.scheduler, model_name, self.limits.timeout_seconds, request)
