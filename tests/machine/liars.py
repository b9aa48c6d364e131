"""Messages that make no sense: each is refused with the right code and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from tests.machine.mesh import Mesh
from tests.machine.peers import Peer, View
from tests.machine.prompts import picks
from tests.unit.pager.rig import PAGE_SIZE, ROOT, key_of, order_of

from pagemesh.pager.leases.states import LeaseState
from pagemesh.wire.messages import Message, Refused
from pagemesh.wire.pager_messages import (
    Admit,
    CancelTicket,
    Commit,
    Extend,
    Fill,
    Fork,
    Offer,
    Redeem,
    Release,
    Withdraw,
)
from pagemesh.wire.tokens import pack

NOBODY = 1 << 60
"""Not an incarnation, nor a lease that was ever granted."""
Lie = Callable[[dict[str, Any]], dict[str, Any]]
LIES: dict[str, tuple[Lie, set[str]]] = {
    "unknown lease": (lambda own: {"lease": own["lease"] + NOBODY}, {"Gone"}),
    "foreign incarnation": (lambda own: {"incarnation": NOBODY}, {"Stale"}),
    "other sequence": (lambda own: {"key": key_of(999_999)}, {"Malformed"}),
}
"""Changes to a valid message, and the codes with which it must then be refused."""
_WHOLE = 1 << 16
"""More tokens than any pool of these tests has slots."""
NEVER: list[tuple[dict[str, Any], str]] = [
    ({"reserve_tokens": _WHOLE}, "NoCapacity"),
    ({"tokens": pack([1] * _WHOLE), "reserve_tokens": _WHOLE}, "NoCapacity"),
    ({"tokens": b"odd"}, "Malformed"),
    ({"tokens": b""}, "Malformed"),
    ({"reserve_tokens": 1}, "Malformed"),
    ({"deadline_ms": 0}, "DeadlineExceeded"),
    ({"epoch": 0}, "Stale"),
    ({"incarnation": NOBODY}, "Stale"),
    ({"worker": "nobody"}, "Stale"),
    ({"order": order_of(999_998)}, "Malformed"),
]
"""Changes to an admission that make it invalid in any state, and the code of the refusal."""


class Liars(Mesh):
    """Rules of workers that send invalid messages."""

    def must_refuse(self, message: Message, codes: set[str]) -> None:
        """``message`` is refused with one of ``codes`` and a reason, and nothing changes."""
        before = self.rig.core.report()
        answer = self.rig.ask(message)
        assert isinstance(answer, Refused), (message, answer)
        assert answer.code in codes and answer.message, (message, answer)
        assert len(self.rig.commands) == 1, "more was done than refused"
        assert self.rig.core.report() == before, message

    @precondition(lambda self: self.has("held"))
    @rule(pick=picks, what=st.sampled_from(sorted(LIES)))
    def lease_is_not_as_it_is_said(self, pick: int, what: str) -> None:
        peer, view = self.view(pick)
        if not self.stands(peer, view):
            return
        lie, codes = LIES[what]
        own: dict[str, Any] = self.own(peer, view)
        own |= lie(own)
        self.must_refuse(self.messages(own, view)[pick % 5], codes)

    def messages(self, own: dict[str, Any], view: View) -> list[Message]:
        """The messages of a holder about its lease; the last one releases it."""
        fill, pages = view.fill(), len(view.table)
        child = msgspec.structs.replace(view.key, choice=9_999)
        return [
            Extend(**own, have_pages=pages, page_count=pages + 1),
            Commit(**own, fill=fill),
            Fork(**own, fill=fill, children=[child], reserve_tokens=view.filled),
            Offer(**own, epoch=self.rig.epoch, fill=fill, ticket="f" * 32, ttl_ms=1_000),
            Release(**own, fill=fill),
        ]

    @precondition(lambda self: self.has("lost") or self.has("offered"))
    @rule(pick=picks)
    def lease_is_not_held_any_more(self, pick: int) -> None:
        """The lease was revoked or offered. A release is left out: the holder may not have heard
        that it succeeded."""
        peer, view = self.view(pick, "lost" if self.has("lost") else "offered")
        lease = self.rig.core.books.leases.get(view.id)
        if lease is None or peer.has(view) or not self.is_open(peer):
            return
        self.must_refuse(self.messages(self.own(peer, view), view)[pick % 4], {"Stale"})

    @precondition(lambda self: self.has("held"))
    @rule(pick=picks, what=st.sampled_from([Commit, Release]))
    def more_is_said_to_be_filled_than_can_be(self, pick: int, what: type[Message]) -> None:
        peer, view = self.view(pick)
        if not self.stands(peer, view):
            return
        slots, lease = len(view.table) * PAGE_SIZE, self.rig.core.books.leases[view.id]
        known = lease.known_tokens
        fills = [
            Fill(filled_tokens=slots + 1, first_token=0, tokens=pack([0] * (slots + 1))),
            Fill(filled_tokens=0, first_token=known + 1, tokens=pack([0])),
            Fill(filled_tokens=0, first_token=0, tokens=b"odd"),
            Fill(filled_tokens=known + 1, first_token=0),
        ]
        if lease.committed_pages * PAGE_SIZE < known:
            other = [1 - token for token in view.tokens[:known]]
            fills.append(Fill(filled_tokens=0, first_token=0, tokens=pack(other)))
        wrong: Any = what
        message = wrong(**self.own(peer, view), fill=fills[pick % len(fills)])
        self.must_refuse(message, {"Malformed"})

    @precondition(lambda self: self.has("held"))
    @rule(pick=picks)
    def growth_can_never_be(self, pick: int) -> None:
        peer, view = self.view(pick)
        if not self.stands(peer, view):
            return
        pages, own = self.rig.core.books.facts.page_count, self.own(peer, view)
        message, code = Extend(**own, have_pages=0, page_count=pages + 1), "NoCapacity"
        if pick % 2:
            unseen = len(view.table) + 100
            message, code = Extend(**own, have_pages=unseen, page_count=1), "Malformed"
        if not self.waits(peer, view):
            return self.must_refuse(message, {code})
        answer = self.rig.ask(message)
        assert isinstance(answer, Refused) and answer.code == code
        assert not self.waits(peer, view), "others wait behind what was refused"

    # By index: Hypothesis records the arguments of rules many times, and one prompt is long.
    @rule(pick=picks, change=st.integers(0, len(NEVER) - 1))
    def admission_can_never_be(self, pick: int, change: int) -> None:
        peer = self.peer(pick)
        if not self.is_open(peer):
            return
        good = Admit(
            key=key_of(999_999), order=order_of(999_999), worker=peer.name,
            incarnation=peer.incarnation, epoch=peer.epoch, root=ROOT, tokens=pack([1, 1]),
            reserve_tokens=2, deadline_ms=1_000,
        )  # fmt: skip
        fields, code = NEVER[change]
        self.must_refuse(msgspec.structs.replace(good, **fields), {code})

    def waits(self, peer: Peer, view: View) -> bool:
        """Whether the lease waits to grow."""
        queues = self.rig.core.books.waiting
        queued = {waiter.name for waiter in [*queues, *queues.held_back()]}
        return (peer.incarnation, view.key) in queued

    def is_open(self, peer: Peer) -> bool:
        """Whether ``peer`` has a session with the current pager."""
        session = self.rig.core.books.sessions.get(peer.incarnation)
        return session is not None and session.is_open and peer.epoch == self.rig.epoch

    def stands(self, peer: Peer, view: View) -> bool:
        """Whether the current pager also sees the lease as held by ``peer``."""
        lease = self.rig.core.books.leases.get(view.id)
        return self.is_open(peer) and lease is not None and lease.life.state is LeaseState.HELD

    @precondition(lambda self: self.has("offered"))
    @rule(pick=picks, to=picks)
    def handle_is_not_the_one_that_was_offered(self, pick: int, to: int) -> None:
        """A guessed handle or ticket is refused."""
        _, view = self.view(pick, "offered")
        peer, books = self.peer(to), self.rig.core.books
        if not self.is_open(peer):
            return
        assert view.handle is not None
        handle, replace = view.handle, msgspec.structs.replace
        good = Redeem(
            key=view.key, worker=peer.name, incarnation=peer.incarnation, epoch=peer.epoch,
            ticket=view.ticket, handle=handle, reserve_tokens=view.filled,
        )  # fmt: skip
        guessed = replace(good, ticket="e" * 32)
        self.must_refuse(guessed, {"Stale"})
        who: dict[str, Any] = {"worker": peer.name, "incarnation": peer.incarnation}
        self.must_refuse(Withdraw(**who, ticket="e" * 32), {"Stale"})
        self.must_refuse(CancelTicket(**who, ticket="e" * 32), {"Gone"})
        if view.ticket not in books.tickets:
            return
        stale = [
            replace(handle, granted_at=handle.granted_at + 1),
            replace(handle, pool_incarnation=handle.pool_incarnation + 1),
            replace(handle, lease=handle.lease + 1),
            replace(handle, token_count=handle.token_count + 1),
            replace(handle, layout_digest=bytes(32)),
        ]
        self.must_refuse(replace(good, handle=stale[pick % len(stale)]), {"Stale"})
        self.must_refuse(replace(good, key=key_of(999_999)), {"Malformed"})
