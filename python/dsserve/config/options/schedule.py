"""Launch flags of the group "Memory and schedule"."""

from __future__ import annotations

from dataclasses import dataclass

from dsserve.config.flag import LATER, Kind, option, switch

_MOST = 2**29 - 1
"""Largest count that the scheduler takes; sums of several still fit its 32 bits."""

_MOST_SECONDS = 1e9


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """Sizes of the pools and of a step, and the order of requests."""

    mem_fraction_static: float | None = option(
        None,
        "Part of the memory that weights and pools take.",
        since=1,
        kind=Kind.FLOAT,
        default_text="auto; on the CPU pools of 1GiB",
    )
    max_total_tokens: int | None = option(
        None,
        "Tokens that the KV pool holds.",
        since=1,
        kind=Kind.INT,
        minimum=1,
        default_text="auto: what fits the pool",
    )
    max_running_requests: int = option(
        256, "Requests that run at once.", since=1, kind=Kind.INT, minimum=1, maximum=65535
    )
    max_queued_requests: int | None = option(
        None,
        "Requests that may wait; more get a 503.",
        since=1,
        kind=Kind.INT,
        minimum=1,
        maximum=_MOST,
    )
    chunked_prefill_size: int | None = option(
        None,
        "Rows that one prefill step computes at most; -1 does not cut prompts.",
        since=1,
        kind=Kind.INT,
        minimum=-1,
        maximum=_MOST,
        default_text="auto: 1024 on the CPU",
    )
    max_prefill_tokens: int = option(
        16384, "New tokens of one prefill step.", since=1, kind=Kind.INT, minimum=1, maximum=_MOST
    )
    prefill_max_requests: int | None = option(
        None, "Requests of one prefill step.", since=3, kind=Kind.INT, minimum=1, maximum=_MOST
    )
    enable_mixed_chunk: bool = switch("Let decoding requests join prefill steps.", since=1)
    prefill_decode_interval: int = option(
        0,
        "Decode steps after each prefill step, at least.",
        since=1,
        kind=Kind.INT,
        minimum=0,
        maximum=_MOST,
    )
    enable_prefill_delayer: bool = switch("Hold prefills until all DP ranks have one.", since=LATER)
    prefill_delayer_max_delay_ms: float | None = option(
        None, "Longest such delay.", since=LATER, kind=Kind.FLOAT, minimum=0
    )
    schedule_policy: str = option(
        "fcfs",
        "Order of waiting requests: arrival, longest cached prefix, order of the prefix tree, waited "
        "per uncached token, fewest uncached tokens, longest output, or a seeded shuffle.",
        since=1,
        choices={
            "fcfs": 1,
            "lpm": 1,
            "dfs-weight": 3,
            "hrrn": 3,
            "shortest-prefill-first": 3,
            "lof": 3,
            "random": 3,
        },
    )
    schedule_conservativeness: float = option(
        1.0,
        "Factor on the output that admission expects of running requests.",
        since=1,
        kind=Kind.FLOAT,
    )
    enable_priority_scheduling: bool = switch("Order by the priority of a request.", since=3)
    priority_scheduling_preemption_threshold: int = option(
        10, "Priority difference that preempts.", since=3, kind=Kind.INT, minimum=0, maximum=_MOST
    )
    schedule_low_priority_values_first: bool = switch("Small values are urgent.", since=3)
    disable_priority_preemption: bool = switch("Order only, never preempt.", since=3)
    abort_on_priority_when_disabled: bool = switch(
        "Refuse requests that carry a priority while priorities are off.", since=3
    )
    retraction_policy: str = option(
        "length",
        "Who gives pages back first when memory is short: the shortest output, the least urgent, or "
        "whose pages cost the least to compute again.",
        since=1,
        choices={"length": 1, "priority": 1, "cost": 3},
    )
    retraction_backup: str = option(
        "none",
        "Where the KV of a retracted request goes.",
        since=1,
        choices={"none": 1, "host": LATER},
    )
    fair_by: str = option(
        "none",
        "Share the machine fairly over keys or users.",
        since=3,
        choices={"none": 3, "api_key": 3, "user": 3},
    )
    request_waiting_timeout: float = option(
        -1.0,
        "Seconds a request may wait.",
        since=3,
        kind=Kind.FLOAT,
        minimum=-1,
        maximum=_MOST_SECONDS,
        default_text="-1 = off",
    )
    request_running_timeout: float = option(
        -1.0,
        "Seconds a request may run.",
        since=3,
        kind=Kind.FLOAT,
        minimum=-1,
        maximum=_MOST_SECONDS,
        default_text="-1 = off",
    )
    prefill_max_defer: int = option(
        4,
        "Steps in a row that a half-done prompt may be paused, whatever asks for it.",
        since=3,
        kind=Kind.INT,
        minimum=0,
        maximum=_MOST,
    )
    inbatch_prefix_hold: int = option(
        2,
        "Steps that duplicates of a prompt wait for it.",
        since=3,
        kind=Kind.INT,
        minimum=0,
        maximum=_MOST,
    )
    max_overtake: int = option(
        512,
        "Requests that may overtake a waiting one.",
        since=3,
        kind=Kind.INT,
        minimum=1,
        maximum=_MOST,
    )
    allow_auto_truncate: bool = switch(
        "Cut the end of completion prompts that are too long; conversations are still refused.",
        since=3,
    )
    disable_overlap_schedule: bool = switch(
        "Wait for the result of a step before planning the next.", since=1
    )
    disable_consecutive_prefill_overlap: bool = switch("Do not overlap two prefill steps.", since=3)
    enable_two_batch_overlap: bool = switch("Interleave two half batches.", since=LATER)
    tbo_token_distribution_threshold: float = option(
        0.48,
        "Smallest share of a half batch.",
        since=LATER,
        kind=Kind.FLOAT,
        minimum=0,
        maximum=0.5,
    )
    page_size: int | None = option(
        None,
        "Tokens of one KV page: a power of two, 2 or more.",
        since=1,
        kind=Kind.INT,
        minimum=2,
        maximum=65536,
        default_text="128, or the window of the model where that is smaller",
    )
    swa_full_tokens_ratio: float | None = option(
        None,
        "Window pages per full page.",
        since=LATER,
        kind=Kind.FLOAT,
        minimum=0,
        default_text="auto",
    )
