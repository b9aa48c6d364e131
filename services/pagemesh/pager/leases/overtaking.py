"""Who of those that wait for pages is served next: mostly the first, and now and then somebody
behind it who finds much more of its prompt cached.

Pages for the first may have to be taken from what others came for. Requests of three groups, each
with a prefix of its own, that come in turns would each drive out what the next one needs, and all
prefixes be computed again and again:

    waiting   B1 C1 A2 B2 C2 A3        cached, by nobody used: the prefix of A
    served    A2, then A3, then B1 ...

Whoever was preempted does not go before anybody: its pages were taken for somebody who waits. And
it is bounded: only sequences of the first's priority that came within the worth of a level after it
(``messages.LEVEL_US``) go before it, and a few times. Whoever does takes a place just ahead of it
in the one order of sequences for as long as it has the lease: otherwise the first would take the
pages back at once.
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
"""Waiters whose prompts are looked up when there is room again."""
PASSED_MAX = 16
"""How often one who is first is gone before."""
SHARE_MIN = 0.25
"""So much more of its prompt must be cached for whoever goes before the first."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What it would take to admit somebody now."""

    cached_share: float
    """Of its prompt."""
    fits: bool
    """There is room for the rest."""
    evicts: bool
    """That takes the place of what is cached."""


class Overtaking:
    """Chooses; remembers how often those who wait were passed as the first."""

    def __init__(self, outlook: Callable[[Admit], Outlook]) -> None:
        self._outlook = outlook
        self._passed_counts: dict[Name, int] = {}
        """Of those who wait."""

    def next(self, waiting: WaitList) -> Waiter:
        """Of ``waiting``, in which somebody is, who is to be tried now."""
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
        """Somebody went before the first of ``waiting``."""
        name = waiting.first.name
        counts = {one: count for one, count in self._passed_counts.items() if one in waiting}
        self._passed_counts = {**counts, name: counts.get(name, 0) + 1}


def _is_near(order: Order, first: Order) -> bool:
    same = order.priority == first.priority and first.arrival_us > 0
    return same and order.due_us < first.due_us + LEVEL_US


def ahead_of(first: Order, own: Order) -> Order:
    """``own``, moved to just before ``first``, which has the same priority."""
    return msgspec.structs.replace(own, arrival_us=first.arrival_us - 1)
