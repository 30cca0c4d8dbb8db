"""Fixtures: a local server in a thread, and clients for it."""

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
def run_server(**options: Any) -> Iterator[str]:
    """Run a server as `clearhead serve` does; yield its address."""
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
    with run_server(models=explainers) as url:
        yield url


@pytest.fixture(scope="session")
def client(address: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=address, timeout=120) as http_client:
        yield http_client


@pytest.fixture
def app(explainers: dict[str, clearhead.Explainer]) -> Iterator[Callable[..., TestClient]]:
    """Make test clients, each with its own application, which need no port."""
    clients: list[TestClient] = []

    def make_client(**limits: Any) -> TestClient:
        keys = {key: limits.pop(key) for key in ("token", "allowed_hosts") if key in limits}
        models = {"zoo:sentiment": explainers["zoo:sentiment"]}
        test_client = TestClient(make_app(models, limits=Limits(**limits), **keys), base_url="http://127.0.0.1")
        test_client.__enter__()
        clients.append(test_client)
        return test_client

    yield make_client
    for test_client in clients:
        test_client.__exit__(None, None, None)


def stream_events(client: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    with client.stream("POST", "/api/explain", json=body) as response:
        assert response.status_code == 200, response.read()
        return [json.loads(line) for line in response.iter_lines()]


def make_png(width: int = 96, height: int = 96) -> bytes:
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "PNG")
    return file.getvalue()


def encode_base64(content: bytes) -> str:
    return b64encode(content).decode()
