"""Serve the files of the page from a fixed table, so that no path of a request is ever opened."""

from functools import cache
from importlib.resources import files

from fastapi import Response
from starlette.exceptions import HTTPException

from clearhead.render import bundle

#: File name → media type.
PAGE_MEDIA_TYPES = {
    "index.html": "text/html",
    "page.css": "text/css",
    "icon.svg": "image/svg+xml",
    **dict.fromkeys(("page.js", "form.js", "api_client.js", "result.js", "history.js"), "text/javascript"),
}


async def serve_page_file(name: str = "index.html") -> Response:
    """Serve a file of the page."""
    if name not in PAGE_MEDIA_TYPES:
        raise HTTPException(404, "there is no such page")
    return Response(read_page_file(name), media_type=PAGE_MEDIA_TYPES[name])


async def serve_asset(name: str) -> Response:
    """Serve a file of the renderer."""
    if name not in bundle.ASSET_NAMES:
        raise HTTPException(404, "there is no such file")
    return Response(bundle.read_asset(name), media_type=bundle.get_asset_media_type(name))


@cache
def read_page_file(name: str) -> bytes:
    """Read a file of the page, cached."""
    return (files("clearhead.web") / "static" / name).read_bytes()
