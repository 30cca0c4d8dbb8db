"""`clearhead serve` as people start it."""

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


def start(*options: str, token: str | None = None) -> subprocess.Popen[str]:
    environment = {**os.environ, **({} if token is None else {"CLEARHEAD_TOKEN": token})}
    command = [sys.executable, "-m", "clearhead", "serve", "--port", "0", *options]
    listen = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # tests in the background are started deaf to it
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, preexec_fn=listen)


def test_it_says_where_it_is_keeps_its_secret_and_ends_when_told() -> None:
    server = start("--model", "zoo:sentiment", token=TOKEN)
    assert server.stderr is not None
    try:
        line = next(line for line in server.stderr if "clearhead is at" in line)
        found = re.search(r"http://localhost:(\d+)/", line)
        assert found is not None and TOKEN not in line
        address = f"http://127.0.0.1:{found[1]}"
        assert httpx.get(address).status_code == 200
        assert httpx.get(f"{address}/api/models").status_code == 401
        models = httpx.get(f"{address}/api/models", headers={"authorization": f"Bearer {TOKEN}"}).json()["models"]
        assert [one["name"] for one in models] == ["zoo:sentiment"]
    finally:
        server.send_signal(signal.SIGINT)
        rest = server.stderr.read()
        code = server.wait(timeout=30)
    assert code == 130 and TOKEN not in rest and "Traceback" not in rest


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "can be reached from other machines, so a token is needed"),
        (["--token-file", "/nowhere/at/all"], "cannot be read"),
        (["--port", "TAKEN"], "choose another --port"),
    ],
)
def test_what_cannot_be_served_is_said(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from clearhead.cli import main

    monkeypatch.delenv("CLEARHEAD_TOKEN", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SystemExit) as ended:
        main(["serve", *(option.replace("TAKEN", str(taken.getsockname()[1])) for option in options)])
    assert ended.value.code == 2 and message in capsys.readouterr().err
