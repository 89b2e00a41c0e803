"""How urgent is a call, for whom is it, and until when is it of use?

`priority`, `timeout_ms` (or the header `x-dsserve-deadline-ms`) and `user` of a body, as the scheduler
takes them (`serving.md` a.6, a.14).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dsserve.entrypoints.middleware import given_key, header
from dsserve.errors import InvalidRequest, Overloaded, Unsupported, shown

if TYPE_CHECKING:
    from starlette.requests import Request

    from dsserve.entrypoints.openai.protocol import GenerationBody
    from dsserve.entrypoints.state import ServerState

DEADLINE_HEADER: Final = b"x-dsserve-deadline-ms"
MAX_TIMEOUT_MS: Final = 7 * 24 * 3600 * 1000
MAX_DIGITS: Final = 20


@dataclass(frozen=True, kw_only=True)
class Urgency:
    """What a call asks of the order of requests.

    Attributes:
        priority: None where priorities are off or the client named none.
        deadline_s: `time.monotonic()` after which the answer is of no use; None for never.
        tenant: Whom the machine's time is charged to; None where it is not shared by anyone's name.
    """

    priority: int | None = None
    deadline_s: float | None = None
    tenant: str | None = None


def urgency_of(
    state: ServerState, request: Request, body: GenerationBody, *, arrival_s: float
) -> Urgency:
    """Read how urgent a call is.

    Args:
        state: The server.
        request: The HTTP request, for its headers.
        body: The checked body.
        arrival_s: `time.monotonic()` when the request came in.

    Raises:
        RequestError: A value is out of range, or priorities are off.
        Overloaded: Priorities are off and `--abort-on-priority-when-disabled` is set.
    """
    timeout_ms = _timeout_ms(request, body)
    return Urgency(
        priority=_priority(state, body.priority),
        deadline_s=None if timeout_ms is None else arrival_s + timeout_ms / 1000,
        tenant=_tenant(state, request, body),
    )


def _priority(state: ServerState, priority: int | None) -> int | None:
    if priority is None or state.config.enable_priority_scheduling:
        return priority
    if state.config.abort_on_priority_when_disabled:
        raise Overloaded(
            "'priority' is refused: priorities are off (--enable-priority-scheduling)",
            param="priority",
            code="priority_disabled",
        )
    if priority != 0:
        raise Unsupported(
            "'priority' is not supported: priorities are off (--enable-priority-scheduling)",
            param="priority",
        )
    return None


def _timeout_ms(request: Request, body: GenerationBody) -> int | None:
    """The shorter of what body and header say."""
    given = header(request.scope, DEADLINE_HEADER)
    if given is None:
        return body.timeout_ms
    from_header = int(given) if len(given) <= MAX_DIGITS and given.isdigit() else 0
    if not 0 < from_header <= MAX_TIMEOUT_MS:
        raise InvalidRequest(
            f"the header 'x-dsserve-deadline-ms' is {shown(given)}, it must be a number of "
            f"milliseconds between 1 and {MAX_TIMEOUT_MS}",
            param="x-dsserve-deadline-ms",
        )
    return from_header if body.timeout_ms is None else min(from_header, body.timeout_ms)


def _tenant(state: ServerState, request: Request, body: GenerationBody) -> str | None:
    if state.config.fair_by == "user":
        return body.user or ""
    if state.config.fair_by == "api_key":
        key = given_key(request.scope)
        return "" if key is None else key.decode("latin-1")
    return None
