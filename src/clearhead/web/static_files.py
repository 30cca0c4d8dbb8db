"""The files of the page: a fixed table, so that no path of a request is ever opened."""

from functools import cache
from importlib.resources import files

from fastapi import Response
from starlette.exceptions import HTTPException

from clearhead.render import bundle

#: Every file there is, and its media type.
PAGE = {
    "index.html": "text/html",
    "page.css": "text/css",
    "icon.svg": "image/svg+xml",
    **dict.fromkeys(("page.js", "form.js", "talking.js", "results.js", "visit.js"), "text/javascript"),
}


async def page_file(name: str = "index.html") -> Response:
    if name not in PAGE:
        raise HTTPException(404, "there is no such page")
    return Response(read(name), media_type=PAGE[name])


async def asset(name: str) -> Response:
    """A file of the renderer."""
    if name not in bundle.NAMES:
        raise HTTPException(404, "there is no such file")
    return Response(bundle.read(name), media_type=bundle.media_type(name))


@cache
def read(name: str) -> bytes:
    return (files("clearhead.web") / "static" / name).read_bytes()
