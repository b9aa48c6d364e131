"""The machines' workers reopen sessions and declare what they hold, part by part."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from tests.machine.mesh import Mesh
from tests.machine.peers import Peer
from tests.machine.prompts import picks

part_counts = st.integers(1, 3)


class Declarers(Mesh):
    """Rules of declarations. Other rules may run between two parts, and what a worker releases
    meanwhile is in none of the later parts."""

    @rule(pick=picks, part_count=part_counts)
    def opens_again_and_declares(self, pick: int, part_count: int) -> None:
        peer = self.peer(pick)
        self.opens_and_declares(peer, part_count)

    @rule(pick=picks, part_count=part_counts)
    def opens_again_and_begins_to_declare(self, pick: int, part_count: int) -> None:
        peer = self.peer(pick)
        peer.open()
        self.pass_on()
        peer.begin_declaring(part_count)

    @precondition(lambda self: self.declarers())
    @rule(pick=picks)
    def declares_another_part(self, pick: int) -> None:
        peers = self.declarers()
        self.declare_part(peers[pick % len(peers)])

    def opens_and_declares(self, peer: Peer, part_count: int) -> None:
        peer.open()
        self.pass_on()
        peer.begin_declaring(part_count)
        self.declare_rest(peer)

    def declarers(self) -> list[Peer]:
        return [peer for peer in self.peers if peer.undeclared]
