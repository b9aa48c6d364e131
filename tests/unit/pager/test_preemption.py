"""Pages taken back: by whom, from whom, and when they may be used again."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest
from tests.unit.pager.rig import (
    ROOT,
    Rig,
    Worker,
    code_of,
    fill_of,
    is_queued,
    key_of,
    order_of,
    table_of,
)

from pagemesh.pager.events import Notify, SetLeaseWord
from pagemesh.wire.messages import LEVEL_US, Message
from pagemesh.wire.pager_messages import Admit, Extended, Granted, Revoke, TicketClosed
from pagemesh.wire.pool_format import HeaderState
from pagemesh.wire.tokens import pack


def revoked(rig: Rig) -> list[int]:
    return [n.lease for n in rig.taken(Revoke)]


def test_an_older_sequence_takes_from_the_youngest_and_no_more_than_it_needs(
    rig: Rig, worker: Worker
) -> None:
    leases = {number: worker.granted(number, range(n := 100 * number, n + 16)) for number in
              (2, 3, 4, 5)}  # fmt: skip
    assert is_queued(worker.admit(1, range(20)))
    assert revoked(rig) == [leases[5].lease, leases[4].lease]
    worker.ack(leases[5])
    assert not rig.taken(Granted)
    worker.ack(leases[4])
    [granted] = rig.taken(Granted)
    assert isinstance(granted, Granted) and granted.key == key_of(1)
    assert set(table_of(granted)) <= {*table_of(leases[5]), *table_of(leases[4])}


def test_two_attempts_at_a_sequence_that_fill_the_pool_do_not_wait_for_each_other(
    rig: Rig, worker: Worker
) -> None:
    """The gateway has made another, and the first has not heard that it is given up."""
    other = Worker(rig, "other", 2)
    first, second = worker.granted(1, range(32)), other.granted(1, range(100, 132), attempt=2)
    assert is_queued(other.extend(second, 9)) and not revoked(rig)
    assert is_queued(worker.extend(first, 9))
    assert revoked(rig) == [second.lease], "the later attempt is the younger"
    other.ack(second)
    assert [one.lease for one in rig.taken(Extended)] == [first.lease]


def test_the_word_changes_before_the_holder_is_told_and_the_pages_drain(
    rig: Rig, worker: Worker
) -> None:
    victim = worker.granted(2, range(64))
    worker.admit(1, range(4))
    word = next(i for i, c in enumerate(rig.commands) if isinstance(c, SetLeaseWord))
    told = next(i for i, c in enumerate(rig.commands) if isinstance(c, Notify))
    assert word < told
    assert rig.words[victim.lease_slot] == 0
    assert (rig.headers.states == HeaderState.DRAINING).all()
    assert rig.core.report().draining_pages == 16


def test_pages_of_a_revoked_lease_are_used_by_nobody_before_it_is_acknowledged(
    rig: Rig, worker: Worker
) -> None:
    victim = worker.granted(2, range(64))
    assert is_queued(worker.admit(1, range(4)))
    for _ in range(5):
        rig.tick(400)
        worker.heartbeat(victim)
        assert is_queued(worker.admit(1, range(4)))
    assert rig.core.report().draining_pages == 16
    worker.ack(victim)
    assert rig.core.report().draining_pages == 0 and len(rig.taken(Granted)) == 1


def test_a_revocation_is_repeated_until_it_is_acknowledged(rig: Rig, worker: Worker) -> None:
    victim = worker.granted(2, range(64))
    worker.admit(1, range(4))
    assert revoked(rig) == [victim.lease]
    rig.tick(100)
    assert revoked(rig) == []
    rig.tick(500)
    assert revoked(rig) == [victim.lease]
    worker.ack(victim)
    rig.tick(500)
    assert revoked(rig) == []


def test_a_revocation_that_is_repeated_says_why_again(rig: Rig, worker: Worker) -> None:
    worker.granted(2, range(64))
    worker.admit(1, range(4))
    rig.tick(600)
    assert [notice.reason for notice in rig.taken(Revoke)] == ["preempted"] * 2


def test_a_revocation_tells_how_the_pool_is_used(rig: Rig, worker: Worker) -> None:
    worker.release(worker.granted(9, range(80, 84)), range(80, 84))
    reading = worker.granted(0, range(9))
    worker.committed(reading, range(9))
    worker.granted(2, range(20, 60))
    assert is_queued(worker.admit(1, range(100, 120)))
    (notice,) = rig.taken(Revoke)
    assert notice.usage == "16 pages: 2 free, 1 held, 2 pinned, 1 idle, 10 draining"


def test_committed_pages_of_a_victim_stay_pinned_until_the_acknowledgement(
    rig: Rig, worker: Worker
) -> None:
    victim = worker.granted(2, range(64))
    worker.committed(victim, range(62))
    worker.admit(1, range(100, 108))
    assert (rig.core.report().pinned_pages, rig.core.report().draining_pages) == (15, 1)
    worker.ack(victim)
    assert len(rig.taken(Granted)) == 1 and rig.core.report().idle_pages == 14


def test_idle_cache_goes_before_any_lease(rig: Rig, worker: Worker) -> None:
    worker.release(worker.granted(3, range(32)), range(32))
    young = worker.granted(4, range(200, 232))
    assert code_of(worker.admit(1, range(300, 332))) == "Granted"
    assert revoked(rig) == [] and rig.core.report().preempted_count == 0
    worker.release(young)


def test_nobody_preempts_the_older(rig: Rig, worker: Worker) -> None:
    worker.granted(1, range(64))
    assert is_queued(worker.admit(2, range(4)))
    assert revoked(rig) == []


def test_who_could_not_be_served_by_the_young_alone_leaves_them_alone(
    rig: Rig, worker: Worker
) -> None:
    worker.granted(1, range(32))
    worker.granted(3, range(100, 132))
    assert is_queued(worker.admit(2, range(200, 236)))  # 9 pages, the young one has 8
    assert revoked(rig) == []


def test_priority_comes_before_age() -> None:
    rig = Rig(4)
    worker = Worker(rig, "w", 1)
    urgent = worker.granted(1, range(16))
    message = Admit(
        key=key_of(9), order=order_of(9, priority=-1), worker="w", incarnation=1, epoch=1,
        root=b"r" * 32, tokens=b"\0" * 4, reserve_tokens=1, deadline_ms=1_000,
    )  # fmt: skip
    assert is_queued(rig.ask(message))
    assert revoked(rig) == [urgent.lease]


def test_who_waits_ages_so_that_the_more_urgent_cannot_starve_it() -> None:
    """One after the other, each there before the one before it ends."""
    rig = Rig(4)
    worker = Worker(rig, "w", 1)

    def ask(number: int, priority: int, arrival_us: int) -> Message:
        order = msgspec.structs.replace(order_of(number, priority=priority), arrival_us=arrival_us)
        return rig.ask(
            Admit(
                key=key_of(number), order=order, worker="w", incarnation=1, epoch=1, root=ROOT,
                tokens=pack([number] * 16), reserve_tokens=16, deadline_ms=60_000,
            )
        )  # fmt: skip

    held = ask(10, 0, 0)
    assert is_queued(ask(1, 1, 0))
    for number in range(11, 31):
        assert isinstance(held, Granted)
        came_us = (number - 10) * 1_000_000
        assert is_queued(ask(number, 0, came_us)) and is_queued(ask(1, 1, 0))
        worker.release(held, [int(held.key.request, 16)] * 16)
        [held] = rig.taken(Granted)
        if held.key == key_of(1):
            break
    assert came_us == LEVEL_US


def test_growth_preempts_too(rig: Rig, worker: Worker) -> None:
    old, young = worker.granted(1, range(8)), worker.granted(2, range(100, 156))
    assert is_queued(worker.extend(old, 4, have=2))
    assert revoked(rig) == [young.lease]
    worker.ack(young)
    [more] = rig.taken(Extended)
    assert isinstance(more, Extended) and len(table_of(more)) == 2


def test_a_ticket_in_the_way_is_closed_and_its_pages_are_free_at_once(
    rig: Rig, worker: Worker
) -> None:
    lease = worker.granted(2, range(64))
    worker.offered(lease, fill_of(range(6)))
    assert code_of(worker.admit(1, range(100, 116))) == "Granted"
    assert [n.outcome for n in rig.taken(TicketClosed)] == ["expired"]
    assert revoked(rig) == [] and rig.core.report().draining_pages == 0


def test_a_victim_waits_behind_who_took_its_pages_and_keeps_its_order(
    rig: Rig, worker: Worker
) -> None:
    victim = worker.granted(2, range(64))
    worker.admit(1, range(100, 132))
    worker.ack(victim)
    [first] = rig.taken(Granted)
    assert isinstance(first, Granted)
    assert is_queued(worker.admit(2, range(64)))
    worker.release(first)
    assert [g.key for g in rig.taken(Granted)] == [key_of(2)]


@pytest.mark.parametrize("lets_go", [Worker.ack, Worker.release], ids=["acknowledges", "releases"])
def test_a_victim_that_asks_again_before_it_lets_go_keeps_its_place(
    lets_go: Callable[[Worker, Granted], Message],
) -> None:
    """As workers do: they ask at once, and let go when their step has ended."""
    rig = Rig(4)
    older, younger = Worker(rig, "older", 1), Worker(rig, "younger", 2)
    first, victim = older.granted(1, range(8)), younger.granted(3, range(100, 108))
    assert is_queued(older.admit(2, range(50, 58))) and revoked(rig) == [victim.lease]
    assert is_queued(younger.admit(3, range(100, 108)))
    assert is_queued(younger.admit(4, range(200, 208)))
    lets_go(younger, victim)
    [second] = rig.taken(Granted)
    assert second.key == key_of(2)
    for done, following in ((first, 3), (second, 4)):
        older.release(done)
        assert [g.key for g in rig.taken(Granted)] == [key_of(following)]
    younger.admit(3, range(100, 108))
    assert not revoked(rig), "nobody younger had its pages"


def test_a_ticket_that_ends_takes_nobodys_place_in_the_queue() -> None:
    rig = Rig(4)
    older, offerer = Worker(rig, "older", 1), Worker(rig, "offerer", 2)
    first = older.granted(1, range(8))
    offerer.offered(offerer.granted(3, range(100, 108)), fill_of(range(100, 108)))
    assert is_queued(offerer.admit(3, range(100, 108)))
    assert isinstance(older.admit(2, range(50, 58)), Granted), "the ticket was in the way"
    older.release(first)
    assert [g.key for g in rig.taken(Granted)] == [key_of(3)]


@pytest.mark.parametrize("seed", range(20))
def test_everybody_finishes_though_the_pool_is_a_fraction_of_the_demand(seed: int) -> None:
    """Eight sequences grow to 40 tokens each in a pool of 12 pages (80 are wanted)."""
    dice, rig = random.Random(seed), Rig(12)
    worker = Worker(rig, "w", 1)
    wanted = {number: [number * 1000 + i for i in range(40)] for number in range(8)}
    leases: dict[int, Granted] = {}
    pages: dict[int, int] = {}
    length = dict.fromkeys(wanted, 4)
    for _ in range(3_000):
        if not wanted:
            break
        number = dice.choice(list(wanted))
        tokens = wanted[number][: length[number]]
        if number not in leases:
            answer = worker.admit(number, tokens)
        elif length[number] == 40:
            worker.release(leases.pop(number), tokens)
            del wanted[number], pages[number]
            continue
        elif length[number] % 4:
            length[number] += 1
            continue
        else:
            answer = worker.extend(leases[number], pages[number] + 1)
        heard = [answer, *rig.taken(Granted), *rig.taken(Extended)]
        for message in heard:
            if isinstance(message, Granted):
                owner = int(message.key.request, 16)
                leases[owner], pages[owner] = message, len(table_of(message))
            elif isinstance(message, Extended):
                owner = int(message.key.request, 16)
                grown = message.first_index + len(table_of(message))
                if owner in leases and grown > pages[owner]:
                    pages[owner] = grown
                    length[owner] = max(length[owner], 4 * (grown - 1)) + 1
        for lease in revoked(rig):
            owner = next(n for n, held in leases.items() if held.lease == lease)
            worker.ack(leases.pop(owner))
            for message in rig.taken(Granted):
                assert isinstance(message, Granted)
                again = int(message.key.request, 16)
                leases[again], pages[again] = message, len(table_of(message))
        rig.tick(10)
        worker.open()
    assert not wanted, f"{len(wanted)} never finished"
    assert rig.core.report().held_pages == rig.core.report().pinned_pages == 0


class TestALateWorker:
    """It was told to let go of a lease, and is frozen."""

    @pytest.fixture
    def frozen(self, rig: Rig) -> Worker:
        return Worker(rig, "frozen", 2)

    def silence(self, rig: Rig, worker: Worker, *held: Granted, ms: int) -> None:
        for _ in range(ms // 200):
            rig.tick(200)
            worker.heartbeat(*held)

    def test_holds_nobody_up_once_it_is_known_for_one(
        self, rig: Rig, worker: Worker, frozen: Worker
    ) -> None:
        mine, others = worker.granted(2, range(32)), frozen.granted(3, range(100, 132))
        assert is_queued(worker.admit(1, range(200, 216)))
        assert revoked(rig) == [others.lease], "the youngest"
        self.silence(rig, worker, mine, ms=800)
        assert is_queued(worker.admit(1, range(200, 216)))
        assert mine.lease not in revoked(rig), "it may be busy with a step"
        self.silence(rig, worker, mine, ms=400)
        assert is_queued(worker.admit(1, range(200, 216)))
        assert mine.lease in revoked(rig)
        worker.ack(mine)
        [granted] = rig.taken(Granted)
        assert granted.key == key_of(1)
        assert not {*table_of(granted)} & {*table_of(others)}, "these drain still"

    def test_has_more_taken_from_it_only_where_nobody_else_can_give(
        self, rig: Rig, worker: Worker, frozen: Worker
    ) -> None:
        mine = worker.granted(2, range(16))
        first, second = frozen.granted(3, range(100, 116)), frozen.granted(4, range(200, 232))
        assert is_queued(worker.admit(1, range(300, 316)))
        assert revoked(rig) == [second.lease]
        self.silence(rig, worker, mine, ms=1_200)
        assert is_queued(worker.admit(1, range(300, 316)))
        taken = set(revoked(rig))
        assert mine.lease in taken and first.lease not in taken

    def test_that_is_only_busy_loses_no_more_than_was_needed(self, rig: Rig) -> None:
        """A step may take longer than that: nobody else has anything to give meanwhile."""
        busy, waiting = Worker(rig, "busy", 2), Worker(rig, "waiting", 3)
        held = [busy.granted(2 + n, range(100 * n, 100 * n + 16)) for n in range(4)]
        for _ in range(8):
            assert is_queued(waiting.admit(1, range(900, 908)))
            rig.tick(400)
            for one in (busy, waiting):
                one.heartbeat(*(held if one is busy else ()))
        assert set(revoked(rig)) == {held[-1].lease}

    def test_is_counted_on_where_all_are_late(
        self, rig: Rig, worker: Worker, frozen: Worker
    ) -> None:
        mine = [worker.granted(2 + n, range(100 * n, 100 * n + 16)) for n in range(2)]
        others = [frozen.granted(5 + n, range(500 + 100 * n, 516 + 100 * n)) for n in range(2)]
        waiting = Worker(rig, "waiting", 3)
        for _ in range(10):
            assert is_queued(waiting.admit(1, range(900, 908)))
            rig.tick(400)
            worker.heartbeat(*mine)
            frozen.heartbeat(*others)
            waiting.heartbeat()
        assert set(revoked(rig)) == {mine[-1].lease, others[-1].lease}, "one of each"


def test_what_is_promised_to_who_is_taken_back_is_room_too(rig: Rig, worker: Worker) -> None:
    worker.granted(5, range(100, 132))
    young = worker.granted(9, range(200, 224), first_tokens=8)
    assert is_queued(worker.admit(1, range(32))), "two pages are free, six are to be had"
    assert [revoke.lease for revoke in rig.taken(Revoke)] == [young.lease]


def test_what_is_cached_and_read_by_who_was_taken_back_is_waited_for(
    rig: Rig, worker: Worker
) -> None:
    worker.granted(5, range(100, 132))
    young = worker.granted(9, range(200, 224))
    worker.committed(young, range(200, 224))
    for _ in range(3):
        assert is_queued(worker.admit(1, range(32))), "two pages are free, six are to be had"
    assert [revoke.lease for revoke in rig.taken(Revoke)] == [young.lease]
