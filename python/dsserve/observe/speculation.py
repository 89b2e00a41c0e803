"""Series of speculative decoding, from what the engine counts (`serving.md` h.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from prometheus_client.metrics_core import Metric


class SpeculationCollector(Collector):
    """Lengths with the anchor, or the token behind the accepted drafts, in them: 1 is a verification that took none.

    Args:
        prefix: Before each name.
        constant: Labels of every series.
    """

    def __init__(self, prefix: str, constant: Mapping[str, str]) -> None:
        self._prefix, self._constant = prefix, constant
        self.totals: Mapping[str, Any] = {}

    def collect(self) -> Iterator[Metric]:
        """Return the newest values."""
        verify_lens: list[int] = self.totals.get("verify_lens", [])
        accept_lens: list[int] = self.totals.get("accept_lens", [])
        yield self._counter(
            "spec_verify_calls", "Times that drafts of a request were verified.", sum(verify_lens)
        )
        yield self._counter(
            "spec_verified_tokens",
            "Draft tokens that the target looked at.",
            sum(length * count for length, count in enumerate(verify_lens)),
        )
        accepted = CounterMetricFamily(
            f"{self._prefix}_spec_accepted_tokens",
            "Draft tokens accepted, by their place in the block.",
            labels=[*self._constant, "position"],
        )
        for position in range(1, len(accept_lens)):
            labels = [*self._constant.values(), str(position)]
            accepted.add_metric(labels, sum(accept_lens[position:]))
        yield accepted
        yield self._histogram(
            "spec_accept_length", "Accepted drafts and the token behind them.", accept_lens
        )
        yield self._histogram("spec_verify_len", "The anchor and the drafts verified.", verify_lens)

    def _counter(self, name: str, text: str, value: int) -> CounterMetricFamily:
        family = CounterMetricFamily(f"{self._prefix}_{name}", text, labels=[*self._constant])
        family.add_metric([*self._constant.values()], value)
        return family

    def _histogram(self, name: str, text: str, counts: Sequence[int]) -> HistogramMetricFamily:
        """A histogram with a bucket for each length; `counts` start with length 1."""
        family = HistogramMetricFamily(f"{self._prefix}_{name}", text, labels=[*self._constant])
        if counts:
            total, buckets = 0, []
            for index, count in enumerate(counts):
                total += count
                buckets.append((str(float(index + 1)), total))
            buckets.append(("+Inf", total))
            length = sum((index + 1) * count for index, count in enumerate(counts))
            family.add_metric([*self._constant.values()], buckets=buckets, sum_value=length)
        return family
