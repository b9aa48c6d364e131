"""Ghosts: records of recently evicted runs, so that their return can be noticed. They are bounded
in number and keep no page.

A place in the prefix tree is named by a hash chained over the first pages of the edges down to it.
Names serve statistics only, so a collision hardly matters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

_PASSED_MIN = 64
"""At least this many outdated entries may stay in the queue before they are removed."""
_NAME_MASK: Final = (1 << 60) - 1
"""Python keeps an integer of 60 bits in 32 bytes; a longer one takes 48."""


class Ghost:
    """A run of evicted pages. ``below``: the name to which the names of its children are chained.
    ``kind``, ``use_count`` and ``used_at`` are the policy's."""

    __slots__ = ("below", "kind", "page_count", "place", "use_count", "used_at")

    def __init__(
        self, place: int, below: int, kind: int, use_count: int, used_at: int, page_count: int
    ) -> None:
        self.place: Final = place
        self.below: Final = below
        self.kind: Final = kind
        self.use_count: Final = use_count
        self.used_at: Final = used_at
        self.page_count: Final = page_count


def place_of(above: int, first_page: bytes) -> int:
    """The name of an edge that starts with ``first_page`` below ``above``."""
    return hash((above, first_page)) & _NAME_MASK


class GhostBudget:
    """How many ghosts several policies keep in all. Beyond ``count_max``, those that have more than
    an equal part forget their oldest for each new one."""

    def __init__(self, count_max: int) -> None:
        self.count_max: Final = count_max
        self.count = 0
        self.sharer_count = 0

    def is_beyond(self, own_count: int) -> bool:
        """Whether a sharer with ``own_count`` ghosts is to forget one."""
        return self.count > self.count_max and own_count * self.sharer_count > self.count_max


class Ghosts:
    """The last evicted runs, at most ``count_max`` of them with ``pages_max`` pages in all, and
    within ``budget``; None: nobody else's count."""

    def __init__(
        self, pages_max: int, count_max: int, on_forgotten: Callable[[Ghost], None],
        budget: GhostBudget | None = None,
    ) -> None:  # fmt: skip
        self._pages_max = pages_max
        self._count_max = count_max
        self._budget = GhostBudget(count_max) if budget is None else budget
        self._budget.sharer_count += 1
        self._on_forgotten = on_forgotten
        self.by_place: dict[int, Ghost] = {}
        """For reading only."""
        # With a plain dictionary, this takes a fifth of the memory of an OrderedDict.
        self._order: deque[Ghost] = deque()
        """The oldest first; entries that are no longer in ``by_place`` are skipped."""
        self._page_count = 0

    def __len__(self) -> int:
        return len(self.by_place)

    def __contains__(self, place: int) -> bool:
        return place in self.by_place

    def put(self, ghost: Ghost) -> None:
        """Remember ``ghost`` instead of any other at its place, and forget the oldest beyond the
        limits."""
        by_place, budget = self.by_place, self._budget
        if ghost.place in by_place and (old := self.take(ghost.place)) is not None:
            self._on_forgotten(old)
        by_place[ghost.place] = ghost
        self._order.append(ghost)
        self._page_count += ghost.page_count
        budget.count += 1
        while (
            self._page_count > self._pages_max
            or len(by_place) > self._count_max
            or budget.is_beyond(len(by_place))
        ):
            oldest = self._order.popleft()
            if by_place.get(oldest.place) is oldest:
                del by_place[oldest.place]
                self._page_count -= oldest.page_count
                budget.count -= 1
                self._on_forgotten(oldest)

    def lengthen(self, ghost: Ghost, place: int, page_count: int) -> Ghost | None:
        """Replace ``ghost`` by one that starts ``page_count`` pages earlier, at ``place``, and is
        the newest. Returns it, or None when ``ghost`` is forgotten already."""
        if not self._is_there(ghost):
            return None
        self.take(ghost.place)
        longer = Ghost(
            place, ghost.below, ghost.kind, ghost.use_count, ghost.used_at,
            ghost.page_count + page_count,
        )  # fmt: skip
        self.put(longer)
        return longer

    def _is_there(self, ghost: Ghost) -> bool:
        return self.by_place.get(ghost.place) is ghost

    def take(self, place: int) -> Ghost | None:
        """Remove and return the ghost at ``place``, if any."""
        ghost = self.by_place.pop(place, None)
        if ghost is not None:
            self._page_count -= ghost.page_count
            self._budget.count -= 1
            if len(self._order) > _PASSED_MIN + 2 * len(self.by_place):
                self._order = deque(filter(self._is_there, self._order))
        return ghost

    def close(self) -> None:
        """Leave the budget to the others."""
        self._budget.count -= len(self.by_place)
        self._budget.sharer_count -= 1

    def check(self) -> None:
        """Raise ``AssertionError`` unless all ghosts are counted, within the limits and queued."""
        assert self._page_count == sum(ghost.page_count for ghost in self.by_place.values())
        assert self._page_count <= self._pages_max and len(self) <= self._count_max
        assert len(self) <= self._budget.count and self._budget.sharer_count > 0
        assert all(ghost.place == place for place, ghost in self.by_place.items())
        there = [ghost for ghost in self._order if self._is_there(ghost)]
        assert len(there) == len(self), "one would never be forgotten, or too early"

    def returned(self, place: int, tokens: bytes, page_bytes: int) -> Iterator[Ghost]:
        """Remove and yield the evicted runs that ``tokens``, cached again from ``place`` on, bring
        back."""
        at = 0
        while at < len(tokens):
            ghost = self.take(place)
            if ghost is None:
                return
            yield ghost
            at += ghost.page_count * page_bytes
            place = place_of(ghost.below, tokens[at : at + page_bytes])
