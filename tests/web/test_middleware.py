"""Who may ask, how much may be sent, and what a browser may do with the answer."""

from collections.abc import Callable

import pytest
from fastapi.testclient import TestClient

from clearhead.errors import InputError
from clearhead.web.middleware import check_token

Make = Callable[..., TestClient]
TOKEN = "a-token-that-is-long-enough"


def test_every_answer_tells_the_browser_to_run_nothing_else(app: Make) -> None:
    client = app()
    for path in ("/", "/page.js", "/assets/clearhead.js", "/api/models", "/nowhere", "/api/nowhere"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self';" in policy and "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"
        assert "server" not in headers


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", ""])
def test_a_name_that_points_here_is_not_enough(app: Make, host: str) -> None:
    answer = app().get("/api/models", headers={"host": host})
    assert answer.status_code == 400 and "--allow-host" in answer.json()["error"]


@pytest.mark.parametrize("host", ["localhost", "localhost:8411", "127.0.0.1", "[::1]:8411", "explain.example.org"])
def test_addresses_and_names_that_were_allowed_are(app: Make, host: str) -> None:
    assert app(allowed_hosts=["explain.example.org"]).get("/api/models", headers={"host": host}).status_code == 200


def test_requests_from_other_pages_are_not_taken(app: Make) -> None:
    client, ask = app(), {"model": "zoo:sentiment", "text": "x"}
    for headers in ({"origin": "https://evil.example"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}):
        assert client.post("/api/explanations", json=ask, headers=headers).status_code == 403
    own = client.get("/api/models", headers={"origin": "http://127.0.0.1", "sec-fetch-site": "same-origin"})
    assert own.status_code == 200
    # What a page elsewhere could send without being asked first is no JSON to us.
    simple = client.post("/api/explanations", content=b'{"model": "x"}', headers={"content-type": "text/plain"})
    assert simple.status_code == 422


def test_a_token_is_asked_for_by_everything_that_computes(app: Make) -> None:
    client = app(token=TOKEN)
    assert client.get("/").status_code == client.get("/page.js").status_code == 200
    for wrong in ({}, {"authorization": "Bearer wrong"}, {"authorization": TOKEN[:-1]}, {"authorization": "Bearer é"}):
        encoded = {key: value.encode("utf-8") for key, value in wrong.items()}
        answer = client.get("/api/models", headers=encoded)
        assert answer.status_code == 401 and TOKEN not in answer.text
    assert client.get("/api/models", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200


def test_a_server_that_others_reach_needs_a_token() -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        check_token(host, None)
    for host in ("0.0.0.0", "::", "192.168.1.4", "explain.example.org"):
        with pytest.raises(InputError, match="CLEARHEAD_TOKEN"):
            check_token(host, None)
        check_token(host, TOKEN)
    with pytest.raises(InputError, match="at least 16"):
        check_token("0.0.0.0", "short")


def test_no_path_of_a_request_is_opened(app: Make) -> None:
    client = app()
    for path in ("/../pyproject.toml", "/%2e%2e/app.py", "/app.py", "/assets/..%2fhtml.py", "/assets/%2fetc%2fpasswd"):
        assert client.get(path).status_code == 404


def test_too_much_is_refused_before_it_is_read(app: Make) -> None:
    client = app(body_bytes=1000)
    said = client.post("/api/open", content=b"x" * 2000)
    assert said.status_code == 413 and "too large" in said.json()["error"]

    def pieces() -> object:  # without a length in advance
        for _ in range(4):
            yield b"x" * 500

    assert client.post("/api/open", content=pieces()).status_code == 413  # type: ignore[arg-type]
    lied = client.post("/api/open", content=b"x", headers={"content-length": "-1"})
    assert lied.status_code == 413
