"""The application: the page, and the JSON behind it."""

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
from clearhead.probes import look
from clearhead.web import result_files
from clearhead.web.attention_cache import Heads
from clearhead.web.explain_job import Explaining, rehearse
from clearhead.web.image_upload import File, opened
from clearhead.web.limits import Limits
from clearhead.web.middleware import Guard
from clearhead.web.model_registry import Follow, Held, Shelf, zoo_names
from clearhead.web.openapi import EVENTS, FORMS, answers, described
from clearhead.web.responses import Answer, failed, invalid, json_of, refuse, turn_away
from clearhead.web.scheduler import Full, Queue
from clearhead.web.schemas import Ask, Input, Shared, Shown, check, inputs_of, picture_in
from clearhead.web.static_files import asset, page_file

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

Number = Annotated[int, Query(ge=0, lt=10_000)]
#: What it costs, in passes, to try every method of a model, and to look at every head of an input.
TRYING, LOOKING = 50.0, 8.0


def make_app(
    models: "Sequence[str] | Mapping[str, Explainer] | None" = None,
    *,
    limits: Limits | None = None,
    token: str | None = None,
    hosts: Sequence[str] = (),
    follow: Follow = list,
) -> Guard:
    """The page as an ASGI application.

    models: the names that may be asked for, or explainers by name; by default the zoo's
    follow: a bar over the names while they are opened, such as tqdm
    token: what requests must bring (`Authorization: Bearer …`); hosts: further names that the server goes by
    """
    limits = limits or Limits()
    site = Site(Shelf(zoo_names() if models is None else models, follow), limits)
    app = FastAPI(
        title="clearhead",
        version=clearhead.__version__,
        openapi_url="/api/openapi.json",
        docs_url=None,  # its pages of documentation fetch scripts from elsewhere
        redoc_url=None,
        lifespan=site.alive,
    )
    app.include_router(site.routes())
    for kind, handler in {
        ClearheadError: refuse,
        Full: turn_away,
        RequestValidationError: invalid,
        HTTPException: failed,
    }.items():
        app.add_exception_handler(kind, handler)  # type: ignore[arg-type]
    app.openapi = partial(described, app, list(site.shelf.held))  # type: ignore[method-assign]
    return Guard(app, limits, token, hosts)


class Site:
    """What the page can be asked. Whatever computes goes through the queue."""

    def __init__(self, shelf: Shelf, limits: Limits) -> None:
        self.shelf, self.limits, self.queue = shelf, limits, Queue(limits)
        self.heads = Heads(limits.map_bytes)

    @asynccontextmanager
    async def alive(self, app: FastAPI) -> AsyncIterator[None]:
        first = next(iter(self.shelf.held.values()))
        self.queue.idle.append((first.name, partial(rehearse, first)))
        self.queue.start()
        try:
            yield
        finally:
            await run_in_threadpool(self.queue.stop)

    def routes(self) -> APIRouter:
        made = APIRouter()
        get, post = partial(made.add_api_route, methods=["GET"]), partial(made.add_api_route, methods=["POST"])
        for path in ("/", "/{name}"):
            get(path, page_file, include_in_schema=False)
        get("/assets/{name}", asset, include_in_schema=False)
        get("/api/about", self.about, responses=answers())
        get("/api/models", self.models, responses=answers())
        get("/api/model", self.model, responses=answers(422, 429))
        post("/api/explain", self.explain, responses=answers(413, 422, 429, ok=EVENTS))
        post("/api/explanations", self.explanations, responses=answers(413, 422, 429, ok=FORMS["explanations"]))
        post("/api/attention", self.attention, responses=answers(413, 422, 429))
        get("/api/heads/{key}", self.head, responses=answers(404, 422, ok=FORMS["head"]))
        post("/api/open", self.open, responses=answers(413, 422, ok=FORMS["shown"]), openapi_extra=FORMS["file"])
        post("/api/view", self.view, responses=answers(413, 422))
        post("/api/share", self.share, responses=answers(413, 422, ok=FORMS["shared"]))
        made.add_api_route("/api/jobs/{job}", self.cancel, methods=["DELETE"], responses=answers(404))
        return made

    async def about(self) -> Response:
        """The version, the limits, and what is going on."""
        told = {"version": clearhead.__version__, "limits": self.limits.to_dict(), "waiting": len(self.queue.jobs)}
        return json_of(told)

    async def models(self) -> Response:
        """The models that may be asked for."""
        return json_of({"models": self.shelf.lines()})

    async def model(self, request: Request, name: str, tried: bool = True) -> Response:
        """What one model takes and says, and which methods can explain it, the cheapest first.

        With `tried=false` no method is tried on it, and whether it applies is null where that is not known yet.
        """
        held = self.shelf[name]
        if not tried or held.methods is not None:  # nothing is run
            return json_of(await run_in_threadpool(held.about, False))
        return await self._answer(request, name).computed(held, held.about, TRYING, gives_way=True)

    async def explain(self, request: Request, ask: Ask) -> Response:
        """Explain one input; results come one JSON object a line, as they are ready, the cheapest method first.

        A request is cancelled by closing it, or by `DELETE /api/jobs/{id}` with the id of its first line.
        """
        answer = await self._asked(request, ask, with_view=True)
        return StreamingResponse(answer.lines(), media_type="application/x-ndjson")

    async def explanations(self, request: Request, ask: Ask) -> Response:
        """The same, in one piece when all of it is done."""
        answer = await self._asked(request, ask, with_view=False)
        return json_of(await answer.whole())

    async def attention(self, request: Request, ask: Input) -> Response:
        """The attention of one input: every head, as the page draws it."""
        held, file = await self._admitted(ask)

        def made() -> dict[str, Any]:
            ex = held.explainer
            given = inputs_of(ask, ex.subject, None if file is None else opened(file, self.limits))
            return self.heads.shown(look(ex, given, self.limits.units))

        return await self._answer(request, ask.model).computed(held, made, LOOKING)

    async def head(
        self, key: str, layer: Number, head: Number, name: Annotated[str, Query(max_length=200)] = ""
    ) -> Response:
        """The whole map of one head that was looked at: a byte for each weight's square root, row by row.

        key: what `POST /api/attention` said; name: of its maps, where there are several
        """
        try:
            content = await run_in_threadpool(self.heads.tile, key, name, layer, head)
        except KeyError:
            raise HTTPException(
                404, "there is no such head, or it is kept no longer: look at the heads again"
            ) from None
        return Response(content, media_type="application/octet-stream")

    async def open(self, request: Request) -> Response:
        """Look at a saved explanation: the bytes of a .safetensors or .json file."""
        content = await request.body()
        found = await run_in_threadpool(result_files.explanations_in, content, self.limits)
        return json_of(await run_in_threadpool(lambda: {**result_files.sent(found), "view": result_files.drawn(found)}))

    async def view(self, shown: Shown) -> Response:
        """Several explanations side by side, as the page draws them."""
        found = await run_in_threadpool(result_files.explanations_of, shown, self.limits)
        return json_of({"view": await run_in_threadpool(result_files.drawn, found)})

    async def share(self, shared: Shared) -> Response:
        """A file of explanations: one page that needs no server, or safetensors."""
        found = await run_in_threadpool(result_files.explanations_of, shared, self.limits)
        write, kind = {
            "html": (result_files.as_html, "text/html"),
            "safetensors": (result_files.as_safetensors, "application/octet-stream"),
        }[shared.form]
        content = await run_in_threadpool(write, found)
        disposition = {"content-disposition": f'attachment; filename="explanation.{shared.form}"'}
        return Response(content, media_type=kind, headers=disposition)

    async def cancel(self, job: str) -> Response:
        """Cancel a request by the id of its first line."""
        if not self.queue.cancel(job):
            raise HTTPException(404, "there is no such request, or it is done")
        return json_of({"cancelled": job})

    async def _asked(self, request: Request, ask: Ask, with_view: bool) -> Answer:
        held, file = await self._admitted(ask)
        answer = self._answer(request, ask.model)
        answer.submit(Explaining(ask, held, file, answer.job, self.limits, with_view).steps())
        return answer

    async def _admitted(self, ask: Input) -> tuple[Held, File | None]:
        """The model and the picture, looked at from outside alone: nothing is decoded for those who wait."""
        check(ask, self.limits)
        self.queue.check_room()
        return self.shelf[ask.model], await run_in_threadpool(picture_in, ask, self.limits)

    def _answer(self, request: Request, model: str) -> Answer:
        return Answer(self.queue, model, self.limits.seconds, request)
