"""The Prometheus registry of a server: counters of the API process and levels sent by the engine.

Names and labels are those of `serving.md` h.1, with the prefix `dsserve_`. Rates are counters, levels are
gauges. Counters that the engine keeps arrive as running totals and are advanced by their difference.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import HistogramMetricFamily, SummaryMetricFamily
from prometheus_client.registry import Collector

from dsserve.observe.speculation import SpeculationCollector

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prometheus_client.metrics_core import Metric

logger = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_PREFIX = "dsserve"
_LABELS = ("model_name", "dp_rank", "role")
_LATENCY_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
    *(30.0, 60.0, 120.0, 300.0, 600.0),
)
_TOKEN_BUCKETS = tuple(float(1 << exponent) for exponent in range(21))


class Metrics:
    """All series of one server.

    Args:
        model_name: Value of the label `model_name`.
        role: Value of the label `role`.
    """

    def __init__(self, *, model_name: str, role: str = "unified") -> None:
        # A second series per counter that nobody reads.
        disable_created_metrics()  # type: ignore[no-untyped-call]  # not annotated there
        self.registry = CollectorRegistry()
        self._constant = {"model_name": model_name, "dp_rank": "0", "role": role}

        self.http_requests = Counter(
            "http_requests",
            "HTTP requests by route and status (499: the client left).",
            ("path", "status"),
            namespace=_PREFIX,
            registry=self.registry,
        )
        self.requests = self.counter("num_requests", "Requests that ended, for any reason.")
        self._aborted = self.counter("num_aborted_requests", "Requests aborted.", "reason")
        self.prompt_tokens = self.counter("prompt_tokens", "Prompt tokens of ended requests.")
        self.generation_tokens = self.counter("generation_tokens", "Tokens generated.")
        self._cached_tokens = self.counter(
            "cached_tokens", "Prompt tokens whose KV was reused.", "tier"
        )
        self.time_to_first_token = self.histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _LATENCY_BUCKETS_S
        )
        self.inter_token_latency = self.histogram(
            "inter_token_latency_seconds", "Between tokens of one request.", _LATENCY_BUCKETS_S
        )
        self.request_latency = self.histogram(
            "e2e_request_latency_seconds", "From arrival to the end.", _LATENCY_BUCKETS_S
        )
        self.prompt_tokens_histogram = self.histogram(
            "prompt_tokens_histogram", "Prompt tokens per request.", _TOKEN_BUCKETS
        )
        self.generation_tokens_histogram = self.histogram(
            "generation_tokens_histogram", "Generated tokens per request.", _TOKEN_BUCKETS
        )
        self._engine = _EngineSeries(self)

    @property
    def constant_labels(self) -> dict[str, str]:
        """The labels that every series of the engine has."""
        return self._constant

    def count_cached(self, num_tokens: int, *, tier: str = "device") -> None:
        """Add prompt tokens that were served from a cache tier."""
        self._cached_tokens.labels(**self._constant, tier=tier).inc(num_tokens)

    def count_aborted(self, reason: str) -> None:
        """Count one aborted request."""
        self._aborted.labels(**self._constant, reason=reason).inc()

    def update_engine(self, stats: Mapping[str, Any], *, max_tokens: int) -> None:
        """Take the engine's latest heartbeat; keys this version does not know are ignored.

        Args:
            stats: Levels and running totals.
            max_tokens: Tokens that the KV pages hold.
        """
        self._engine.update(stats, max_tokens)

    def render(self) -> bytes:
        """Return the registry in Prometheus' text format."""
        return generate_latest(self.registry)

    def counter(self, name: str, text: str, *labels: str) -> Any:
        """Register a counter; without labels of its own it is ready to count."""
        counter = Counter(
            name, text, (*_LABELS, *labels), namespace=_PREFIX, registry=self.registry
        )
        return counter if labels else counter.labels(**self._constant)

    def gauge(self, name: str, text: str, *labels: str) -> Any:
        """Register a gauge; without labels of its own it is ready to be set."""
        gauge = Gauge(name, text, (*_LABELS, *labels), namespace=_PREFIX, registry=self.registry)
        return gauge if labels else gauge.labels(**self._constant)

    def histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Any:
        """Register a histogram with fixed buckets."""
        return Histogram(
            name, text, _LABELS, namespace=_PREFIX, registry=self.registry, buckets=buckets
        ).labels(**self._constant)


# Heartbeat key -> counter name, its text, its own labels.
_ENGINE_COUNTERS: dict[str, tuple[str, str, dict[str, str]]] = {
    "retracted_total": ("num_retracted_reqs", "Times a running request gave its pages back.", {}),
    "encoder_replay_rows_total": (
        "replayed_tokens",
        "Cached tokens computed again to rebuild window state, and tail rows.",
        {"kind": "encoder"},
    ),
    "decoder_tail_rows_total": ("replayed_tokens", "", {"kind": "decoder"}),
    "prefill_tokens_total": ("realtime_tokens", "Rows computed, by mode.", {"mode": "prefill"}),
    "generated_tokens_total": ("realtime_tokens", "", {"mode": "decode"}),
    "prefill_steps_total": ("steps", "Steps launched, by kind.", {"kind": "prefill"}),
    "decode_steps_total": ("steps", "", {"kind": "decode"}),
    "verify_steps_total": ("steps", "", {"kind": "verify"}),
    "preempted_total": (
        "num_preempted_reqs",
        "Times a running request gave way to a more urgent one.",
        {},
    ),
    "draft_tokens_total": (
        "spec_draft_tokens",
        "Draft tokens that steps had for verification.",
        {},
    ),
    "evicted_pages_total": (
        "evicted_pages",
        "Pages dropped from the prefix cache.",
        {"component": "full", "tier": "device"},
    ),
    "rejected_total": ("num_rejected_requests", "Requests that the scheduler refused.", {}),
    "no_progress_passes": ("no_progress_passes", "Passes in which nothing could be planned.", {}),
}
_POOL_STATES = ("free", "evictable", "locked", "private", "quarantined")


class _EngineSeries:
    """Series whose values come with heartbeats."""

    def __init__(self, metrics: Metrics) -> None:
        self._constant = metrics.constant_labels
        self._running = metrics.gauge("num_running_reqs", "Requests with a slot.")
        self._queued = metrics.gauge("num_queue_reqs", "Requests that wait.", "queue")
        self._new_token_ratio = metrics.gauge(
            "new_token_ratio", "Share of the output limits that admission reserves."
        )
        self._pools = metrics.gauge("pool_units", "Units of each pool by state.", "pool", "state")
        self._token_usage = metrics.gauge("token_usage", "Share of the KV pages in use.")
        self._max_tokens = metrics.gauge("max_total_num_tokens", "Tokens the KV pages hold.")
        self._stages = metrics.counter(
            "scheduler_stage_seconds", "Seconds the step loop spent, by stage.", "stage"
        )
        self._engram = _EngramSeries(metrics)
        self._summaries = _SummaryCollector(self._constant)
        metrics.registry.register(self._summaries)
        self._speculation = SpeculationCollector(_PREFIX, self._constant)
        metrics.registry.register(self._speculation)
        self._counters: dict[str, Any] = {}
        self._totals: dict[str, float] = {}
        by_name: dict[str, Any] = {}
        for key, (name, text, labels) in _ENGINE_COUNTERS.items():
            if name not in by_name:
                by_name[name] = metrics.counter(name, text, *labels)
            self._counters[key] = (
                by_name[name].labels(**self._constant, **labels) if labels else by_name[name]
            )

    def update(self, stats: Mapping[str, Any], max_tokens: int) -> None:
        self._max_tokens.set(max_tokens)
        if "num_running" in stats:
            self._running.set(stats["num_running"])
        if "num_waiting" in stats:
            self._queued.labels(**self._constant, queue="waiting").set(stats["num_waiting"])
        if "new_token_ratio" in stats:
            self._new_token_ratio.set(stats["new_token_ratio"])
        for key, counter in self._counters.items():
            if key in stats:
                self._advance(key, counter, float(stats[key]))
        for pool in stats.get("pools", ()):
            self._update_pool(pool)
        for stage, seconds in stats.get("scheduler_stage_seconds", {}).items():
            counter = self._stages.labels(**self._constant, stage=stage)
            self._advance(f"stage {stage}", counter, float(seconds))
        self._engram.update(stats.get("engram", {}))
        self._summaries.stats = stats
        self._speculation.totals = stats.get("speculation", {})

    def _advance(self, key: str, counter: Any, total: float) -> None:
        """Bring a counter up to a running total."""
        increase = total - self._totals.get(key, 0.0)
        self._totals[key] = total
        if increase > 0:
            counter.inc(increase)

    def _update_pool(self, pool: Mapping[str, Any]) -> None:
        name = str(pool["name"])
        for state in _POOL_STATES:
            if state in pool:
                self._pools.labels(**self._constant, pool=name, state=state).set(pool[state])
        if name == "full" and pool.get("capacity"):
            idle = pool.get("free", 0) + pool.get("evictable", 0)
            self._token_usage.set(1.0 - idle / pool["capacity"])


class _EngramSeries:
    """Look-ups of Engram rows; the cache's hit rate is hits over both results."""

    def __init__(self, metrics: Metrics) -> None:
        self._constant = metrics.constant_labels
        self._rows = metrics.counter(
            "engram_rows", "Engram rows that steps looked up.", "placement"
        )
        self._cache_rows = metrics.counter(
            "engram_cache_rows",
            "Distinct Engram rows of each step, by whether the hot-row cache held them before it.",
            "result",
        )
        self._peer_bytes = metrics.counter(
            "engram_peer_bytes", "Bytes of Engram rows read from the parts of other ranks."
        )
        self._totals: dict[str, float] = {}

    def update(self, totals: Mapping[str, Any]) -> None:
        if not totals:
            return
        placement = str(totals["placement"])
        self._advance("rows", self._rows.labels(**self._constant, placement=placement), totals)
        for key, result in (("cache_hits", "hit"), ("cache_misses", "miss")):
            self._advance(key, self._cache_rows.labels(**self._constant, result=result), totals)
        self._advance("peer_bytes", self._peer_bytes, totals)

    def _advance(self, key: str, counter: Any, totals: Mapping[str, Any]) -> None:
        increase = float(totals[key]) - self._totals.get(key, 0.0)
        self._totals[key] = float(totals[key])
        if increase > 0:
            counter.inc(increase)


class _SummaryCollector(Collector):
    """Sums, counts and buckets that the engine keeps."""

    def __init__(self, constant: Mapping[str, str]) -> None:
        self._constant = constant
        self.stats: Mapping[str, Any] = {}

    def collect(self) -> Iterator[Metric]:
        """Return the newest values."""
        family = SummaryMetricFamily(
            f"{_PREFIX}_step_seconds",
            "Seconds of the steps on the device, by kind.",
            labels=[*_LABELS, "kind"],
        )
        for kind, total in self.stats.get("step_seconds", {}).items():
            values = [*self._constant.values(), kind]
            family.add_metric(values, count_value=total["count"], sum_value=total["sum"])
        yield family
        yield self._host_gaps()
        yield self._engram_reads()
        family = SummaryMetricFamily(
            f"{_PREFIX}_queue_time_seconds", "From arrival to first admission.", labels=_LABELS
        )
        if "queue_time_us_total" in self.stats:
            family.add_metric(
                list(self._constant.values()),
                count_value=int(self.stats.get("admitted_total", 0)),
                sum_value=self.stats["queue_time_us_total"] * 1e-6,
            )
        yield family

    def _engram_reads(self) -> SummaryMetricFamily:
        """Time of the staging thread in tables that are not in the device's memory."""
        family = SummaryMetricFamily(
            f"{_PREFIX}_engram_host_read_seconds",
            "Seconds of the look-ups that went to an Engram table in host memory.",
            labels=_LABELS,
        )
        totals = self.stats.get("engram", {})
        if totals.get("reads"):
            family.add_metric(
                list(self._constant.values()),
                count_value=totals["reads"],
                sum_value=totals["read_s"],
            )
        return family

    def _host_gaps(self) -> HistogramMetricFamily:
        """The host's time on the critical path of each step: what the device waited for it."""
        gaps = HistogramMetricFamily(
            f"{_PREFIX}_host_gap_seconds",
            "Seconds in which the device waited for the next step.",
            labels=[*_LABELS, "kind"],
        )
        for kind, total in self.stats.get("host_gap_seconds", {}).items():
            count, buckets = 0, []
            for end_s, more in total.get("buckets", ()):
                count += more
                buckets.append((repr(float(end_s)), count))
            buckets.append(("+Inf", total["count"]))
            gaps.add_metric(
                [*self._constant.values(), kind], buckets=buckets, sum_value=total["sum"]
            )
        return gaps
