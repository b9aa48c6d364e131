"""Workers as plain dictionaries, and a memory that records what was written where.

A slot holds the whole context that its K and V were computed from. So a page whose content is not
what a worker expects shows at once, whatever the pager believes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.unit.pager.rig import LAYOUT, PAGE_SIZE, Rig

from pagemesh.pager.events import Holder
from pagemesh.pager.leases.states import LeaseState
from pagemesh.wire.cache_terms import NO_TERMS, CacheTerms
from pagemesh.wire.messages import Message, Order, Refused, SequenceKey
from pagemesh.wire.pager_messages import (
    AckRevoke,
    Admit,
    Declare,
    Declared,
    Extended,
    Fill,
    Granted,
    Handle,
    HeldLease,
    OpenSession,
    PoolSpec,
    Release,
    Revoke,
    SessionOpened,
    TicketClosed,
)
from pagemesh.wire.pool_format import HeaderState
from pagemesh.wire.tokens import pack, pack_extents, unpack_extents

Context = tuple[object, ...]
NOTHING = Fill(filled_tokens=0, first_token=0)
WRITABLE = (HeaderState.HELD, HeaderState.DRAINING)
MODELS = {"w0": "one", "w1": "one", "w2": "two"}
"""The model of each worker, as the pager knows it."""


class Memory:
    """The slots of all pages; enforces that only a page's writer writes to it."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self.slots: dict[tuple[int, int], Context] = {}
        self.ages: dict[bytes, int] = {}
        """How often each root was invalidated: its age, which is part of what slots hold."""

    def write(self, table: list[int], position: int, context: Context, writer: int) -> None:
        page = table[position // PAGE_SIZE]
        state, owner = self._rig.headers.states[page], int(self._rig.headers.writers[page])
        assert state in WRITABLE and owner == writer, (
            f"{writer} writes page {page}, which is {HeaderState(state).name} of {owner}"
        )
        self.slots[page, position % PAGE_SIZE] = context

    def copy(self, source: int, target: int, writer: int) -> None:
        for offset in range(PAGE_SIZE):
            if (source, offset) in self.slots:
                self.write([target], offset, self.slots[source, offset], writer)

    def read(self, table: list[int], position: int) -> Context | None:
        return self.slots.get((table[position // PAGE_SIZE], position % PAGE_SIZE))


@dataclass(eq=False)
class View:
    """A lease as its holder knows it."""

    granted: Granted
    order: Order
    root: bytes
    tokens: list[int]
    table: list[int]
    filled: int
    granted_at: int
    epoch: int
    state: str = "held"  # held, offered, lost
    in_step: int = 0
    """Number of slots that a running step is about to write."""
    ticket: str = ""
    handle: Handle | None = None
    terms: CacheTerms = NO_TERMS
    reserved_pages: int = 0
    """Pages reserved for it; those that it does not have yet are promised until it is offered."""
    age: int = 0
    """Age of its root when it was admitted."""

    def context(self, tokens: list[int]) -> Context:
        """The context that the slot of the last of ``tokens`` is computed from."""
        return (self.root, self.age, *tokens)

    @property
    def id(self) -> int:
        return self.granted.lease

    @property
    def key(self) -> SequenceKey:
        return self.granted.key

    @property
    def promised_pages(self) -> int:
        return max(self.reserved_pages - len(self.table), 0) if self.state == "held" else 0

    def fill(self, filled: int | None = None) -> Fill:
        count = self.filled if filled is None else filled
        return Fill(filled_tokens=count, first_token=0, tokens=pack(self.tokens[:count]))


@dataclass
class Wish:
    """An admission that was requested and has not been answered yet."""

    order: Order
    root: bytes
    tokens: list[int]
    terms: CacheTerms = NO_TERMS
    reserved_pages: int = 0
    age: int | None = None
    """Age of its root, if it continues what another worker computed."""
    message: Admit | None = None
    """The request."""


@dataclass
class Peer:
    """One worker incarnation that does exactly what workers do."""

    rig: Rig
    memory: Memory
    name: str
    incarnation: int
    epoch: int = 0
    views: dict[int, View] = field(default_factory=dict)
    wishes: dict[SequenceKey, Wish] = field(default_factory=dict)
    dead_leases: set[int] = field(default_factory=set)
    declare_count: int = 0
    undeclared: list[list[View]] = field(default_factory=list)
    """The leases of the parts that are still to be sent of a declaration."""
    part_count: int = 0

    @property
    def holder(self) -> Holder:
        return Holder(self.incarnation, self.name, f"lock-{self.incarnation}")

    def held(self) -> list[View]:
        return [view for view in self.views.values() if view.state == "held"]

    def has(self, view: View) -> bool:
        """Whether the pager, too, sees the lease as held by this worker."""
        lease = self.rig.core.books.leases.get(view.id)
        holds = lease is not None and lease.life.state is LeaseState.HELD
        return holds and lease is not None and lease.incarnation == self.incarnation

    # Sessions

    def open(self) -> None:
        """Open a session. An unfinished declaration is dropped, to be made anew another time. If
        the pager has too many sessions already, the worker asks again another time."""
        self.undeclared.clear()
        answer = self.rig.ask(
            OpenSession(
                worker=self.name, incarnation=self.incarnation,
                role="prefill" if self.name == "w0" else "decode",
                model=MODELS[self.name], lock_name=f"lock-{self.incarnation}",
                pool=PoolSpec(
                    layout_digest=LAYOUT, page_size=PAGE_SIZE, page_bytes=1 << 12,
                    place=self.rig.place,
                ),
            )
        )  # fmt: skip
        if isinstance(answer, Refused):
            is_full = len(self.rig.core.books.sessions) >= self.rig.limits.session_count_max
            assert answer.code == "Busy" and is_full, answer
            return
        assert isinstance(answer, SessionOpened), answer
        self.epoch = answer.epoch

    def begin_declaring(self, part_count: int) -> None:
        """Begin to declare everything in ``part_count`` parts, but not while a step uses a lost
        lease."""
        self.undeclared.clear()
        if any(view.state == "lost" and view.in_step for view in self.views.values()):
            return
        views = [view for view in self.views.values() if view.state != "lost"]
        self.declare_count, self.part_count = self.declare_count + 1, part_count
        self.undeclared = [views[part::part_count] for part in range(part_count)]

    def next_part(self) -> Declare:
        """The next part, without leases that have been released since the first."""
        part, views = self.part_count - len(self.undeclared), self.undeclared.pop(0)
        there = [view for view in views if self.views.get(view.id) is view]
        return Declare(
            worker=self.name, incarnation=self.incarnation, epoch=self.epoch,
            number=self.declare_count, part=part, parts=self.part_count,
            leases=[self._line(view) for view in there],
        )  # fmt: skip

    def declared(self, answer: Message) -> None:
        """Handle the pager's answer to a part."""
        if isinstance(answer, Refused):  # the pager is another one, or counts us as silent
            self.undeclared.clear()
        elif isinstance(answer, Declared):
            for lease in answer.lost:
                if lease in self.views:
                    self.lose(self.views[lease])

    def _line(self, view: View) -> HeldLease:
        return HeldLease(
            lease=view.id, lease_slot=view.granted.lease_slot, key=view.key, order=view.order,
            root=view.root, granted_at=view.granted_at, extents=pack_extents(view.table),
            tokens=pack(view.tokens[: view.filled]), ticket=view.ticket or None,
            terms=view.terms, promised_pages=view.promised_pages,
        )  # fmt: skip

    # Messages of the pager

    def granted(self, answer: Granted, wish: Wish, filled: int | None = None) -> View | None:
        """Take up a grant. One that is known, or that we no longer want, is ignored."""
        if answer.lease in self.dead_leases or answer.lease in self.views:
            return None
        table = table_of(answer.extents)
        cached = answer.cached_tokens if filled is None else filled
        assert len(table) * PAGE_SIZE >= cached
        view = View(
            answer, wish.order, wish.root, list(wish.tokens), table, cached,
            answer.granted_at, self.epoch, terms=wish.terms, reserved_pages=wish.reserved_pages,
            age=self.memory.ages.get(wish.root, 0) if wish.age is None else wish.age,
        )  # fmt: skip
        self.views[answer.lease] = view
        self.check_view(view)
        return view

    def give_back(self, granted: Granted) -> None:
        """Release a lease that we do not use."""
        self.dead_leases.add(granted.lease)
        self.rig.ask(
            Release(
                key=granted.key, worker=self.name, incarnation=self.incarnation,
                lease=granted.lease, fill=NOTHING,
            )
        )  # fmt: skip

    def extended(self, answer: Extended) -> None:
        view = self.views.get(answer.lease)
        if view is None or view.state != "held":
            return
        pages = table_of(answer.extents)
        assert len(view.table) >= answer.first_index
        both = view.table[answer.first_index :]
        assert both == pages[: len(both)], "a page table changed mid-sequence"
        view.table += pages[len(both) :]
        view.granted_at = max(view.granted_at, answer.granted_at)

    def notified(self, message: Message) -> None:
        match message:
            case Revoke():
                view = self.views.get(message.lease)
                if view is not None:
                    self.lose(view)
                else:
                    self.dead_leases.add(message.lease)
                    self.acknowledge(message.lease)
            case TicketClosed():
                for view in list(self.views.values()):
                    if view.ticket == message.ticket and view.state == "offered":
                        theirs = message.outcome != "cancelled" or not self.has(view)
                        assert theirs, "it is to forget what it holds"
                        del self.views[view.id]
            case Granted():
                wish = self.wishes.pop(message.key, None)
                if wish is None:
                    if message.lease not in self.views:
                        self.give_back(message)
                else:
                    self.granted(message, wish)
            case Extended():
                self.extended(message)
            case _:
                raise AssertionError(f"a worker was sent {message}")

    def lose(self, view: View) -> None:
        """The lease is lost; it is acknowledged once no step of ours uses it."""
        if view.state == "offered":
            del self.views[view.id]
        else:
            view.state = "lost"

    def acknowledge(self, *leases: int) -> None:
        self.rig.ask(AckRevoke(worker=self.name, incarnation=self.incarnation, leases=list(leases)))

    # Steps

    def word_stands(self, view: View) -> bool:
        return int(self.rig.words[view.granted.lease_slot]) == view.id

    def begin_step(self, view: View, count: int) -> None:
        """Begin a step that will write ``count`` slots, if the lease word is intact and there is
        room."""
        room = len(view.table) * PAGE_SIZE - view.filled
        view.in_step = min(count, room) if self.word_stands(view) else 0

    def end_step(self, view: View, token: int) -> None:
        """Write the slots; count them only if the lease word is still intact."""
        count, view.in_step = view.in_step, 0
        stands, tokens = self.word_stands(view), list(view.tokens)
        for position in range(view.filled, view.filled + count):
            if position == len(tokens):
                tokens.append(token)
            context = view.context(tokens[: position + 1])
            self.memory.write(view.table, position, context, self.incarnation)
        if stands:
            view.tokens = tokens
            view.filled += count
        else:
            self.lose(view)

    def check_view(self, view: View) -> None:
        """Every filled slot holds the context that it should have been computed from."""
        for position in range(view.filled):
            found = self.memory.read(view.table, position)
            wanted = view.context(view.tokens[: position + 1])
            assert found == wanted, f"slot {position} of {view.id} holds {found}, not {wanted}"


def table_of(extents: bytes) -> list[int]:
    return [int(page) for page in unpack_extents(extents, page_count_max=1 << 16)]
