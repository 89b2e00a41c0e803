"""Text to ids and ids to text for everything that is not chat, many streams per call."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path

from dsserve import _native
from dsserve.errors import ConfigError, InvalidRequest
from dsserve.protocol.engine import pack_u32, pack_u64, unpack_u32

MAX_STOP_STRINGS = 16
"""As in DeepSeek's API."""


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
    """Incremental decoding of many streams; every stream is named by a handle.

    Text given out by `push` and `finish` together is what decoding all ids at once gives, up to the
    first stop string, whatever the split into calls.
    """

    def __init__(self, tokenizer: _native.Tokenizer) -> None:
        self._decoder = _native.StreamDecoder(tokenizer)

    def open(
        self,
        *,
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
        include_stop: bool = False,
    ) -> int:
        """Start a stream and return its handle.

        Args:
            stop: Stop strings; the one that is complete first ends the stream.
            skip_special_tokens: Give special tokens no text.
            include_stop: Cut the text after the stop string instead of before it.

        Raises:
            InvalidRequest: A stop string is empty or holds a lone surrogate, there are more than
                16, or they are longer than 64 KiB together.
        """
        if len(stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(
                f"stop lists {len(stop)} strings, the limit is {MAX_STOP_STRINGS}", param="stop"
            )
        try:
            return self._decoder.open(list(stop), skip_special_tokens, include_stop)
        except UnicodeEncodeError as error:
            raise InvalidRequest("a stop string holds a lone surrogate", param="stop") from error
        except _native.TokenizerError as error:
            raise InvalidRequest(str(error), param="stop") from error

    def push(self, updates: Sequence[tuple[int, Sequence[int]]]) -> list[TextDelta]:
        """Give (handle, new ids) of any number of streams; one delta each, in order.

        Raises:
            TokenizerError: A handle is unknown (a bug of the caller); no stream was changed.
        """
        handles = pack_u64(handle for handle, _ in updates)
        offsets = pack_u32(accumulate((len(ids) for _, ids in updates), initial=0))
        ids = pack_u32(chain.from_iterable(ids for _, ids in updates))
        return [_delta(piece) for piece in self._decoder.push_batch(handles, offsets, ids)]

    def push_one(self, handle: int, token_ids: Sequence[int]) -> TextDelta:
        """Give the new ids of one stream; otherwise as `push`."""
        return self.push([(handle, token_ids)])[0]

    def finish(self, handle: int) -> TextDelta:
        """End and forget a stream: what was held back comes out, an incomplete character as U+FFFD.

        Raises:
            TokenizerError: The handle is unknown (a bug of the caller).
        """
        return _delta(self._decoder.finish(handle))

    def close(self, handle: int) -> None:
        """Forget a stream; unknown and finished handles are ignored."""
        self._decoder.close(handle)

    def __len__(self) -> int:
        """Return the number of open streams."""
        return len(self._decoder)


class TextCodec:
    """Whole texts to ids and back; usable from any thread.

    Attributes:
        tokenizer: What the other text classes share.
        vocab_size: Largest id plus one.
        longest_token: Bytes of the longest token; a text has at least one token per so many characters.
    """

    def __init__(self, path: Path, *, num_threads: int = 2) -> None:
        """Load `tokenizer.json`, or the one in the directory `path`.

        Raises:
            ConfigError: The file is missing or not a byte-level tokenizer.
        """
        try:
            self.tokenizer = _native.Tokenizer(path, num_threads)
        except _native.TokenizerError as error:
            raise ConfigError(str(error)) from error
        self.vocab_size = self.tokenizer.vocab_size
        self.longest_token = max(
            (len(self.tokenizer.token_bytes(token_id)) for token_id in range(self.vocab_size)),
            default=1,
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode one text.

        Args:
            text: Spellings of added tokens in it become those tokens.
            add_special_tokens: Add what the tokenizer's files ask for (`add_bos_token`).

        Raises:
            InvalidRequest: The text holds a lone surrogate.
        """
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Encode texts in parallel; same ids as one by one.

        Raises:
            InvalidRequest: A text holds a lone surrogate.
        """
        try:
            batch = self.tokenizer.encode_batch(list(texts), add_special_tokens)
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                "the text holds a lone surrogate, which is no valid text",
                param="prompt",
                code="invalid_unicode",
            ) from error
        except _native.TokenizerError as error:
            raise InvalidRequest(str(error), param="prompt") from error
        return [unpack_u32(ids) for ids in batch]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decode ids; ids outside the vocabulary give no text.

        Raises:
            InvalidRequest: An id is negative or does not fit 32 bits.
        """
        try:
            packed = pack_u32(token_ids)
        except (OverflowError, TypeError) as error:
            raise InvalidRequest(
                "token ids must be integers from 0 to 4294967295", param="tokens"
            ) from error
        return self.tokenizer.decode(packed, skip_special_tokens)

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token by its exact spelling."""
        return self.tokenizer.token_to_id(token)


def _delta(piece: _native.Piece) -> TextDelta:
    return TextDelta(piece.text, piece.stop, piece.kept_tokens, piece.emitted_tokens)
