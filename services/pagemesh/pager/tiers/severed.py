"""What followed pages that are gone from disk, one record after the other.

A page may be followed by all there is, so that to drop that at once could hold up everybody. Until
it was dropped it stays where it is: it is found only by way of the page that is gone, and if that
is there again it may as well stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pagemesh.pager.tiers.disk_shelves import Record, Shelf

DROPPED_MAX = 1_024


class Severed:
    """``shelves``: those in use, by root. What followed on others is theirs to free."""

    def __init__(self, shelves: Mapping[bytes, Shelf]) -> None:
        self._shelves = shelves
        self._gone: list[tuple[Shelf, int]] = []
        """Chain keys of what is gone; the last is gone through first."""

    def __bool__(self) -> bool:
        """Whether something may be left to drop."""
        return bool(self._gone)

    def add(self, shelf: Shelf, chain: int) -> None:
        """``chain`` is gone."""
        if chain in shelf.followers:
            self._gone.append((shelf, chain))

    def some(self, *, at_once: bool) -> Iterator[Record]:
        """As many records as may be dropped in a turn, or ``at_once`` all. Each is to be dropped
        and to be added before the next."""
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
