"""Where the Engram tables of this process lie: how much memory that takes, whether it may, and what reads them."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dsserve.engram.cache import RowCache, cached_row_bytes
from dsserve.engram.host_table import open_host_tables
from dsserve.engram.peers import Peers
from dsserve.engram.sharded_table import open_sharded_tables, shard_shape
from dsserve.engram.shared import SharedFolder, free_bytes, memory_root
from dsserve.engram.staging import Stager
from dsserve.engram.table import EngramStats, EngramTable, TableShape
from dsserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsserve.engram.table import RowSource

logger = logging.getLogger(__name__)

#: How long a rank waits for the others to load their parts: 190 GiB at 0.1 GiB/s.
LOAD_TIMEOUT_S = 1900.0
#: How long it waits for rank 0 to begin.
_JOIN_TIMEOUT_S = 60.0
#: Memory limit of the control group, by version.
_GROUP_LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngramOptions:
    """What the flags say, and which process this is.

    Attributes:
        placement: `device` (in each process's device memory), `host` (one copy per node) or `sharded` (by row range).
        cache_rows: Size of the hot-row cache; 0 = none.
        memory_limit: Bytes that the tables may take on this node; None = what is free.
        folder: Name of the server's shared memory (`shared.folder_name`).
        rank: This process.
        num_ranks: Processes of the server on this node.
    """

    placement: str = "device"
    cache_rows: int = 0
    memory_limit: int | None = None
    folder: str = ""
    rank: int = 0
    num_ranks: int = 1

    @property
    def layout(self) -> str:
        """The placement in words, for log and progress."""
        return "one copy for the node" if self.placement == "host" else "row ranges"


class OpenTables:
    """The tables of this process, and what must be closed with them."""

    def __init__(self, stager: Stager, tables: Sequence[EngramTable], stack: ExitStack) -> None:
        """Take over what `open_tables` opened."""
        self.stager, self.tables = stager, tables
        self._stack = stack

    def close(self) -> None:
        """End the thread and let go of the shared memory. A second call does nothing."""
        self.stager.close()
        self._stack.close()


def open_tables(
    shapes: list[TableShape],
    options: EngramOptions,
    source: RowSource,
    *,
    root: Path | None = None,
    timeout_s: float = LOAD_TIMEOUT_S,
) -> OpenTables:
    """Load or map the tables for the placements `host` and `sharded`.

    Args:
        shapes: Sizes of the tables.
        options: Placement, and this process among the others.
        source: Where rows are loaded from.
        root: Folder of the shared memory; None = the node's.
        timeout_s: How long to wait for the other ranks.

    Raises:
        ConfigError: The tables take more memory than they may, or another rank could not load its part.
        EngramPeerLost: Another rank died.
    """
    check_memory(shapes, options, root=root)
    stats = EngramStats(options.placement)
    with ExitStack() as stack:
        folder = stack.enter_context(_folder(options, root, timeout_s))
        peers = stack.enter_context(Peers(folder, rank=options.rank, num_ranks=options.num_ranks))
        tables: list[EngramTable]
        if options.placement == "host":
            tables = [*open_host_tables(shapes, folder, peers, source, timeout_s=timeout_s)]
        else:
            tables = [
                *open_sharded_tables(shapes, folder, peers, source, stats, timeout_s=timeout_s)
            ]
        cache_rows = _cache_rows(shapes, options)
        cache = RowCache(tables, cache_rows, stats) if cache_rows else None
        logger.info(
            "Engram tables: %s of %d tables with %d rows, %d bytes in shared memory %s, %d rows cached",
            options.layout,
            len(shapes),
            sum(shape.num_rows for shape in shapes),
            memory_needed(shapes, options),
            folder.path.name,
            cache_rows,
        )
        return OpenTables(Stager(tables, stats, cache), tables, stack.pop_all())


def memory_needed(shapes: list[TableShape], options: EngramOptions) -> int:
    """Bytes that the tables, and the cache of each process, take on a node."""
    caches = options.num_ranks * _cache_rows(shapes, options) * cached_row_bytes(shapes[0])
    if options.placement == "sharded":
        parts = [shard_shape(shape, options.num_ranks).num_bytes for shape in shapes]
        return caches + options.num_ranks * sum(parts)
    copies = options.num_ranks if options.placement == "device" else 1
    return caches + copies * sum(shape.num_bytes for shape in shapes)


def _cache_rows(shapes: list[TableShape], options: EngramOptions) -> int:
    """Rows of the cache; more than there are would stay empty."""
    return min(options.cache_rows, sum(shape.num_rows for shape in shapes))


def check_memory(
    shapes: list[TableShape], options: EngramOptions, *, root: Path | None = None
) -> None:
    """Refuse tables that do not fit, before anything of them is read; rank 0 speaks for all.

    Raises:
        ConfigError: With the number of bytes needed.
    """
    if options.rank != 0:
        return  # what is free then depends on how far the others are
    needed = memory_needed(shapes, options)
    allowed, reason = options.memory_limit, "--engram-memory-limit allows"
    if allowed is None:
        allowed, reason = _available(options, root)
    if needed > allowed:
        raise ConfigError(
            f"--engram-placement {options.placement}: the Engram tables need {needed} bytes of memory on this node, "
            f"{reason} {allowed}; give more memory, or choose another placement",
            param="--engram-placement",
        )


def _available(options: EngramOptions, root: Path | None) -> tuple[int, str]:
    """Bytes that are free on the node, and where that is from."""
    limits = [(_host_bytes(), "the host has free")]
    for limit_file, usage_file in _GROUP_LIMITS:
        limit, usage = _number(limit_file), _number(usage_file)
        if limit is not None and usage is not None:
            limits.append((max(limit - usage, 0), "the memory limit of the container leaves"))
    if options.placement != "device":
        base = root or memory_root()
        limits.append((free_bytes(base), f"{base} has free"))
    return min(limits)


def _host_bytes() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _number(path: str) -> int | None:
    """The number in a file of the control group; None without a file, or without a limit in it."""
    try:
        return int(Path(path).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _folder(options: EngramOptions, root: Path | None, timeout_s: float) -> SharedFolder:
    if options.rank == 0:
        return SharedFolder.create(options.folder, root=root)
    return SharedFolder.join(options.folder, root=root, timeout_s=min(timeout_s, _JOIN_TIMEOUT_S))
