"""Prefixes in flight: who computes which one right now, and who waits for it.

A lease that was granted for a prompt *fills*: it is registered where its committed pages end in
the tree, under the tokens of its next page. An admission whose match ends there and that goes
on with the same page waits, until those pages are committed, instead of computing them too.

    granted ---> filling at (node, next page) ---commits---> filling further on ---> complete
                   | commits what somebody waits for           | revoked, offered, over, stalled
                   v                                           v
                 who waited for no more is due               who still waits is due

Who is due asks anew, the oldest first: there may be more to wait for; or the first takes over,
and the others wait for that one.

Waiting never deadlocks, since who fills has all pages of its prompt, or is promised them and
waits for nothing but room (``promises``), and who waits holds nothing, so nobody waits for it. Nor
does it turn urgency around: nobody waits for somebody who is clearly behind it in the order of
sequences (``InFlight.may_wait``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice
from typing import Protocol

from pagemesh.pager.leases.waiting import Name, Place, Waiter
from pagemesh.pager.limits import PagerLimits
from pagemesh.pager.tree.radix import Forest, Match, Node
from pagemesh.wire.messages import Order, SequenceKey
from pagemesh.wire.pager_messages import Admit

_FILLING_MAX = 16
"""Leases at one place that are compared; more are there only if they may not wait."""


class Filler(Protocol):
    """A lease, or what the pager itself reads from disk."""

    id: int
    key: SequenceKey
    order: Order
    incarnation: int
    anchor: Node
    """Where its committed pages end."""
    tokens: bytes
    tokens_first: int
    prompt_pages: int
    """How far it fills; 0: it does not."""
    place: tuple[Node, bytes] | None
    """Where it is registered."""

    @property
    def committed_pages(self) -> int: ...

    @property
    def may_fill(self) -> bool: ...

    def known_from(self, position: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Found:
    """``lease`` is about to commit ``pages`` pages beyond a match. ``is_fit``: they may be
    waited for."""

    lease: Filler
    pages: int
    is_fit: bool


@dataclass(slots=True, eq=False)
class Wait:
    """A sequence that waited, or waits, for another to commit the first ``pages`` pages of
    its prompt. It keeps this while it queues for room afterwards."""

    waiter: Waiter
    start_pages: int
    """Cached when it began to wait."""
    since_ms: int
    lease: Filler | None = None
    """Whom it waits for; None: it is due, or queues for room."""
    pages: int = 0
    waited_ms: int = 0
    fetched_pages: int = 0
    """Of those it waited for, read from disk."""


class InFlight:
    """Who fills, by place, and who waits for whom."""

    def __init__(self, forest: Forest, page_size: int, limits: PagerLimits) -> None:
        self._forest = forest
        self._limits = limits
        self._page_size = page_size
        self._width = 4 * page_size
        self._filling: dict[tuple[object, bytes], list[Filler]] = {}
        self._latest: Filler | None = None
        """Fills, and is registered only when somebody looks: if nobody comes meanwhile, as
        under light load, it never has to be."""
        self.waits: dict[Name, Wait] = {}
        """Those who wait, or did and queue for room now."""
        self._behind: dict[int, dict[Name, Wait]] = {}
        """Lease -> those who wait for it."""
        self.due: list[tuple[Place, Name]] = []
        """A heap of those who are to ask anew (``pop_due``), some of whom may not any more."""
        self._progress_ms: dict[int, int] = {}
        """When an incarnation last committed something, of those that are waited for."""
        self.saved_tokens = 0
        """Computed once instead of again, by waiting."""

    # Who fills

    def enter(self, lease: Filler, prompt_pages: int) -> None:
        """``lease`` is about to fill the first ``prompt_pages`` pages."""
        if self._latest is not None:
            self._register_latest()
        lease.prompt_pages = prompt_pages
        self._latest = lease

    def committed(self, lease: Filler, now_ms: int) -> None:
        """``lease``, which fills, has more committed pages than before."""
        done = lease.anchor.depth
        is_complete = done >= lease.prompt_pages
        if lease.incarnation in self._progress_ms:  # its worker computes, if only for others
            self._progress_ms[lease.incarnation] = now_ms
        if lease is self._latest:
            if is_complete:
                self._latest, lease.prompt_pages = None, 0
            return
        self._unregister(lease)
        if is_complete:
            lease.prompt_pages = 0
        else:
            self._register(lease)
        behind = self._behind.get(lease.id)
        if behind is None:
            return
        for wait in [wait for wait in behind.values() if wait.pages <= done]:
            self._make_due(wait)

    def fetched(self, lease: Filler, first_page: int) -> None:
        """The pages of ``lease`` from ``first_page`` on came from disk: tell who waited."""
        for wait in self._behind.get(lease.id, {}).values():
            wait.fetched_pages += max(0, min(wait.pages, lease.committed_pages) - first_page)

    def leave(self, lease: Filler) -> None:
        """``lease`` commits no more of its prompt. Harmless when it does not fill."""
        if not lease.prompt_pages:
            return
        lease.prompt_pages = 0
        if lease is self._latest:
            self._latest = None
            return
        self._unregister(lease)
        for wait in list(self._behind.get(lease.id, {}).values()):
            self._make_due(wait)

    def _register_latest(self) -> None:
        if self._latest is not None:
            self._register(self._latest)
            self._latest = None

    def _register(self, lease: Filler) -> None:
        at = 4 * (lease.anchor.depth * self._page_size - lease.tokens_first)
        lease.place = place = (lease.anchor, lease.tokens[at : at + self._width])
        there = self._filling.get(place)
        if there is None:
            self._filling[place] = [lease]
        else:
            there.append(lease)

    def _unregister(self, lease: Filler) -> None:
        place, lease.place = lease.place, None
        assert place is not None, "who does not fill is registered"
        there = self._filling[place]
        if len(there) == 1:
            del self._filling[place]
        else:
            there.remove(lease)

    # Looking

    @property
    def is_filling(self) -> bool:
        """Whether there is anything that ``find`` may find."""
        return self._latest is not None or bool(self._filling)

    def find(self, match: Match, message: Admit) -> Found | None:
        """Who is about to commit what follows ``match``, if anybody: of those that may be
        waited for the one with the most pages in common, else any with the most."""
        if self._latest is not None:
            self._register_latest()
        if not self._filling or match.edge_pages or not message.read_cache:
            return None
        at = match.node.depth * self._width
        there = self._filling.get((match.node, message.tokens[at : at + self._width]))
        pages_max = (len(message.tokens) // 4 - 1) // self._page_size - match.node.depth
        if there is None or pages_max <= 0:
            return None
        best: Found | None = None
        for lease in list(islice(there, _FILLING_MAX)):
            own = (lease.key.request, lease.key.choice) == (message.key.request, message.key.choice)
            if own and lease.key.attempt < message.key.attempt:
                self.leave(lease)  # given up: its gateway has made another attempt
                continue
            found = Found(
                lease,
                self._common_pages(lease, message.tokens, at, pages_max),
                not own and self.may_wait(message.order, lease.order),
            )
            if best is None or (found.is_fit, found.pages, lease.id) > (
                best.is_fit, best.pages, best.lease.id,
            ):  # fmt: skip
                best = found
        return best

    def may_wait(self, order: Order, filling: Order) -> bool:
        """Whether a sequence at ``order`` waits for the one at ``filling``: one that goes before
        it. What arrives together reaches a pager in any order, so those that came within
        ``in_flight_together_ms`` are all the same age."""
        return filling.due_us <= order.due_us + 1_000 * self._limits.in_flight_together_ms

    def _common_pages(self, lease: Filler, tokens: bytes, at: int, pages_max: int) -> int:
        start = lease.committed_pages
        pages = min(lease.prompt_pages - start, pages_max)
        rest = lease.known_from(start * self._page_size)
        return self._forest.common_pages(rest, tokens, at, pages * self._width)

    # Who waits

    @property
    def wait_count(self) -> int:
        """Sequences that wait for others to commit."""
        return sum(map(len, self._behind.values()))

    def has_place(self, name: Name) -> bool:
        """Whether ``wait_for`` would let ``name`` wait."""
        return name in self.waits or len(self.waits) < self._limits.waiter_count_max

    @property
    def awaited(self) -> set[int]:
        """The incarnations that somebody waits for."""
        return {wait.lease.incarnation for wait in self.waits.values() if wait.lease is not None}

    def wait_for(self, found: Found, start_pages: int, waiter: Waiter, now_ms: int) -> bool:
        """Let ``waiter``, with ``start_pages`` cached, wait. False: too many do already."""
        self._register_latest()
        wait = self.waits.get(waiter.name)
        if wait is None:
            if not self.has_place(waiter.name):
                return False
            wait = self.waits[waiter.name] = Wait(waiter, start_pages, now_ms)
        else:
            self._stop(wait)
            wait.waiter = waiter
        lease = wait.lease = found.lease
        wait.pages = start_pages + found.pages
        self._progress_ms.setdefault(lease.incarnation, now_ms)
        self._behind.setdefault(lease.id, {})[waiter.name] = wait
        return True

    def ask_again(self, waiter: Waiter) -> bool:
        """Note that ``waiter`` was heard of. Whether it waits for somebody still."""
        wait = self.waits.get(waiter.name)
        if wait is None:
            return False
        wait.waiter = waiter
        return wait.lease is not None

    def pop_due(self, now_ms: int) -> Waiter | None:
        """The oldest of those who are to ask anew, if any."""
        while self.due:
            _, name = heappop(self.due)
            wait = self.waits.get(name)
            if wait is None or wait.lease is not None:
                continue
            wait.waited_ms = now_ms - wait.since_ms
            if wait.waiter.forget_ms > now_ms:
                return wait.waiter
            del self.waits[name]
        return None

    def end_wait(self, name: Name) -> Wait | None:
        """Forget how ``name`` waited: it is served, or wants nothing any more."""
        wait = self.waits.pop(name, None)
        if wait is not None:
            self._stop(wait)
        return wait

    def end_waits_of(self, incarnation: int) -> None:
        """Forget the waits of a worker incarnation."""
        for name in [name for name in self.waits if name[0] == incarnation]:
            self.end_wait(name)

    def tick(self, now_ms: int) -> None:
        """Forget those who were silent for too long, and give up who is waited for and whose
        worker, for too long, committed nothing."""
        for wait in [wait for wait in self.waits.values() if wait.waiter.forget_ms <= now_ms]:
            self.end_wait(wait.waiter.name)
        self._progress_ms = {life: self._progress_ms[life] for life in self.awaited}
        for wait in list(self.waits.values()):
            if wait.lease is not None:
                idle_ms = now_ms - self._progress_ms[wait.lease.incarnation]
                if idle_ms >= self._limits.in_flight_stall_ms_max:
                    self.leave(wait.lease)

    def was_away(self, away_ms: int, now_ms: int, latest_ms: int) -> None:
        """Nobody was heard for so long: that is nobody's silence, and nobody's standstill."""
        for wait in self.waits.values():
            wait.waiter = wait.waiter.later(away_ms, latest_ms)
        for life, since_ms in self._progress_ms.items():
            self._progress_ms[life] = min(since_ms + away_ms, now_ms)

    def _make_due(self, wait: Wait) -> None:
        self._stop(wait)
        heappush(self.due, (wait.waiter.place, wait.waiter.name))

    def _stop(self, wait: Wait) -> None:
        """It waits for nobody."""
        lease, wait.lease = wait.lease, None
        if lease is not None:
            behind = self._behind[lease.id]
            del behind[wait.waiter.name]
            if not behind:
                del self._behind[lease.id]

    # Checking

    def waiters(self) -> Iterator[Waiter]:
        """Those who wait for somebody."""
        return (wait.waiter for wait in self.waits.values() if wait.lease is not None)

    def check(self, leases: Mapping[int, Filler]) -> None:
        """Raise ``AssertionError`` unless every registration is of a standing lease of
        ``leases``, and every wait for one of them that will end it."""
        assert not self.due, "somebody was not asked anew"
        filling = {lease.id: lease for lease in leases.values() if lease.place is not None}
        if self._latest is not None:
            assert leases[self._latest.id] is self._latest and self._latest.place is None
        for lease in leases.values():
            is_filling = lease.id in filling or lease is self._latest
            assert is_filling == (lease.prompt_pages > 0), "it fills unseen, or is seen no more"
        assert filling == {lease.id: lease for some in self._filling.values() for lease in some}
        for place, some in self._filling.items():
            assert some and all(lease.place == place for lease in some)
        for lease in filling.values():
            assert lease.may_fill, "a lease fills that is not held"
            assert lease.committed_pages < lease.prompt_pages, "what is complete fills"
            rest = lease.known_from(lease.committed_pages * self._page_size)
            assert lease.place == (lease.anchor, rest[: self._width]), "it fills elsewhere"
        behind = {name: wait for some in self._behind.values() for name, wait in some.items()}
        assert behind == {name: w for name, w in self.waits.items() if w.lease is not None}
        assert len(self.waits) <= self._limits.waiter_count_max
        for name, wait in behind.items():
            assert wait.lease is not None and wait.waiter.name == name
            assert filling.get(wait.lease.id) is wait.lease, "a wait for nobody"
            assert wait.pages > wait.lease.committed_pages, "a wait that is over"
            assert self.may_wait(wait.waiter.order, wait.lease.order), "who is older waits"
