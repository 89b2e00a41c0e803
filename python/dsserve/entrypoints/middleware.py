"""Plain ASGI middleware: request ids, HTTP counters, API keys, the limit of a request body.

None of them touches a response body, so a stream passes through unbuffered and a disconnect is seen by
the endpoint itself.
"""

from __future__ import annotations

import hmac
import logging
import re
import secrets
from typing import TYPE_CHECKING

from dsserve.entrypoints.errors import send_error
from dsserve.errors import Forbidden, PayloadTooLarge, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from dsserve.observe.metrics import Metrics

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/ready", "/health_generate", "/metrics"})
ADMIN_PATHS = frozenset({"/flush_cache"})
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")


class RequestIdMiddleware:
    """Gives every request an id (`scope["state"]["request_id"]`) and returns it in `x-request-id`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = header(scope, b"x-request-id")
        request_id = given if given and _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message.get("headers", []),
                    (b"x-request-id", request_id.encode("ascii")),
                ]
            await send(message)

        await self._app(scope, receive, send_with_id)


class HttpMetricsMiddleware:
    """Counts requests by route and status."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 499  # what stays if the client leaves before a response began

        async def send_counting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_counting)
        finally:
            # The route's own path, not the client's, which would be an unbounded label.
            route = scope.get("route")
            path = getattr(route, "path", None) or "other"
            self._metrics.http_requests.labels(path=path, status=str(status)).inc()


class ApiKeyMiddleware:
    """Asks for a key on every path but the probes; admin paths ask for the admin key."""

    def __init__(self, app: ASGIApp, *, api_keys: Sequence[str], admin_key: str | None) -> None:
        self._app = app
        self._api_keys = [key.encode() for key in api_keys]
        self._admin_key = admin_key.encode() if admin_key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            error = self._check(scope)
            if error is not None:
                await send_error(error, scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> Unauthorized | Forbidden | None:
        given = given_key(scope)
        is_admin_key = self._admin_key is not None and _is_one_of(given, [self._admin_key])
        if scope["path"] in ADMIN_PATHS:
            return self._check_admin(scope, given, is_admin_key=is_admin_key)
        if self._api_keys and not is_admin_key and not _is_one_of(given, self._api_keys):
            return _unauthorized(given)
        return None

    def _check_admin(
        self, scope: Scope, given: bytes | None, *, is_admin_key: bool
    ) -> Unauthorized | Forbidden | None:
        if self._admin_key is not None:
            if is_admin_key:
                return None
            if _is_one_of(given, self._api_keys):
                return Forbidden("this endpoint needs the admin key (--admin-api-key)")
            return _unauthorized(given)
        if self._api_keys:
            return None if _is_one_of(given, self._api_keys) else _unauthorized(given)
        if is_loopback(scope):
            return None
        return Forbidden(
            "without --admin-api-key or --api-key this endpoint answers the local machine only"
        )


class BodyLimitMiddleware:
    """Refuses bodies above a limit, by their declared length or while they stream in."""

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = header(scope, b"content-length")
        if declared is not None and declared.isdigit() and int(declared) > self._max_bytes:
            await send_error(self._error(), scope, receive, send)
            return
        received = 0

        async def receive_counting() -> Message:
            nonlocal received
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > self._max_bytes:
                    raise self._error()
            return message

        await self._app(scope, receive_counting, send)

    def _error(self) -> PayloadTooLarge:
        return PayloadTooLarge(
            f"the request body is larger than {self._max_bytes} bytes (--max-payload-size)"
        )


def header(scope: Scope, name: bytes) -> str | None:
    """Return the first header called `name` (lower case), or None."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value).decode("latin-1")
    return None


def is_loopback(scope: Scope) -> bool:
    """Tell whether the client is on this machine."""
    client = scope.get("client")
    if client is None:  # a Unix socket
        return True
    host = str(client[0])
    return host in {"::1", "localhost"} or host.startswith(("127.", "::ffff:127."))


def is_admin(scope: Scope, admin_key: str | None) -> bool:
    """Tell whether a request that passed `ApiKeyMiddleware` may use admin functions."""
    if admin_key is None:
        return True
    return _is_one_of(given_key(scope), [admin_key.encode()])


def given_key(scope: Scope) -> bytes | None:
    """Return the key that a request carries, right or wrong."""
    authorization = header(scope, b"authorization")
    if authorization is not None:
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() == "bearer":
            return key.strip().encode("latin-1")
    key_header = header(scope, b"x-api-key")
    return key_header.encode("latin-1") if key_header is not None else None


def _is_one_of(given: bytes | None, keys: Sequence[bytes]) -> bool:
    # Every key is compared, each in constant time, so that timing tells nothing.
    matches = [hmac.compare_digest(given, key) for key in keys] if given is not None else []
    return any(matches)


def _unauthorized(given: bytes | None) -> Unauthorized:
    if given is None:
        return Unauthorized(
            "no API key given: send it as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'"
        )
    return Unauthorized("the API key is wrong")
