"""A model of reuse: how likely idle pages are to be used again, given their kind and age.

Entries belong to a few *kinds*, and are weighted by their number of pages. For each kind the model
records at what age entries were used again or forgotten, and how many still wait. From these
follows the hazard of a use at each age, as in survival analysis: uses at that age, over entries
that were waiting then. Entries that still wait count too (as censored observations); otherwise
entries that live long would seem to be used often.

The worth of an entry is not its hazard now but the best rate of uses that waiting for some time can
yield (the index of Gittins, 1979): people take a minute to answer, so a page is worth more than
what will happen to it in the next second. Ranking cache entries by such learned rates, by age, is
the idea of hit density (Beckmann, Chen and Cidon, 2018).
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

_F64 = NDArray[np.float64]
_I64 = NDArray[np.int64]

AGE_BUCKETS: Final = 40
"""Two per octave, from a 256th of the pool to two thousand pools."""
COHORTS: Final = 64
"""Waiting entries are counted by when they began to wait, in eighths of a pool; the oldest cohort
includes all older entries."""
_UNITS_PER_POOL, _COHORTS_PER_POOL = 256, 8
_OUTCOMES_MAX = 16_384.0
"""In entries of mean weight. Beyond this all evidence is halved, so that the model adapts."""
_LATER = np.triu(np.ones((AGE_BUCKETS, AGE_BUCKETS)))
_PASSED = np.tri(AGE_BUCKETS, k=-1) + np.eye(AGE_BUCKETS) / 2
# An entry that ended in a bucket (row) spent half its width there and passed all before (columns).
_NUMBERS_MAX: Final = 3_072
"""Numbers that are recorded before they are counted: three or four per event of an entry."""
_FEW_ENTRIES = 20.0
"""A kind is judged like all others until about this many of its entries have reached an age."""


class ReuseModel:
    """Ages are in ticks, one for each page that becomes cached. ``page_count``: of the pool."""

    def __init__(self, kind_count: int, page_count: int) -> None:
        self._unit_ticks = max(1, page_count // _UNITS_PER_POOL)
        self._cohort_ticks = max(1, page_count // _COHORTS_PER_POOL)
        self._cohort = 0
        self._used = np.zeros((kind_count, AGE_BUCKETS))
        self._lost = np.zeros((kind_count, AGE_BUCKETS))
        self._waiting = np.zeros((kind_count, COHORTS))
        self._ended_pages = 0.0
        borders = _borders() * self._unit_ticks
        self._starts, self._widths = borders[:-1], np.diff(borders)
        self._passed = _PASSED * self._widths
        self.worth = [[0.0] * AGE_BUCKETS for _ in range(kind_count)]
        """Kind, age bucket -> uses per tick that keeping a page can yield, as of ``refresh``."""
        # Every request adds to these lists, so events are only recorded, and counted in batches. A
        # caller that cannot afford a call may append to them as ``enter``, ``use`` and ``lose`` do.
        self.entered: list[int] = []
        self.ended: list[int] = []
        self.lapsed: list[int] = []

    def bucket(self, age: int) -> int:
        """The index of the age bucket for ``age`` ticks."""
        units = age // self._unit_ticks
        if units < 2:
            return units
        bits = units.bit_length()
        found = 2 * bits - 2 + (units >> (bits - 2) & 1)
        return found if found < AGE_BUCKETS else AGE_BUCKETS - 1

    # Events of entries; ``since`` is the tick at which they began to wait

    def enter(self, kind: int, now: int, page_count: int) -> None:
        """``page_count`` pages of ``kind`` begin to wait."""
        self.entered += (kind, now, page_count)

    def use(self, kind: int, since: int, now: int, page_count: int) -> None:
        """``page_count`` waiting pages of ``kind`` are used."""
        self.ended += (kind, since, now, page_count)

    def lose(self, kind: int, since: int, now: int, page_count: int) -> None:
        """``page_count`` waiting pages of ``kind`` were not used, and are no longer observed."""
        self.lapsed += (kind, since, now, page_count)

    @property
    def is_full(self) -> bool:
        """Whether enough events are recorded that they should be counted."""
        return len(self.entered) + len(self.ended) + len(self.lapsed) > _NUMBERS_MAX

    def count(self) -> None:
        """Count the recorded events, together: one by one would take several times as long."""
        if self.entered:
            kinds, ticks, pages = _columns(self.entered, 3)
            self._advance(int(ticks.max()) // self._cohort_ticks)
            np.add.at(self._waiting, (kinds, self._places(ticks)), pages)
        for happened, ended in ((self.ended, self._used), (self.lapsed, self._lost)):
            if happened:
                kinds, since, ticks, pages = _columns(happened, 4)
                np.subtract.at(self._waiting, (kinds, self._places(since)), pages)
                buckets = np.searchsorted(self._starts, ticks - since, side="right") - 1
                np.add.at(ended, (kinds, buckets), pages)
                self._ended_pages += float(pages.sum())
            happened.clear()
        self.entered.clear()

    def waiting_pages(self) -> list[int]:
        """How many pages of each kind wait."""
        waiting: list[int] = np.rint(self._waiting.sum(1)).astype(np.int64).tolist()
        for kind, _, pages in _columns(self.entered, 3).T.tolist():
            waiting[kind] += pages
        for kind, _, _, pages in _columns(self.ended + self.lapsed, 4).T.tolist():
            waiting[kind] -= pages
        return waiting

    def _places(self, ticks: _I64) -> _I64:
        """The columns of ``_waiting`` for entries that began to wait at ``ticks``."""
        places: _I64 = np.maximum(ticks // self._cohort_ticks, self._cohort - COHORTS + 1) % COHORTS
        return places

    def refresh(self, now: int, entry_pages: float) -> None:
        """Compute ``worth`` from the events so far. ``entry_pages``: mean pages of an entry. Takes
        a fraction of a millisecond."""
        self.count()
        self._advance(now // self._cohort_ticks)
        used = self._used
        exposure = self._exposure(used + self._lost, now)
        hazard = self._hazard(used, exposure, _FEW_ENTRIES * entry_pages)
        seen = np.flatnonzero(exposure.any(1))
        for kind, rates in zip(seen.tolist(), self._best_rates(hazard[seen]).tolist(), strict=True):
            self.worth[kind] = rates
        if self._ended_pages > _OUTCOMES_MAX * entry_pages:
            self._used /= 2
            self._lost /= 2
            self._ended_pages /= 2

    def _exposure(self, ended: _F64, now: int) -> _F64:
        """Ticks times pages that each kind (rows) has spent at each age (columns), float64 [kinds,
        buckets]."""
        cohorts = np.arange(self._cohort - COHORTS + 1, self._cohort + 1)
        ages = np.maximum(0.0, now - (cohorts + 0.5) * self._cohort_ticks)
        spent = ages[:, None] - self._starts
        np.minimum(np.maximum(spent, 0.0, out=spent), self._widths, out=spent)
        waiting = self._waiting[:, cohorts % COHORTS]
        exposure: _F64 = ended @ self._passed + waiting @ spent
        return exposure

    def _hazard(self, used: _F64, exposure: _F64, few_pages: float) -> _F64:
        """Uses per tick and page, float64 [kinds, buckets]. Where a kind has little exposure, the
        hazard of all kinds at that age, times how much more this kind is used overall."""
        total = exposure.sum(0)
        common = np.divide(used.sum(0), total, out=np.zeros_like(total), where=total > 0)
        factor = (used.sum(1) + few_pages) / (exposure @ common + few_pages)
        few = few_pages * self._widths
        hazard: _F64 = (used + factor[:, None] * common * few) / (exposure + few)
        return hazard

    def _best_rates(self, hazard: _F64) -> _F64:
        """For an entry at the start of each bucket: expected uses over expected ticks, if it waits
        for a use, but at most to the end of this or a later bucket, whichever is best. float64
        [kinds, buckets]."""
        widths = self._widths
        chance = -np.expm1(-hazard * widths)
        alive = np.ones_like(hazard)
        alive[:, 1:] = np.maximum(np.cumprod(1 - chance, 1)[:, :-1], 1e-12)
        uses = alive * chance
        ticks = alive * np.where(hazard > 0, chance / np.maximum(hazard, 1e-300), widths)
        uses_until, ticks_until = np.cumsum(uses, 1), np.cumsum(ticks, 1)
        gain = uses_until[:, None, :] - (uses_until - uses)[:, :, None]
        spent = ticks_until[:, None, :] - (ticks_until - ticks)[:, :, None]
        # Ends before the start are excluded. In place, as these are by far the largest arrays.
        gain *= _LATER
        gain /= np.maximum(spent, 1e-300, out=spent)
        best: _F64 = gain.max(2)
        return best

    def _advance(self, cohort: int) -> None:
        steps = min(COHORTS, cohort - self._cohort)
        for fresh in range(cohort - steps + 1, cohort + 1):
            self._waiting[:, (fresh + 1) % COHORTS] += self._waiting[:, fresh % COHORTS]
            self._waiting[:, fresh % COHORTS] = 0.0  # the oldest joined the one after it
        self._cohort = max(self._cohort, cohort)


def _columns(happened: list[int], width: int) -> _I64:
    """int64 [width, entries]."""
    columns: _I64 = np.array(happened, np.int64).reshape(-1, width).T
    return columns


def _borders() -> _F64:
    """0, 1, 2, 3, 4, 6, 8, 12, ...: where age buckets begin and end, in units."""
    octaves = np.exp2(np.arange(1, AGE_BUCKETS // 2 + 1))
    return np.concatenate([[0.0, 1.0], np.stack([octaves, 1.5 * octaves], 1).ravel()])[
        : AGE_BUCKETS + 1
    ]
