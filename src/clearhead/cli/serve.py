"""`clearhead serve`: the page on this machine."""

import os
import socket
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from clearhead.cli import output as put
from clearhead.errors import InputError

EXAMPLES = (
    "clearhead serve",
    "clearhead serve --model zoo:sentiment --model ./my-classifier --port 8500",
    "CLEARHEAD_TOKEN=$(cat token) clearhead serve --host 0.0.0.0 --allow-host explain.example.org",
)
PORT = 8411


def serve(
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-m",
            metavar="NAME",
            help="A model that may be asked for: zoo:NAME, a folder, a hub name; may be given several times. Default: "
            "every model of the zoo.",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where to listen. Anything but loopback needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="0 for any that is free.")] = PORT,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A further name that the server goes by, beside its address and localhost."),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Holds the token that requests must bring; or set the variable CLEARHEAD_TOKEN."
        ),
    ] = None,
    waiting: Annotated[
        int, typer.Option(metavar="N", min=1, help="Requests that may wait; more are turned away.")
    ] = 64,
    seconds: Annotated[
        float, typer.Option(metavar="S", min=1, help="From a request to the end of its answer, at most.")
    ] = 120.0,
    open_browser: Annotated[bool, typer.Option("--open", metavar="", help="Open the page in a browser.")] = False,
) -> None:
    """Open a page on this machine: type a text or drop a picture, and see what made the model say that.

    Only this machine can reach it, unless --host says otherwise. It fetches nothing, and keeps nothing.
    """
    try:
        import fastapi  # noqa: F401
        import uvicorn
    except ImportError as missing:
        raise InputError(f"the page needs {missing.name}: pip install 'clearhead[web]'") from None
    from clearhead.web import Limits, make_app
    from clearhead.web.middleware import check_token, is_loopback

    token = _token(token_file)
    check_token(host, token)
    limits = Limits(waiting=waiting, seconds=seconds)
    with _listening(host, port) as listener:  # before models are opened, which may take a while
        app = make_app(model or None, limits=limits, token=token, hosts=allow_host or (), follow=_opening)
        taken = listener.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{'localhost' if is_loopback(host) else shown}:{taken}/"
        # The token itself is not printed: what is printed may be kept.
        print(f"clearhead is at {address}{'#token=…' if token else ''}  (Ctrl-C ends it)", file=sys.stderr, flush=True)
        if open_browser:
            import webbrowser

            webbrowser.open(address)  # without the token: a browser's command line can be read by others
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=10,
            timeout_graceful_shutdown=3,
        )
        uvicorn.Server(config).run(sockets=[listener])


def _opening(names: Sequence[str]) -> Iterable[str]:
    from rich.progress import track

    return track(
        names, description="opening models", console=put.console(stderr=True), transient=True, disable=not put.talks()
    )


def _token(file: Path | None) -> str | None:
    """A token is read from a file or the environment: what stands on a command line is seen by others."""
    if file is None:
        return os.environ.get("CLEARHEAD_TOKEN") or None
    try:
        found = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as problem:
        raise InputError(f"--token-file {str(file)!r} cannot be read: {problem}") from None
    if not found:
        raise InputError(f"--token-file {str(file)!r} is empty")
    return found


def _listening(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=256)
    except OSError as problem:
        why = problem.strerror or str(problem)
        raise InputError(f"cannot listen at {host}:{port} ({why}): choose another --port, or 0 for any") from None
