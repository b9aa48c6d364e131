"""Whether reading pages from disk beats computing them again, by what both took lately.

    fetching    (bytes already asked for + bytes wanted) / bandwidth + a fixed part
    computing   tokens wanted / tokens a millisecond of one sequence's prefill

Both rates are moving averages of what was seen: of reads, checksums included, and of prompts from
their admission to their commits, so a prefill that is busy with others counts as slow. While one
of them is not known, reading is tried. A bandwidth is believed for a minute: a disk that was busy
once gets another chance.
"""

from __future__ import annotations

from dataclasses import dataclass

FIXED_MS = 1.0
"""Of a fetch, whatever its size: two threads are woken, and the admission is decided anew."""
_BELIEVED_MS_MAX = 60_000
_WEIGHT = 0.25
"""Of the newest measurement."""


@dataclass(slots=True)
class FetchCost:
    """What was measured."""

    page_bytes: int
    page_size: int
    disk_bytes_per_ms: float = 0.0
    """0: not known."""
    prefill_tokens_per_ms: float = 0.0
    """0: not known."""
    _disk_ms: int = 0

    def read(self, pages: int, took_us: int, now_ms: int) -> None:
        """Reading ``pages`` took ``took_us``."""
        rate = 1_000 * pages * self.page_bytes / max(took_us, 1)
        self.disk_bytes_per_ms = _mean(self._disk_rate(now_ms), rate)
        self._disk_ms = now_ms

    def computed(self, tokens: int, took_ms: int) -> None:
        """Computing ``tokens`` of a prompt took ``took_ms``."""
        self.prefill_tokens_per_ms = _mean(self.prefill_tokens_per_ms, tokens / max(took_ms, 1))

    def fetch_ms(self, pages: int, ahead_pages: int, now_ms: int) -> float:
        """What fetching ``pages`` after ``ahead_pages`` others would take, as far as is known."""
        rate = self._disk_rate(now_ms)
        wanted_bytes = (pages + ahead_pages) * self.page_bytes
        return FIXED_MS + (wanted_bytes / rate if rate else 0.0)

    def compute_ms(self, pages: int) -> float:
        """What computing ``pages`` would take, as far as is known."""
        rate = self.prefill_tokens_per_ms
        return pages * self.page_size / rate if rate else 0.0

    def is_fetch_quicker(self, pages: int, ahead_pages: int, now_ms: int) -> bool:
        """Whether ``pages`` are to be fetched."""
        if not self.prefill_tokens_per_ms or not self._disk_rate(now_ms):
            return True
        return self.fetch_ms(pages, ahead_pages, now_ms) < self.compute_ms(pages)

    def _disk_rate(self, now_ms: int) -> float:
        return self.disk_bytes_per_ms if now_ms - self._disk_ms < _BELIEVED_MS_MAX else 0.0


def _mean(before: float, now: float) -> float:
    return now if not before else before + _WEIGHT * (now - before)
