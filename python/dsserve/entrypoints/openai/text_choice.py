"""The text of one choice of a completion: decoding, stop strings, stop tokens, what counts as output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dsserve.frontend.output import finish_reason
from dsserve.protocol.engine import FinishCode

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dsserve.entrypoints.generation import Choice
    from dsserve.entrypoints.openai.protocol import CompletionBody
    from dsserve.frontend.client import OutputDelta
    from dsserve.frontend.detokenize import Detokenizer


class TextChoice:
    """Turns a choice's output into text; iterate `pieces`.

    Attributes:
        token_ids: Output ids so far, those that count.
        finish_reason: Set with the last piece.
        matched_stop: The stop string or the stop token id that ended the output, or None.
    """

    def __init__(self, choice: Choice, detokenizer: Detokenizer, body: CompletionBody) -> None:
        self.choice = choice
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.matched_stop: str | int | None = None
        self._own_stop_ids = frozenset(body.stop_token_ids or ())
        self._detokenizer = detokenizer
        self._keeps_stop = body.keeps_stop()
        self._handle = detokenizer.open(
            stop=body.stop_strings(),
            skip_special_tokens=body.skip_special_tokens is not False,
            include_stop=self._keeps_stop,
        )

    async def push(self, delta: OutputDelta) -> tuple[str, list[int]]:
        """Take the next output.

        Returns:
            The text that it completes, and the ids of it that count. `finish_reason` is set if the
            output ended with it.
        """
        is_stop_token = delta.finish_code is FinishCode.STOP_TOKEN
        shown = delta.token_ids
        if is_stop_token and not self._keeps_stop:
            shown = shown[:-1]
        piece = self._detokenizer.push_one(self._handle, shown)
        text = piece.text
        fresh = delta.token_ids
        if piece.stop is not None:
            fresh = fresh[: max(0, piece.kept_tokens - len(self.token_ids))]
            self.matched_stop = piece.stop
            self.finish_reason = "stop"
            await self.choice.finish(piece.kept_tokens)
        elif delta.finish_code is not FinishCode.NONE:
            text += self._finish_text(delta)
            if is_stop_token and delta.token_ids:
                self.matched_stop = delta.token_ids[-1]
        self.token_ids += fresh
        return text, fresh

    @property
    def stop_reason(self) -> str | int | None:
        """What ended the output, if the client named it: vLLM has null for the model's own ids."""
        stop = self.matched_stop
        return None if isinstance(stop, int) and stop not in self._own_stop_ids else stop

    def close(self) -> None:
        """Release the decoder; a second call does nothing."""
        self._detokenizer.close(self._handle)

    def _finish_text(self, delta: OutputDelta) -> str:
        """Release what the decoder held back; it may complete a stop string no longer."""
        tail = self._detokenizer.finish(self._handle)
        self.finish_reason = finish_reason(delta.finish_code)
        return tail.text


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
