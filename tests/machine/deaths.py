"""The machines' pagers die in the middle of a turn, with some of its commands performed."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from tests.machine.declarers import Declarers
from tests.machine.mesh import RESTARTS_MAX
from tests.machine.peers import Peer, View
from tests.machine.prompts import picks

from pagemesh.pager.events import Asked, Event, Sweep, Tick
from pagemesh.wire.messages import SequenceKey
from pagemesh.wire.pager_messages import Admit, Commit, Extend, Release
from pagemesh.wire.tokens import pack

EVENTS = ("admit", "extend", "commit", "release", "give up", "tick", "sweep")


class Deaths(Declarers):
    """Rules of pagers that die before the end of a turn."""

    unheard: int = 0
    """Number of attempts whose admission was never answered; each has another number."""

    @precondition(lambda self: self.has("held") and self.rig.epoch < RESTARTS_MAX)
    @rule(pick=picks, what=st.sampled_from(EVENTS), done=st.integers(0, 7))
    def pager_dies_amid(self, pick: int, what: str, done: int) -> None:
        """The first ``done`` of its commands are performed. What the worker was about to release,
        it releases to the next pager."""
        peer, view = self.view(pick)
        self.declare_rest(peer)
        if view.in_step or view.state != "held":
            return
        event = self.event(peer, view, what)
        known = [peer.holder for peer in self.peers if peer.incarnation in self.rig.known]
        for command in self.rig.core.handle(event, self.rig.now_ms)[:done]:
            self.rig.perform(command)
        self.pass_on_to_the_living()
        owed = event.message if isinstance(event, Asked) else None
        if isinstance(owed, Release):
            peer.views.pop(view.id, None)
            peer.dead_leases.add(view.id)
        self.rig.restart(known)
        self.pass_on()
        for one in list(self.peers):
            self.opens_and_declares(one, 1)
        if isinstance(owed, Release):
            self.ask(peer, owed)

    def pass_on_to_the_living(self) -> None:
        """Drop the notices: there is no pager to answer what workers would say to them."""
        self.rig.notices.clear()

    def event(self, peer: Peer, view: View, what: str) -> Event:
        own: dict[str, Any] = self.own(peer, view)
        have = len(view.table)
        match what:
            case "admit":
                message: Any = Admit(
                    key=self.another(view), order=view.order, worker=peer.name,
                    incarnation=peer.incarnation, epoch=peer.epoch, root=view.root,
                    tokens=pack([*view.tokens, 1]), reserve_tokens=len(view.tokens) + 9,
                    terms=view.terms, deadline_ms=60_000,
                )  # fmt: skip
            case "extend":
                message = Extend(**own, have_pages=have, page_count=have + 2)
            case "commit":
                message = Commit(**own, fill=view.fill())
            case "release" | "give up":
                message = Release(**own, fill=view.fill(), cache=what == "release")
            case "tick":
                self.rig.now_ms += 1_000
                return Tick()
            case _:
                return Sweep()
        return Asked(0, message)

    def another(self, view: View) -> SequenceKey:
        self.unheard += 1
        return msgspec.structs.replace(view.key, attempt=1_000_000 + self.unheard)
