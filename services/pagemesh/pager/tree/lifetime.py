"""Until when idle edges may be read, and which of them are over.

An edge is *timed* while nobody used it who wants it kept for ever. What a lease used is kept
until its time to live after the lease has ended, or for longer if somebody else said so; what
is in use is never over. Whoever uses an edge uses all above it, so nothing lives longer than what
is above it, and what is below something that is over is over too.

    keep -----> due in a second -----> dropped: idle, and its time is over
     ^               |  `------------> waits for another second: somebody used it since
     `---- in use <--'

Whether something may be read is asked at every match (``Forest.match``); this here only finds
what to reclaim, so it may be a second late.

The next pager reads all this from headers. The last page of a timed edge says until when the edge
is kept, and speaks for those before it; pages that say nothing are kept for ever. Edges
whose headers do not say it yet are ``untold``, until ``PagerCore.handle`` returns.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pagemesh.pager.tree.radix import Node

FOREVER_MS: Final = 1 << 61
"""The largest power of two that compiled code keeps in a register."""
_SECONDS_LOOK_MAX, _SECONDS_NEAR_MAX = 4_096, 8


class Lifetimes:
    """Timed edges by the second in which they are looked at again; each is in one at most."""

    def __init__(self) -> None:
        self._seconds: dict[int, dict[Node, None]] = {}
        self.due: dict[Node, int] = {}
        """The second of each. Only to be looked at; empty: nothing is timed."""
        self.untold: dict[Node, None] = {}
        """Edges whose headers do not say until when they are kept."""
        self._at = 0
        """No second before this one has any."""

    def __len__(self) -> int:
        return len(self.due)

    def knows(self, node: Node) -> bool:
        """Whether ``node`` is timed and will be looked at."""
        return node in self.due

    def is_due_by(self, by_ms: int) -> bool:
        """Whether an edge is to be looked at by then; also if it would take long to tell."""
        end_s = by_ms // 1_000 + 1
        if not self.due or end_s <= self._at:
            return False
        if end_s - self._at > _SECONDS_NEAR_MAX:
            return True
        return any(second in self._seconds for second in range(self._at, end_s))

    def keep(self, node: Node, until_ms: int) -> None:
        """``node``, and so all above it, may be read until ``until_ms``, or for longer if that
        was so before."""
        while node.expires_ms < until_ms:
            node.expires_ms = until_ms
            self.untold[node] = None
            if until_ms >= FOREVER_MS:
                self.forget(node)
            elif node not in self.due:
                self._put(node, until_ms)
            node = node.parent

    def resume(self, node: Node, until_ms: int) -> None:
        """``node``, of an earlier life, was kept ``until_ms``, and its headers say so."""
        node.expires_ms = until_ms
        if until_ms < FOREVER_MS:
            self._put(node, until_ms)
        self.keep(node.parent, until_ms)

    def cut(self, upper: Node, lower: Node) -> None:
        """``upper``, new, is the first part of what ``lower`` was."""
        upper.expires_ms = lower.expires_ms
        if lower in self.due:
            self._put(upper, lower.expires_ms)
            self.untold[upper] = None

    def shortened(self, node: Node) -> None:
        """``node`` has lost its last pages."""
        if node in self.due:
            self.untold[node] = None

    def forget(self, node: Node) -> None:
        """``node`` is not timed, or not there, any more."""
        second = self.due.pop(node, None)
        if second is not None:
            there = self._seconds[second]
            del there[node]
            if not there:
                del self._seconds[second]

    def over(self, now_ms: int, count_max: int) -> list[Node]:
        """At most ``count_max`` edges, idle, whose time is over; the caller drops them, with all
        below them, or has them looked at ``again``."""
        found: list[Node] = []
        now_s = now_ms // 1_000
        for _ in range(_SECONDS_LOOK_MAX):
            if self._at > now_s or not self.due:
                break
            at, self._at = self._at, self._at + 1
            some = list(islice(self._seconds.get(at, ()), count_max))
            for node in some:
                self.forget(node)
                if node.expires_ms > now_ms:
                    self._put(node, node.expires_ms)
                elif not node.pins:  # what is in use comes back when it is not
                    found.append(node)
            count_max -= len(some)
            if at in self._seconds:  # there are more than may be looked at now
                self._at = at
                break
        return found

    def again(self, node: Node, now_ms: int) -> None:
        """``node`` is over, and could not be dropped yet."""
        if node not in self.due:
            self._put(node, now_ms)

    def _put(self, node: Node, until_ms: int) -> None:
        second = until_ms // 1_000 + 1
        self._at = min(self._at, second) if self.due else second
        self.due[node] = second
        self._seconds.setdefault(second, {})[node] = None

    def check(self) -> None:
        """Raise ``AssertionError`` unless every timed edge is in one second, not before ``_at``."""
        listed = {node: second for second, some in self._seconds.items() for node in some}
        assert listed == self.due, "an edge is due in two seconds, or in none"
        assert all(self._seconds.values()), "an empty second is kept"
        assert not listed or min(self._seconds) >= self._at, "a second is never looked at"
        assert all(node.expires_ms < FOREVER_MS for node in listed)
