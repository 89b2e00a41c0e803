"""How many tokens a second does the HTTP server decode, for one stream and for eight?

Checkpoint: golden A (12 layers, random weights, so no drafts), on the CPU. Greedy, end tokens ignored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.http_server import running_server
from benchmarks.http_streams import decode_figures
from benchmarks.record import ROOT

if TYPE_CHECKING:
    from benchmarks.record import Figure

CHECKPOINT = ROOT / "tests" / "golden" / "data" / "v41-tiny-a"
VOCAB_SIZE = 500
#: Streams -> tokens per second to reach.
BARS = {1: 30.0, 8: 100.0}


def measure() -> list[Figure]:
    """Start a server, warm it up, and decode; the figure is tokens per second after the first token."""
    flags = ("--model-path", str(CHECKPOINT), "--speculative-algorithm", "none")
    with running_server(model=CHECKPOINT.name, flags=flags) as server:
        return decode_figures(server, name="http", bars=BARS, vocab_size=VOCAB_SIZE)
