"""Access control, request size limits, and security headers."""

from collections.abc import Callable

import pytest
from fastapi.testclient import TestClient

from clearhead.errors import InputError
from clearhead.web.middleware import check_token

MakeClient = Callable[..., TestClient]
TOKEN = "a-token-that-is-long-enough"


def test_every_response_has_strict_security_headers(app: MakeClient) -> None:
    client = app()
    for path in ("/", "/page.js", "/assets/clearhead.js", "/api/models", "/nowhere", "/api/nowhere"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self';" in policy and "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"
        assert "server" not in headers


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", ""])
def test_unknown_host_header_is_rejected(app: MakeClient, host: str) -> None:
    response = app().get("/api/models", headers={"host": host})
    assert response.status_code == 400 and "--allow-host" in response.json()["error"]


@pytest.mark.parametrize("host", ["localhost", "localhost:8411", "127.0.0.1", "[::1]:8411", "explain.example.org"])
def test_local_and_allowed_host_headers_are_accepted(app: MakeClient, host: str) -> None:
    assert app(allowed_hosts=["explain.example.org"]).get("/api/models", headers={"host": host}).status_code == 200


def test_cross_origin_requests_are_rejected(app: MakeClient) -> None:
    client, body = app(), {"model": "zoo:sentiment", "text": "x"}
    for headers in ({"origin": "https://evil.example"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}):
        assert client.post("/api/explanations", json=body, headers=headers).status_code == 403
    same_origin = client.get("/api/models", headers={"origin": "http://127.0.0.1", "sec-fetch-site": "same-origin"})
    assert same_origin.status_code == 200
    # A cross-origin page can send this without a preflight request: it is not accepted as JSON.
    simple = client.post("/api/explanations", content=b'{"model": "x"}', headers={"content-type": "text/plain"})
    assert simple.status_code == 422


def test_api_requires_token_but_static_page_does_not(app: MakeClient) -> None:
    client = app(token=TOKEN)
    assert client.get("/").status_code == client.get("/page.js").status_code == 200
    for headers in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": TOKEN[:-1]},
        {"authorization": "Bearer é"},
    ):
        encoded = {key: value.encode("utf-8") for key, value in headers.items()}
        response = client.get("/api/models", headers=encoded)
        assert response.status_code == 401 and TOKEN not in response.text
    assert client.get("/api/models", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200


def test_public_host_requires_a_token() -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        check_token(host, None)
    for host in ("0.0.0.0", "::", "192.168.1.4", "explain.example.org"):
        with pytest.raises(InputError, match="CLEARHEAD_TOKEN"):
            check_token(host, None)
        check_token(host, TOKEN)
    with pytest.raises(InputError, match="at least 16"):
        check_token("0.0.0.0", "short")


def test_path_traversal_returns_404(app: MakeClient) -> None:
    client = app()
    for path in ("/../pyproject.toml", "/%2e%2e/app.py", "/app.py", "/assets/..%2fhtml.py", "/assets/%2fetc%2fpasswd"):
        assert client.get(path).status_code == 404


def test_too_large_body_returns_413(app: MakeClient) -> None:
    client = app(max_body_bytes=1000)
    too_large = client.post("/api/open", content=b"x" * 2000)
    assert too_large.status_code == 413 and "too large" in too_large.json()["error"]

    def chunks() -> object:  # without a length in advance
        for _ in range(4):
            yield b"x" * 500

    assert client.post("/api/open", content=chunks()).status_code == 413  # type: ignore[arg-type]
    negative_length = client.post("/api/open", content=b"x", headers={"content-length": "-1"})
    assert negative_length.status_code == 413
