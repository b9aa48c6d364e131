"""What of a declaration is not believed, or comes twice, or never."""

from __future__ import annotations

import msgspec
import pytest
from tests.unit.pager.rig import (
    LIMITS,
    Rig,
    Worker,
    code_of,
    fill_of,
    is_queued,
    key_of,
    table_of,
)
from tests.unit.pager.steps import cache
from tests.unit.pager.test_lost_leases import lost_lease
from tests.unit.pager.test_recovery import declare, line

from pagemesh.pager.events import KillHolder, ProbeHolder, Tick
from pagemesh.wire.messages import Message, Ok
from pagemesh.wire.pager_messages import Declare, Declared, Granted, TicketClosed


def repeated(rig: Rig, worker: Worker, message: Declare, after_ms: int) -> Message:
    """``message`` comes once more, that long after a worker whose session goes on sent it."""
    for _ in range(after_ms // 1_000):
        rig.tick(1_000)
        worker.heartbeat()
    return rig.ask(message)


@pytest.fixture
def lease(worker: Worker) -> Granted:
    return worker.granted(1, range(10))


def test_a_declaration_that_comes_again_much_later_takes_nothing_back(
    rig: Rig, worker: Worker
) -> None:
    """What was granted since is not in it."""
    message = Declare(
        worker=worker.name, incarnation=worker.incarnation, epoch=rig.epoch, number=7, leases=[]
    )
    rig.ask(message)
    lease = worker.granted(1, range(10))
    after_ms = 2 * LIMITS.declare_grace_ms + 1_000
    assert code_of(repeated(rig, worker, message, after_ms)) == "Stale"
    assert worker.committed(lease, range(10)) == 8


def test_who_declares_is_not_silent(rig: Rig, worker: Worker, lease: Granted) -> None:
    for _ in range(3):
        rig.tick(LIMITS.session_ttl_ms - 1)
        assert rig.ask(
            Declare(
                worker=worker.name, incarnation=1, epoch=rig.epoch, number=rig.now_ms,
                leases=[line(lease, 1, [])],
            )
        )  # fmt: skip
    rig.tick(LIMITS.session_ttl_ms - 1)
    assert worker.committed(lease, range(10)) == 8


def test_a_lease_that_was_taken_back_may_be_left_out(rig: Rig, worker: Worker) -> None:
    """Its acknowledgement may be on its way."""
    victim = worker.granted(2, range(64))
    assert is_queued(worker.admit(1, range(4)))
    for _ in range(LIMITS.declare_grace_ms // 1_000 + 1):
        rig.tick(1_000)
        worker.heartbeat()
    assert declare(rig, worker) == []
    assert rig.core.report().draining_pages == 16
    worker.ack(victim)
    assert rig.core.report().draining_pages == 0


def test_a_lease_that_was_taken_back_is_not_lost_when_it_is_named(rig: Rig, worker: Worker) -> None:
    """Its revocation says so, and why."""
    victim = worker.granted(2, range(64))
    assert is_queued(worker.admit(1, range(4)))
    assert declare(rig, worker, line(victim, 2, [])) == []
    worker.ack(victim)
    assert rig.core.report().draining_pages == 0


def test_who_names_a_lease_that_is_over_owes_nothing_for_it(
    rig: Rig, worker: Worker, lease: Granted
) -> None:
    worker.release(lease)
    assert declare(rig, worker, line(lease, 1, [])) == [lease.lease]
    assert ProbeHolder(1) not in rig.tick(LIMITS.probe_again_ms)


def test_who_asks_again_for_what_it_has_declared_is_told_how_much_of_it_is_filled(
    rig: Rig, worker: Worker, lease: Granted
) -> None:
    worker.committed(lease, range(10))
    rig.restart([worker.holder])
    assert declare(rig, worker, line(lease, 1, list(range(10)))) == []
    again = worker.granted(1, range(10))
    assert (again.lease, again.cached_tokens) == (lease.lease, 10)


def test_a_lease_that_another_holds_is_lost(rig: Rig, worker: Worker, lease: Granted) -> None:
    other = Worker(rig, "other", 2)
    assert declare(rig, other, line(lease, 1, [])) == [lease.lease]
    assert worker.committed(lease, range(10)) == 8


def test_a_declared_lease_that_is_to_leave_nothing_takes_what_it_read_along(
    rig: Rig, worker: Worker
) -> None:
    cache(worker, 1, range(8))
    lease = worker.granted(2, range(9))
    rig.restart([worker.holder])
    assert declare(rig, worker, line(lease, 2, list(range(8)))) == []
    worker.release(lease, cache=False)
    assert worker.granted(3, range(9)).cached_tokens == 0


def test_of_two_leases_of_one_sequence_the_second_is_lost(rig: Rig, worker: Worker) -> None:
    one, two = worker.granted(1, range(8)), worker.granted(2, range(100, 108))
    rig.restart([worker.holder])
    same = msgspec.structs.replace(line(two, 1, []), key=one.key)
    assert declare(rig, worker, line(one, 1, []), same) == [two.lease]


def test_what_a_young_pager_did_not_hear_lets_no_ticket_outlive_its_longest_time(
    rig: Rig, worker: Worker
) -> None:
    lease = worker.granted(1, range(8))
    worker.offered(lease, fill_of(range(8)))
    rig.restart([worker.holder])
    declare(rig, worker, line(lease, 1, list(range(8)), ticket="a" * 32))
    assert len(rig.core.books.tickets) == 1
    rig.now_ms += 50
    rig.handle(Tick(away_ms=2_350))  # it was stopped before there was a ticket, for most of that
    rig.tick(LIMITS.ticket_ttl_ms_max)
    assert not rig.core.books.tickets


def test_of_two_leases_on_one_ticket_the_second_is_lost(rig: Rig, worker: Worker) -> None:
    one, two = worker.granted(1, range(8)), worker.granted(2, range(100, 108))
    worker.offered(one, fill_of(range(8)))
    rig.restart([worker.holder])
    lines = [line(one, 1, list(range(8)), ticket="a" * 32), line(two, 2, [], ticket="a" * 32)]
    assert declare(rig, worker, *lines) == [two.lease]


def test_who_withdrew_a_ticket_and_did_not_hear_of_it_is_not_told_that_another_has_the_lease(
    rig: Rig, worker: Worker, lease: Granted
) -> None:
    """It would forget the sequence, which nobody else has. Withdrawing once more tells it."""
    offered = worker.offered(lease, fill_of(range(10)))
    worker.withdraw()
    held = line(lease, 1, list(range(10)), ticket=offered.ticket)
    assert declare(rig, worker, held) == []
    assert rig.taken(TicketClosed) == []
    assert worker.withdraw() == Ok()
    assert worker.committed(lease, range(10)) == 8


def test_what_was_withdrawn_unheard_and_is_over_is_lost(
    rig: Rig, worker: Worker, lease: Granted
) -> None:
    offered = worker.offered(lease, fill_of(range(10)))
    worker.withdraw()
    worker.release(lease)
    held = line(lease, 1, list(range(10)), ticket=offered.ticket)
    assert declare(rig, worker, held) == [lease.lease]


def test_a_lease_on_a_ticket_that_is_closed_already_is_lost(rig: Rig, worker: Worker) -> None:
    one, two = worker.granted(1, range(8)), worker.granted(2, range(100, 108))
    worker.offered(one, fill_of(range(8)))
    rig.restart([worker.holder])
    worker.open()
    lines = [line(one, 1, list(range(8)), ticket="a" * 32), line(two, 2, [], ticket="a" * 32)]
    parts = [
        Declare(
            worker=worker.name, incarnation=1, epoch=rig.epoch, number=1, part=part, parts=2,
            leases=[lines[part]],
        )
        for part in range(2)
    ]  # fmt: skip
    assert code_of(rig.ask(parts[0])) == "Ok"
    worker.cancel()
    assert rig.ask(parts[1]) == Declared(lost=[two.lease])


@pytest.mark.parametrize("table", [[], [0, 1, 16], [0, 1, 1 << 20]])
def test_a_lease_of_no_pages_or_of_such_as_are_not_there_is_lost(
    rig: Rig, worker: Worker, lease: Granted, table: list[int]
) -> None:
    rig.restart([worker.holder])
    assert declare(rig, worker, line(lease, 1, [], table=table)) == [lease.lease]
    worker.ack(lease)
    assert rig.core.report().free_pages == 16


class TestWhoDoesNotDoItsPart:
    """Others wait for its pages: it is asked after, and killed in the end."""

    def chased(self, rig: Rig, other: Worker, *beats: Worker) -> list[object]:
        """What is done while ``other`` waits for room, and ``beats`` go on beating: they may be in
        a step, which has to end first."""
        other.open()
        assert is_queued(other.admit(9, range(64)))
        seen: list[object] = []
        for _ in range(LIMITS.busy_drain_ms_max // 500 + 1):
            for one in (other, *beats):
                one.heartbeat()
            other.admit(9, range(64))
            seen += rig.tick(500)
        return seen

    def test_a_worker_that_beats_and_never_declares(self, rig: Rig, lease: Granted) -> None:
        worker, other = Worker(rig, "w", 1), Worker(rig, "other", 2)
        rig.restart([worker.holder, other.holder])
        worker.open()
        declare(rig, other)
        seen = self.chased(rig, other, worker)
        assert ProbeHolder(1) in seen and KillHolder(1) in seen

    def test_a_worker_that_never_lets_go_of_what_is_lost(self, rig: Rig, worker: Worker) -> None:
        lease = lost_lease(rig, worker)
        assert declare(rig, worker, line(lease, 1, [])) == [lease.lease]
        seen = self.chased(rig, Worker(rig, "other", 2), worker)
        assert ProbeHolder(1) in seen and KillHolder(1) in seen

    def test_a_worker_that_falls_silent_before_it_has_declared(
        self, rig: Rig, worker: Worker
    ) -> None:
        """It may read what is cached, though nothing says so: it is not forgotten."""
        rig.restart([worker.holder])
        worker.open()
        other = Worker(rig, "other", 2)
        for _ in range(LIMITS.session_ttl_ms // 1_000 + 1):
            rig.tick(1_000)
            other.heartbeat()
        assert ProbeHolder(1) in rig.tick(LIMITS.probe_again_ms)
        assert 1 in rig.core.books.unsettled and 1 in rig.core.books.sessions


class TestOffered:
    """To a pager that has heard of the worker's leases already."""

    TICKET = "a" * 32
    TOKENS = list(range(10))

    def test_one_whose_offer_is_under_way_is_not_lost(self, rig: Rig, worker: Worker) -> None:
        lease = worker.granted(1, self.TOKENS)
        assert not declare(rig, worker, line(lease, 1, self.TOKENS, ticket=self.TICKET))
        assert worker.offered(lease, fill_of(self.TOKENS), self.TICKET).handle.lease == lease.lease

    def test_one_whose_ticket_is_open_hears_of_no_end(
        self, rig: Rig, worker: Worker, lease: Granted
    ) -> None:
        worker.offered(lease, fill_of(self.TOKENS), self.TICKET)
        assert not declare(rig, worker, line(lease, 1, self.TOKENS, ticket=self.TICKET))
        assert not rig.taken(TicketClosed)

    def test_how_a_ticket_ended_hears_its_offerer_alone(
        self, rig: Rig, worker: Worker, lease: Granted
    ) -> None:
        offered = worker.offered(lease, fill_of(self.TOKENS), self.TICKET)
        other = Worker(rig, "other", 2)
        other.redeemed(lease.key, offered)
        rig.taken(TicketClosed)
        declared = line(lease, 1, self.TOKENS, ticket=self.TICKET)
        declare(rig, other, declared)
        assert not rig.taken(TicketClosed)
        declare(rig, worker, declared)
        assert [closed.outcome for closed in rig.taken(TicketClosed)] == ["redeemed"]

    def test_one_that_is_on_a_ticket_is_not_held(
        self, rig: Rig, worker: Worker, lease: Granted
    ) -> None:
        worker.offered(lease, fill_of(self.TOKENS), self.TICKET)
        assert declare(rig, worker, line(lease, 1, self.TOKENS)) == [lease.lease]


@pytest.mark.parametrize("damage", [{"tokens": b"odd"}, {"extents": b"odd"}])
def test_a_declaration_with_a_damaged_line_takes_up_nothing(
    rig: Rig, worker: Worker, lease: Granted, damage: dict[str, bytes]
) -> None:
    """Though the line before it is whole."""
    second = worker.granted(2, range(20, 28))
    rig.restart([worker.holder])
    worker.open()
    damaged = msgspec.structs.replace(line(second, 2, []), **damage)
    whole = line(lease, 1, list(range(10)))
    message = Declare(
        worker=worker.name, incarnation=worker.incarnation, epoch=rig.epoch, number=1,
        leases=[whole, damaged],
    )  # fmt: skip
    assert code_of(rig.ask(message)) == "Malformed"
    assert not rig.core.books.leases
    assert declare(rig, worker, whole) == []


def test_a_lease_that_is_declared_with_a_page_twice_is_not_believed(
    rig: Rig, worker: Worker, lease: Granted
) -> None:
    rig.restart([worker.holder])
    first, second, _ = table_of(lease)
    twice = line(lease, 1, [], table=[first, second, second])
    assert declare(rig, worker, twice) == [lease.lease]
    assert rig.core.report().held_pages == 0
    worker.ack(lease)
    assert rig.core.report().free_pages == 16


def test_who_dies_and_has_not_declared_keeps_nothing_from_being_evicted(
    rig: Rig, worker: Worker
) -> None:
    cache(worker, 1, range(8))
    rig.restart([worker.holder])
    late = Worker(rig, "late", 2)
    assert is_queued(late.admit(2, range(100, 164))), "it may be reading two pages"
    rig.die(1)
    assert [granted.key for granted in rig.taken(Granted)] == [key_of(2)]
