"""What chat completions and completions share about a call: its names, its frame, its logs."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.requests import Request

    from dsserve.entrypoints.openai.protocol import GenerationBody


@dataclass(frozen=True, kw_only=True)
class Frame:
    """The fields that every object of one answer repeats.

    Attributes:
        id: The answer's id, which is also a name for `/abort_request`.
        names: All names of the call.
        created: Unix time in seconds.
    """

    id: str
    names: tuple[str, ...]
    created: int
    model: str
    fingerprint: str

    def wrap(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return an answer or a chunk of one."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }


def build_frame(
    request: Request, body: GenerationBody, *, prefix: str, model: str, fingerprint: str
) -> Frame:
    """Name a call.

    Args:
        request: Its HTTP request; the `x-request-id` is one of the names.
        body: Its body; `rid` or `request_id` becomes the answer's id.
        prefix: `chatcmpl-` or `cmpl-`.
        model: Served name.
        fingerprint: `system_fingerprint`.
    """
    client_id = body.client_id()
    answer_id = client_id if client_id is not None else prefix + secrets.token_hex(16)
    http_id: str = request.state.request_id
    return Frame(
        id=answer_id,
        names=(answer_id, http_id),
        created=int(time.time()),
        model=model,
        fingerprint=fingerprint,
    )
