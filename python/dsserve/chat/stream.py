"""Generated ids of one choice to chat deltas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dsserve.protocol.engine import FinishCode


class ChatStream:
    """One choice: takes generated ids in order, gives OpenAI `delta` objects.

    Attributes:
        finished: No further ids are wanted. If that became true by a push without a finish code
            (stop string, or a second call with `parallel_tool_calls: false`), the caller must tell
            the engine: `client.finish(request_id, stream.kept_tokens)`.
        kept_tokens: Ids that count as output (usage `completion_tokens`). Ids pushed after
            `finished` are dropped and not counted.
        reasoning_tokens: How many of them were reasoning (0 with thinking off).
        finish_reason: None until finished, then `stop`, `length` or `tool_calls`.
        index: Choice index of the request (`n`).
    """

    finished: bool
    kept_tokens: int
    reasoning_tokens: int
    finish_reason: str | None
    index: int

    def push(
        self, token_ids: Sequence[int], finish_code: FinishCode = FinishCode.NONE
    ) -> list[dict[str, Any]]:
        """Take the next ids; return the deltas they complete, often none.

        Args:
            token_ids: New ids of this choice in order, as the engine sent them (the stop token,
                if one ended the request, included: it is counted, not shown).
            finish_code: Of the engine's message. STOP_TOKEN, STOP_STRING and LENGTH end the stream;
                for ABORT and errors call `close` and report the error instead.

        Returns:
            Deltas such as `{"content": "a"}`, `{"reasoning_content": "b"}`,
            `{"tool_calls": [{"index": 0, "id": ..., "type": "function", "function": {...}}]}`,
            never empty ones, without role. Neighbouring deltas of one kind are merged. After the
            last ones, `finish_reason` is set.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Release the parser of a stream that will not be finished (client gone, engine fault)."""
        raise NotImplementedError
