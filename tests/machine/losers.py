"""Workers of the machines whose leases were taken back: they let go, and ask again."""

from __future__ import annotations

from hypothesis.stateful import precondition, rule
from tests.machine.mesh import Mesh
from tests.machine.peers import Wish
from tests.machine.prompts import picks
from tests.unit.pager.rig import PAGE_SIZE

from pagemesh.wire.pager_messages import Admit
from pagemesh.wire.tokens import pack


class Losers(Mesh):
    """Rules of what becomes of a lease that is lost."""

    @precondition(lambda self: self.has("lost"))
    @rule(pick=picks)
    def acknowledges(self, pick: int) -> None:
        peer, view = self.view(pick, "lost")
        if not view.in_step:
            del peer.views[view.id]
            peer.dead_leases.add(view.id)
            peer.acknowledge(view.id)
            self.pass_on()

    @precondition(lambda self: self.has("lost"))
    @rule(pick=picks)
    def acknowledges_and_asks_again(self, pick: int) -> None:
        """For all that it had, in its old place."""
        peer, view = self.view(pick, "lost")
        if view.in_step or not view.tokens:  # a branch may have none
            return
        self.acknowledges(pick)
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
