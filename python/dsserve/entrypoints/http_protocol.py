"""HTTP/1.1 by uvicorn and httptools, with what they lack.

A request's head is limited; the body of a request that offers an upgrade (`Upgrade: h2c`, as the HTTP
client of Java does by default) is read; and what cannot be parsed gets OpenAI's error body.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dsserve.errors import error_body

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers together."""

_BODY_HEADERS = (b"content-length", b"transfer-encoding")


class HeadTooLargeError(ValueError):
    """A request's head is above `MAX_HEAD_BYTES`."""


class HttpProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._is_in_head = False
        # Bytes that came in while the head was incomplete.
        self._head_bytes = 0
        # The parser reads a head of our own, see `_go_on_without_upgrade`.
        self._is_own_head = False

    def data_received(self, data: bytes) -> None:
        """Parse what came in."""
        self._unset_keepalive_if_required()
        try:
            while data:
                data = self._feed(data)
        except HeadTooLargeError as error:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, str(error))
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, HeadTooLargeError):
                self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, str(error.__context__))
            else:
                self.logger.info("refused what is no valid HTTP request: %s", error)
                self._refuse(HTTPStatus.BAD_REQUEST, "this is no valid HTTP/1.1 request")

    def on_message_begin(self) -> None:
        """Begin a request."""
        if not self._is_own_head:
            self._is_in_head, self._head_bytes = True, 0
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Take a part of the request's target."""
        if not self._is_own_head:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        if not self._is_own_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request."""
        if self._is_own_head:
            self._is_own_head = False
            return
        self._is_in_head = False
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        _check_head(size)
        super().on_headers_complete()

    def _feed(self, data: bytes) -> bytes:
        """Give the parser `data`; return what it left."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as error:
            self._go_on_without_upgrade()
            return data[error.args[0] :]
        if self._is_in_head:
            self._head_bytes += len(data)
            _check_head(self._head_bytes)
        return b""

    def _go_on_without_upgrade(self) -> None:
        """Replace the parser, which takes what follows for another protocol.

        No upgrade is offered here, so the body and further requests follow as if none had been asked
        for. The new parser gets a head that tells it the length of the body.
        """
        self.parser = httptools.HttpRequestParser(self)
        lines = [
            name + b": " + value + b"\r\n" for name, value in self.headers if name in _BODY_HEADERS
        ]
        if lines:
            self.cycle.more_body = True
            self._is_own_head = True
            self.parser.feed_data(b"POST / HTTP/1.1\r\n" + b"".join(lines) + b"\r\n")

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        body = orjson.dumps(
            error_body(message, error_type="invalid_request_error", code="invalid_http")
        )
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode("ascii") + body)
        self.transport.close()


def _check_head(size: int) -> None:
    if size > MAX_HEAD_BYTES:
        raise HeadTooLargeError(
            f"the request line and headers are larger than {MAX_HEAD_BYTES} bytes; send less"
        )
