"""What every request passes and every answer carries: who may ask, how much may be sent, what a browser may do."""

import asyncio
import ipaddress
import json
import re
import secrets
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from starlette.exceptions import HTTPException

from clearhead.errors import InputError
from clearhead.web.limits import Limits

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cache-control": "no-store",
}
#: Shorter tokens could be guessed.
SHORTEST = 16


def is_loopback(host: str) -> bool:
    """
    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_token(host: str, token: str | None) -> None:
    """A server that others can reach needs a token."""
    if token is None and not is_loopback(host):
        raise InputError(
            f"--host {host} can be reached by others, so a token is needed: set CLEARHEAD_TOKEN to one (python -c "
            "'import secrets; print(secrets.token_urlsafe(24))' makes one), or give --token-file"
        )
    if token is not None and len(token) < SHORTEST:
        raise InputError(f"the token has {len(token)} characters: it needs at least {SHORTEST}")
    if token is not None and not re.fullmatch(r"[A-Za-z0-9._~-]+", token):
        raise InputError("the token may hold letters, digits and . _ ~ - only: it is part of an address")


class Guard:
    """The application behind its checks."""

    def __init__(self, app: App, limits: Limits, token: str | None = None, hosts: Iterable[str] = ()) -> None:
        self.app, self.limits, self.token = app, limits, token
        self.hosts = {"localhost", *(host.lower() for host in hosts)}

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _http(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        headers = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in scope["headers"]}
        answer = _with_headers(send)
        if refused := self._refused(scope["path"], headers):
            await _say(answer, *refused)
        else:
            await self.app(scope, self._bounded(receive), answer)

    def _refused(self, path: str, headers: dict[str, str]) -> tuple[int, str] | None:
        host = host_in(headers.get("host", ""))
        if not (_is_address(host) or host in self.hosts):
            # A name that an attacker points at this machine would make their page one with ours.
            return 400, "this server does not go by that name: open it by its address, or name it with --allow-host"
        origin = headers.get("origin")
        if origin is not None and origin.lower().partition("://")[2] != headers.get("host", "").lower():
            return 403, "requests from other pages are not taken"
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and path.startswith("/api/"):
            return 403, "requests from other pages are not taken"
        if self.token is not None and path.startswith("/api/"):
            scheme, _, given = headers.get("authorization", "").partition(" ")
            known = secrets.compare_digest(given.encode("utf-8", "replace"), self.token.encode())
            if scheme.lower() != "bearer" or not known:
                return 401, "this server asks for a token: open the page with #token=… at the end of its address"
        length = headers.get("content-length", "0")
        if not length.isascii() or not length.isdigit() or len(length) > 12 or int(length) > self.limits.body_bytes:
            return 413, f"too much was sent: {self.limits.body_bytes // 2**20} MiB are the most that is taken"
        return None

    def _bounded(self, receive: Receive) -> Receive:
        """Reads a body up to the limit, and not forever."""
        limits, left, began = self.limits, self.limits.body_bytes, asyncio.get_running_loop().time()
        complete = False

        async def bounded() -> Message:
            nonlocal left, complete
            if complete:  # what comes now is that the client has gone
                return await receive()
            wait = began + limits.reading_seconds - asyncio.get_running_loop().time()
            try:
                message = await asyncio.wait_for(receive(), max(wait, 0.001))
            except TimeoutError:
                raise HTTPException(408, f"the request did not come within {limits.reading_seconds:.0f} s") from None
            left -= len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if left < 0:
                raise HTTPException(413, f"too much was sent: {limits.body_bytes // 2**20} MiB are the most")
            return message

        return bounded


def host_in(header: str) -> str:
    """The name in a Host header, without its port.

    >>> host_in("localhost:8411"), host_in("[::1]:8411"), host_in("127.0.0.1")
    ('localhost', '::1', '127.0.0.1')
    """
    name = header.strip().lower()
    return name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _with_headers(send: Send) -> Send:
    async def answer(message: Message) -> None:
        if message["type"] == "http.response.start":
            own = {key.lower() for key, _ in message.get("headers", [])}
            added = [(k.encode(), v.encode()) for k, v in HEADERS.items() if k.encode() not in own]
            message["headers"] = [*message.get("headers", []), *added]
        await send(message)

    return answer


async def _say(send: Send, status: int, words: str) -> None:
    body = json.dumps({"error": words}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
