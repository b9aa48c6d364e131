"""The free pages of a pool, kept so that most grants are one contiguous run.

Longer runs lie on a stack of their own, from the top of which grants for prompts are cut. Single
pages and short runs, as growing answers leave them, lie on a second stack that serves small
grants, so that these do not fragment the long runs. ``tidy`` joins adjacent pages into runs.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from pagemesh.pager.pages.runs import Pages, Run, first_of, run_of, table_of
from pagemesh.wire.tokens import U32

_Borders = NDArray[np.int64]
RUN_PAGES_MIN: Final = 8
_LOOK_RUNS_MAX: Final = 4
_TIDY_PAGES_MAX = 1 << 14
_TIDY_RUNS_MAX = 1 << 10


class FreePages:
    """``count`` free pages. The ledger ensures that no page is pushed twice."""

    __slots__ = ("_odd", "_odd_count", "_runs", "_untidy", "count")

    def __init__(self, page_count: int) -> None:
        """Start with all of ``page_count`` pages free."""
        self.count = page_count
        # The top of each stack is its end.
        self._runs = [Run(0, page_count)] if page_count else []
        self._odd: U32 = np.empty(page_count, "<u4")
        self._odd_count = 0
        self._untidy = False

    def reset(self, pages: U32) -> None:
        """Make ``pages``, ascending, the only free pages. Low ones are given out first."""
        self.count, self._runs, self._odd_count = len(pages), [], 0
        self._put(*_pieces(pages))

    def push(self, pages: Pages) -> None:
        """Add ``pages``."""
        count = len(pages)
        if not count:
            return
        self.count += count
        self._untidy = True
        if isinstance(pages, Run) and count >= RUN_PAGES_MIN:
            self._runs.append(pages)
            return
        if count == 1:
            self._odd[self._odd_count] = first_of(pages)
        else:
            self._odd[self._odd_count : self._odd_count + count] = table_of(pages)[::-1]
        self._odd_count += count

    def pop(self, count: int) -> Pages:
        """Remove and return ``count`` pages, ascending; there must be that many."""
        self.count -= count
        if count < RUN_PAGES_MIN and self._odd_count >= count:
            if count == 1:  # the most frequent case: an answer grows
                self._odd_count = at = self._odd_count - 1
                return Run(page := self._odd.item(at), page + 1)
            return run_of(np.sort(self._pop_odd(count)))
        runs = self._runs
        for index in range(-1, -1 - min(len(runs), _LOOK_RUNS_MAX), -1):
            run = runs[index]
            cut = run.start + count
            if cut < run.stop:  # usually true of the first run that is tried
                runs[index] = Run(cut, run.stop)
                return Run(run.start, cut)
            if cut == run.stop:
                del runs[index]
                return run
        return self._gather(count)

    def tidy(self) -> None:
        """Join pages at the top of both stacks into longer runs, and leave low pages on top."""
        if not self._untidy or not self.count:
            return
        self._untidy = False
        odd = np.sort(self._pop_odd(min(self._odd_count, _TIDY_PAGES_MAX)))
        runs = self._runs[-_TIDY_RUNS_MAX:]
        del self._runs[-_TIDY_RUNS_MAX:]
        starts, stops = _pieces(odd)
        starts = np.concatenate([starts, np.array([run.start for run in runs], np.int64)])
        stops = np.concatenate([stops, np.array([run.stop for run in runs], np.int64)])
        order = np.argsort(starts)
        starts, stops = starts[order], stops[order]
        apart = starts[1:] != stops[:-1]
        self._put(starts[np.append(True, apart)], stops[np.append(apart, True)])

    def table(self) -> U32:
        """Every free page, in no particular order."""
        return np.concatenate([*map(table_of, self._runs), self._odd[: self._odd_count]])

    def _pop_odd(self, count: int) -> U32:
        self._odd_count -= count
        return self._odd[self._odd_count : self._odd_count + count]

    def _gather(self, count: int) -> Pages:
        """Remove and return ``count`` pages that no single run has."""
        parts: list[U32] = []
        while count and self._runs:
            run = self._runs.pop()
            taken = min(len(run), count)
            if taken < len(run):
                self._runs.append(Run(run.start + taken, run.stop))
            parts.append(table_of(Run(run.start, run.start + taken)))
            count -= taken
        parts.append(self._pop_odd(count))
        return run_of(np.sort(np.concatenate(parts)))

    def _put(self, starts: _Borders, stops: _Borders) -> None:
        """Push runs ``[start, stop)``, which ascend, so that the lowest ends on top."""
        counts = stops - starts
        long = counts >= RUN_PAGES_MIN
        borders = zip(starts[long].tolist(), stops[long].tolist(), strict=True)
        self._runs += [Run(*border) for border in borders][::-1]
        starts, counts = starts[~long], counts[~long]
        firsts = np.repeat(starts - np.cumsum(counts) + counts, counts)
        odd = (firsts + np.arange(len(firsts)))[::-1]
        self._odd[self._odd_count : self._odd_count + len(odd)] = odd
        self._odd_count += len(odd)


def _pieces(pages: U32) -> tuple[_Borders, _Borders]:
    """The starts and stops of the runs in ``pages``, which ascend."""
    if not len(pages):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    apart = np.diff(pages) != 1
    ascending = pages.astype(np.int64)
    return ascending[np.append(True, apart)], ascending[np.append(apart, True)] + 1
