"""How do log lines look, and which two lines do steps write?

`serving.md` h.2: one line per PREFILL step, one per N decode steps. Text or JSON lines on stderr.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

logger = logging.getLogger(__name__)

FIELDS = "fields"
"""Attribute of a log record with values that JSON lines carry one by one."""


def setup_logging(
    level: str = "info",
    *,
    use_json: bool = False,
    process: str = "api",
    stream: IO[str] | None = None,
) -> None:
    """Send everything logged in this process to one stream. A later call replaces the former.

    Args:
        level: debug, info, warning, error or critical.
        use_json: One JSON object a line.
        process: Says in each line which process wrote it.
        stream: stderr if None.
    """
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(JsonFormatter(process) if use_json else TextFormatter(process))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())


class TextFormatter(logging.Formatter):
    """`2026-01-31 12:00:00.123 INFO  engine dsserve.engine.loop: message`."""

    def __init__(self, process: str) -> None:
        super().__init__(
            f"%(asctime)s.%(msecs)03d %(levelname)-7s {process} %(name)s: %(message)s",
            datefmt="%Y-%m-%d %H:%M:%S",
        )


class JsonFormatter(logging.Formatter):
    """One object per line: time, level, process, logger, message, fields, traceback."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Render a record."""
        line: dict[str, Any] = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, FIELDS, {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class StepLog:
    """Writes the step lines.

    Args:
        decode_interval: Decode steps per line.
        clock: Seconds.
    """

    def __init__(
        self, *, decode_interval: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._decode_interval = decode_interval
        self._clock = clock
        self._num_steps = 0
        self._num_tokens = 0
        self._since_s = clock()

    def prefill(self, values: Mapping[str, Any], levels: Mapping[str, Any]) -> None:
        """Write the line of a PREFILL step.

        Args:
            values: What the step did, by name.
            levels: Running and waiting requests and pool usage after it.
        """
        self._write("prefill step", {**values, **levels})

    def decode(self, num_tokens: int, levels: Callable[[], Mapping[str, Any]]) -> None:
        """Count a DECODE step with `num_tokens` output tokens; each N-th writes a line."""
        if self._num_steps == 0:
            self._since_s = self._clock()
        self._num_steps += 1
        self._num_tokens += num_tokens
        if self._num_steps < self._decode_interval:
            return
        elapsed_s = max(self._clock() - self._since_s, 1e-9)
        throughput = round(self._num_tokens / elapsed_s, 1)
        values = {"steps": self._num_steps, "tokens": self._num_tokens, "tokens_per_s": throughput}
        self._num_steps = self._num_tokens = 0
        self._write("decode steps", {**values, **levels()})

    def _write(self, title: str, values: Mapping[str, Any]) -> None:
        if logger.isEnabledFor(logging.INFO):
            text = " ".join(f"{name}={value}" for name, value in values.items())
            logger.info("%s: %s", title, text, extra={FIELDS: dict(values)})
