"""Text to ids and ids to text for everything that is not chat, many streams per call."""

import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import NamedTuple

from dsserve import _native
from dsserve._native import StreamOptions
from dsserve.errors import ConfigError, InvalidRequest
from dsserve.protocol.engine import Outputs, pack_u32, pack_u64, unpack_u32

logger = logging.getLogger(__name__)

MAX_STOP_STRINGS = 16
"""As in DeepSeek's API."""

MESSAGE_CACHE_BYTES = 64 * 1024 * 1024
"""Limit of the cache of encoded messages."""

_IDS_PER_CALL = 4096
_FIRST_OWN_NAME = 2**63
"""Names that are made up begin here, request ids at 1."""


class TextDelta(NamedTuple):
    """What one push gave for one stream; a tuple, since every stream makes one each step.

    Attributes:
        text: New text, possibly empty (an incomplete character or a possible stop string is held).
        stop: The stop string or pattern that was found, or None. The stream then ignores further ids,
            and the engine must be told: `client.finish(request_id, delta.kept_tokens)`.
        kept_tokens: Ids that count as output so far, up to the one that completed the stop.
        emitted_tokens: The leading ids all of whose text is out (log-probabilities go with them).
    """

    text: str
    stop: str | None
    kept_tokens: int
    emitted_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """How a stream becomes text.

    Attributes:
        stop: Stop strings; what is complete first ends the stream.
        stop_regex: Stop patterns, likewise.
        skip_special_tokens: Give special tokens no text.
        include_stop: Cut the text after what stopped it instead of before it, and give a stop token
            its text.
    """

    stop: Sequence[str] = ()
    stop_regex: Sequence[str] = ()
    skip_special_tokens: bool = True
    include_stop: bool = False

    def compile(self) -> StreamOptions:
        """Build what finds the stops, without the interpreter lock: it may take tens of milliseconds.

        Raises:
            InvalidRequest: A stop string is empty or holds a lone surrogate, there are more than
                16, or they are longer than 64 KiB together; a stop pattern is longer than 1 KiB, is
                no regular expression without look-around, matches the empty text, or is too large.
        """
        for field, values in (("stop", self.stop), ("stop_regex", self.stop_regex)):
            if len(values) > MAX_STOP_STRINGS:
                raise InvalidRequest(
                    f"{field} lists {len(values)} texts, the limit is {MAX_STOP_STRINGS}",
                    param=field,
                )
        try:
            return StreamOptions(
                list(self.stop), self.skip_special_tokens, self.include_stop, list(self.stop_regex)
            )
        except UnicodeEncodeError as error:
            param = "stop" if error.object in self.stop else "stop_regex"
            raise InvalidRequest("a stop string holds a lone surrogate", param=param) from error
        except _native.TokenizerError as error:
            message = str(error)
            param = "stop_regex" if message.startswith("stop pattern") else "stop"
            raise InvalidRequest(message, param=param) from error


class Detokenizer:
    """Incremental decoding of many streams; every stream has a name.

    Text given out by `push` and `finish` together is what decoding all ids at once gives, up to the
    first stop, whatever the split into calls.
    """

    def __init__(self, tokenizer: _native.Tokenizer) -> None:
        self._decoder = _native.StreamDecoder(tokenizer)
        self._names = itertools.count(_FIRST_OWN_NAME)

    def open(
        self, options: TextOptions | StreamOptions | None = None, *, name: int | None = None
    ) -> int:
        """Start a stream and return its name.

        Args:
            options: How it becomes text, compiled already if several streams share it.
            name: A request id; a name of its own is made up if left out.

        Raises:
            InvalidRequest: As `TextOptions.compile`.
            TokenizerError: An open stream has the name (a bug of the caller).
        """
        if isinstance(options, TextOptions):
            options = options.compile()
        name = next(self._names) if name is None else name
        self._decoder.open(name, options)
        return name

    def step(self, outputs: Outputs) -> dict[int, TextDelta]:
        """Decode the outputs of one engine step, all streams in one call.

        Streams that ended are forgotten; what they held back is in their delta.

        Returns:
            The delta of each request that has a stream, by its position in `outputs`.
        """
        if not len(self._decoder):
            return {}
        pieces = self._decoder.push_batch(
            outputs.request_ids, outputs.token_offsets, outputs.token_ids, outputs.finish_codes
        )
        return {index: delta for index, delta in enumerate(_deltas(pieces)) if delta is not None}

    def push(self, updates: Sequence[tuple[int, Sequence[int]]]) -> list[TextDelta]:
        """Give (name, new ids) of any number of streams; one delta each, in order.

        Raises:
            KeyError: No stream has one of the names (a bug of the caller).
        """
        names = pack_u64(name for name, _ in updates)
        offsets = pack_u32(accumulate((len(ids) for _, ids in updates), initial=0))
        ids = pack_u32(chain.from_iterable(ids for _, ids in updates))
        deltas = []
        for (name, _), delta in zip(
            updates, _deltas(self._decoder.push_batch(names, offsets, ids)), strict=True
        ):
            if delta is None:
                raise KeyError(name)
            deltas.append(delta)
        return deltas

    def push_one(self, name: int, token_ids: Sequence[int]) -> TextDelta:
        """Give the new ids of one stream; otherwise as `push`."""
        return self.push([(name, token_ids)])[0]

    def finish(self, name: int) -> TextDelta:
        """End and forget a stream: what was held back comes out, an incomplete character as U+FFFD.

        Raises:
            TokenizerError: No stream has the name (a bug of the caller).
        """
        piece = self._decoder.finish(name)
        return TextDelta(piece.text, piece.stop, piece.kept_tokens, piece.emitted_tokens)

    def close(self, name: int) -> None:
        """Forget a stream; unknown and finished names are ignored."""
        self._decoder.close(name)

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

    def __init__(self, path: Path, *, num_threads: int = 2, backend: str = "auto") -> None:
        """Load `tokenizer.json`, or the one in the directory `path`.

        Args:
            path: The file or its directory.
            num_threads: Threads that encode.
            backend: `--tokenizer-backend`: auto, huggingface or fastokens.

        Raises:
            ConfigError: The file is missing or not a byte-level tokenizer, or the backend `fastokens`
                does not know its split pattern.
        """
        try:
            self.tokenizer = _native.Tokenizer(
                path, num_threads, backend=backend, cache_bytes=MESSAGE_CACHE_BYTES
            )
        except _native.TokenizerError as error:
            raise ConfigError(str(error)) from error
        reason = self.tokenizer.fallback_reason
        logger.info(
            "tokenizer backend %s: %s",
            self.tokenizer.backend,
            reason or "the split pattern is known",
        )
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

    def decode_each(self, token_ids: Sequence[int]) -> list[str]:
        """Decode each id by itself, special tokens too.

        Many are done a part at a time, so that other threads get the interpreter lock in between.
        """
        texts: list[str] = []
        for start in range(0, len(token_ids), _IDS_PER_CALL):
            packed = pack_u32(token_ids[start : start + _IDS_PER_CALL])
            texts += self.tokenizer.decode_each(packed, skip_special=False)
        return texts

    def completed_stop(self, stops: Sequence[str], token_ids: Sequence[int]) -> str | None:
        """Return the stop string that the last id completed: of several the first, then the longest."""
        if not stops or not token_ids:
            return None
        # A character has at most 4 bytes and almost every id at least one.
        tail = token_ids[-4 * (max(map(len, stops)) + 2) :]
        text = self.decode(tail)
        # What was whole before the last id; an incomplete character was not.
        num_before = len(self.decode(tail[:-1]).rstrip("\ufffd"))
        found = [
            (start + len(stop), -len(stop), stop)
            for stop in stops
            if (start := text.find(stop, max(0, num_before - len(stop) + 1))) >= 0
        ]
        return min(found)[2] if found else None

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token by its exact spelling."""
        return self.tokenizer.token_to_id(token)


def _deltas(pieces: _native.StepPieces) -> Iterator[TextDelta | None]:
    stops = pieces.stops
    counts = zip(pieces.texts, pieces.kept_tokens, pieces.emitted_tokens, strict=True)
    for index, (text, kept_tokens, emitted_tokens) in enumerate(counts):
        if text is None:
            yield None
        else:
            yield TextDelta(text, stops.get(index), kept_tokens, emitted_tokens)
