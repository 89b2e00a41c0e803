"""What `dsserve launch --dry-run` prints: resolved configuration, pools and how many requests fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsserve.config.flag import flags_of
from dsserve.config.server import FLAG_GROUPS, ServerConfig
from dsserve.config.values import format_size
from dsserve.engram.placement import EngramOptions, memory_needed
from dsserve.engram.table import table_shapes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dsserve.config.model import ModelConfig
    from dsserve.engine.memory import MemoryPlan

#: Context lengths whose concurrency is shown, with their usual names.
CONTEXTS = {"4K": 4096, "32K": 32768, "128K": 131072, "1M": 1048576}


def describe(config: ServerConfig, model: ModelConfig, memory: MemoryPlan) -> str:
    """Return the text, from the configuration and sizes alone."""
    return "\n".join(
        [
            *_config_lines(config),
            "",
            *_pool_lines(memory),
            *_engram_lines(config, model),
            "",
            *_fit_lines(config, model, memory),
        ]
    )


def max_concurrency(memory: MemoryPlan, *, context: int, max_running_requests: int) -> int:
    """Return how many requests of `context` tokens run at once without waiting for memory."""
    pages = -(-context // memory.page_size)
    return min(memory.num_pages // pages, max_running_requests)


def _config_lines(config: ServerConfig) -> Iterator[str]:
    yield "Resolved configuration"
    values = config.to_public_dict()
    for options in FLAG_GROUPS.values():
        for flag in flags_of(options):
            if flag.works:
                yield f"  {flag.name} = {values[flag.name]}"


def _pool_lines(memory: MemoryPlan) -> Iterator[str]:
    rows = [
        ("pool", "units", "bytes a unit", "total"),
        (
            "full",
            f"{memory.num_pages} pages of {memory.page_size} tokens",
            str(memory.bytes_per_page),
            # The dummy page takes memory, too.
            format_size((memory.num_pages + 1) * memory.bytes_per_page),
        ),
        (
            "window",
            f"{memory.num_slots} request slots",
            str(memory.bytes_per_slot),
            format_size(memory.num_slots * memory.bytes_per_slot),
        ),
    ]
    yield f"Pools ({memory.reason.rstrip(',')})"
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield (
            "  "
            + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    yield f"  in all {format_size(memory.total_bytes)}"


def _engram_lines(config: ServerConfig, model: ModelConfig) -> Iterator[str]:
    shapes = table_shapes(model)
    if shapes:
        needed = memory_needed(
            shapes,
            EngramOptions(placement=config.engram_placement, cache_rows=config.engram_cache_size),
        )
        yield (
            f"Engram tables ({config.engram_placement}): {len(shapes)} with "
            f"{sum(shape.num_rows for shape in shapes)} rows of {shapes[0].row_bytes} bytes, "
            f"in all {format_size(needed)}"
        )


def _fit_lines(config: ServerConfig, model: ModelConfig, memory: MemoryPlan) -> Iterator[str]:
    yield f"Bytes per token: {memory.bytes_per_token:g}"
    yield f"Tokens in the pool: {memory.num_tokens}"
    yield f"Maximum concurrency (at most {config.max_running_requests} by --max-running-requests)"
    context_length = config.context_length or model.max_position_embeddings
    for name, context in CONTEXTS.items():
        count = max_concurrency(
            memory, context=context, max_running_requests=config.max_running_requests
        )
        note = (
            f"  (beyond the context length, {context_length})" if context > context_length else ""
        )
        yield f"  at {name:>4}: {count}{note}"
