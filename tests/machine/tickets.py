"""The machines' tickets: offered, redeemed, withdrawn, cancelled; in time, late, and twice."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from tests.machine.mesh import Mesh
from tests.machine.peers import Peer, Wish
from tests.machine.prompts import picks

from pagemesh.wire.messages import Refused
from pagemesh.wire.pager_messages import CancelTicket, Offer, Redeem, Withdraw

REMEMBERED_MAX = 8


class Tickets(Mesh):
    """Rules of leases that are handed over by tickets."""

    ticket_count: int = 0
    """Number of tickets so far; each has another number."""
    remembered: tuple[tuple[Redeem, Wish], ...] = ()
    """The messages that redeem the last tickets, and the wishes they are for."""

    @precondition(lambda self: self.has("held"))
    @rule(pick=picks, ttl_ms=st.sampled_from([100, 30_000]))
    def offers(self, pick: int, ttl_ms: int) -> None:
        peer, view = self.view(pick)
        if view.in_step:
            return
        self.ticket_count += 1
        message = Offer(
            key=view.key, worker=peer.name, incarnation=peer.incarnation, epoch=peer.epoch,
            lease=view.id, ticket=f"{self.ticket_count:032x}", fill=view.fill(), ttl_ms=ttl_ms,
        )  # fmt: skip
        self.heard(peer, message, self.ask(peer, message))

    @precondition(lambda self: self.has("offered"))
    @rule(pick=picks, to=picks, more=st.integers(0, 8))
    def redeems(self, pick: int, to: int, more: int) -> None:
        _, view = self.view(pick, "offered")
        peer = self.peer(to)
        assert view.handle is not None
        message = Redeem(
            key=view.key, worker=peer.name, incarnation=peer.incarnation, epoch=peer.epoch,
            ticket=view.ticket, handle=view.handle, reserve_tokens=view.filled + more,
        )  # fmt: skip
        wish = Wish(view.order, view.root, view.tokens, view.terms, age=view.age)
        self.remembered = (*self.remembered[1 - REMEMBERED_MAX :], (message, wish))
        self.taken_over(peer, view.handle, self.ask(peer, message), wish)

    @precondition(lambda self: self.has("offered"))
    @rule(pick=picks, hears=st.booleans())
    def withdraws(self, pick: int, hears: bool = True) -> None:
        """A worker that does not hear the answer still declares the lease as offered, or asks
        again."""
        peer, view = self.view(pick, "offered")
        message = Withdraw(worker=peer.name, incarnation=peer.incarnation, ticket=view.ticket)
        answer = self.ask(peer, message)
        if hears and not isinstance(answer, Refused):
            self.withdrawn(peer, view.ticket)

    def withdrawn(self, peer: Peer, ticket: str) -> None:
        for view in peer.views.values():
            if view.ticket == ticket and view.state == "offered":
                view.state, view.ticket, view.reserved_pages = "held", "", 0

    @precondition(lambda self: self.has("offered"))
    @rule(pick=picks, by=picks)
    def cancels(self, pick: int, by: int) -> None:
        _, view = self.view(pick, "offered")
        peer = self.peer(by)
        self.ask(
            peer, CancelTicket(worker=peer.name, incarnation=peer.incarnation, ticket=view.ticket)
        )

    @precondition(lambda self: self.remembered)
    @rule(pick=picks, by=picks, what=st.sampled_from(["redeem", "redeem", "withdraw", "cancel"]))
    def ticket_comes_up_again(self, pick: int, by: int, what: str) -> None:
        """Any worker redeems it, whoever has it by now or had it."""
        message, wish = self.remembered[pick % len(self.remembered)]
        peer, ticket = self.peer(by), message.ticket
        if what == "redeem":
            message = Redeem(
                key=message.key, worker=peer.name, incarnation=peer.incarnation, epoch=peer.epoch,
                ticket=ticket, handle=message.handle, reserve_tokens=message.reserve_tokens,
            )  # fmt: skip
            self.taken_over(peer, message.handle, self.ask(peer, message), wish)
        elif what == "withdraw":
            answer = self.ask(
                peer, Withdraw(worker=peer.name, incarnation=peer.incarnation, ticket=ticket)
            )
            if not isinstance(answer, Refused):
                self.withdrawn(peer, ticket)
        else:
            self.ask(
                peer, CancelTicket(worker=peer.name, incarnation=peer.incarnation, ticket=ticket)
            )
