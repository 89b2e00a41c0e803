"""Text to ids and ids to text for everything that is not chat, many streams per call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dsserve import _native


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one push gave for one stream.

    Attributes:
        text: New text, possibly empty (an incomplete character or a possible stop string is held).
        stop: The stop string that was found, or None. The stream then ignores further ids and the
            caller tells the engine: `client.finish(request_id, delta.kept_tokens)`.
        kept_tokens: Ids that count as output so far, up to the one that completed the stop string.
        emitted_tokens: The leading ids all of whose text is out (log-probabilities go with them).
    """

    text: str
    stop: str | None
    kept_tokens: int
    emitted_tokens: int


class Detokenizer:
    """Incremental decoding of many streams; every stream is named by a handle."""

    def __init__(self, tokenizer: _native.Tokenizer) -> None:
        raise NotImplementedError

    def open(
        self,
        *,
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
        include_stop: bool = False,
    ) -> int:
        """Start a stream and return its handle.

        Raises:
            InvalidRequest: A stop string is empty, there are more than 16 or they are too long.
        """
        raise NotImplementedError

    def push(self, updates: Sequence[tuple[int, Sequence[int]]]) -> list[TextDelta]:
        """Give (handle, new ids) of any number of streams; one delta each, in order."""
        raise NotImplementedError

    def push_one(self, handle: int, token_ids: Sequence[int]) -> TextDelta:
        """Give the new ids of one stream."""
        raise NotImplementedError

    def finish(self, handle: int) -> TextDelta:
        """End a stream: what was held back comes out, an incomplete character as U+FFFD."""
        raise NotImplementedError

    def close(self, handle: int) -> None:
        """Forget a stream; unknown and finished handles are ignored."""
        raise NotImplementedError


class TextCodec:
    """Whole texts to ids and back."""

    def __init__(self, path: Path, *, num_threads: int = 2) -> None:
        """Load `tokenizer.json`.

        Raises:
            ConfigError: The file is missing or not a byte-level tokenizer.
        """
        raise NotImplementedError

    tokenizer: _native.Tokenizer
    vocab_size: int

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode one text.

        Raises:
            InvalidRequest: The text holds a lone surrogate.
        """
        raise NotImplementedError

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Encode texts in parallel; same ids as one by one."""
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decode ids; ids outside the vocabulary give no text."""
        raise NotImplementedError

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token by its exact spelling."""
        raise NotImplementedError
