"""A server on this machine in a thread of its own, and clients that talk to it."""

import io
import json
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn
from fastapi.testclient import TestClient
from PIL import Image

import clearhead
from clearhead.web import Limits, make_app

MODELS = ["zoo:sentiment", "zoo:pets", "zoo:spell", "zoo:pets-clip", "zoo:shapes-detr", "zoo:shapes-vqa"]


@contextmanager
def serving(**options: Any) -> Iterator[str]:
    """The address of a server that runs as `clearhead serve` runs it."""
    config = uvicorn.Config(
        make_app(**options), port=0, log_level="warning", access_log=False, timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.02)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=20)


@pytest.fixture(scope="session")
def explainers() -> dict[str, clearhead.Explainer]:
    return {name: clearhead.load(name) for name in MODELS}


@pytest.fixture(scope="session")
def address(explainers: dict[str, clearhead.Explainer]) -> Iterator[str]:
    with serving(models=explainers) as found:
        yield found


@pytest.fixture(scope="session")
def client(address: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=address, timeout=120) as made:
        yield made


@pytest.fixture
def app(explainers: dict[str, clearhead.Explainer]) -> Iterator[Callable[..., TestClient]]:
    """Clients of applications of their own, which need no port."""
    made: list[TestClient] = []

    def make(**limits: Any) -> TestClient:
        keys = {key: limits.pop(key) for key in ("token", "allowed_hosts") if key in limits}
        held = {"zoo:sentiment": explainers["zoo:sentiment"]}
        one = TestClient(make_app(held, limits=Limits(**limits), **keys), base_url="http://127.0.0.1")
        one.__enter__()
        made.append(one)
        return one

    yield make
    for one in made:
        one.__exit__(None, None, None)


def events(client: httpx.Client, ask: dict[str, Any]) -> list[dict[str, Any]]:
    with client.stream("POST", "/api/explain", json=ask) as answer:
        assert answer.status_code == 200, answer.read()
        return [json.loads(line) for line in answer.iter_lines()]


def png(wide: int = 96, high: int = 96) -> bytes:
    noise = np.random.default_rng(0).integers(0, 256, (high, wide, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "PNG")
    return file.getvalue()


def in_base64(content: bytes) -> str:
    return b64encode(content).decode()
