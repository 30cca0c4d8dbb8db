"""Local web page and JSON API: one process loads models, explains inputs and shows the results.

`clearhead serve` starts it. `make_app` returns the ASGI application, for use with another server.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clearhead.web.app import make_app
    from clearhead.web.limits import Limits

__all__ = ["Limits", "make_app"]


def __getattr__(name: str) -> object:  # lazy, so that FastAPI is imported only when it is used
    if name == "make_app":
        from clearhead.web.app import make_app

        return make_app
    if name == "Limits":
        from clearhead.web.limits import Limits

        return Limits
    raise AttributeError(f"module 'clearhead.web' has no attribute {name!r}")
