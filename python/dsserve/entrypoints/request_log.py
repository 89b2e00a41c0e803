"""`--log-requests`: a line when a request is taken and one when it ends.

Level 0 has counts and times, 1 adds the sampling values, 2 the texts cut short, 3 the whole texts. Keys are
never logged, texts never below level 2.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import msgspec

from dsserve.observe.log import FIELDS
from dsserve.protocol.engine import unpack_u32

if TYPE_CHECKING:
    from dsserve.config.server import ServerConfig
    from dsserve.frontend.detokenize import TextCodec
    from dsserve.frontend.output import TokenCounts
    from dsserve.protocol.engine import EngineRequest

logger = logging.getLogger("dsserve.requests")

SAMPLING_LEVEL, CUT_TEXT_LEVEL, WHOLE_TEXT_LEVEL = 1, 2, 3
CUT_LENGTH = 200


class RequestLog:
    """Writes the lines of a server; does nothing unless switched on."""

    def __init__(self, config: ServerConfig, codec: TextCodec) -> None:
        self._level = config.log_requests_level if config.log_requests else -1
        self._codec = codec

    @property
    def wants_texts(self) -> bool:
        """Whether output ids must be kept until the end."""
        return self._level >= CUT_TEXT_LEVEL

    def taken(self, request: EngineRequest, names: tuple[str, ...]) -> None:
        """Log a request that goes to the engine."""
        if self._level < 0:
            return
        values: dict[str, Any] = {
            "request": request.request_id,
            "id": names[0],
            "prompt_tokens": len(request.token_ids) // 4,
            "max_new_tokens": request.max_new_tokens,
        }
        if self._level >= SAMPLING_LEVEL:
            values |= msgspec.structs.asdict(request.sampling)
            values |= {"min_new_tokens": request.min_new_tokens, "ignore_eos": request.ignore_eos}
        if self.wants_texts:
            values["prompt"] = self._text(unpack_u32(request.token_ids))
        _write("request taken", values)

    def ended(
        self,
        request: EngineRequest,
        names: tuple[str, ...],
        counts: TokenCounts,
        reason: str,
        token_ids: list[int],
    ) -> None:
        """Log the end of a request; `reason` is a finish code's name or `rejected` or `lost`."""
        if self._level < 0:
            return
        values: dict[str, Any] = {
            "request": request.request_id,
            "id": names[0],
            "finish": reason,
            "prompt_tokens": counts.prompt,
            "cached_tokens": counts.cached,
            "output_tokens": counts.completion,
            "seconds": round(time.monotonic() - request.arrival_s, 4),
        }
        if self.wants_texts:
            values["output"] = self._text(token_ids)
        _write("request ended", values)

    def _text(self, token_ids: list[int]) -> str:
        if self._level >= WHOLE_TEXT_LEVEL:
            return self._codec.decode(token_ids, skip_special_tokens=False)
        # A token is at least a byte, so this many ids are always enough for the cut.
        text = self._codec.decode(token_ids[: 4 * CUT_LENGTH], skip_special_tokens=False)
        is_cut = len(text) > CUT_LENGTH or len(token_ids) > 4 * CUT_LENGTH
        return text[:CUT_LENGTH] + ("..." if is_cut else "")


def _write(title: str, values: dict[str, Any]) -> None:
    shown = " ".join(f"{name}={value!r}" for name, value in values.items())
    logger.info("%s: %s", title, shown, extra={FIELDS: values})
