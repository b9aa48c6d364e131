"""Damaged pages on disk: which prefixes lost them, and when the disk is given up.

A damaged page is forgotten with all that follows it, and computed again. A disk on which that keeps
happening costs each request a read before it computes, and nobody knows what else it has lost: it
is given up.

    the last 64 loads     . . . X . . X . . . . X . . .      X: it found a damaged page
                          off once more than 8 of them did
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

LOADS_WATCHED = 64
DAMAGED_LOADS_MAX = 8
"""How many of those may find damage."""
_RUNS_MAX = 256
"""Lost runs of pages that are remembered; the oldest is forgotten first."""


class Damage:
    """The damage of one pager life."""

    def __init__(self) -> None:
        self._loads: deque[bool] = deque(maxlen=LOADS_WATCHED)
        """Whether each of the last loads found damage."""
        self._runs: OrderedDict[tuple[bytes, int], tuple[int, ...]] = OrderedDict()
        """By root and first page: the chain keys of pages that were lost together."""

    @property
    def load_count(self) -> int:
        """How many of the last loads are watched."""
        return len(self._loads)

    @property
    def damaged_count(self) -> int:
        """How many of them found damage."""
        return sum(self._loads)

    @property
    def is_too_much(self) -> bool:
        """Whether the disk is not to be relied on."""
        return self.damaged_count > DAMAGED_LOADS_MAX

    @property
    def has_runs(self) -> bool:
        """Whether any lost run is remembered."""
        return bool(self._runs)

    def loaded(self, *, is_damaged: bool) -> None:
        """A load is over."""
        self._loads.append(is_damaged)

    def lost(self, root: bytes, chains: Sequence[int]) -> None:
        """A run of pages, from the damaged one on, cannot be found any more."""
        self._runs[root, chains[0]] = tuple(chains)
        if len(self._runs) > _RUNS_MAX:
            self._runs.popitem(last=False)

    def mended(self, root: bytes, chains: Iterable[int]) -> None:
        """These pages were computed again and go to disk again: forget that they were lost."""
        if self._runs:
            for chain in chains:
                self._runs.pop((root, chain), None)

    def lost_pages(self, root: bytes, chains: Iterable[int]) -> int:
        """How many of ``chains``, from the first on, were lost together."""
        run: tuple[int, ...] = ()
        count = 0
        for chain in chains:
            if not count:
                run = self._runs.get((root, chain), ())
            if count == len(run) or run[count] != chain:
                break
            count += 1
        return count
