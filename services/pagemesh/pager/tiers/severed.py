"""Finds what followed pages that are gone from disk, one record after the other.

A page may be followed by everything else on disk, so dropping all of that at once could hold up
everybody. Until a record is dropped, it does no harm: it can be found only through the page that is
gone, and if that page comes back, the record may as well stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pagemesh.pager.tiers.disk_shelves import Record, Shelf

DROPPED_MAX = 1_024


class Severed:
    """``shelves``: those in use, by root. Shelves of retired roots are freed as a whole."""

    def __init__(self, shelves: Mapping[bytes, Shelf]) -> None:
        self._shelves = shelves
        self._gone: list[tuple[Shelf, int]] = []
        """A stack of shelves and chain keys of pages that are gone."""

    def __bool__(self) -> bool:
        """Whether records may be left to drop."""
        return bool(self._gone)

    def add(self, shelf: Shelf, chain: int) -> None:
        """The page with the key ``chain`` is gone."""
        if chain in shelf.followers:
            self._gone.append((shelf, chain))

    def some(self, *, at_once: bool) -> Iterator[Record]:
        """Records to drop: as many as a turn has time for, or ``at_once`` all. The caller must drop
        each, and ``add`` it, before it takes the next."""
        left = DROPPED_MAX
        while self._gone and (left or at_once):
            shelf, chain = self._gone[-1]
            is_ours = self._shelves.get(shelf.root) is shelf
            if not is_ours or chain not in shelf.followers or chain in shelf.records:
                self._gone.pop()
                continue
            follower, is_last = shelf.followers.one_of(chain)
            if is_last:
                self._gone.pop()
            left -= 1
            yield shelf.records[follower]
