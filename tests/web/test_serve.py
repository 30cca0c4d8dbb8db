"""`clearhead serve` as a subprocess, and its option errors."""

import os
import re
import signal
import socket
import subprocess
import sys
from functools import partial

import httpx
import pytest

TOKEN = "a-token-that-is-long-enough"


def start_server(*options: str, token: str | None = None) -> subprocess.Popen[str]:
    environment = {**os.environ, **({} if token is None else {"CLEARHEAD_TOKEN": token})}
    command = [sys.executable, "-m", "clearhead", "serve", "--port", "0", *options]
    restore_sigint = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # background processes may ignore SIGINT
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, preexec_fn=restore_sigint)


def test_serve_prints_address_hides_token_and_stops_on_sigint() -> None:
    server = start_server("--model", "zoo:sentiment", token=TOKEN)
    assert server.stderr is not None
    try:
        line = next(line for line in server.stderr if "clearhead is running at" in line)
        match = re.search(r"http://localhost:(\d+)/", line)
        assert match is not None and TOKEN not in line
        address = f"http://127.0.0.1:{match[1]}"
        assert httpx.get(address).status_code == 200
        assert httpx.get(f"{address}/api/models").status_code == 401
        models = httpx.get(f"{address}/api/models", headers={"authorization": f"Bearer {TOKEN}"}).json()["models"]
        assert [model["name"] for model in models] == ["zoo:sentiment"]
    finally:
        server.send_signal(signal.SIGINT)
        remaining_output = server.stderr.read()
        code = server.wait(timeout=30)
    assert code == 130 and TOKEN not in remaining_output and "Traceback" not in remaining_output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "can be reached from other machines, so a token is needed"),
        (["--token-file", "/nowhere/at/all"], "cannot be read"),
        (["--port", "TAKEN"], "choose another --port"),
    ],
)
def test_invalid_serve_options_are_rejected(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from clearhead.cli import main

    monkeypatch.delenv("CLEARHEAD_TOKEN", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as used_socket, pytest.raises(SystemExit) as exit_info:
        main(["serve", *(option.replace("TAKEN", str(used_socket.getsockname()[1])) for option in options)])
    assert exit_info.value.code == 2 and message in capsys.readouterr().err
