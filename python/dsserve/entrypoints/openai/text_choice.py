"""The text of one choice of a completion: what stopped it, and what counts as output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dsserve.frontend.output import finish_reason
from dsserve.protocol.engine import FinishCode

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dsserve.entrypoints.generation import Choice
    from dsserve.entrypoints.openai.protocol import CompletionBody
    from dsserve.frontend.client import OutputDelta


class TextChoice:
    """Turns a choice's output into text; iterate `pieces`.

    Attributes:
        token_ids: Output ids so far, those that count.
        finish_reason: Set with the last piece.
        matched_stop: The stop string or pattern or the stop token id that ended the output, or None.
    """

    def __init__(self, choice: Choice, body: CompletionBody) -> None:
        self.choice = choice
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.matched_stop: str | int | None = None
        self._own_stop_ids = frozenset(body.stop_token_ids or ())

    async def push(self, delta: OutputDelta) -> tuple[str, list[int]]:
        """Take the next output.

        Returns:
            The text that it completes, and the ids of it that count. `finish_reason` is set if the
            output ended with it.
        """
        piece = delta.text
        text = "" if piece is None else piece.text
        fresh = delta.token_ids
        if piece is not None and piece.stop is not None:
            fresh = fresh[: max(0, piece.kept_tokens - len(self.token_ids))]
            self.matched_stop = piece.stop
            self.finish_reason = "stop"
            await self.choice.stopped(piece.kept_tokens)
        elif delta.finish_code is not FinishCode.NONE:
            self.finish_reason = finish_reason(delta.finish_code)
            if delta.finish_code is FinishCode.STOP_TOKEN and delta.token_ids:
                self.matched_stop = delta.token_ids[-1]
        self.token_ids += fresh
        return text, fresh

    @property
    def stop_reason(self) -> str | int | None:
        """What ended the output, if the client named it: vLLM has null for the model's own ids."""
        stop = self.matched_stop
        return None if isinstance(stop, int) and stop not in self._own_stop_ids else stop


def choice_object(
    index: int, text: str, source: TextChoice, *, token_ids: Iterable[int] | None
) -> dict[str, Any]:
    """Return one element of `choices`, of an answer or of a chunk."""
    value: dict[str, Any] = {
        "index": index,
        "text": text,
        "logprobs": None,
        "finish_reason": source.finish_reason,
        "matched_stop": source.matched_stop,
        "stop_reason": source.stop_reason,
    }
    if token_ids is not None:
        value["token_ids"] = list(token_ids)
    return value
