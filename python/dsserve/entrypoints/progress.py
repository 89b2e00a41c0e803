"""Shows how far loading is: a bar on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from dsserve.protocol.engine import LoadProgress

logger = logging.getLogger(__name__)


class LoadingBar:
    """One bar per stage of loading.

    Args:
        is_interactive: Draw bars; else each stage is logged when it begins.
    """

    def __init__(self, *, is_interactive: bool | None = None) -> None:
        wanted = sys.stderr.isatty() if is_interactive is None else is_interactive
        self._progress = (
            Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f}%"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            if wanted
            else None
        )
        self._tasks: dict[str, TaskID] = {}
        self._stages: set[str] = set()

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, message: LoadProgress) -> None:
        """Take one report of the engine."""
        if message.stage not in self._stages:
            self._stages.add(message.stage)
            if self._progress is None:
                logger.info("loading: %s", message.stage)
        if self._progress is None:
            return
        task = self._tasks.get(message.stage)
        if task is None:
            task = self._tasks[message.stage] = self._progress.add_task(message.stage, total=None)
        self._progress.update(task, completed=message.done, total=message.total or None)

    def close(self) -> None:
        """Take the bars away; a second call does nothing."""
        if self._progress is not None:
            self._progress.stop()
