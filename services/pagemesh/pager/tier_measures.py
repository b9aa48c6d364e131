"""The disk tier's Prometheus metrics."""

from __future__ import annotations

from dataclasses import asdict, replace

from pagemesh.pager.measures import evicted_pages
from pagemesh.pager.tiers.disk_tier import DiskTier
from pagemesh.pager.tiers.tier_counts import REASONS, TierCounts
from pagemesh.runtime import metrics

_on = metrics.gauge("pager_disk_on", "1 while the disk tier is on.")
_slots = metrics.gauge("pager_disk_slots", "Page slots of the disk tier.", ["state"])
_moved = metrics.counter("pager_disk_pages_total", "Pages of the disk tier, by fate.", ["fate"])
_rates = metrics.gauge(
    "pager_fetch_rates",
    "Rates by which the pager chooses between reading from disk and recomputing; 0: not measured.",
    ["rate"],
)
_failures = metrics.counter(
    "pager_disk_failures_total", "Times the disk tier was turned off after a failure."
)


def _rates_of(disk: DiskTier | None) -> dict[str, float]:
    cost = disk.cost if disk is not None else None
    per_ms = {
        "disk_bytes": cost.disk.read_bytes_per_ms if cost else 0,
        "memory_bytes": cost.memory.read_bytes_per_ms if cost else 0,
        "prefill_tokens": cost.prefill_tokens_per_ms if cost else 0,
    }
    return {f"{name}_per_second": 1_000 * rate for name, rate in per_ms.items()}


class TierMeasures:
    """Gauges and counters of one pager life; counters continue across lives."""

    def __init__(self) -> None:
        self._counts = self._before = TierCounts()
        """The counts of the tier that was seen last, and those already added to the metrics."""

    def failed(self) -> None:
        """The disk tier was given up."""
        _failures.inc()

    def sample(self, disk: DiskTier | None) -> None:
        """A few times a second."""
        _on.set(0 if disk is None else 1)
        used, slots = (disk.page_count, disk.slot_count) if disk is not None else (0, 0)
        _slots.labels("used").set(used)
        _slots.labels("free").set(slots - used)
        for name, rate in _rates_of(disk).items():
            _rates.labels(name).set(rate)
        if disk is not None:
            self._counts = disk.counts
        self._tell()  # after it was given up: what happened before

    def _tell(self) -> None:
        for fate, count in asdict(self._counts).items():
            more = count - getattr(self._before, fate)
            _moved.labels(fate).inc(more)
            if fate in REASONS:
                evicted_pages.labels("disk", REASONS[fate]).inc(more)
        self._before = replace(self._counts)
