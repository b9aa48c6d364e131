"""A pager's second life: what it believes of headers, and of what workers declare."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from tests.unit.pager.rig import ROOT, Rig, Worker, code_of, fill_of, is_queued, order_of, table_of

from pagemesh.pager.events import KillHolder, ProbeHolder
from pagemesh.pager.limits import PagerLimits
from pagemesh.wire.pager_messages import (
    Declare,
    Declared,
    DeclareWanted,
    Extended,
    Granted,
    HeldLease,
    Offer,
    TicketClosed,
)
from pagemesh.wire.pool_format import EPOCH_SHIFT, HeaderState
from pagemesh.wire.tokens import pack, pack_extents


def line(
    lease: Granted, number: int, tokens: list[int], *, table: list[int] | None = None,
    granted_at: int = 0, ticket: str | None = None,
) -> HeldLease:  # fmt: skip
    return HeldLease(
        lease=lease.lease, lease_slot=lease.lease_slot, key=lease.key, order=order_of(number),
        root=ROOT, granted_at=granted_at or lease.granted_at, tokens=pack(tokens), ticket=ticket,
        extents=pack_extents(table if table is not None else table_of(lease)),
    )  # fmt: skip


_numbers = itertools.count(1)


def declare(rig: Rig, worker: Worker, *lines: HeldLease) -> list[int]:
    worker.open()
    answer = rig.ask(
        Declare(
            worker=worker.name, incarnation=worker.incarnation, epoch=rig.epoch,
            number=next(_numbers), leases=list(lines),
        )
    )  # fmt: skip
    assert isinstance(answer, Declared), answer
    return answer.lost


def test_the_cache_is_as_warm_as_before(rig: Rig, worker: Worker) -> None:
    worker.release(worker.granted(1, range(16)), range(16))
    fork = [*range(8), 90, 91, 92, 93]
    worker.release(worker.granted(2, fork), fork)
    rig.restart()
    assert rig.core.report().idle_pages == 5 and rig.core.report().free_pages == 11
    late = Worker(rig, "late", 2)
    assert late.granted(3, [*range(16), 0]).cached_tokens == 16
    assert late.granted(4, [*fork, 0]).cached_tokens == 12


def test_every_ledger_number_of_a_new_life_is_above_every_old_one(rig: Rig, worker: Worker) -> None:
    old = worker.granted(1, range(16))
    rig.restart()
    new = Worker(rig, "late", 2).granted(2, range(16))
    assert old.granted_at < rig.epoch << EPOCH_SHIFT < new.granted_at
    assert int(rig.headers.sequences[table_of(new)].min()) > old.granted_at


def test_ledger_numbers_that_would_go_backwards_stop_the_pager(rig: Rig, worker: Worker) -> None:
    worker.granted(1, range(16))
    rig.epoch -= 1
    with pytest.raises(AssertionError, match="backwards"):
        rig.restart()


def test_pages_of_a_dead_writer_are_free_those_of_a_living_one_drain(rig: Rig) -> None:
    dead, alive = Worker(rig, "dead", 1), Worker(rig, "alive", 2)
    dead.granted(1, range(8))
    alive.granted(2, range(100, 112))
    rig.restart([alive.holder])
    report = rig.core.report()
    assert (report.draining_pages, report.free_pages) == (3, 13)
    rig.die(2)
    assert rig.core.report().free_pages == 16


def test_a_declared_lease_goes_on_as_if_nothing_had_happened(rig: Rig, worker: Worker) -> None:
    worker.release(worker.granted(1, range(8)), range(8))
    lease = worker.granted(2, range(10), 16)
    worker.committed(lease, range(10), 9)
    rig.restart([worker.holder])
    assert declare(rig, worker, line(lease, 2, list(range(9)))) == []
    assert int(rig.words[lease.lease_slot]) == lease.lease
    assert rig.core.report().draining_pages == 0
    assert worker.committed(lease, range(12)) == 12
    worker.release(lease, range(12))
    assert rig.core.report().idle_pages == 3


def test_a_lease_is_not_gone_because_its_holder_has_not_opened_a_session_yet(
    rig: Rig, worker: Worker
) -> None:
    lease = worker.granted(1, range(10))
    rig.restart([worker.holder])
    assert code_of(worker.commit(lease, fill_of(range(10)))) == "Stale"
    assert declare(rig, worker, line(lease, 1, [])) == []
    assert worker.committed(lease, range(10)) == 8


def test_a_worker_is_asked_to_declare_though_it_holds_nothing(rig: Rig, worker: Worker) -> None:
    rig.restart([worker.holder])
    worker.open()
    assert isinstance(worker.heartbeat(), DeclareWanted)
    assert declare(rig, worker) == []
    assert code_of(worker.heartbeat()) == "Ok"


def test_nothing_is_evicted_before_every_living_worker_has_said_what_it_reads(rig: Rig) -> None:
    reader, other = Worker(rig, "reader", 1), Worker(rig, "other", 2)
    reader.release(reader.granted(1, range(48)), range(48))
    reading = reader.granted(2, range(49))
    reader.committed(reading, range(49))
    rig.restart([reader.holder, other.holder])
    declare(rig, other)
    assert rig.core.report().idle_pages == 12
    assert is_queued(other.admit(9, range(500, 520)))
    assert rig.core.report().idle_pages == 12
    declare(rig, reader, line(reading, 2, list(range(49))))
    assert rig.core.report().pinned_pages == 12
    assert is_queued(other.admit(9, range(500, 520)))
    reader.release(reading)
    assert len(rig.taken(Granted)) == 1


def test_what_a_worker_has_not_declared_is_given_to_who_waits_though_others_have_still_to_declare(
    rig: Rig, worker: Worker
) -> None:
    other, slow = Worker(rig, "other", 2), Worker(rig, "slow", 3)
    worker.granted(1, range(60))
    rig.restart([worker.holder, other.holder, slow.holder])
    declare(rig, other)
    assert is_queued(other.admit(2, range(20)))
    declare(rig, worker)
    assert len(rig.taken(Granted)) == 1


def test_a_worker_that_never_declares_is_probed_and_under_pressure_killed(rig: Rig) -> None:
    silent, other = Worker(rig, "silent", 1), Worker(rig, "other", 2)
    silent.granted(1, range(60))
    rig.restart([silent.holder, other.holder])
    declare(rig, other)
    assert is_queued(other.admit(2, range(20)))
    limits = PagerLimits()
    seen = []
    for _ in range(limits.drain_ms_max // 500 + 1):
        other.open()
        other.admit(2, range(20))
        seen += rig.tick(500)
    assert ProbeHolder(1) in seen and KillHolder(1) in seen
    rig.die(1)
    assert len(rig.taken(Granted)) == 1


def test_nobody_is_killed_for_what_it_was_not_asked_before_the_restart(rig: Rig) -> None:
    silent, other = Worker(rig, "silent", 1), Worker(rig, "other", 2)
    silent.granted(1, range(60))
    rig.restart([silent.holder, other.holder], after_ms=60_000)
    declare(rig, other)
    assert is_queued(other.admit(2, range(20)))
    assert KillHolder(1) not in rig.tick(PagerLimits().probe_again_ms)


def test_what_drained_is_free_once_its_writer_has_declared_though_others_have_not(
    rig: Rig, worker: Worker
) -> None:
    slow = Worker(rig, "slow", 2)
    worker.granted(2, range(64))
    assert is_queued(worker.admit(1, range(4)))
    rig.restart([worker.holder, slow.holder])
    assert rig.core.report().draining_pages == 16
    assert declare(rig, worker) == []
    assert rig.core.report().free_pages == 16


def test_what_was_revoked_before_the_crash_is_lost_and_drains_until_acknowledged(
    rig: Rig, worker: Worker
) -> None:
    """The holder had not heard of it, and a step of it may be running."""
    victim = worker.granted(2, range(64))
    assert is_queued(worker.admit(1, range(4)))
    rig.restart([worker.holder])
    assert declare(rig, worker, line(victim, 2, list(range(6)))) == [victim.lease]
    assert rig.core.report().draining_pages == 16
    worker.ack(victim)
    assert rig.core.report().free_pages == 16


def test_a_lost_lease_drains_no_longer_than_its_holder_lives(rig: Rig, worker: Worker) -> None:
    lease = worker.granted(1, range(10))
    rig.restart([worker.holder])
    wrong = line(lease, 1, [], granted_at=1)
    assert declare(rig, worker, wrong) == [lease.lease]
    assert rig.core.report().draining_pages == 3
    rig.die(1)
    assert rig.core.report().free_pages == 16


def test_pages_that_their_writer_does_not_declare_are_free(rig: Rig, worker: Worker) -> None:
    worker.granted(1, range(10))
    kept = worker.granted(2, range(50, 60))
    rig.restart([worker.holder])
    declare(rig, worker, line(kept, 2, []))
    assert (rig.core.report().held_pages, rig.core.report().free_pages) == (3, 13)
    assert np.count_nonzero(rig.words) == 1


@pytest.mark.parametrize("what", ["foreign page", "twice", "other tokens", "too full", "slot"])
def test_a_declaration_that_contradicts_the_pool_is_lost(
    rig: Rig, worker: Worker, what: str
) -> None:
    other = Worker(rig, "other", 2)
    foreign = other.granted(9, range(200, 204))
    lease = worker.granted(1, range(10), 12)
    worker.committed(lease, range(10))
    table, tokens, at = table_of(lease), list(range(10)), lease
    match what:
        case "foreign page":
            table[2] = table_of(foreign)[0]
        case "twice":
            table[2] = table[1]
        case "other tokens":
            tokens[1] = 77
        case "too full":
            tokens = list(range(13))
        case _:
            at = foreign
    rig.restart([worker.holder, other.holder])
    held = HeldLease(
        lease=lease.lease, lease_slot=at.lease_slot, key=lease.key, order=order_of(1),
        root=ROOT, granted_at=lease.granted_at, extents=pack_extents(table), tokens=pack(tokens),
    )  # fmt: skip
    assert declare(rig, worker, held) == [lease.lease]


def test_an_open_ticket_is_opened_again_and_can_be_redeemed(rig: Rig, worker: Worker) -> None:
    decode = Worker(rig, "decode", 2)
    lease = worker.granted(1, range(10), 12)
    offered = worker.offered(lease, fill_of(range(10)))
    rig.restart([worker.holder, decode.holder])
    assert code_of(decode.open()) == "SessionOpened"
    assert code_of(decode.redeem(lease.key, offered)) == "Stale", "not yet known"
    held = line(lease, 1, list(range(10)), ticket=offered.ticket)
    assert declare(rig, worker, held) == []
    assert decode.redeemed(lease.key, offered).cached_tokens == 10


def test_an_offer_redeemed_before_the_crash_belongs_to_who_redeemed_it(
    rig: Rig, worker: Worker
) -> None:
    decode = Worker(rig, "decode", 2)
    lease = worker.granted(1, range(10), 12)
    offered = worker.offered(lease, fill_of(range(10)))
    taken = decode.redeemed(lease.key, offered)
    rig.restart([worker.holder, decode.holder])
    rig.taken(TicketClosed)
    still = line(lease, 1, list(range(10)), ticket=offered.ticket)
    assert declare(rig, worker, still) == [lease.lease]
    assert declare(rig, decode, line(taken, 1, list(range(10)))) == []
    more = decode.extended(taken, 4)
    assert isinstance(more, Extended) and rig.core.report().held_pages == 2


class TestTornHeaders:
    """Page 5 of a chain of eight is damaged."""

    @pytest.fixture
    def table(self, rig: Rig, worker: Worker) -> list[int]:
        lease = worker.granted(1, range(32))
        worker.release(lease, range(32))
        return table_of(lease)

    def restart_with(self, rig: Rig, page: int, state: HeaderState) -> None:
        rig.headers.states[page] = state
        rig.restart()

    def test_a_torn_page_and_all_below_it_are_free(self, rig: Rig, table: list[int]) -> None:
        self.restart_with(rig, table[5], HeaderState.INVALID)
        assert (rig.core.report().idle_pages, rig.core.report().free_pages) == (5, 11)

    def test_a_page_whose_parent_was_given_out_anew_is_free(
        self, rig: Rig, table: list[int]
    ) -> None:
        rig.headers.identities[table[5]] += np.uint64(1_000)
        rig.restart()
        assert rig.core.report().idle_pages == 6

    def test_a_page_under_another_root_than_its_parent_is_not_believed(
        self, rig: Rig, table: list[int]
    ) -> None:
        rig.headers.roots[table[5]] += 1
        rig.restart()
        assert rig.core.report().idle_pages == 5

    def test_a_page_that_is_not_full_is_not_believed(self, rig: Rig, table: list[int]) -> None:
        rig.headers.counts[table[5]] = 3
        rig.restart()
        assert rig.core.report().idle_pages == 5

    def test_one_of_two_pages_with_the_same_tokens_in_the_same_place_is_believed(
        self, rig: Rig, worker: Worker, table: list[int]
    ) -> None:
        """The second one hangs under the fifth too, and a whole chain under it."""
        other = [*range(20), *range(90, 102)]
        worker.release(worker.granted(2, other), other)
        twin = np.flatnonzero(rig.headers.tokens[:, 0] == 90)[0]
        rig.headers.tokens[twin] = rig.headers.tokens[table[5]]
        rig.restart()
        assert rig.core.report().idle_pages == 8

    def test_while_a_worker_lives_that_may_use_it_a_torn_page_is_not_given_out(
        self, rig: Rig, worker: Worker, table: list[int]
    ) -> None:
        rig.headers.states[table[5]] = HeaderState.INVALID
        rig.restart([worker.holder])
        assert (rig.core.report().free_pages, rig.core.report().draining_pages) == (8, 3)
        declare(rig, worker)
        assert rig.core.report().free_pages == 11

    def test_a_page_torn_while_it_was_committed_goes_back_to_its_holder(
        self, rig: Rig, worker: Worker
    ) -> None:
        lease = worker.granted(7, range(200, 208), 12)
        worker.committed(lease, range(200, 208))
        rig.headers.states[table_of(lease)[1]] = HeaderState.INVALID
        rig.restart([worker.holder])
        assert declare(rig, worker, line(lease, 7, list(range(200, 208)))) == []
        assert worker.committed(lease, range(200, 208)) == 8

    @pytest.mark.parametrize("page", range(8))
    def test_any_one_torn_page_costs_just_itself_and_what_follows(
        self, rig: Rig, table: list[int], page: int
    ) -> None:
        self.restart_with(rig, table[page], HeaderState.INVALID)
        assert rig.core.report().idle_pages == page
        late = Worker(rig, "late", 2)
        assert late.granted(3, [*range(32), 0]).cached_tokens == 4 * page


def test_roots_are_found_again_and_their_places_reused(rig: Rig, worker: Worker) -> None:
    for number in range(3):
        root = bytes([number]) * 32
        lease = worker.admit(number, range(8), root=root)
        assert isinstance(lease, Granted)
        worker.release(lease, range(8))
    rig.restart()
    late = Worker(rig, "late", 2)
    found = late.admit(9, range(8), root=bytes([1]) * 32)
    assert isinstance(found, Granted) and found.cached_tokens == 4
    assert len(rig.core.books.forest.trees) == 3


def test_a_declaration_names_only_so_many_leases() -> None:
    rig = Rig(16, limits=PagerLimits(lease_count_max=64, declare_leases_max=3))
    worker = Worker(rig, "w", 1)
    lease = worker.granted(1, range(8))

    def part(index: int) -> str:
        lines = [line(lease, 1, [])] * 2
        message = Declare(
            worker="w", incarnation=1, epoch=rig.epoch, number=1, part=index, parts=2, leases=lines
        )
        return code_of(rig.ask(message))

    assert [part(0), part(0), part(1)] == ["Ok", "Ok", "Malformed"]


def test_a_lease_is_declared_with_an_order_of_its_own(rig: Rig, worker: Worker) -> None:
    lease = worker.granted(1, range(8))
    rig.restart([worker.holder])
    with pytest.raises(AssertionError, match=r"Malformed.*another sequence"):
        declare(rig, worker, line(lease, 2, []))


def test_an_offer_to_an_earlier_pager_that_comes_late_is_stale(rig: Rig, worker: Worker) -> None:
    lease = worker.granted(1, range(10), 16)
    offer = Offer(
        key=lease.key, worker=worker.name, incarnation=worker.incarnation, epoch=rig.epoch,
        lease=lease.lease, ticket="a" * 32, fill=fill_of(range(10)), ttl_ms=10_000,
    )  # fmt: skip
    rig.restart([worker.holder])
    assert declare(rig, worker, line(lease, 1, list(range(9)))) == []
    assert code_of(rig.ask(offer)) == "Stale"
    assert worker.committed(lease, range(10)) == 8, "its holder goes on"
    assert worker.offered(lease, fill_of(range(10))).ticket == "a" * 32
