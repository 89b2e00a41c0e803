"""Generated ids of one choice to chat deltas."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from deepseek_recipe import (
    ChatCompletionChunk,
    InferenceChunk,
    InferenceFinishReason,
    StreamProcessor,
)

from dsserve.chat.deltas import DeltaWriter
from dsserve.protocol.engine import FinishCode


@dataclass(frozen=True, kw_only=True)
class StreamRules:
    """How a stream turns what the recipe reports into deltas; the same for all choices.

    Attributes:
        starts_in_reasoning: The first ids are reasoning.
        thinking_end_id: Token that ends reasoning, if the vocabulary has it.
        skipped_ids: Special tokens that give no text (`skip_special_tokens`).
        separate_reasoning: False: reasoning goes into `content`, between `<think>` and `</think>`.
        stream_reasoning: False: reasoning comes as one delta, when it is complete.
        drops_calls: Tool calls are not reported (`tool_choice: "none"`).
        allows_parallel: False: the reply ends where a second call would begin.
    """

    starts_in_reasoning: bool = False
    thinking_end_id: int | None = None
    skipped_ids: frozenset[int] = field(default_factory=frozenset)
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    drops_calls: bool = False
    allows_parallel: bool = True


class ChatStream:
    """One choice: takes generated ids in order, gives OpenAI `delta` objects.

    Attributes:
        finished: No further ids are wanted. If that became true by a push without a finish code
            (stop string, or a second call with `parallel_tool_calls: false`), the caller must tell
            the engine: `client.finish(request_id, stream.kept_tokens)`.
        kept_tokens: Ids that count as output (usage `completion_tokens`). Ids pushed after
            `finished` are dropped and not counted.
        reasoning_tokens: How many of them were reasoning (0 with thinking off); final once finished.
        finish_reason: None until finished, then `stop`, `length` or `tool_calls`.
        stopped_by_text: A stop string ended the reply, completed by the last id that counts.
        index: Choice index of the request (`n`).
    """

    def __init__(self, processor: StreamProcessor, rules: StreamRules, *, index: int) -> None:
        self.index = index
        self.finished = False
        self.kept_tokens = 0
        self.reasoning_tokens = 0
        self.finish_reason: str | None = None
        self.stopped_by_text = False
        self._processor = processor
        self._rules = rules
        self._writer = DeltaWriter(
            separate_reasoning=rules.separate_reasoning, stream_reasoning=rules.stream_reasoning
        )
        self._is_reasoning = rules.starts_in_reasoning
        self._processor.push(InferenceChunk.ready())

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
        num_shown = len(token_ids) - (finish_code == FinishCode.STOP_TOKEN)
        for position, token_id in enumerate(token_ids):
            if self.finished:
                break
            self.kept_tokens += 1
            if position < num_shown and token_id not in self._rules.skipped_ids:
                self._count_reasoning(token_id)
                # One id at a time: of a piece of several that ends inside a character, the recipe
                # loses the whole text if the stream then ends.
                self._take(self._processor.push(InferenceChunk.tokens([token_id])))
                self.stopped_by_text = self.finish_reason == "stop"
        if not self.finished and finish_code in _ENDS:
            self._take(self._processor.push(InferenceChunk.finish(_ENDS[finish_code])))
            if not self.finished:
                self._take(self._processor.finish())
        return self._writer.take()

    def close(self) -> None:
        """Release the parser of a stream that will not be finished (client gone, engine fault)."""
        self.finished = True
        self._processor.close()

    def _count_reasoning(self, token_id: int) -> None:
        if self._is_reasoning:
            self._is_reasoning = token_id != self._rules.thinking_end_id
            self.reasoning_tokens += self._is_reasoning

    def _take(self, chunks: Iterable[Any]) -> None:
        for chunk in chunks:
            choice = _read_chunk(chunk)
            delta = choice.delta
            if delta.reasoning_content:
                self._writer.reasoning(delta.reasoning_content)
            if delta.content:
                self._is_reasoning = False
                self._writer.content(delta.content)
            if delta.tool_calls:
                self._is_reasoning = False
                if not self._take_calls(delta.tool_calls):
                    return
            if choice.finish_reason is not None:
                self._end(choice.finish_reason, choice.reasoning_tokens)

    def _take_calls(self, calls: list[dict[str, Any]]) -> bool:
        """Report calls; False if the reply ends here because a second one begins."""
        if self._rules.drops_calls:
            return True
        if not self._rules.allows_parallel and any(call["index"] > 0 for call in calls):
            self._end("tool_calls", None)
            self._processor.close()
            return False
        self._writer.calls(calls)
        return True

    def _end(self, reason: str, reported_reasoning_tokens: int | None) -> None:
        if reason == "tool_calls" and self._rules.drops_calls:
            reason = "stop"
        self.finished = True
        self.finish_reason = reason
        # Our count includes what led to a calls block opened while thinking, the recipe's counts
        # some ids of broken characters twice.
        if reported_reasoning_tokens is not None:
            self.reasoning_tokens = min(self.reasoning_tokens, reported_reasoning_tokens)
        self._writer.end_reasoning()


_ENDS = {
    FinishCode.STOP_TOKEN: InferenceFinishReason.Stop,
    FinishCode.STOP_STRING: InferenceFinishReason.Stop,
    FinishCode.LENGTH: InferenceFinishReason.Length,
}


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta
    finish_reason: str | None = None
    reasoning_tokens: int | None = None


class _ReasoningUsage(msgspec.Struct):
    reasoning_tokens: int = 0


class _Usage(msgspec.Struct):
    completion_tokens_details: _ReasoningUsage | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


_decoder = msgspec.json.Decoder(_Chunk)


def _read_chunk(chunk: ChatCompletionChunk) -> _Choice:
    parsed = _decoder.decode(chunk.to_json())
    choice = parsed.choices[0]
    if parsed.usage is not None and parsed.usage.completion_tokens_details is not None:
        choice.reasoning_tokens = parsed.usage.completion_tokens_details.reasoning_tokens
    return choice
