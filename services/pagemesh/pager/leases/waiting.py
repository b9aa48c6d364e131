"""Queues of sequences that wait for pages, in the one total order of sequences.

A sequence that waits to be admitted holds nothing, neither pages nor a promise. The first is served
first, whatever the others want. Only a bounded number may overtake it (``overtaking``), so nobody
starves.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from pagemesh.wire.errors import Busy, Malformed
from pagemesh.wire.messages import Order, SequenceKey
from pagemesh.wire.pager_messages import Admit, Extend, Extended, Granted

FIRST = Order(priority=-1_000, arrival_us=0, request="0" * 32, choice=0)
"""Sorts before every sequence."""
Place = tuple[int, str, int, int, int]
"""The place of an ``Order``, then attempt and incarnation, so that no two waiters tie."""


Name = tuple[int, SequenceKey]
"""Identifies a waiter: a worker incarnation and its sequence."""


def place_of(order: Order, attempt: int, incarnation: int) -> Place:
    return (*order.place, attempt, incarnation)


def require_own(order: Order, key: SequenceKey) -> None:
    """Raises ``Malformed`` unless ``order`` belongs to the sequence ``key``: two sequences with one
    order would have the same place."""
    if order.request != key.request or order.choice != key.choice:
        raise Malformed("the order belongs to another sequence")


@dataclass(frozen=True, slots=True)
class Waiter:
    """A queued request. ``forget_ms``: when it is dropped unless asked again."""

    place: Place
    message: Admit | Extend
    order: Order
    forget_ms: int
    trace: str = ""

    @property
    def name(self) -> Name:
        return (self.message.incarnation, self.message.key)

    def later(self, ms: int, latest_ms: int) -> Waiter:
        """The same, to be forgotten ``ms`` later, but not later than ``latest_ms``."""
        forget_ms = min(self.forget_ms + ms, max(latest_ms, self.forget_ms))
        return Waiter(self.place, self.message, self.order, forget_ms, self.trace)


def pushed(message: Admit | Extend, reply: Granted | Extended) -> Granted | Extended:
    """``reply`` as it is pushed to a worker that was queued: a grant says how it was asked for."""
    if isinstance(message, Admit) and isinstance(reply, Granted):
        return msgspec.structs.replace(reply, asked_as=message.asked_as)
    return reply


class WaitList:
    """Waiters by place; at most ``waiter_count_max``, one for each sequence and incarnation."""

    def __init__(self, waiter_count_max: int) -> None:
        self._waiter_count_max = waiter_count_max
        self.places: list[Place] = []
        """Ascending; for reading only. Empty: nobody waits."""
        self._by_place: dict[Place, Waiter] = {}
        self._by_name: dict[Name, Waiter] = {}

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[Waiter]:
        for place in self.places:
            yield self._by_place[place]

    @property
    def first(self) -> Waiter:
        return self._by_place[self.places[0]]

    def ahead_of(self, place: Place) -> int:
        """How many waiters have smaller places."""
        return bisect_left(self.places, place)

    def put(self, waiter: Waiter) -> None:
        """Queue ``waiter``, or refresh it. Raises ``Busy`` when the list is full."""
        self.require_room(waiter)
        self.discard(*waiter.name)
        insort(self.places, waiter.place)
        self._by_place[waiter.place] = waiter
        self._by_name[waiter.name] = waiter

    def has_room(self, waiter: Waiter) -> bool:
        """Whether ``put`` would accept ``waiter``: there is room, or it is in the list already."""
        return waiter.name in self._by_name or len(self.places) < self._waiter_count_max

    def require_room(self, waiter: Waiter) -> None:
        """Raises ``Busy`` if ``put`` would."""
        if not self.has_room(waiter):
            raise Busy(f"{len(self.places)} sequences wait for pages", retry_after_ms=1_000)

    def discard(self, incarnation: int, key: SequenceKey) -> None:
        """Forget the waiter of that sequence, if there is one."""
        waiter = self._by_name.pop((incarnation, key), None)
        if waiter is not None:
            del self._by_place[waiter.place]
            del self.places[bisect_left(self.places, waiter.place)]

    def discard_session(self, incarnation: int) -> None:
        """Forget the waiters of a worker incarnation."""
        for waiter in [w for w in self if w.message.incarnation == incarnation]:
            self.discard(*waiter.name)

    def was_away(self, away_ms: int, latest_ms: int) -> None:
        """Nobody could be heard for ``away_ms``: keep waiters that much longer, at most until
        ``latest_ms``."""
        for waiter in list(self):
            self._by_name[waiter.name] = self._by_place[waiter.place] = waiter.later(
                away_ms, latest_ms
            )

    def forget_silent(self, now_ms: int) -> None:
        """Forget the waiters that were not heard of in time."""
        for waiter in [w for w in self if w.forget_ms <= now_ms]:
            self.discard(*waiter.name)

    def __contains__(self, name: Name) -> bool:
        return name in self._by_name

    def check(self) -> None:
        assert self.places == sorted(self._by_place), "waiters are out of order"
        assert {w.name for w in self} == set(self._by_name) and len(self._by_name) == len(self)
        assert len(self) <= self._waiter_count_max


class Queues(WaitList):
    """The sequences that wait for room and, in separate lists, those that wait until their tenant
    uses less. Each waits in one list only."""

    def __init__(self, waiter_count_max: int) -> None:
        super().__init__(waiter_count_max)
        self._lists: dict[Name, WaitList] = {}
        """The sequences that wait for their tenants, and the list each is in."""

    @property
    def count(self) -> int:
        """How many sequences wait, for room or for their tenants."""
        return len(self.places) + len(self._lists)

    def held_back(self) -> Iterator[Waiter]:
        """The sequences that wait for their tenants."""
        for own in set(self._lists.values()):
            yield from own

    def hold_back(self, waiter: Waiter, own: WaitList) -> None:
        """Make ``waiter`` wait in ``own``, its tenant's list. Raises ``Busy`` when that is full."""
        own.require_room(waiter)
        self.discard(*waiter.name)
        own.put(waiter)
        self._lists[waiter.name] = own

    def discard(self, incarnation: int, key: SequenceKey) -> None:
        super().discard(incarnation, key)
        self.let_go(incarnation, key)

    def let_go(self, incarnation: int, key: SequenceKey) -> None:
        """Remove the sequence from its tenant's list, if it is in one."""
        own = self._lists.pop((incarnation, key), None)
        if own is not None:
            own.discard(incarnation, key)

    def discard_session(self, incarnation: int) -> None:
        super().discard_session(incarnation)
        for name in [name for name in self._lists if name[0] == incarnation]:
            self.discard(*name)

    def was_away(self, away_ms: int, latest_ms: int) -> None:
        super().was_away(away_ms, latest_ms)
        for own in set(self._lists.values()):
            own.was_away(away_ms, latest_ms)

    def forget_silent(self, now_ms: int) -> None:
        super().forget_silent(now_ms)
        for waiter in [one for one in self.held_back() if one.forget_ms <= now_ms]:
            self.discard(*waiter.name)

    def check(self) -> None:
        super().check()
        assert not self._lists.keys() & self._by_name.keys(), "it waits in two places"
        assert {waiter.name for waiter in self.held_back()} == self._lists.keys()
