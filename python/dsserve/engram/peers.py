"""The processes that share a node's Engram tables: who has joined, whose part is ready, who has died.

Each rank claims a file of the server's folder for as long as it lives (`shared.py`). A thread looks at the others'
claims; once one of them is gone, every look-up of this process raises.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING, Self

from dsserve.errors import ConfigError, EngineFault

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsserve.engram.shared import SharedFolder, WatchedFile

logger = logging.getLogger(__name__)

#: Seconds between two looks at the others; a death is known after at most so long.
WATCH_S = 0.5
#: Seconds between two looks while waiting for a part to be loaded.
_WAIT_S = 0.02
#: What a rank writes into its file when it leaves: by itself, or because another one has died.
_LEFT, _GAVE_UP = b"left", b"gave up"


class EngramPeerLost(EngineFault):
    """A process that holds a part of the Engram tables is gone."""

    default_code = "engram_peer_lost"
    default_status = 503


class Peers:
    """This rank among the ranks of one server. Use it as a context manager, or call `close`."""

    def __init__(self, folder: SharedFolder, *, rank: int, num_ranks: int) -> None:
        """Join: from here on, the others notice if this process dies.

        Args:
            folder: The server's folder.
            rank: This process, 0 .. num_ranks - 1.
            num_ranks: Processes that share the tables.
        """
        self.rank, self.num_ranks = rank, num_ranks
        self._folder = folder
        self._claim = folder.claim(_claim_name(rank))
        self._watched: dict[int, WatchedFile] = {}
        self._lost: str | None = None
        self._is_ready = False
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, _: object) -> None:
        if kind is not None and not self._is_ready:
            self.fail(str(error))
        self.close()

    def ready(self) -> None:
        """Tell the others that this rank's part is loaded."""
        self._is_ready = True
        self._folder.publish(_ready_name(self.rank))

    def fail(self, reason: str) -> None:
        """Tell the others that this rank cannot load its part, if they are still there."""
        with contextlib.suppress(FileNotFoundError):
            self._folder.publish(_failed_name(self.rank), reason)

    def wait_ready(self, ranks: Sequence[int], *, timeout_s: float) -> None:
        """Wait until the parts of some ranks are loaded.

        Raises:
            ConfigError: A rank could not load its part, or has not joined in time.
            EngramPeerLost: A rank died while it loaded.
        """
        deadline = time.monotonic() + timeout_s
        for rank in ranks:
            while self._folder.read(_ready_name(rank)) is None:
                self._check_loading(rank)
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"Engram rank {rank} has not loaded its part within {timeout_s:g} s; see its log"
                    )
                time.sleep(_WAIT_S)

    def watch(self) -> None:
        """Begin to watch the others, of which those present are seen by now."""
        if self.num_ranks > 1:
            self._note_dead()
            self._thread = threading.Thread(target=self._watch, name="engram peers", daemon=True)
            self._thread.start()

    def check(self) -> None:
        """Do nothing while all live.

        Raises:
            EngramPeerLost: A rank has died.
        """
        if self._lost is not None:
            raise EngramPeerLost(self._lost)

    def close(self) -> None:
        """Leave; the others do not take it for a death. A second call does nothing."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
        self._claim.release(_LEFT if self._lost is None else _GAVE_UP)
        for file in self._watched.values():
            file.close()

    def find_dead(self) -> int | None:
        """Look at the others once; returns a rank whose process has died, or None."""
        for rank in range(self.num_ranks):
            if rank == self.rank:
                continue
            file = self._watched.get(rank) or self._folder.watch(_claim_name(rank))
            if file is None:
                continue  # not there yet
            self._watched[rank] = file
            # A rank that leaves because of a death says so: who made the folder removes it then, and with it the
            # file of a dead rank that this one may not have seen yet.
            if file.has_ended(without=_LEFT):
                return rank
        return None

    def _watch(self) -> None:
        while self._lost is None and not self._stopped.wait(WATCH_S):
            self._note_dead()

    def _note_dead(self) -> None:
        dead = self.find_dead()
        if dead is not None:
            self._lost = (
                f"the process of Engram rank {dead} is gone, which shared the tables with this one; "
                "restart the server"
            )
            logger.error("%s", self._lost)

    def _check_loading(self, rank: int) -> None:
        reason = self._folder.read(_failed_name(rank))
        if reason is not None:
            raise ConfigError(f"Engram rank {rank} could not load its part: {reason}")
        dead = self.find_dead()
        if dead is not None:
            raise EngramPeerLost(f"the process of Engram rank {dead} died while it loaded its part")
        if not self._folder.path.is_dir():
            raise EngramPeerLost("the first process of the server has ended and removed the tables")


def _claim_name(rank: int) -> str:
    return f"rank.{rank}"


def _ready_name(rank: int) -> str:
    return f"rank.{rank}.ready"


def _failed_name(rank: int) -> str:
    return f"rank.{rank}.failed"
