"""A pager core with a fake pool around it, for tests.

``Rig`` performs commands on plain arrays (headers, lease words, roots), so that a test can compare
the state of the pool with that of the core, and restart from it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np
from tests.unit.pager.plain_headers import blank, write

from pagemesh.pager.books import Books
from pagemesh.pager.events import (
    Answer,
    Asked,
    Command,
    Event,
    ForgetHolder,
    Holder,
    HolderDied,
    KeepUntil,
    KeptPin,
    Notify,
    PagesDropped,
    PagesStored,
    Recovered,
    RememberHolder,
    RootEntry,
    SetLeaseWord,
    SetStates,
    StorePins,
    StoreRoot,
    Tick,
    WriteHeaders,
)
from pagemesh.pager.eviction import EvictionPolicy, Lru
from pagemesh.pager.limits import PagerLimits, PoolFacts
from pagemesh.pager.pages.runs import table_of as as_table
from pagemesh.pager.state import PagerCore
from pagemesh.wire import codec
from pagemesh.wire.cache_terms import NO_TERMS, CacheTerms
from pagemesh.wire.messages import Message, Order, Refused, SequenceKey
from pagemesh.wire.pager_messages import (
    AckRevoke,
    Admit,
    CancelTicket,
    Commit,
    Committed,
    Extend,
    Extended,
    Fill,
    Fork,
    Forked,
    Granted,
    Heartbeat,
    Offer,
    Offered,
    OpenSession,
    PoolSpec,
    Queued,
    Redeem,
    Release,
    SessionOpened,
    Withdraw,
)
from pagemesh.wire.pool_format import IN_FILE, HeaderState
from pagemesh.wire.tokens import pack, unpack_extents

M = TypeVar("M", bound=Message)
LAYOUT = bytes(range(32))
ROOT = bytes(reversed(range(32)))
PAGE_SIZE = 4
LIMITS = PagerLimits(lease_count_max=64, step_ms_max=20_000)
WHOLE = (HeaderState.HELD, HeaderState.COMMITTED, HeaderState.DRAINING)
"""States of headers that the next pager trusts."""


def key_of(number: int, attempt: int = 1, choice: int = 0) -> SequenceKey:
    return SequenceKey(request=f"{number:032x}", attempt=attempt, choice=choice)


def order_of(number: int, choice: int = 0, priority: int = 0) -> Order:
    """``number`` is also the time of arrival: smaller is older."""
    return Order(priority=priority, arrival_us=number, request=f"{number:032x}", choice=choice)


def fill_of(tokens: Iterable[int], filled: int | None = None, first: int = 0) -> Fill:
    """A fill of ``tokens`` from position ``first`` on, with ``filled`` slots (default: all)."""
    ids = list(tokens)
    count = first + len(ids) if filled is None else filled
    return Fill(filled_tokens=count, first_token=first, tokens=pack(ids))


class Rig:
    """One pool, one pager life at a time."""

    place = IN_FILE
    """Place of the pages, which do not exist here."""

    def __init__(
        self,
        page_count: int = 16,
        *,
        page_size: int = PAGE_SIZE,
        limits: PagerLimits = LIMITS,
        books: type[Books] = Books,
    ) -> None:
        self.page_count, self.page_size, self.limits = page_count, page_size, limits
        self.now_ms, self.epoch, self._books = 1_000, 1, books
        self.headers = blank(page_count, page_size)
        self.words = np.zeros(limits.lease_count_max, np.uint64)
        self.roots: dict[int, RootEntry] = {}
        self.kept_pins, self._kept_at_ms = tuple[KeptPin, ...](), 0
        self.cached: set[int] = set()
        """Pages announced as stored and not as dropped since."""
        self.known: dict[int, Holder] = {}
        """The holders that the next pager will probe."""
        self.notices: list[Notify] = []
        self.commands: list[Command] = []
        self._calls = itertools.count()
        self.core = self._new_core()

    def _new_core(self) -> PagerCore:
        facts = PoolFacts(
            "host", self.epoch, 77, self.page_count, self.page_size, 1 << 12, LAYOUT, "/pool",
            place=self.place,
        )  # fmt: skip
        policy, books = self.new_policy(self.page_count), self._books
        return PagerCore(self.limits, facts, policy, new_policy=self.new_policy, books=books)

    def new_policy(self, _page_count: int) -> EvictionPolicy:
        """The eviction policy of an account: the common one, or that of a tenant with a quota."""
        return Lru()

    # Driving

    def ask(self, message: Message) -> Message:
        """Send ``message``, perform the commands and check the core; returns the answer."""
        call = next(self._calls)
        answers = [c for c in self.handle(Asked(call, message)) if isinstance(c, Answer)]
        assert [answer.call for answer in answers] == [call]
        return answers[0].message

    def tick(self, after_ms: int = 0) -> list[Command]:
        self.now_ms += after_ms
        return self.handle(Tick())

    def die(self, incarnation: int) -> list[Command]:
        return self.handle(HolderDied(incarnation))

    def handle(self, event: Event) -> list[Command]:
        self.commands = self.core.handle(event, self.now_ms)
        for command in self.commands:
            self.perform(command)
        self.core.check()
        report = self.core.report()
        assert codec.decode(codec.encode(report)) == report, "whoever asks could not read it"
        assert report.faults == [], "an audit would find something"
        self.check_headers()
        return self.commands

    def restart(self, holders: Iterable[Holder] = (), after_ms: int = 0) -> None:
        """Kill the pager by SIGKILL; ``after_ms`` later, a new one starts from the pool."""
        self.epoch, self.now_ms = self.epoch + 1, self.now_ms + after_ms
        self.core = self._new_core()
        self.cached.clear()
        pins = tuple(pin.after(self.now_ms - self._kept_at_ms) for pin in self.kept_pins)
        roots, living = tuple(self.roots.values()), tuple(holders)
        self.handle(Recovered(self.headers, roots, self.words, living, pins))

    def perform(self, command: Command) -> None:
        match command:
            case WriteHeaders() | SetStates() | KeepUntil():
                write(self.headers, command)
            case SetLeaseWord(slot, value):
                self.words[slot] = value
            case StoreRoot(index, digest, live):
                named = self.headers.roots[np.isin(self.headers.states, WHOLE)]
                assert not live or index not in named, "a line is given away that a page names"
                self.roots[index] = RootEntry(index, digest, live)
            case StorePins(pins):
                self.kept_pins, self._kept_at_ms = pins, self.now_ms
            case PagesStored():
                assert not self.cached & set(command.pages)
                self.cached |= set(command.pages)
            case PagesDropped():
                assert set(command.pages) <= self.cached
                self.cached -= set(command.pages)
            case Notify():
                self.notices.append(command)
            case RememberHolder(holder):
                self.known[holder.incarnation] = holder
            case ForgetHolder(incarnation):
                self.known.pop(incarnation, None)

    def check_headers(self) -> None:
        """The headers in the pool agree with the core."""
        books = self.core.books
        states, headers = books.pool.states, self.headers
        same = states == headers.states
        # After a restart, pages that drain keep the header of their earlier life.
        same |= (states == HeaderState.DRAINING) & (headers.states != HeaderState.FREE)
        assert same.all(), (states, headers.states)
        assert np.array_equal(books.pool.sequences, headers.sequences)
        assert [pin.name for pin in self.kept_pins] == list(books.pins), "a pin would be lost"
        committed = states == HeaderState.COMMITTED
        retired = [node for tree in books.forest.retired.values() for node in tree.root.below()]
        assert set(np.flatnonzero(committed)) == self.cached | {p for n in retired for p in n.pages}
        assert np.array_equal(books.pool.identities[committed], headers.identities[committed])
        for lease in books.leases.values():
            revoked = lease.life.state.value == "revoked"
            assert self.words[lease.slot] == (0 if revoked else lease.id)
            if not revoked:
                assert (headers.writers[as_table(lease.held_pages)] == lease.incarnation).all()
                assert (headers.roots[as_table(lease.held_pages)] == lease.tree.index).all()
            node = lease.anchor
            while not node.is_root:
                pages = as_table(node.pages)
                assert headers.tokens[pages].tobytes() == node.tokens
                node = node.parent
        assert np.count_nonzero(self.words) == len(books.slots_kept) + sum(
            lease.life.state.value != "revoked" for lease in books.leases.values()
        )

    def taken(self, kind: type[M]) -> list[M]:
        """The notices of a kind since the last call; they are removed."""
        found = [n.message for n in self.notices if isinstance(n.message, kind)]
        self.notices = [n for n in self.notices if not isinstance(n.message, kind)]
        return found


class Worker:
    """One worker incarnation, with calls that check the type of the answer."""

    def __init__(self, rig: Rig, name: str, incarnation: int, *, opened: bool = True) -> None:
        self.rig, self.name, self.incarnation = rig, name, incarnation
        if opened:
            answer = self.open()
            assert isinstance(answer, SessionOpened), answer

    @property
    def holder(self) -> Holder:
        return Holder(self.incarnation, self.name, f"lock-{self.incarnation}")

    def open(self) -> Message:  # SessionOpened or Refused
        spec = PoolSpec(
            layout_digest=LAYOUT, page_size=self.rig.page_size, page_bytes=1 << 12,
            place=self.rig.place,
        )  # fmt: skip
        return self.rig.ask(
            OpenSession(
                worker=self.name, incarnation=self.incarnation, role="prefill",
                lock_name=f"lock-{self.incarnation}", pool=spec, model="a-model",
            )
        )  # fmt: skip

    def _ask(self, message: Message) -> Message:
        return self.rig.ask(message)

    def admit(
        self, number: int, tokens: Iterable[int], reserve: int = 0, *, read_cache: bool = True,
        root: bytes = ROOT, attempt: int = 1, deadline_ms: int = 60_000,
        terms: CacheTerms = NO_TERMS, tokens_max: int = 0, first_tokens: int = 0, priority: int = 0,
    ) -> Message:  # fmt: skip
        """Granted, Queued or Refused."""
        ids = list(tokens)
        return self._ask(
            Admit(
                key=key_of(number, attempt), order=order_of(number, priority=priority),
                worker=self.name, incarnation=self.incarnation, epoch=self.rig.epoch, root=root,
                tokens=pack(ids),
                reserve_tokens=max(reserve, len(ids)), read_cache=read_cache, terms=terms,
                tokens_max=tokens_max, first_tokens=first_tokens, deadline_ms=deadline_ms,
            )
        )  # fmt: skip

    def granted(self, number: int, tokens: Iterable[int], reserve: int = 0, **how: Any) -> Granted:
        answer = self.admit(number, tokens, reserve, **how)
        assert isinstance(answer, Granted), answer
        return answer

    def extend(self, lease: Granted, page_count: int, have: int = 0) -> Message:
        return self._ask(
            Extend(
                key=lease.key, worker=self.name, incarnation=self.incarnation,
                lease=lease.lease, have_pages=have, page_count=page_count,
            )
        )  # fmt: skip

    def extended(self, lease: Granted, page_count: int, have: int = 0) -> Extended:
        answer = self.extend(lease, page_count, have)
        assert isinstance(answer, Extended), answer
        return answer

    def commit(self, lease: Granted, fill: Fill) -> Message:
        return self._ask(
            Commit(
                key=lease.key, worker=self.name, incarnation=self.incarnation,
                lease=lease.lease, fill=fill,
            )
        )  # fmt: skip

    def committed(self, lease: Granted, tokens: Iterable[int], filled: int | None = None) -> int:
        """Commit; all of ``tokens`` from the start. Returns the committed tokens."""
        answer = self.commit(lease, fill_of(tokens, filled))
        assert isinstance(answer, Committed), answer
        return answer.committed_tokens

    def release(self, lease: Granted, tokens: Iterable[int] = (), *, cache: bool = True) -> Message:
        return self._ask(
            Release(
                key=lease.key, worker=self.name, incarnation=self.incarnation,
                lease=lease.lease, fill=fill_of(tokens), cache=cache,
            )
        )  # fmt: skip

    def fork(self, lease: Granted, fill: Fill, children: Iterable[int], reserve: int) -> Message:
        keys = [
            SequenceKey(request=lease.key.request, attempt=lease.key.attempt, choice=choice)
            for choice in children
        ]
        return self._ask(
            Fork(
                key=lease.key, worker=self.name, incarnation=self.incarnation,
                lease=lease.lease, fill=fill, children=keys, reserve_tokens=reserve,
            )
        )  # fmt: skip

    def forked(self, lease: Granted, fill: Fill, children: Iterable[int], reserve: int) -> Forked:
        answer = self.fork(lease, fill, children, reserve)
        assert isinstance(answer, Forked), answer
        return answer

    def offer(
        self, lease: Granted, fill: Fill, ticket: str = "a" * 32, ttl_ms: int = 10_000
    ) -> Message:
        return self._ask(
            Offer(
                key=lease.key, worker=self.name, incarnation=self.incarnation,
                epoch=self.rig.epoch, lease=lease.lease, ticket=ticket, fill=fill, ttl_ms=ttl_ms,
            )
        )  # fmt: skip

    def offered(self, lease: Granted, fill: Fill, ticket: str = "a" * 32) -> Offered:
        answer = self.offer(lease, fill, ticket)
        assert isinstance(answer, Offered), answer
        return answer

    def redeem(self, key: SequenceKey, offered: Offered, reserve: int = 0) -> Message:
        return self._ask(
            Redeem(
                key=key, worker=self.name, incarnation=self.incarnation, epoch=self.rig.epoch,
                ticket=offered.ticket, handle=offered.handle, reserve_tokens=reserve,
            )
        )  # fmt: skip

    def redeemed(self, key: SequenceKey, offered: Offered, reserve: int = 0) -> Granted:
        answer = self.redeem(key, offered, reserve)
        assert isinstance(answer, Granted), answer
        return answer

    def withdraw(self, ticket: str = "a" * 32) -> Message:
        return self._ask(Withdraw(worker=self.name, incarnation=self.incarnation, ticket=ticket))

    def cancel(self, ticket: str = "a" * 32) -> Message:
        return self._ask(
            CancelTicket(worker=self.name, incarnation=self.incarnation, ticket=ticket)
        )

    def ack(self, *leases: Granted) -> Message:
        ids = [lease.lease for lease in leases]
        return self._ask(AckRevoke(worker=self.name, incarnation=self.incarnation, leases=ids))

    def heartbeat(self, *leases: Granted) -> Message:
        digest = 0
        for lease in leases:
            digest ^= lease.lease
        return self._ask(
            Heartbeat(
                worker=self.name, incarnation=self.incarnation, epoch=self.rig.epoch,
                lease_count=len(leases), lease_digest=digest,
            )
        )  # fmt: skip


def table_of(granted: Granted | Extended) -> list[int]:
    return [int(page) for page in unpack_extents(granted.extents, page_count_max=1 << 20)]


def code_of(answer: Message) -> str:
    """The code of a refusal; the type's name of anything else."""
    return answer.code if isinstance(answer, Refused) else type(answer).__name__


def is_queued(answer: Message) -> bool:
    return isinstance(answer, Queued)
