"""`clearhead serve`: the web page on this machine."""

import os
import socket
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clearhead.cli import options as opt
from clearhead.cli import output as put
from clearhead.cli.inputs import disable_bars_for_local_model, report_device_and_dtype
from clearhead.errors import InputError

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

SERVE_EXAMPLES = (
    "clearhead serve",
    "clearhead serve --model zoo:sentiment --model ./my-classifier --port 8500",
    "CLEARHEAD_TOKEN=$(cat token) clearhead serve --host 0.0.0.0 --allow-host explain.example.org",
)
DEFAULT_PORT = 8411


@opt.flatten_option_groups
def serve(
    device_options: opt.CliDeviceOptions,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-m",
            metavar="NAME",
            help="Model: zoo:NAME (see clearhead models), a folder, or a hub name; may be repeated. Default: all "
            "models of the zoo.",
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS", help="Address to listen on. Addresses other than loopback addresses require a token."
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="N", min=0, max=65535, help="Port to listen on; 0 selects any free port.")
    ] = DEFAULT_PORT,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Host name to accept in addition to the server's address and localhost; may be repeated.",
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File with the token that requests must contain; alternatively, set the environment variable "
            "CLEARHEAD_TOKEN.",
        ),
    ] = None,
    waiting: Annotated[
        int, typer.Option(metavar="N", min=1, help="Maximum number of queued requests; further requests are rejected.")
    ] = 64,
    seconds: Annotated[
        float,
        typer.Option(metavar="S", min=1, help="Maximum time in seconds from a request to the end of its response."),
    ] = 120.0,
    open_browser: Annotated[bool, typer.Option("--open", metavar="", help="Open the page in a browser.")] = False,
) -> None:
    """Serve a web page on this machine: enter a text or drop an image to see its explanation.

    Only this machine can reach the page, unless --host is set to another address. The page loads nothing from the
    network, and the server stores nothing.
    """
    try:
        import fastapi  # noqa: F401
        import uvicorn
    except ImportError as missing:
        raise InputError(f"the web page requires {missing.name}: pip install 'clearhead[web]'") from None
    from clearhead.web import Limits, make_app
    from clearhead.web.middleware import check_token, is_loopback
    from clearhead.web.model_registry import list_zoo_model_names

    token = _read_token(token_file)
    check_token(host, token)
    limits = Limits(max_pending_requests=waiting, timeout_seconds=seconds)
    with _open_listener(host, port) as listener:  # before models are loaded, which can take a while
        explainers = _load_explainers(model or list_zoo_model_names(), device_options)
        app = make_app(explainers, limits=limits, token=token, allowed_hosts=allow_host or ())
        bound_port = listener.getsockname()[1]
        shown_host = f"[{host}]" if ":" in host else host
        if is_loopback(host):
            shown_host = "localhost"
        address = f"http://{shown_host}:{bound_port}/"
        # The token itself is not printed, since output may be logged.
        print(
            f"clearhead is running at {address}{'#token=…' if token else ''}  (press Ctrl-C to stop)",
            file=sys.stderr,
            flush=True,
        )
        if open_browser:
            import webbrowser

            webbrowser.open(address)  # without the token: other users can read the browser's command line
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=10,
            timeout_graceful_shutdown=3,
        )
        uvicorn.Server(config).run(sockets=[listener])


def _load_explainers(names: Sequence[str], device_options: opt.CliDeviceOptions) -> "dict[str, Explainer]":
    """Load the models by name, one after another: transformers changes global defaults while it loads a model."""
    import clearhead

    explainers = {}
    for name in _track_loading(names):
        disable_bars_for_local_model(name)
        explainers[name] = clearhead.load(name, **device_options.with_model(name).build_load_kwargs())
    if explainers:
        name, explainer = next(iter(explainers.items()))
        report_device_and_dtype(explainer, name, device_options)
    return explainers


def _track_loading(names: Sequence[str]) -> Iterable[str]:
    """Show a progress bar on stderr while iterating over model names, in an interactive terminal only."""
    from rich.progress import track

    return track(
        names,
        description="loading models",
        console=put.make_console(stderr=True),
        transient=True,
        disable=not put.is_interactive(),
    )


def _read_token(file: Path | None) -> str | None:
    """Read the token from a file or the environment; other users can read command lines."""
    if file is None:
        return os.environ.get("CLEARHEAD_TOKEN") or None
    try:
        token = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as problem:
        raise InputError(f"--token-file {str(file)!r} cannot be read: {problem}") from None
    if not token:
        raise InputError(f"--token-file {str(file)!r} is empty")
    return token


def _open_listener(host: str, port: int) -> socket.socket:
    """Open the listening socket (IPv4 or IPv6); a port that is in use raises `InputError`."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=256)
    except OSError as problem:
        reason = problem.strerror or str(problem)
        raise InputError(
            f"cannot listen on {host}:{port} ({reason}): choose another --port, or 0 for any free port"
        ) from None
