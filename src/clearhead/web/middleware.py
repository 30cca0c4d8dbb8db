"""Security checks of all requests (host, origin, token, body size), and security headers of all responses."""

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
AsgiApp = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

SECURITY_HEADERS = {
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
#: Shorter tokens are guessable.
MIN_TOKEN_LENGTH = 16


def is_loopback(host: str) -> bool:
    """Check whether a listening address can be reached from this machine only.

    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, True, False)

    Args:
        host: An IP address or a host name.

    Returns:
        False for host names other than "localhost", which are not looked up.
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_token(host: str, token: str | None) -> None:
    """Check that a server on a public address has a token, and that the token is well-formed.

    Args:
        host: Listening address.
        token: Token of the server.

    Raises:
        InputError: The token is missing, too short, or has invalid characters.
    """
    if token is None and not is_loopback(host):
        raise InputError(
            f"--host {host} can be reached from other machines, so a token is needed: set CLEARHEAD_TOKEN to a token "
            "(to generate one, run python -c 'import secrets; print(secrets.token_urlsafe(24))'), or use --token-file"
        )
    if token is not None and len(token) < MIN_TOKEN_LENGTH:
        raise InputError(f"the token has {len(token)} characters: it needs at least {MIN_TOKEN_LENGTH}")
    if token is not None and not re.fullmatch(r"[A-Za-z0-9._~-]+", token):
        raise InputError("the token may contain only letters, digits and . _ ~ -, because it is part of a URL")


class SecurityMiddleware:
    """ASGI middleware that rejects invalid requests and adds security headers.

    Args:
        app: The application.
        limits: Limits on request bodies.
        token: Token that API requests must send.
        allowed_hosts: Accepted host names, in addition to IP addresses and localhost.
    """

    def __init__(
        self, app: AsgiApp, limits: Limits, token: str | None = None, allowed_hosts: Iterable[str] = ()
    ) -> None:
        self.app = app
        self.limits = limits
        self.token = token
        self.allowed_hosts = {"localhost", *(host.lower() for host in allowed_hosts)}

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Handle an ASGI connection: HTTP is checked and passed on, web sockets are closed with code 1008.

        Args:
            scope: Type, path and headers of the connection.
            receive: Returns the next event from the client.
            send: Sends an event to the client.
        """
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await self._handle_http(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _handle_http(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Reject the request, or pass it on with a limited body; every response gets the security headers."""
        headers = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in scope["headers"]}
        send_with_headers = _add_security_headers(send)
        if rejection := self._find_rejection(scope["path"], headers):
            await _send_error(send_with_headers, *rejection)
        else:
            await self.app(scope, self._limit_body(receive), send_with_headers)

    def _find_rejection(self, path: str, headers: dict[str, str]) -> tuple[int, str] | None:
        """Return status and message for a request that is not allowed."""
        host = parse_host_header(headers.get("host", ""))
        if not (_is_ip_address(host) or host in self.allowed_hosts):
            # DNS rebinding: a name of an attacker that resolves to this machine would share an origin with this page.
            return 400, "Host header not allowed: open the page by its IP address, or add the name with --allow-host"
        origin = headers.get("origin")
        if origin is not None and origin.lower().partition("://")[2] != headers.get("host", "").lower():
            return 403, "cross-origin requests are not allowed"
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and path.startswith("/api/"):
            return 403, "cross-origin requests are not allowed"
        if self.token is not None and path.startswith("/api/"):
            scheme, _, credentials = headers.get("authorization", "").partition(" ")
            is_valid = secrets.compare_digest(credentials.encode("utf-8", "replace"), self.token.encode())
            if scheme.lower() != "bearer" or not is_valid:
                return 401, "this server requires a token: open the page with #token=… at the end of its URL"
        length = headers.get("content-length", "0")
        if not length.isascii() or not length.isdigit() or len(length) > 12 or int(length) > self.limits.max_body_bytes:
            return 413, self._format_too_large()
        return None

    def _format_too_large(self) -> str:
        """Return the message for a body above the limit, which it names in MiB."""
        return f"the request is too large: at most {self.limits.max_body_bytes // 2**20} MiB are accepted"

    def _limit_body(self, receive: Receive) -> Receive:
        """Wrap `receive` to limit the size of the body and the time to receive it."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.limits.body_timeout_seconds
        remaining_bytes = self.limits.max_body_bytes
        is_complete = False

        async def receive_limited() -> Message:
            nonlocal remaining_bytes, is_complete
            if is_complete:  # the next message is the disconnect of the client, for which there is no deadline
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), max(deadline - loop.time(), 0.001))
            except TimeoutError:
                raise HTTPException(
                    408, f"the request was not received within {self.limits.body_timeout_seconds:.0f} s"
                ) from None
            remaining_bytes -= len(message.get("body", b""))
            is_complete = not message.get("more_body", False)
            if remaining_bytes < 0:
                raise HTTPException(413, self._format_too_large())
            return message

        return receive_limited


def parse_host_header(header: str) -> str:
    """Return the host name of a Host header, without the port.

    >>> parse_host_header("localhost:8411"), parse_host_header("[::1]:8411"), parse_host_header("127.0.0.1")
    ('localhost', '::1', '127.0.0.1')
    """
    name = header.strip().lower()
    if name.startswith("["):  # IPv6
        return name[1:].partition("]")[0]
    return name.partition(":")[0]


def _is_ip_address(host: str) -> bool:
    """Whether a host is a plain IP address, which no DNS entry can point elsewhere."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _add_security_headers(send: Send) -> Send:
    """Wrap `send` to add the security headers that a response does not set itself."""

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", []))
            names = {name.lower() for name, _ in headers}
            for name, value in SECURITY_HEADERS.items():
                if name.encode() not in names:
                    headers.append((name.encode(), value.encode()))
            message["headers"] = headers
        await send(message)

    return send_with_headers


async def _send_error(send: Send, status: int, message: str) -> None:
    """Send a complete JSON response with the message under "error"."""
    body = json.dumps({"error": message}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
