"""Is the engine stuck, or its API process gone? A thread that ends the process if so.

It reads what the step loop writes (`loop.Progress`) and never touches the scheduler.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import shutil
import sys
import threading
import time
from typing import TYPE_CHECKING

from dsserve.engram.shared import folder_name, remove_folder
from dsserve.protocol.engine import ExitCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from dsserve.engine.loop import Progress

logger = logging.getLogger(__name__)

POLL_S = 0.25
NO_PROGRESS_LIMIT_S = 30.0
"""`serving.md` h.3: something waits, and nothing was planned for so long."""


class Watchdog:
    """Checks from its own thread, from `start` until `stop`."""

    def __init__(
        self,
        *,
        timeout_s: float,
        parent_pid: int,
        ipc_dir: str,
        clock: Callable[[], float] = time.monotonic,
        get_parent: Callable[[], int] = os.getppid,
        end_process: Callable[[int], None] = os._exit,
    ) -> None:
        """Prepare.

        Args:
            timeout_s: A step, or a pass of the loop, that takes longer is stuck.
            parent_pid: The API process; 0 if nobody started this one.
            ipc_dir: Removed with the server's shared memory when the API process is gone, which would have done it.
            clock: Seconds, the same as the loop's.
            get_parent: Returns the id of the parent process.
            end_process: Ends the process at once with an exit code.
        """
        self._timeout_s = timeout_s
        self._parent_pid = parent_pid
        self._ipc_dir = ipc_dir
        self._clock = clock
        self._get_parent = get_parent
        self._end_process = end_process
        self._progress: Progress | None = None
        self._has_warned = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch the parent process."""
        self._thread.start()

    def watch(self, progress: Progress) -> None:
        """Begin to watch the step loop too."""
        progress.last_pass_s = self._clock()
        self._progress = progress

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def check(self) -> ExitCode | None:
        """Look once; returns the code to exit with if something is wrong, which was logged."""
        if self._parent_pid and self._get_parent() != self._parent_pid:
            logger.error("the API process %d is gone", self._parent_pid)
            return ExitCode.ORPHANED
        progress = self._progress
        if progress is None:
            return None
        now_s = self._clock()
        age_s, what = max(
            (_age(now_s, progress.step_since_s), "a step has been running"),
            (_age(now_s, progress.last_pass_s), "the step loop has been stuck"),
        )
        stall_s = _age(now_s, progress.stalled_since_s)
        if age_s > self._timeout_s:
            logger.critical("%s for %.1f s, above --watchdog-timeout", what, age_s)
            return ExitCode.WATCHDOG
        if stall_s > NO_PROGRESS_LIMIT_S:
            logger.critical("requests wait and nothing could be planned for %.1f s", stall_s)
            return ExitCode.WATCHDOG
        if age_s <= self._timeout_s / 2:
            self._has_warned = False
        elif not self._has_warned:
            self._has_warned = True
            logger.warning("%s for %.1f s", what, age_s)
        return None

    def _run(self) -> None:
        while not self._stopped.wait(POLL_S):
            if self._progress is not None:
                # Should native code keep the interpreter lock, this thread cannot run either: then a
                # thread without Python dumps the stacks and ends the process (with code 1).
                faulthandler.dump_traceback_later(2 * self._timeout_s, exit=True)
            code = self.check()
            if code is not None:
                self._end(code)
                return
        faulthandler.cancel_dump_traceback_later()

    def _end(self, code: ExitCode) -> None:
        if code is ExitCode.WATCHDOG and self._progress is not None:
            state = json.dumps(self._progress.snapshot, default=str)
            logger.critical("state at the last heartbeat: %s", state)
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        if code is ExitCode.ORPHANED:
            remove_folder(folder_name(self._ipc_dir))
            shutil.rmtree(self._ipc_dir, ignore_errors=True)
        logging.shutdown()
        self._end_process(code)


def _age(now_s: float, since_s: float) -> float:
    return now_s - since_s if since_s else 0.0
