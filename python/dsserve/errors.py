"""Every error that dsserve raises on purpose: one tree, each class with a stable code and a status.

DsserveError (500)
├── ConfigError              a flag, a config file or an environment variable is wrong; exit code 2
│   └── CheckpointError      a checkpoint lacks a tensor, or one has the wrong shape or type
├── RequestError (400)       the client's fault
│   ├── InvalidRequest       a field is missing, of the wrong type or out of range
│   ├── ContextTooLong       prompt (plus output) does not fit the context or the pools
│   ├── GrammarError         a grammar, a schema or a pattern is invalid
│   └── Unsupported          a known parameter that does not work (yet)
├── Unauthorized (401), Forbidden (403), NotFound (404), MethodNotAllowed (405)
├── Conflict (409), PayloadTooLarge (413), RateLimited (429)
├── Overloaded (503), NotReady (503)
├── DeadlineExceeded (504)
├── Cancelled (499)          the client left or the request was aborted on demand
├── EngineFault (500)        the engine failed on one request
│   └── EngineLost (503)     the engine process is gone
└── TransferError (500)      moving KV data between processes failed

The body is OpenAI's; nothing here knows HTTP beyond the number of a status. The table of statuses is
`serving.md` d.4.
"""
# Names follow the design documents, which do not end every exception in "Error".
# ruff: noqa: N818

from __future__ import annotations

from typing import Any, ClassVar


class DsserveError(Exception):
    """Base of all errors that dsserve raises on purpose.

    Attributes:
        message: One line for the user: the value, the limit and the remedy.
        code: Stable machine-readable name.
        status: HTTP status that a client gets.
        param: The offending request field or flag, if one is to blame.
        retry_after_s: Seconds after which trying again makes sense, for the `Retry-After` header.
    """

    default_code: ClassVar[str] = "internal_error"
    default_status: ClassVar[int] = 500
    error_type: ClassVar[str] = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = self.default_code if code is None else code
        self.status = self.default_status if status is None else status
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        """Return the OpenAI error body of this error."""
        return error_body(
            self.message, error_type=self.error_type, param=self.param, code=self.code
        )


class ConfigError(DsserveError):
    """A flag, a config file or an environment variable is wrong; the process exits with code 2."""

    default_code = "invalid_config"
    error_type = "config_error"


class CheckpointError(ConfigError):
    """A checkpoint cannot be loaded as it is; the message names the file or the tensor."""

    default_code = "invalid_checkpoint"


class RequestError(DsserveError):
    """The client's request cannot be served as it is."""

    default_code = "invalid_request"
    default_status = 400
    error_type = "invalid_request_error"


class InvalidRequest(RequestError):
    """A field is missing, has the wrong type or is out of range."""

    default_code = "invalid_value"


class ContextTooLong(RequestError):
    """The prompt, or prompt plus output, does not fit the context or a pool."""

    default_code = "context_length_exceeded"


class GrammarError(RequestError):
    """A grammar, a schema or a pattern of the request is invalid."""

    default_code = "invalid_grammar"


class Unsupported(RequestError):
    """A parameter that is known but does not work, or not yet."""

    default_code = "unsupported_parameter"


class Unauthorized(DsserveError):
    """The API key is missing or wrong."""

    default_code = "invalid_api_key"
    default_status = 401
    error_type = "authentication_error"


class Forbidden(DsserveError):
    """The key is right but does not allow this, or only the local machine may ask."""

    default_code = "forbidden"
    default_status = 403
    error_type = "permission_error"


class NotFound(DsserveError):
    """The path, model or object does not exist."""

    default_code = "not_found"
    default_status = 404
    error_type = "invalid_request_error"


class MethodNotAllowed(DsserveError):
    """The path exists, but not with this HTTP method."""

    default_code = "method_not_allowed"
    default_status = 405
    error_type = "invalid_request_error"


class Conflict(DsserveError):
    """The state of the server does not allow the operation now."""

    default_code = "conflict"
    default_status = 409
    error_type = "conflict_error"


class PayloadTooLarge(DsserveError):
    """The request body is above the limit."""

    default_code = "payload_too_large"
    default_status = 413
    error_type = "invalid_request_error"


class RateLimited(DsserveError):
    """The client asks for more than it may have now."""

    default_code = "rate_limit_exceeded"
    default_status = 429
    error_type = "rate_limit_error"


class Overloaded(DsserveError):
    """The queue is full."""

    default_code = "queue_full"
    default_status = 503
    error_type = "server_error"


class NotReady(DsserveError):
    """The server starts or drains."""

    default_code = "not_ready"
    default_status = 503
    error_type = "server_error"


class DeadlineExceeded(DsserveError):
    """The request's deadline passed."""

    default_code = "deadline_exceeded"
    default_status = 504
    error_type = "timeout_error"


class Cancelled(DsserveError):
    """The request was aborted: its client left, or somebody asked for it."""

    default_code = "aborted"
    default_status = 499
    error_type = "aborted"


class EngineFault(DsserveError):
    """The engine failed on this request, or as a whole."""

    default_code = "engine_fault"
    error_type = "server_error"


class EngineLost(EngineFault):
    """The engine process is gone; whoever runs the server restarts it."""

    default_code = "engine_lost"
    default_status = 503


class TransferError(DsserveError):
    """Moving KV data between processes or tiers failed."""

    default_code = "transfer_failed"
    error_type = "server_error"


_REJECTIONS: dict[str, type[DsserveError]] = {
    "context_length_exceeded": ContextTooLong,
    "pool_capacity_exceeded": ContextTooLong,
    "queue_full": Overloaded,
    "invalid_token_id": InvalidRequest,
    "invalid_value": InvalidRequest,
    "duplicate_request_id": InvalidRequest,
    "empty_prompt": InvalidRequest,
    "invalid_draft_len": InvalidRequest,
    "deadline_exceeded": DeadlineExceeded,
    "deadline_unreachable": RateLimited,
    "priority_disabled": Overloaded,
    "not_ready": NotReady,
    "engine_lost": EngineLost,
}


def rejection_error(code: str, message: str) -> DsserveError:
    """Return the error for a rejection that the scheduler sent.

    Args:
        code: Rejection code of the scheduler; an unknown one becomes an `EngineFault` with that code.
        message: The scheduler's message.
    """
    error_class = _REJECTIONS.get(code, EngineFault)
    tries_again = code in ("queue_full", "deadline_unreachable")
    return error_class(message, code=code, retry_after_s=1 if tries_again else None)


def shown(value: object, *, most: int = 80) -> str:
    """Return a value as a message may quote it: its `repr`, cut to `most` characters."""
    if isinstance(value, str | bytes):
        value = value[: most + 1]  # the repr of a whole body would be as long
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # too deep, or an integer of too many digits
        return f"that {type(value).__name__}"
    return text if len(text) <= most else text[: most - 3] + "..."


def error_body(
    message: str, *, error_type: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return an error body in OpenAI's form."""
    return {"error": {"message": message, "type": error_type, "param": param, "code": code}}
