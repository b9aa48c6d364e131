"""Workers of the machines whose leases were taken back: they let go, and ask again."""

from __future__ import annotations

from hypothesis.stateful import precondition, rule
from tests.machine.mesh import Mesh
from tests.machine.peers import Peer, View, Wish
from tests.machine.prompts import picks
from tests.unit.pager.rig import PAGE_SIZE

from pagemesh.pager.leases.waiting import Name
from pagemesh.wire.pager_messages import Admit
from pagemesh.wire.tokens import pack


class Losers(Mesh):
    """Rules of what becomes of a lease that is lost."""

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
    def asks_again_and_acknowledges(self, pick: int) -> None:
        """As workers do, who ask at once; what a step still uses they let go of when it ends."""
        peer, view = self.view(pick, "lost")
        if view.tokens:
            self.ask_again(peer, view)
        if not view.in_step and view.id in peer.views:
            self.let_go(peer, view)

    def let_go(self, peer: Peer, view: View) -> None:
        """Whoever waits for that sequence by now goes on waiting, or is served."""
        name = (peer.incarnation, view.key)
        waits = name in self.waiting()
        del peer.views[view.id]
        peer.dead_leases.add(view.id)
        peer.acknowledge(view.id)
        if waits and name not in self.waiting():
            leases = self.rig.core.books.sessions[peer.incarnation].leases.values()
            assert any(lease.key == view.key for lease in leases), "it has lost its place"
        self.pass_on()

    def waiting(self) -> set[Name]:
        books = self.rig.core.books
        waiters = [*books.waiting, *books.waiting.held_back(), *books.in_flight.waiters()]
        return {waiter.name for waiter in waiters}

    def ask_again(self, peer: Peer, view: View) -> None:
        """For all that it had, in its old place."""
        reserve_tokens = max(len(view.table) * PAGE_SIZE, len(view.tokens))
        reserved_pages = -(-reserve_tokens // PAGE_SIZE)
        peer.wishes[view.key] = Wish(
            view.order, view.root, view.tokens, view.terms, reserved_pages
        )  # fmt: skip
        message = Admit(
            key=view.key, order=view.order, worker=peer.name, incarnation=peer.incarnation,
            epoch=peer.epoch, root=view.root, tokens=pack(view.tokens),
            reserve_tokens=reserve_tokens, terms=view.terms, again=True, deadline_ms=60_000,
        )  # fmt: skip
        self.heard(peer, message, self.ask(peer, message))
