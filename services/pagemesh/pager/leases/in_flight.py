"""Prefixes in flight: which leases are computing which prefix right now, and who waits for them.

A lease that was granted for a prompt *fills*: it is registered at the tree node where its committed
pages end, under the tokens of its next page. An admission whose match ends at that node and whose
next page is the same waits until the common pages are committed, instead of computing them too.

    granted ---> filling at (node, next page) ---commits---> filling further on ---> complete
                   | has committed what a waiter wants         | revoked, offered, ended, stalled
                   v                                           v
                 that waiter is due                          every waiter is due

Waiters that are due ask again, the oldest first. There may be more to wait for; or the first one
takes over the filling, and the others wait for it.

Waiting never deadlocks: a filling lease has all pages of its prompt, or is promised them and waits
for nothing but room (``promises``), and a waiter holds nothing, so nobody waits for it. Nor does it
invert priorities: no sequence waits for one that is clearly behind it in the order of sequences
(``InFlight.may_wait``).
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
"""How many leases at one place are compared. More can be there only if these may not wait."""


class Filler(Protocol):
    """What fills a prefix: a lease, or pages that are being read from disk."""

    id: int
    key: SequenceKey
    order: Order
    incarnation: int
    anchor: Node
    """Where its committed pages end."""
    tokens: bytes
    tokens_first: int
    prompt_pages: int
    """Pages of its prefix when that is complete; 0: it does not fill."""
    place: tuple[Node, bytes] | None
    """Where it is registered: the node where its committed pages end, and its next page."""

    @property
    def committed_pages(self) -> int: ...

    @property
    def may_fill(self) -> bool: ...

    def known_from(self, position: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Found:
    """``lease`` will commit ``pages`` pages beyond a match. ``is_fit``: the sequence may wait for
    them."""

    lease: Filler
    pages: int
    is_fit: bool


@dataclass(slots=True, eq=False)
class Wait:
    """A sequence that waits, or has waited, for another to commit the first ``pages`` pages of its
    prompt. The record is kept while the sequence queues for room afterwards."""

    waiter: Waiter
    start_pages: int
    """Pages of its prompt that were cached when it began to wait."""
    since_ms: int
    lease: Filler | None = None
    """What it waits for; None: it is due, or queues for room."""
    pages: int = 0
    waited_ms: int = 0
    fetched_pages: int = 0
    """How many of the pages it waited for were read from disk."""


class InFlight:
    """The filling leases by place, and the sequences that wait for them."""

    def __init__(self, forest: Forest, page_size: int, limits: PagerLimits) -> None:
        self._forest = forest
        self._limits = limits
        self._page_size = page_size
        self._width = 4 * page_size
        self._filling: dict[tuple[object, bytes], list[Filler]] = {}
        self._latest: Filler | None = None
        """The last lease that began to fill. It is registered only when something is looked up: if
        nothing is meanwhile, as under light load, it never has to be."""
        self.waits: dict[Name, Wait] = {}
        """Sequences that wait, or have waited and now queue for room."""
        self._behind: dict[int, dict[Name, Wait]] = {}
        """Lease -> sequences that wait for it."""
        self.due: list[tuple[Place, Name]] = []
        """A heap of sequences that are to ask again (``pop_due``); some entries may be outdated."""
        self._progress_ms: dict[int, int] = {}
        """When each incarnation that is waited for last committed something."""
        self.saved_tokens = 0
        """Tokens that were not computed a second time, thanks to waiting."""

    # Filling

    def enter(self, lease: Filler, prompt_pages: int) -> None:
        """``lease`` begins to fill the first ``prompt_pages`` pages of its prompt."""
        if self._latest is not None:
            self._register_latest()
        lease.prompt_pages = prompt_pages
        self._latest = lease

    def committed(self, lease: Filler, now_ms: int) -> None:
        """``lease``, which is filling, has committed more pages."""
        done = lease.anchor.depth
        is_complete = done >= lease.prompt_pages
        if lease.incarnation in self._progress_ms:  # its worker is alive, whatever it computes
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
        """The pages of ``lease`` from ``first_page`` on came from disk: note it for its waiters."""
        for wait in self._behind.get(lease.id, {}).values():
            wait.fetched_pages += max(0, min(wait.pages, lease.committed_pages) - first_page)

    def leave(self, lease: Filler) -> None:
        """``lease`` stops filling; its waiters are due. Does nothing when it does not fill."""
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

    # Looking up

    @property
    def is_filling(self) -> bool:
        """Whether any lease is filling, so that ``find`` may find one."""
        return self._latest is not None or bool(self._filling)

    def find(self, match: Match, message: Admit) -> Found | None:
        """The lease that will commit what follows ``match``, if any: of those that ``message`` may
        wait for, the one with the most pages in common; else, of all, the one with the most."""
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
        """Whether a sequence at ``order`` may wait for the one at ``filling``, which must not be
        behind it. Requests that arrive together reach the pager in any order, so those within
        ``in_flight_together_ms`` count as equally old."""
        return filling.due_us <= order.due_us + 1_000 * self._limits.in_flight_together_ms

    def _common_pages(self, lease: Filler, tokens: bytes, at: int, pages_max: int) -> int:
        start = lease.committed_pages
        pages = min(lease.prompt_pages - start, pages_max)
        rest = lease.known_from(start * self._page_size)
        return self._forest.common_pages(rest, tokens, at, pages * self._width)

    # Waiting

    @property
    def wait_count(self) -> int:
        """Number of sequences that wait for others to commit."""
        return sum(map(len, self._behind.values()))

    def has_place(self, name: Name) -> bool:
        """Whether ``wait_for`` would let ``name`` wait."""
        return name in self.waits or len(self.waits) < self._limits.waiter_count_max

    @property
    def awaited(self) -> set[int]:
        """The incarnations that sequences wait for."""
        return {wait.lease.incarnation for wait in self.waits.values() if wait.lease is not None}

    def wait_for(self, found: Found, start_pages: int, waiter: Waiter, now_ms: int) -> bool:
        """Let ``waiter``, with ``start_pages`` cached, wait for ``found``. Returns False when too
        many wait already."""
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
        """Note that ``waiter`` has asked again. Returns whether it still waits for a lease."""
        wait = self.waits.get(waiter.name)
        if wait is None:
            return False
        wait.waiter = waiter
        return wait.lease is not None

    def pop_due(self, now_ms: int) -> Waiter | None:
        """Remove and return the oldest waiter that is due, if any."""
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
        """Remove and return the wait of ``name``: it is served, or no longer wants pages."""
        wait = self.waits.pop(name, None)
        if wait is not None:
            self._stop(wait)
        return wait

    def end_waits_of(self, incarnation: int) -> None:
        """Remove the waits of a worker incarnation."""
        for name in [name for name in self.waits if name[0] == incarnation]:
            self.end_wait(name)

    def tick(self, now_ms: int) -> None:
        """Remove waiters that were silent for too long, and give up on filling leases that are
        waited for but whose worker has committed nothing for too long."""
        for wait in [wait for wait in self.waits.values() if wait.waiter.forget_ms <= now_ms]:
            self.end_wait(wait.waiter.name)
        self._progress_ms = {life: self._progress_ms[life] for life in self.awaited}
        for wait in list(self.waits.values()):
            if wait.lease is not None:
                idle_ms = now_ms - self._progress_ms[wait.lease.incarnation]
                if idle_ms >= self._limits.in_flight_stall_ms_max:
                    self.leave(wait.lease)

    def was_away(self, away_ms: int, now_ms: int, latest_ms: int) -> None:
        """Nobody could be heard for ``away_ms``: that counts neither as silence nor as a stall."""
        for wait in self.waits.values():
            wait.waiter = wait.waiter.later(away_ms, latest_ms)
        for life, since_ms in self._progress_ms.items():
            self._progress_ms[life] = min(since_ms + away_ms, now_ms)

    def _make_due(self, wait: Wait) -> None:
        self._stop(wait)
        heappush(self.due, (wait.waiter.place, wait.waiter.name))

    def _stop(self, wait: Wait) -> None:
        """``wait`` waits for no lease any more."""
        lease, wait.lease = wait.lease, None
        if lease is not None:
            behind = self._behind[lease.id]
            del behind[wait.waiter.name]
            if not behind:
                del self._behind[lease.id]

    # Checking

    def waiters(self) -> Iterator[Waiter]:
        """The sequences that wait for a lease."""
        return (wait.waiter for wait in self.waits.values() if wait.lease is not None)

    def check(self, leases: Mapping[int, Filler]) -> None:
        """Raise ``AssertionError`` unless exactly the filling ones of ``leases`` are registered, at
        the right places, and every wait is for one of them that will end it."""
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
