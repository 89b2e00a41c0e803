"""Launch flags of the group "Cache tiers"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dsserve.config.flag import LATER, Kind, option, switch


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """The prefix cache and its tiers."""

    disable_radix_cache: bool = switch("Reuse no prefixes.", since=1)
    radix_eviction_policy: str = option(
        "lru",
        "What is dropped first from the prefix cache: the least recently used, the least hit, what was "
        "hit once at most, the oldest, the least urgent requests' part, or the cheapest to compute again.",
        since=1,
        choices={"lru": 1, "lfu": 3, "slru": 3, "fifo": 3, "priority": 3, "cost": 3},
    )
    strip_thinking_cache: bool = switch("Do not cache what follows the start of thinking.", since=4)
    enable_hierarchical_cache: bool = switch("Keep evicted pages in host memory.", since=LATER)
    hicache_ratio: float = option(
        2.0, "Host pool per device pool.", since=LATER, kind=Kind.FLOAT, minimum=0
    )
    hicache_size: float = option(
        0.0,
        "Host pool in GB per rank; 0 uses the ratio.",
        since=LATER,
        kind=Kind.FLOAT,
        minimum=0,
        default_text="0",
    )
    hicache_write_policy: str = option(
        "write_through",
        "When pages are copied to the host.",
        since=LATER,
        choices={
            "write_through": LATER,
            "write_through_selective": LATER,
            "write_back": LATER,
        },
    )
    hicache_io_backend: str = option(
        "kernel",
        "How pages are copied.",
        since=LATER,
        choices={"kernel": LATER, "direct": LATER},
    )
    hicache_mem_layout: str = option(
        "page_first",
        "Layout of the host pool.",
        since=LATER,
        choices={"page_first": LATER, "layer_first": LATER},
    )
    hicache_storage_backend: str | None = option(None, "Store behind the host pool.", since=LATER)
    hicache_storage_prefetch_policy: str = option(
        "timeout",
        "How long admission waits for the store.",
        since=LATER,
        choices={"best_effort": LATER, "wait_complete": LATER, "timeout": LATER},
    )
    hicache_storage_backend_extra_config: dict[str, Any] = option(
        {}, "Options of the store, JSON.", since=LATER, kind=Kind.JSON, default_text="none"
    )
    storage_read: str | None = option(
        None, "Which ranks read the store.", since=LATER, choices={"dedup": LATER}
    )
    enable_unified_cache_external_linker: bool = switch(
        "Link the device pool to a store directly.", since=LATER
    )
    unified_cache_external_linker_backend: str = option(
        "auto",
        "Store of the linker.",
        since=LATER,
        choices={
            "auto": LATER,
            "shm": LATER,
            "tcp": LATER,
            "mooncake": LATER,
            "hf3fs": LATER,
            "dynamic": LATER,
        },
    )
    unified_cache_external_linker_config: dict[str, Any] = option(
        {}, "Options of the linker, JSON.", since=LATER, kind=Kind.JSON, default_text="none"
    )
    kv_events_config: dict[str, Any] = option(
        {}, "Publisher of cache events, JSON.", since=LATER, kind=Kind.JSON, default_text="none"
    )
