"""The Prometheus registry of a server: counters of the API process and levels sent by the engine.

Names and labels are those of `serving.md` h.1, with the prefix `dsserve_`. Rates are counters, levels are
gauges. Counters that the engine keeps arrive as running totals and are advanced by their difference.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

if TYPE_CHECKING:
    from collections.abc import Mapping

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
        self.registry = CollectorRegistry()
        self._constant = {"model_name": model_name, "dp_rank": "0", "role": role}
        self._totals: dict[tuple[str, ...], float] = {}

        self.http_requests = Counter(
            "http_requests",
            "HTTP requests by route and status (499: the client left).",
            ("path", "status"),
            namespace=_PREFIX,
            registry=self.registry,
        )
        self.requests = self._counter("num_requests", "Requests that ended, for any reason.")
        self._aborted = self._counter("num_aborted_requests", "Requests aborted.", "reason")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of ended requests.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._cached_tokens = self._counter(
            "cached_tokens", "Prompt tokens whose KV was reused.", "tier"
        )
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _LATENCY_BUCKETS_S
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Between tokens of one request.", _LATENCY_BUCKETS_S
        )
        self.request_latency = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the end.", _LATENCY_BUCKETS_S
        )
        self.prompt_tokens_histogram = self._histogram(
            "prompt_tokens_histogram", "Prompt tokens per request.", _TOKEN_BUCKETS
        )
        self.generation_tokens_histogram = self._histogram(
            "generation_tokens_histogram", "Generated tokens per request.", _TOKEN_BUCKETS
        )
        self._engine = _EngineSeries(self)

    def count_cached(self, num_tokens: int, *, tier: str = "device") -> None:
        """Add prompt tokens that were served from a cache tier."""
        self._cached_tokens.labels(**self._constant, tier=tier).inc(num_tokens)

    def count_aborted(self, reason: str) -> None:
        """Count one aborted request."""
        self._aborted.labels(**self._constant, reason=reason).inc()

    def update_engine(self, stats: Mapping[str, Any]) -> None:
        """Take the engine's latest heartbeat; keys this version does not know are ignored."""
        self._engine.update(stats)

    def render(self) -> bytes:
        """Return the registry in Prometheus' text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Any:
        counter = Counter(
            name, text, (*_LABELS, *labels), namespace=_PREFIX, registry=self.registry
        )
        return counter if labels else counter.labels(**self._constant)

    def _gauge(self, name: str, text: str, *labels: str) -> Any:
        gauge = Gauge(name, text, (*_LABELS, *labels), namespace=_PREFIX, registry=self.registry)
        return gauge if labels else gauge.labels(**self._constant)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Any:
        return Histogram(
            name, text, _LABELS, namespace=_PREFIX, registry=self.registry, buckets=buckets
        ).labels(**self._constant)

    def _advance(self, counter: Any, total: float, **labels: str) -> None:
        """Bring a counter up to a running total; a smaller total means that the engine restarted."""
        key = (counter._name, *labels.values())
        increase = total - self._totals.get(key, 0.0)
        self._totals[key] = total
        if increase > 0:
            (counter.labels(**self._constant, **labels) if labels else counter).inc(increase)
