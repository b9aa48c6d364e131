"""Lifetimes: until when idle edges may be read, and which of them have expired.

An edge is *timed* if all requests that used it have a time to live. Edges that a lease used are
kept for its time to live after the lease has ended, or longer if another request wants that; an
edge in use never expires. A lease that uses an edge also uses all above it. So no edge lives longer
than the one above it, and everything below an expired edge has expired too.

    keep -----> listed by second -----> dropped: idle and expired
     ^               |  `-------------> listed again for later: it was used since
     `---- in use <--'

Whether an edge may be read is checked at every match (``Forest.match``). This module only finds
edges to reclaim, and may be a second late.

The next pager reads lifetimes from page headers. The header of the last page of a timed edge says
until when the edge is kept, and applies to the pages before it too; pages without an end are kept
for ever. Edges whose headers are out of date are in ``untold`` until ``PagerCore.handle`` returns.
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
    """Timed edges by the second in which they are looked at next; each is listed at most once."""

    def __init__(self) -> None:
        self._seconds: dict[int, dict[Node, None]] = {}
        self.due: dict[Node, int] = {}
        """The second under which each edge is listed; for reading only. Empty: nothing is timed."""
        self.untold: dict[Node, None] = {}
        """Edges whose headers do not say yet until when they are kept."""
        self._at = 0
        """No edge is listed under an earlier second."""

    def __len__(self) -> int:
        return len(self.due)

    def knows(self, node: Node) -> bool:
        """Whether ``node`` is timed and will be looked at."""
        return node in self.due

    def is_due_by(self, by_ms: int) -> bool:
        """Whether an edge is to be looked at by then; True also if finding out would take long."""
        end_s = by_ms // 1_000 + 1
        if not self.due or end_s <= self._at:
            return False
        if end_s - self._at > _SECONDS_NEAR_MAX:
            return True
        return any(second in self._seconds for second in range(self._at, end_s))

    def keep(self, node: Node, until_ms: int) -> None:
        """Keep ``node``, and so all above it, until ``until_ms``, or longer if it was kept longer
        before."""
        while node.expires_ms < until_ms:
            node.expires_ms = until_ms
            self.untold[node] = None
            if until_ms >= FOREVER_MS:
                self.forget(node)
            elif node not in self.due:
                self._put(node, until_ms)
            node = node.parent

    def resume(self, node: Node, until_ms: int) -> None:
        """Restore ``node`` from an earlier pager life: its headers keep it ``until_ms``."""
        node.expires_ms = until_ms
        if until_ms < FOREVER_MS:
            self._put(node, until_ms)
        self.keep(node.parent, until_ms)

    def cut(self, upper: Node, lower: Node) -> None:
        """``lower`` was cut: the new ``upper`` is its first part."""
        upper.expires_ms = lower.expires_ms
        if lower in self.due:
            self._put(upper, lower.expires_ms)
            self.untold[upper] = None

    def shortened(self, node: Node) -> None:
        """``node`` has lost its last pages."""
        if node in self.due:
            self.untold[node] = None

    def forget(self, node: Node) -> None:
        """``node`` is no longer timed, or has left the tree."""
        second = self.due.pop(node, None)
        if second is not None:
            there = self._seconds[second]
            del there[node]
            if not there:
                del self._seconds[second]

    def over(self, now_ms: int, count_max: int) -> list[Node]:
        """At most ``count_max`` idle edges that have expired; the caller drops them with all below
        them, or calls ``again``."""
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
                elif not node.pins:  # an edge in use is listed again when it is unpinned
                    found.append(node)
            count_max -= len(some)
            if at in self._seconds:  # more than may be looked at in this call
                self._at = at
                break
        return found

    def again(self, node: Node, now_ms: int) -> None:
        """``node`` has expired but could not be dropped yet: list it again."""
        if node not in self.due:
            self._put(node, now_ms)

    def _put(self, node: Node, until_ms: int) -> None:
        second = until_ms // 1_000 + 1
        self._at = min(self._at, second) if self.due else second
        self.due[node] = second
        self._seconds.setdefault(second, {})[node] = None

    def check(self) -> None:
        """Raise ``AssertionError`` unless every timed edge is listed once, not before ``_at``."""
        listed = {node: second for second, some in self._seconds.items() for node in some}
        assert listed == self.due, "an edge is due in two seconds, or in none"
        assert all(self._seconds.values()), "an empty second is kept"
        assert not listed or min(self._seconds) >= self._at, "a second is never looked at"
        assert all(node.expires_ms < FOREVER_MS for node in listed)
