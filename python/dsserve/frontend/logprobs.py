"""Which log-probabilities go out with which piece of text?

The engine gives them per id, text goes out in pieces that end inside no character and hold back
what may become a stop. An id's entry goes out with the piece that has the last of its text.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from dsserve import _native
from dsserve.protocol.engine import pack_u32


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """What the engine says about one output id.

    Attributes:
        token_id: The id.
        logprob: Its log-probability.
        top: The likeliest ids with theirs, the likeliest first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignedLogprob:
    """An entry with its place in the text.

    Attributes:
        entry: What the engine says.
        token: The id's own text; broken characters are U+FFFD.
        data: The id's own bytes, which may be a part of a character.
        text_offset: Characters of the output's text before this id's.
    """

    entry: TokenLogprob
    token: str
    data: bytes
    text_offset: int


class LogprobAligner:
    """Holds the entries of one output until their text is out."""

    def __init__(self, tokenizer: _native.Tokenizer, *, skip_special_tokens: bool = True) -> None:
        """For a stream of `Detokenizer` with the same `skip_special_tokens`."""
        self._tokenizer = tokenizer
        self._aligner = _native.TokenAligner(tokenizer, skip_special_tokens)
        self._held: deque[AlignedLogprob] = deque()
        self._num_taken = 0

    def push(self, entries: Sequence[TokenLogprob]) -> None:
        """Take the entries of the next ids, in order."""
        places = self._aligner.push(pack_u32(entry.token_id for entry in entries))
        for entry, (_, _, first_char) in zip(entries, places, strict=True):
            data = self._tokenizer.token_bytes(entry.token_id)
            self._held.append(
                AlignedLogprob(
                    entry=entry,
                    token=data.decode("utf-8", errors="replace"),
                    data=data,
                    text_offset=first_char,
                )
            )

    def take(self, emitted_tokens: int) -> list[AlignedLogprob]:
        """Return the entries of ids whose text is out by now and was not before.

        Args:
            emitted_tokens: `TextDelta.emitted_tokens`. With a stop that is `kept_tokens`: entries of
                later ids stay behind and are dropped with this object.
        """
        count = min(emitted_tokens - self._num_taken, len(self._held))
        self._num_taken += max(0, count)
        return [self._held.popleft() for _ in range(count)]
