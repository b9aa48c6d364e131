"""How many stored pages to fetch rather than compute again, by what both have cost lately.

    fetching    (bytes already asked for + bytes wanted) / bandwidth + a fixed part
    computing   tokens wanted / tokens per millisecond of one sequence's prefill

Pages in memory come many times faster than pages that are only on disk, so each medium has a
bandwidth of its own, and the first pages of a run may be worth fetching when the rest are not:

    pages of a run    memory memory memory disk disk     fetched: up to where most is saved
    saved so far        +7     +14    +21   +18  +15                         ^

All rates are moving averages of measurements: of reads, checksums included, and of prompts from
their admission to their commits, so a prefill worker that is busy with others counts as slow. While
a rate that is needed is not known, pages are fetched. A bandwidth is believed for a minute: a disk
that was busy once gets another chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from pagemesh.pager.tiers.recent_slots import RecentSlots
from pagemesh.pager.tiers.tier_events import PagesLoaded

FIXED_MS = 1.0
"""The fixed part of a fetch: two threads are woken, and the admission is decided again."""
_BELIEVED_MS_MAX = 60_000
_WEIGHT = 0.25
"""Of the newest measurement."""


@dataclass(slots=True)
class Bandwidth:
    """The bandwidth of reads from one medium."""

    read_bytes_per_ms: float = 0.0
    """0: not known."""
    _measured_ms: int = 0

    def measured(self, read_bytes: int, took_us: int, now_ms: int) -> None:
        """Reading ``read_bytes`` took ``took_us``."""
        rate = 1_000 * read_bytes / max(took_us, 1)
        self.read_bytes_per_ms = _mean(self.believed(now_ms), rate)
        self._measured_ms = now_ms

    def believed(self, now_ms: int) -> float:
        """Bytes a millisecond; 0: not known, or too long ago."""
        return self.read_bytes_per_ms if now_ms - self._measured_ms < _BELIEVED_MS_MAX else 0.0


class FetchCost:
    """The rates measured. ``memory_pages``: how many pages, those written or read last, are in
    memory as well."""

    def __init__(self, page_bytes: int, page_size: int, memory_pages: int = 0) -> None:
        self._page_bytes, self._page_size = page_bytes, page_size
        self.disk, self.memory = Bandwidth(), Bandwidth()
        self.prefill_tokens_per_ms = 0.0
        """0: not known."""
        self.recent = RecentSlots(memory_pages)
        """Which slots should be in memory."""
        self._loading: dict[int, tuple[int, int]] = {}
        """By load: its pages in memory, and on disk alone."""

    def begun(self, load: int, slots: Sequence[int]) -> None:
        """``load`` is going to read ``slots``."""
        in_memory = sum(map(self.recent.__contains__, slots))
        self._loading[load] = in_memory, len(slots) - in_memory

    def loaded(self, event: PagesLoaded, slots: Sequence[int], now_ms: int) -> None:
        """A load is over, and has read ``slots``."""
        del self._loading[event.load]
        self.recent.used(slots)
        disk_count = len(slots) - event.memory_count
        if event.memory_count:
            memory_bytes = event.memory_count * self._page_bytes
            self.memory.measured(memory_bytes, event.memory_us, now_ms)
        if disk_count:
            disk_us = event.read_us - event.memory_us
            self.disk.measured(disk_count * self._page_bytes, disk_us, now_ms)

    def computed(self, tokens: int, took_ms: int) -> None:
        """Computing ``tokens`` of a prompt took ``took_ms``."""
        self.prefill_tokens_per_ms = _mean(self.prefill_tokens_per_ms, tokens / max(took_ms, 1))

    def pages_worth(self, slots: Sequence[int], now_ms: int) -> int:
        """How many of the pages in ``slots``, a run from its start, are to be fetched."""
        rate = self.prefill_tokens_per_ms
        compute_ms = self._page_size / rate if rate else 0.0
        in_memory = [slot in self.recent for slot in slots]
        media = ((self.memory, True), (self.disk, False))
        rates = {here: medium.believed(now_ms) for medium, here in media if here in in_memory}
        if not compute_ms or not all(rates.values()):
            return len(slots)
        page_ms = {here: self._page_bytes / rate for here, rate in rates.items()}
        saved_ms = list(accumulate(compute_ms - page_ms[here] for here in in_memory))
        most_ms = max(saved_ms)
        if most_ms <= FIXED_MS + self._ahead_ms(now_ms):
            return 0
        return saved_ms.index(most_ms) + 1

    def _ahead_ms(self, now_ms: int) -> float:
        """How long the loads that have begun will take, as far as is known."""
        rates = self.memory.believed(now_ms), self.disk.believed(now_ms)
        pages = map(sum, zip((0, 0), *self._loading.values(), strict=True))
        return sum(
            count * self._page_bytes / rate
            for count, rate in zip(pages, rates, strict=True)
            if rate
        )


def _mean(before: float, now: float) -> float:
    return now if not before else before + _WEIGHT * (now - before)
