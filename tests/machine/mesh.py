"""Some workers and one pager, which exchange messages, answers and notices."""

from __future__ import annotations

from typing import Any

from tests.machine.peers import Memory, Peer, View, Wish, table_of
from tests.unit.pager.rig import Rig
from tests.unit.pager.steps import lives

from pagemesh.wire.messages import Message, Order, Refused
from pagemesh.wire.pager_messages import (
    Admit,
    Declare,
    Extended,
    Forked,
    Granted,
    Handle,
    Heartbeat,
    Offer,
    Offered,
    Queued,
    Release,
)
from pagemesh.wire.pool_format import HeaderState

REPLAY_MAX = 32
RESTARTS_MAX = 4


class Mesh:
    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.memory = Memory(rig)
        self.peers: list[Peer] = []
        self.sent: list[tuple[Peer, Message]] = []
        self.declared_pages = 0
        """Pages promised to leases of an earlier life of the pager when these were declared. Others
        may have got them before that."""

    def require_as_warm(self, before: dict[int, int], used: set[int]) -> None:
        """All pages that were cached still are, and expire at the same time; pages in ``used``,
        whose use may have ended, at any time."""
        now_ms, after = self.rig.now_ms, lives(self.rig)
        assert after.keys() == before.keys()
        for page, until_ms in before.items():
            assert page in used or after[page] == max(until_ms, now_ms), "it lives on otherwise"

    # Sending

    def ask(self, peer: Peer, message: Message) -> Message:
        """Send as a worker does, and deliver the pager's notices. A worker that is declaring what
        it holds asks for nothing else before that is answered."""
        if not isinstance(message, Declare | Heartbeat | Release):
            self.declare_rest(peer)
        self.sent = [*self.sent[-REPLAY_MAX:], (peer, message)]
        before = set(self.rig.core.books.leases)
        answer = self.rig.ask(message)
        if isinstance(message, Declare):
            leases = self.rig.core.books.leases
            declared = [held for held in message.leases if held.lease not in before]
            there = [leases[held.lease] for held in declared if held.lease in leases]
            self.declared_pages += sum(lease.promised_pages for lease in there)
        self.pass_on()
        return answer

    def declare_part(self, peer: Peer) -> None:
        peer.declared(self.ask(peer, peer.next_part()))

    def declare_rest(self, peer: Peer) -> None:
        while peer.undeclared:
            self.declare_part(peer)

    def pass_on(self) -> None:
        for _ in range(100):
            if not self.rig.notices:
                return
            notice = self.rig.notices.pop(0)
            for peer in self.peers:
                if peer.name == notice.worker:
                    peer.notified(notice.message)
        raise AssertionError("notices without end")

    def own(self, peer: Peer, view: View) -> dict[str, Any]:
        """The fields that all messages about a lease have."""
        return {
            "key": view.key, "worker": peer.name, "incarnation": peer.incarnation, "lease": view.id,
        }  # fmt: skip

    def peer(self, pick: int) -> Peer:
        return self.peers[pick % len(self.peers)]

    def view(self, pick: int, state: str = "held") -> tuple[Peer, View]:
        found = [(p, v) for p in self.peers for v in p.views.values() if v.state == state]
        return found[pick % len(found)]

    def has(self, state: str) -> bool:
        return any(view.state == state for peer in self.peers for view in peer.views.values())

    def heard(self, peer: Peer, message: Message, answer: Message) -> None:
        """Handle an answer as a worker does, whether it is the first or a repeated one."""
        match answer:
            case Granted():
                wish = peer.wishes.pop(answer.key, None)
                if wish is not None and isinstance(message, Admit):
                    peer.granted(answer, wish)
                elif answer.lease not in peer.views:
                    peer.give_back(answer)
            case Extended():
                peer.extended(answer)
            case Forked():
                self.forked(peer, answer)
            case Offered():
                self.offered(peer, message, answer)
            case Refused(code=code) if isinstance(message, Admit):
                is_over = code == "OverQuota" and message.terms.has_quota
                assert is_over or code in {"Stale", "NoCapacity", "Busy"}, answer
                peer.wishes.pop(message.key, None)
            case Queued():
                assert answer.ask_again_ms
            case _:
                pass
        self.pass_on()

    def forked(self, peer: Peer, answer: Forked) -> None:
        parent = peer.views.get(answer.lease)
        for child in answer.children:
            if child.lease in peer.views:
                continue
            if parent is None or child.lease in peer.dead_leases:
                peer.give_back(child)
                continue
            filled = child.cached_tokens
            for copy in answer.copies:
                if copy.target_page in table_of(child.extents):
                    self.memory.copy(copy.source_page, copy.target_page, peer.incarnation)
            tokens = parent.tokens[:filled]
            order = Order(
                priority=parent.order.priority, arrival_us=parent.order.arrival_us,
                request=parent.order.request, choice=child.key.choice,
            )  # fmt: skip
            wish = Wish(order, parent.root, tokens, parent.terms, age=parent.age)
            peer.granted(child, wish)

    def taken_over(self, peer: Peer, handle: Handle, answer: Message, wish: Wish) -> None:
        """Take up a redeemed lease. The pages that ``peer`` may write from now on must be stale for
        all others who have the ``handle``."""
        if not isinstance(answer, Granted):
            return
        pages, headers = table_of(answer.extents), self.rig.headers
        own = [page for page in pages if headers.states[page] == HeaderState.HELD]
        assert (headers.sequences[own] > handle.granted_at).all(), "two may write a page"
        if peer.granted(answer, wish) is None:
            assert answer.lease in peer.views or answer.lease in peer.dead_leases

    def offered(self, peer: Peer, message: Message, answer: Offered) -> None:
        view = peer.views.get(answer.handle.lease)
        if view is not None and view.state == "held" and isinstance(message, Offer):
            view.state, view.ticket, view.handle = "offered", answer.ticket, answer.handle
