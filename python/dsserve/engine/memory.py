"""How many pages does the KV pool get, and what do they cost?"""

import os
from dataclasses import dataclass

from dsserve.config.model import ModelConfig
from dsserve.config.resolve import DEFAULT_CPU_POOL_BYTES
from dsserve.config.server import ServerConfig
from dsserve.errors import ConfigError
from dsserve.kv.layout import kv_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Sizes of the KV pools.

    Attributes:
        num_pages: Usable pages of the FULL pool, without the dummy page.
        num_slots: Request slots, with the padding slot.
        reason: Where the page count comes from, for the log.
    """

    page_size: int
    num_pages: int
    num_slots: int
    bytes_per_page: int
    bytes_per_token: float
    bytes_per_slot: int
    reason: str

    @property
    def num_tokens(self) -> int:
        """Tokens that all pages hold."""
        return self.num_pages * self.page_size

    @property
    def total_bytes(self) -> int:
        """Bytes of the FULL pool (dummy page included) and of the request slots."""
        return (self.num_pages + 1) * self.bytes_per_page + self.num_slots * self.bytes_per_slot


def plan_memory(server: ServerConfig, model: ModelConfig) -> MemoryPlan:
    """Choose the page count for a resolved configuration.

    Raises:
        ConfigError: Not one page fits.
    """
    page_size = server.page_size
    if page_size is None:
        raise ConfigError("--page-size is not resolved", param="--page-size")
    has_draft_rings = server.speculative_algorithm == "DSPARK" and server.load_format != "fake"
    layout = kv_layout(model, page_size, draft=has_draft_rings)
    if server.max_total_tokens is not None:
        num_pages = server.max_total_tokens // page_size
        flag, reason = "--max-total-tokens", f"--max-total-tokens {server.max_total_tokens}"
    else:
        flag = "--mem-fraction-static"
        pool_bytes, reason = _pool_bytes(server)
        num_pages = pool_bytes // layout.bytes_per_page - 1
    if num_pages < 1:
        raise ConfigError(
            f"{reason} holds no page of {page_size} tokens ({layout.bytes_per_page} bytes); "
            "raise it or lower --page-size",
            param=flag,
        )
    return MemoryPlan(
        page_size=page_size,
        num_pages=num_pages,
        num_slots=server.max_running_requests + 1,
        bytes_per_page=layout.bytes_per_page,
        bytes_per_token=layout.bytes_per_token,
        bytes_per_slot=layout.bytes_per_slot,
        reason=reason,
    )


def _pool_bytes(server: ServerConfig) -> tuple[int, str]:
    fraction = server.mem_fraction_static
    if fraction is None:
        return DEFAULT_CPU_POOL_BYTES, "the pool of 1 GiB, the default on the CPU,"
    host_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(host_bytes * fraction), f"--mem-fraction-static {fraction:g} of the host's memory"
