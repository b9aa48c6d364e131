"""What the disk tier shows to Prometheus."""

from __future__ import annotations

from dataclasses import asdict, replace

from pagemesh.pager.measures import evicted_pages
from pagemesh.pager.tiers.disk_tier import DiskTier
from pagemesh.pager.tiers.tier_counts import REASONS, TierCounts
from pagemesh.runtime import metrics

_on = metrics.gauge("pager_disk_on", "1 while pages are kept on disk.")
_slots = metrics.gauge("pager_disk_slots", "Slots for pages on disk.", ["state"])
_moved = metrics.counter(
    "pager_disk_pages_total", "Pages by what became of them in the disk tier.", ["fate"]
)
_rates = metrics.gauge(
    "pager_fetch_rates", "What the choice to read from disk goes by; 0: not measured.", ["rate"]
)
_failures = metrics.counter("pager_disk_failures_total", "Times that the disk tier was given up.")


class TierMeasures:
    """Gauges and counters of one pager life; counters go on over lives."""

    def __init__(self) -> None:
        self._counts = self._before = TierCounts()
        """Of the tier that was seen last, and what of that was told."""

    def failed(self) -> None:
        """The disk tier was given up."""
        _failures.inc()

    def sample(self, disk: DiskTier | None) -> None:
        """A few times a second."""
        _on.set(0 if disk is None else 1)
        if disk is None:
            for state in ("used", "free"):
                _slots.labels(state).set(0)
            self._tell()  # what happened before it was given up
            return
        _slots.labels("used").set(disk.page_count)
        _slots.labels("free").set(disk.slot_count - disk.page_count)
        _rates.labels("disk_bytes_per_second").set(1_000 * disk.cost.disk.read_bytes_per_ms)
        _rates.labels("memory_bytes_per_second").set(1_000 * disk.cost.memory.read_bytes_per_ms)
        _rates.labels("prefill_tokens_per_second").set(1_000 * disk.cost.prefill_tokens_per_ms)
        self._counts = disk.counts
        self._tell()

    def _tell(self) -> None:
        for fate, count in asdict(self._counts).items():
            more = count - getattr(self._before, fate)
            _moved.labels(fate).inc(more)
            if fate in REASONS:
                evicted_pages.labels("disk", REASONS[fate]).inc(more)
        self._before = replace(self._counts)
