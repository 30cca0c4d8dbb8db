"""The local page: one process that holds models, explains what it is sent, and shows it. `clearhead serve` starts it.

`make_app` gives the ASGI application by itself, for those who have a server of their own.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clearhead.web.app import make_app
    from clearhead.web.limits import Limits

__all__ = ["Limits", "make_app"]


def __getattr__(name: str) -> object:  # FastAPI is imported by those alone who use it
    if name == "make_app":
        from clearhead.web.app import make_app

        return make_app
    if name == "Limits":
        from clearhead.web.limits import Limits

        return Limits
    raise AttributeError(f"module 'clearhead.web' has no attribute {name!r}")
