"""Which waiter is served next: usually the first, and sometimes one behind it that finds much more
of its prompt cached.

Serving the first may evict what others need. If requests of three groups, each with a prefix of its
own, arrive in turns, each would evict the prefix that the next one needs, and all prefixes would be
computed again and again:

    waiting   B1 C1 A2 B2 C2 A3        cached and unused: the prefix of A
    served    A2, then A3, then B1 ...

A preempted sequence overtakes nobody: its pages were taken for a sequence that waits. Overtaking
is also bounded. Only sequences with the priority of the first that came after it by less than a
priority level is worth (``messages.LEVEL_US``) may overtake it, and only a few times. A sequence
that overtakes gets a place just ahead of the first in the one order of sequences, for as long as it
has the lease: otherwise the first would take the pages back at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import msgspec

from pagemesh.pager.leases.waiting import Name, Waiter, WaitList
from pagemesh.wire.messages import LEVEL_US, Order
from pagemesh.wire.pager_messages import Admit

LOOKED_AT_MAX = 8
"""Waiters whose prompts are looked up when there is room again, the first included."""
PASSED_MAX = 16
"""How often the first waiter may be overtaken."""
SHARE_MIN = 0.25
"""A waiter overtakes only if the cached share of its prompt exceeds that of the first by this."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What it would take to admit a sequence now."""

    cached_share: float
    """The share of its prompt that is cached."""
    fits: bool
    """There is room for the rest."""
    evicts: bool
    """Making that room would evict cached pages."""


class Overtaking:
    """Chooses the next waiter; remembers how often waiters were overtaken while first."""

    def __init__(self, outlook: Callable[[Admit], Outlook]) -> None:
        self._outlook = outlook
        self._passed_counts: dict[Name, int] = {}
        """By waiter; those that no longer wait are dropped when one is overtaken."""

    def next(self, waiting: WaitList) -> Waiter:
        """The waiter to try now; ``waiting`` must not be empty."""
        first = waiting.first
        if len(waiting) == 1 or not isinstance(first.message, Admit):
            return first
        if self._passed_counts.get(first.name, 0) >= PASSED_MAX:
            return first
        own = self._outlook(first.message)
        if own.fits and not own.evicts:
            return first
        best, most_share = first, own.cached_share + SHARE_MIN
        for waiter in islice(waiting, 1, LOOKED_AT_MAX):
            message = waiter.message
            if not isinstance(message, Admit) or not _is_near(waiter.order, first.order):
                break
            if message.again:
                continue
            seen = self._outlook(message)
            if seen.fits and seen.cached_share > most_share:
                best, most_share = waiter, seen.cached_share
        return best

    def passed(self, waiting: WaitList) -> None:
        """The first of ``waiting`` was overtaken."""
        name = waiting.first.name
        counts = {one: count for one, count in self._passed_counts.items() if one in waiting}
        self._passed_counts = {**counts, name: counts.get(name, 0) + 1}


def _is_near(order: Order, first: Order) -> bool:
    same = order.priority == first.priority and first.arrival_us > 0
    return same and order.due_us < first.due_us + LEVEL_US


def ahead_of(first: Order, own: Order) -> Order:
    """``own``, moved to just before ``first``, which has the same priority."""
    return msgspec.structs.replace(own, arrival_us=first.arrival_us - 1)
