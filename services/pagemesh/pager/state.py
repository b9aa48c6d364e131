"""``PagerCore``: events in, commands out. Everything that a pager decides, without I/O.

    Asked        -> the request's handler; a fault becomes a ``Refused`` and changes nothing
    HolderDied   -> its leases end, its pages are free
    Recovered    -> ledger and tree of an earlier life are rebuilt (once, first)
    Tick         -> sessions and tickets expire, silent holders are chased
    Sweep        -> a turn's worth of what was invalidated is freed
    TierEvent    -> what the disk has found, written, read, or failed at

After each event, waiters are served if something became available. See ``books`` for the state, and
the modules beside it for the decisions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pagemesh.pager.audit import check_books, report
from pagemesh.pager.books import Books
from pagemesh.pager.door import Door
from pagemesh.pager.events import (
    Answer,
    Asked,
    Command,
    Event,
    HolderDied,
    KeepUntil,
    Recovered,
    Sweep,
    Tick,
)
from pagemesh.pager.eviction import EvictionPolicy, Lru
from pagemesh.pager.leases.admission import Admission
from pagemesh.pager.leases.filling import Filling
from pagemesh.pager.leases.handover import Handover
from pagemesh.pager.leases.preemption import Preemption
from pagemesh.pager.leases.quotas import Quotas
from pagemesh.pager.leases.sessions import Sessions
from pagemesh.pager.leases.waterfall import Waterfalls
from pagemesh.pager.limits import PagerLimits, PoolFacts
from pagemesh.pager.pages.runs import last, own
from pagemesh.pager.recovery import Recovery
from pagemesh.pager.retention.ages import Ages
from pagemesh.pager.retention.pins import Pins
from pagemesh.pager.retention.retiring import Retiring
from pagemesh.pager.retention.sweeps import Sweeps
from pagemesh.pager.tiers.tier_events import TierEvent
from pagemesh.pager.tiers.traffic import Tiers
from pagemesh.pager.tree.accounts import NewPolicy
from pagemesh.pager.tree.lifetime import FOREVER_MS
from pagemesh.wire.cache_messages import (
    AskCacheStats,
    AskCacheTop,
    AskCacheTree,
    InvalidateCache,
    PinPrefix,
    UnpinPrefix,
)
from pagemesh.wire.errors import Fault, Malformed
from pagemesh.wire.messages import Message, Refused
from pagemesh.wire.pager_messages import (
    AckRevoke,
    Admit,
    CancelTicket,
    Commit,
    Declare,
    Extend,
    Fork,
    Heartbeat,
    Offer,
    OpenSession,
    Redeem,
    Release,
    Withdraw,
)
from pagemesh.wire.pager_reports import InspectPager, PagerReport

Handler = Callable[[Any], Message]


class PagerCore:
    """One pager life over one pool. ``policy`` evicts for all without a quota; ``new_policy`` makes
    one for each tenant with a quota. ``books`` may be a subclass, for simulators to plant bugs."""

    def __init__(
        self,
        limits: PagerLimits,
        pool: PoolFacts,
        policy: EvictionPolicy,
        *,
        new_policy: NewPolicy = lambda _pages: Lru(),
        books: type[Books] = Books,
    ) -> None:
        self.books = books(limits, pool, policy, new_policy)
        self._untold = self.books.forest.lifetimes.untold
        self._filling = Filling(self.books)
        self._preemption = Preemption(self.books, self._close_offer)
        self.tiers = Tiers(self.books)
        quotas = Quotas(self.books, self._preemption)
        self._pins = Pins(self.books)
        self._sweeps = Sweeps(self.books, self.tiers)
        self._retiring = Retiring(self.books, self._pins, self._sweeps)
        self._ages = Ages()
        self._door = Door(
            self.books, self._pins, self._retiring, self._ages, self.tiers, self._sweeps
        )
        self._waterfalls = Waterfalls(self.books, self.tiers)
        self._admission = Admission(
            self.books, self._preemption, quotas, self.tiers, self._pins, self._waterfalls
        )
        self._handover = Handover(self.books, self._filling, self._admission)
        self._sessions = Sessions(self.books)
        self._recovery = Recovery(
            self.books, self._admission, self._handover, self._sessions, self._pins, self._retiring
        )
        self._handlers: dict[type[Message], Handler] = {
            OpenSession: self._sessions.open,
            Heartbeat: self._sessions.heartbeat,
            Declare: self._recovery.declare,
            Admit: self._admission.admit,
            Extend: self._admission.extend,
            Commit: self._filling.commit,
            Fork: self._handover.fork,
            Release: self._filling.release,
            Offer: self._handover.offer,
            Redeem: self._handover.redeem,
            Withdraw: self._handover.withdraw,
            CancelTicket: self._handover.cancel,
            AckRevoke: self._sessions.acknowledge,
            InspectPager: self._inspect,
            AskCacheStats: self._door.stats,
            AskCacheTree: self._door.tree,
            AskCacheTop: self._door.top,
            PinPrefix: self._door.pin,
            UnpinPrefix: self._door.unpin,
            InvalidateCache: self._door.invalidate,
        }

    def handle(self, event: Event, now_ms: int) -> list[Command]:
        """The commands to perform for ``event``, in order. ``now_ms`` is monotonic."""
        books = self.books
        books.now_ms = books.forest.now_ms = now_ms
        books.out, books.late, books.freed = [], [], False
        if isinstance(event, Asked):  # as most are; faster than ``match``
            books.trace, message = event.trace, event.message
            try:
                answer = self._handlers.get(type(message), _refuse)(message)
            except Fault as fault:
                assert not books.out, "a refusal left something done"
                answer = Refused.of(fault)
            books.out.append(Answer(event.call, answer))
        else:
            self._take_note(event)
        if books.in_flight.due:
            self._admission.serve_due()
        if books.freed and books.waiting.count:
            self._admission.serve_held_back()
            self._admission.serve_waiters()
            self._admission.serve_due()
        if self._untold:
            self._tell_lives()
        if books.late:
            books.out += books.late
        return books.out

    @property
    def is_sweeping(self) -> bool:
        """Whether a ``Sweep`` has something to free now."""
        return self._sweeps.is_due

    def report(self) -> PagerReport:
        """The ledger and every lease."""
        return report(self.books)

    def check(self) -> None:
        """Raise ``AssertionError`` when ledger, tree, leases or tables disagree."""
        check_books(self.books)
        self._waterfalls.check()
        self._sweeps.check()

    def _take_note(self, event: HolderDied | Recovered | Tick | Sweep | TierEvent) -> None:
        """Handle an event that is no request."""
        match event:
            case HolderDied(incarnation):
                self._sessions.bury(incarnation)
            case Recovered():
                self._recovery.recover(event)
            case Tick(away_ms):
                self._sessions.was_away(away_ms)
                self._tick()
            case Sweep():
                self._sweeps.work()
            case _:
                self.tiers.handle(event)

    def _tick(self) -> None:
        books = self.books
        self._sessions.expire()
        self._handover.expire()
        books.waiting.forget_silent(books.now_ms)
        books.in_flight.tick(books.now_ms)
        self._sessions.chase()
        books.reclaim()
        self._pins.expire()
        self._sweeps.tick()
        self._ages.note(books.pool.last_sequence, books.now_ms)
        books.pool.tidy()
        books.accounts.tidy()
        books.freed = books.freed or books.waiting.count > 0

    def _tell_lives(self) -> None:
        """Write into headers until when pages that were used are kept."""
        out, untold = self.books.out, self._untold
        for node in untold:
            pages, until_ms = node.pages, node.expires_ms
            if len(pages):
                told = pages if until_ms >= FOREVER_MS else own(last(pages))
                out.append(KeepUntil(told, until_ms))
        untold.clear()

    def _inspect(self, message: InspectPager) -> PagerReport:
        return report(self.books, message.after)

    def _close_offer(self, lease: Any) -> None:
        self._handover.close_offer(lease)


def _refuse(message: Message) -> Message:
    raise Malformed(f"a pager does not accept {type(message).__name__} messages")
