"""The machines' workers acknowledge revoked leases and ask again, or give up waiting; and gateways
that have lost track of an attempt start another one."""

from __future__ import annotations

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from tests.machine.mesh import Mesh
from tests.machine.peers import NOTHING, Peer, View, Wish
from tests.machine.prompts import picks
from tests.unit.pager.rig import PAGE_SIZE

from pagemesh.pager.leases.waiting import Name
from pagemesh.wire.messages import Ok, Refused, SequenceKey
from pagemesh.wire.pager_messages import NO_LEASE, Admit, Extend, Extended, Release
from pagemesh.wire.tokens import pack


class Losers(Mesh):
    """Rules of lost leases, and of sequences that nobody waits for."""

    attempts: int = 0
    """Number of attempts beyond the first of each sequence; each has another number."""

    @precondition(lambda self: self.has("lost"))
    @rule(pick=picks)
    def acknowledges(self, pick: int) -> None:
        peer, view = self.view(pick, "lost")
        if not view.in_step:
            self.let_go(peer, view)

    @precondition(lambda self: self.has("lost"))
    @rule(pick=picks)
    def acknowledges_and_asks_again(self, pick: int) -> None:
        peer, view = self.view(pick, "lost")
        if not view.in_step and view.tokens:  # a branch may have none
            self.let_go(peer, view)
            self.ask_again(peer, view)

    @precondition(lambda self: self.has("lost"))
    @rule(pick=picks)
    def releases_what_is_lost(self, pick: int) -> None:
        """As a worker does that has not heard of the revocation."""
        peer, view = self.view(pick, "lost")
        if view.in_step:
            return
        del peer.views[view.id]
        peer.dead_leases.add(view.id)
        self.ask(peer, Release(**self.own(peer, view), fill=NOTHING))
        lease = self.rig.core.books.leases.get(view.id)
        assert lease is None or lease.incarnation != peer.incarnation, "it keeps what was let go"

    @precondition(lambda self: self.those_in_queues())
    @rule(pick=picks)
    def asks_again_while_it_waits(self, pick: int) -> None:
        found = self.those_in_queues()
        peer, key = found[pick % len(found)]
        message = peer.wishes[key].message
        assert message is not None
        self.heard(peer, message, self.ask(peer, message))

    @precondition(lambda self: self.has("held"))
    @rule(pick=picks)
    def nobody_hears_the_answer(self, pick: int) -> None:
        """The worker holds a lease that it does not know of, so it is in no declaration."""
        peer, view = self.view(pick)
        if view.tokens:
            self.attempts += 1
            key = msgspec.structs.replace(view.key, attempt=1 + self.attempts)
            self.ask(peer, self.admission(peer, view, key, again=False))

    @precondition(lambda self: self.those_in_queues())
    @rule(pick=picks)
    def gives_up_its_place(self, pick: int) -> None:
        found = self.those_in_queues()
        peer, key = found[pick % len(found)]
        del peer.wishes[key]
        message = Release(
            key=key, worker=peer.name, incarnation=peer.incarnation, lease=NO_LEASE, fill=NOTHING
        )
        assert isinstance(self.ask(peer, message), Ok)
        assert (peer.incarnation, key) not in self.waiting(), "pages are kept back for nobody"

    @precondition(lambda self: self.those_that_wait_to_grow())
    @rule(pick=picks, asks=st.booleans())
    def grows_no_more(self, pick: int, asks: bool) -> None:
        """What it has is enough: it asks for just that, or says that it no longer waits."""
        views = self.those_that_wait_to_grow()
        peer, view = views[pick % len(views)]
        have, own = len(view.table), self.own(peer, view)
        if asks:
            answer = self.ask(peer, Extend(**own, have_pages=have, page_count=have))
            assert isinstance(answer, Extended | Refused), answer
            self.heard(peer, answer, answer)
        else:
            nothing = Release(**{**own, "lease": NO_LEASE}, fill=NOTHING)
            assert isinstance(self.ask(peer, nothing), Ok)
        assert (peer.incarnation, view.key) not in self.waiting(), "pages are kept back for nobody"

    def those_that_wait_to_grow(self) -> list[tuple[Peer, View]]:
        waiting = self.waiting()
        held = [(peer, view) for peer in self.peers for view in peer.held() if peer.has(view)]
        return [(peer, view) for peer, view in held if (peer.incarnation, view.key) in waiting]

    def those_in_queues(self) -> list[tuple[Peer, SequenceKey]]:
        waiting = self.waiting()
        wanted = [(peer, key) for peer in self.peers for key in peer.wishes]
        return [(peer, key) for peer, key in wanted if (peer.incarnation, key) in waiting]

    @precondition(lambda self: self.has("held"))
    @rule(pick=picks, to=picks)
    def another_attempt_is_made(self, pick: int, to: int) -> None:
        """The earlier attempt continues beside it: its worker was not told."""
        _, view = self.view(pick)
        if view.tokens:
            self.attempts += 1
            key = msgspec.structs.replace(view.key, attempt=1 + self.attempts)
            self.ask_for(self.peer(to), view, key, again=False)

    @precondition(lambda self: self.has("lost"))
    @rule(pick=picks)
    def asks_again_and_acknowledges(self, pick: int) -> None:
        """As workers do, which ask at once and acknowledge when no step uses the pages any more."""
        peer, view = self.view(pick, "lost")
        if view.tokens:
            self.ask_again(peer, view)
        if not view.in_step and view.id in peer.views:
            self.let_go(peer, view)

    def let_go(self, peer: Peer, view: View) -> None:
        """Acknowledge; if the sequence waits already, it keeps waiting or is served."""
        name = (peer.incarnation, view.key)
        queue, most = self.rig.core.books.waiting, self.rig.limits.waiter_count_max
        waits, was_full = name in self.waiting(), len(queue) >= most
        del peer.views[view.id]
        peer.dead_leases.add(view.id)
        peer.acknowledge(view.id)
        # If it was, whoever left its tenant's list for it lost its place.
        is_full = was_full or len(queue) >= most
        if waits and not is_full and name not in self.waiting():
            leases = self.rig.core.books.sessions[peer.incarnation].leases.values()
            assert any(lease.key == view.key for lease in leases), "it has lost its place"
        self.pass_on()

    def waiting(self) -> set[Name]:
        books = self.rig.core.books
        waiters = [*books.waiting, *books.waiting.held_back(), *books.in_flight.waiters()]
        return {waiter.name for waiter in waiters}

    def ask_again(self, peer: Peer, view: View) -> None:
        """Ask for all that it had, in its old place in the order."""
        self.ask_for(peer, view, view.key, again=True)

    def ask_for(self, peer: Peer, view: View, key: SequenceKey, *, again: bool) -> None:
        message = self.admission(peer, view, key, again=again)
        reserved_pages = -(-message.reserve_tokens // PAGE_SIZE)
        wish = Wish(view.order, view.root, view.tokens, view.terms, reserved_pages, message=message)
        peer.wishes[key] = wish
        self.heard(peer, message, self.ask(peer, message))

    def admission(self, peer: Peer, view: View, key: SequenceKey, *, again: bool) -> Admit:
        return Admit(
            key=key, order=view.order, worker=peer.name, incarnation=peer.incarnation,
            epoch=peer.epoch, root=view.root, tokens=pack(view.tokens),
            reserve_tokens=max(len(view.table) * PAGE_SIZE, len(view.tokens)),
            terms=view.terms, again=again, deadline_ms=60_000,
        )  # fmt: skip
