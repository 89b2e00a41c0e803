"""Turns every error into a response with OpenAI's body."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import orjson
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from dsserve.errors import (
    DsserveError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    error_body,
    shown,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fastapi import FastAPI, Request
    from starlette.types import Receive, Scope, Send

logger = logging.getLogger(__name__)


class OrjsonResponse(Response):
    """A JSON response written by orjson."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return the bytes of the body."""
        return orjson.dumps(content, option=orjson.OPT_NON_STR_KEYS)


def error_response(error: DsserveError) -> Response:
    """Return the response for an error."""
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    elif error.status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers["retry-after"] = "1"
    if error.status == HTTPStatus.UNAUTHORIZED:
        headers["www-authenticate"] = "Bearer"
    return OrjsonResponse(error.body(), status_code=error.status, headers=headers)


async def send_error(error: DsserveError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request with an error from inside a middleware."""
    await error_response(error)(scope, receive, send)


def install_error_handlers(app: FastAPI) -> None:
    """Register handlers so that no error leaves the application in another form."""
    app.add_exception_handler(DsserveError, _on_dsserve_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_error)


class LastResortMiddleware:
    """Outermost edge: an unexpected exception is logged and answered without its traceback."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_started = False

        async def send_watching(message: Any) -> None:
            nonlocal is_started
            is_started = is_started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, send_watching)
        except DsserveError as error:
            # Raised by a middleware while the body streamed in.
            if is_started:
                raise
            await send_error(error, scope, receive, send)
        except Exception:  # the process edge (style guide, section 5)
            logger.exception("request %s %s failed", scope["method"], scope["path"])
            if is_started:
                raise
            body = error_body(
                "internal error; the server's log has the details",
                error_type="internal_error",
                code="internal_error",
            )
            await OrjsonResponse(body, status_code=500)(scope, receive, send)


def validation_error(errors: Sequence[Mapping[str, Any]]) -> InvalidRequest:
    """Return one error for what pydantic found: the first problem, named by its path.

    Args:
        errors: `ValidationError.errors()`, at least one.
    """
    first = errors[0]
    param = ".".join(_path(first)) or None
    where = f"'{param}': " if param else ""
    # The members of a union complain one by one about the same field.
    fields = {tuple(_path(error)[:1]) for error in errors}
    num_more = len(fields) - 1
    more = f" (and {num_more} more fields)" if num_more else ""
    code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
    return InvalidRequest(f"{where}{_text(first)}{more}", param=param, code=code)


def _path(error: Mapping[str, Any]) -> list[str]:
    location = [str(part) for part in error["loc"] if part not in ("body", "query")]
    # pydantic appends the names of the tried union members; they mean nothing to a client.
    return [part for part in location if not _is_union_branch(part)]


def _text(error: Mapping[str, Any]) -> str:
    text = str(error["msg"]).removeprefix("Value error, ")
    needed = text.removeprefix("Input should be ")
    if needed == text:
        return text
    given = error.get("input")
    return f"must be {needed}, not {'null' if given is None else shown(given)}"


def _is_union_branch(part: str) -> bool:
    return (
        "[" in part
        or "constrained" in part
        or part in {"str", "int", "float", "bool", "list", "dict"}
    )


async def _on_dsserve_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, DsserveError):
        raise error
    if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        logger.warning("%s %s: %s", request.method, request.url.path, error)
    return error_response(error)


async def _on_validation_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, RequestValidationError):
        raise error
    return error_response(validation_error(error.errors()))


async def _on_http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    path = request.url.path
    if error.status_code == HTTPStatus.NOT_FOUND:
        return error_response(NotFound(f"no such path: {path}"))
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        response = error_response(MethodNotAllowed(f"{request.method} is not allowed for {path}"))
        response.headers.update(error.headers or {})
        return response
    return error_response(
        DsserveError(str(error.detail), status=error.status_code, code="http_error")
    )
