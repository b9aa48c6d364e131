"""Sessions: silence, death, differing holdings."""

from __future__ import annotations

import itertools

import pytest
from tests.unit.pager.rig import (
    LAYOUT,
    LIMITS,
    ROOT,
    Rig,
    Worker,
    code_of,
    fill_of,
    is_queued,
    key_of,
    order_of,
)

from pagemesh.pager.events import ForgetHolder, KillHolder, ProbeHolder, RememberHolder, Tick
from pagemesh.pager.limits import PagerLimits
from pagemesh.pager.service import settings_of
from pagemesh.runtime.service_config import load_service_config
from pagemesh.wire.messages import Ok, Refused
from pagemesh.wire.pager_messages import (
    Declare,
    Declared,
    DeclareWanted,
    Granted,
    HeldLease,
    OpenSession,
    PoolSpec,
    Revoke,
)
from pagemesh.wire.tokens import pack


def held(lease: Granted, number: int, tokens: int = 0) -> HeldLease:
    return HeldLease(
        lease=lease.lease, lease_slot=lease.lease_slot, key=lease.key, order=order_of(number),
        root=ROOT, granted_at=lease.granted_at, extents=lease.extents,
        tokens=pack(range(tokens)),
    )  # fmt: skip


_numbers = itertools.count(2)


def declare(
    rig: Rig, worker: Worker, *leases: HeldLease, part: int = 0, parts: int = 1, number: int = 0
) -> object:
    return rig.ask(
        Declare(
            worker=worker.name, incarnation=worker.incarnation, epoch=rig.epoch,
            number=number or next(_numbers), part=part, parts=parts, leases=list(leases),
        )
    )  # fmt: skip


def open_message(layout: bytes, place: str = "") -> OpenSession:
    return OpenSession(
        worker="x", incarnation=9, role="decode", lock_name="lock",
        pool=PoolSpec(layout_digest=layout, page_size=4, page_bytes=1 << 12, place=place),
    )  # fmt: skip


def test_another_layout_is_refused_and_both_are_named(rig: Rig) -> None:
    refused = rig.ask(open_message(b"z" * 32))
    assert isinstance(refused, Refused) and refused.code == "Stale"
    assert LAYOUT.hex() in refused.message and (b"z" * 32).hex() in refused.message


def test_pages_in_another_place_are_refused_and_both_are_named(rig: Rig) -> None:
    refused = rig.ask(open_message(LAYOUT, "cuda:1"))
    assert isinstance(refused, Refused) and refused.code == "Stale"
    assert "in host memory, yours would be in cuda:1" in refused.message


def test_who_holds_what_lock_is_remembered_before_the_session_is_confirmed(rig: Rig) -> None:
    rig.ask(open_message(LAYOUT))
    [remembered] = [c for c in rig.commands if isinstance(c, RememberHolder)]
    assert remembered.holder.lock_name == "lock" and rig.commands[-1] is not remembered


def test_a_session_that_falls_silent_loses_its_leases_but_its_pages_drain(
    rig: Rig, worker: Worker
) -> None:
    worker.granted(1, range(10))
    rig.tick(LIMITS.session_ttl_ms - 1)
    assert rig.core.report().held_pages == 3
    commands = rig.tick(1)
    assert ProbeHolder(1) in commands
    [revoke] = rig.taken(Revoke)
    assert isinstance(revoke, Revoke) and revoke.reason == "session_expired"
    assert (rig.core.report().draining_pages, rig.core.report().session_count) == (3, 0)
    assert code_of(worker.admit(2, [1])) == "Stale"
    assert code_of(worker.heartbeat()) == "Stale", "renewal never resurrects"


def test_a_silent_holder_that_wakes_up_lets_go_and_starts_afresh(rig: Rig, worker: Worker) -> None:
    lease = worker.granted(1, range(10))
    rig.tick(LIMITS.session_ttl_ms)
    assert code_of(worker.open()) == "SessionOpened"
    assert rig.core.report().draining_pages == 3
    assert code_of(worker.extend(lease, 4)) == "Stale"
    worker.ack(lease)
    assert rig.core.report().free_pages == 16
    assert code_of(worker.admit(1, range(10))) == "Granted"


def test_who_speaks_in_the_name_of_another_worker_is_stale(rig: Rig, worker: Worker) -> None:
    lease = worker.granted(1, range(10))
    other = Worker(rig, "other", worker.incarnation, opened=False)
    assert code_of(other.heartbeat(lease)) == "Stale"
    assert code_of(other.commit(lease, fill_of(range(10)))) == "Stale"
    assert worker.committed(lease, range(10)) == 8


def test_death_frees_at_once_what_silence_left_draining(rig: Rig, worker: Worker) -> None:
    worker.granted(1, range(10))
    rig.tick(LIMITS.session_ttl_ms)
    commands = rig.die(1)
    assert rig.core.report().free_pages == 16 and ForgetHolder(1) in commands


def test_a_silent_holder_is_probed_again_and_again(rig: Rig, worker: Worker) -> None:
    worker.granted(1, range(10))
    rig.tick(LIMITS.session_ttl_ms)
    assert ProbeHolder(1) in rig.tick(LIMITS.probe_again_ms)
    assert ProbeHolder(1) not in rig.tick(1)


def test_a_silent_holder_is_killed_only_when_others_wait_for_its_pages(
    rig: Rig, worker: Worker
) -> None:
    worker.granted(1, range(64))
    rig.tick(LIMITS.session_ttl_ms)
    assert KillHolder(1) not in rig.tick(2 * LIMITS.drain_ms_max)
    other = Worker(rig, "other", 2)
    assert is_queued(other.admit(2, range(4)))
    assert KillHolder(1) in rig.tick(LIMITS.probe_again_ms)


def test_a_worker_that_beats_and_never_acknowledges_is_killed_once_no_step_can_be_the_reason(
    rig: Rig, worker: Worker
) -> None:
    worker.granted(2, range(64))
    other = Worker(rig, "other", 2)
    for waited_ms in range(0, LIMITS.busy_drain_ms_max + 1_000, 500):
        assert is_queued(other.admit(1, range(4)))
        worker.heartbeat()
        other.heartbeat()
        killed = KillHolder(1) in rig.tick(500)
        assert killed == (waited_ms + 500 >= LIMITS.busy_drain_ms_max)


def test_a_worker_that_falls_silent_in_a_step_is_killed_soon_after_it_was_heard_last() -> None:
    """However long it has owed what others wait for: while it beat it may have been busy."""
    limits = PagerLimits(lease_count_max=64, session_ttl_ms=3_000)
    rig = Rig(16, limits=limits)
    worker, other = Worker(rig, "w", 1), Worker(rig, "other", 2)
    worker.granted(2, range(64))
    for beat in [True] * 40 + [False] * 12:
        assert is_queued(other.admit(1, range(4)))
        other.heartbeat()
        if beat:
            worker.heartbeat()
            heard_ms = rig.now_ms
        killed = KillHolder(1) in rig.tick(500)
        assert killed == (rig.now_ms - heard_ms >= limits.drain_ms_max)


def test_a_pager_waits_for_as_long_a_step_as_its_workers_may_take() -> None:
    environ = {"PAGEMESH_SECRET": "0123456789abcdef"}
    usual = settings_of(load_service_config(environ))
    longer = settings_of(load_service_config(environ, {"PAGEMESH_STEP_MS_MAX": "420000"}))
    assert usual.limits.step_ms_max == PagerLimits().step_ms_max
    assert longer.limits.step_ms_max == 420_000


def test_a_worker_is_killed_by_the_first_that_it_owes_whatever_was_taken_from_it_since(
    rig: Rig, worker: Worker
) -> None:
    first, second = worker.granted(3, range(32)), worker.granted(2, range(100, 132))
    other = Worker(rig, "other", 2)
    killed_ms = []
    for waited_ms in range(0, LIMITS.busy_drain_ms_max + 1_000, 500):
        late = waited_ms >= LIMITS.busy_drain_ms_max - 1_000
        assert is_queued(other.admit(1, range(4)))
        assert not late or is_queued(other.admit(0, range(200, 264)))
        worker.open()
        other.open()
        if KillHolder(1) in rig.tick(500):
            killed_ms.append(waited_ms + 500)
    revoked = {revoke.lease for revoke in rig.taken(Revoke)}
    assert revoked == {first.lease, second.lease}
    assert killed_ms[0] == LIMITS.busy_drain_ms_max


def test_a_new_incarnation_ends_the_session_of_the_one_before(rig: Rig, worker: Worker) -> None:
    worker.granted(1, range(10))
    Worker(rig, "w", 2)
    assert rig.core.report().draining_pages == 3
    assert code_of(worker.admit(2, [1])) == "Stale"
    rig.die(1)
    assert rig.core.report().draining_pages == 0
    assert code_of(Worker(rig, "w", 2, opened=False).admit(2, [1])) == "Granted"


def test_who_releases_what_ended_in_the_hands_of_another_hears_that_it_is_gone(
    rig: Rig, worker: Worker
) -> None:
    lease = worker.granted(1, range(10))
    worker.release(lease)
    assert code_of(worker.release(lease)) == "Ok"
    assert code_of(Worker(rig, "other", 2).release(lease)) == "Gone"


def test_sessions_are_bounded(rig: Rig) -> None:
    for number in range(LIMITS.session_count_max):
        Worker(rig, f"w{number}", number + 1)
    late = Worker(rig, "late", 9_999, opened=False)
    assert code_of(late.open()) == "Busy"


class TestHoldings:
    def test_equal_holdings_are_fine(self, rig: Rig, worker: Worker) -> None:
        one, two = worker.granted(1, range(4)), worker.granted(2, range(4))
        assert worker.heartbeat(one, two) == Ok()

    def test_a_difference_that_lasts_asks_for_a_declaration(self, rig: Rig, worker: Worker) -> None:
        worker.granted(1, range(4))
        assert worker.heartbeat() == Ok(), "the grant may be under way"
        assert isinstance(worker.heartbeat(), DeclareWanted)

    def test_differences_that_did_not_last_ask_for_none(self, rig: Rig, worker: Worker) -> None:
        lease = worker.granted(1, range(4))
        for _ in range(3):
            assert worker.heartbeat() == Ok()
            assert worker.heartbeat(lease) == Ok()

    def test_equal_counts_of_different_leases_differ(self, rig: Rig, worker: Worker) -> None:
        lease = worker.granted(1, range(4))
        worker.release(lease)
        worker.granted(2, range(4))
        worker.heartbeat(lease)
        assert isinstance(worker.heartbeat(lease), DeclareWanted)

    def test_a_lease_that_is_not_declared_is_revoked_once_it_is_old_enough(
        self, rig: Rig, worker: Worker
    ) -> None:
        worker.granted(1, range(4))
        assert declare(rig, worker) == Declared(lost=[])
        assert rig.core.report().held_pages == 1, "its grant may be under way"
        rig.tick(LIMITS.declare_grace_ms)
        declare(rig, worker)
        assert rig.core.report().draining_pages == 1

    def test_a_declared_lease_that_is_not_there_is_lost(self, rig: Rig, worker: Worker) -> None:
        lease = worker.granted(1, range(4))
        kept = worker.granted(2, range(4))
        worker.release(lease)
        assert declare(rig, worker, held(lease, 1), held(kept, 2)) == Declared(lost=[lease.lease])

    def test_parts_are_judged_together(self, rig: Rig, worker: Worker) -> None:
        one, two = worker.granted(1, range(4)), worker.granted(2, range(4))
        rig.tick(LIMITS.declare_grace_ms)
        assert declare(rig, worker, held(two, 2), part=1, parts=2, number=1) == Ok()
        assert rig.core.report().draining_pages == 0
        assert declare(rig, worker, held(one, 1), part=0, parts=2, number=1) == Declared(lost=[])
        assert rig.core.report().held_pages == 2

    def test_parts_of_different_declarations_are_never_put_together(
        self, rig: Rig, worker: Worker
    ) -> None:
        one, two = worker.granted(1, range(4)), worker.granted(2, range(4))
        rig.tick(LIMITS.declare_grace_ms)
        assert declare(rig, worker, part=1, parts=2, number=1) == Ok()
        assert declare(rig, worker, held(one, 1), part=0, parts=2, number=2) == Ok()
        late = declare(rig, worker, part=1, parts=2, number=1)
        assert isinstance(late, Refused) and late.code == "Stale"
        rest = declare(rig, worker, held(two, 2), part=1, parts=2, number=2)
        assert rest == Declared(lost=[])
        assert rig.core.report().held_pages == 2

    def test_what_is_granted_while_leases_are_declared_is_not_missed(
        self, rig: Rig, worker: Worker
    ) -> None:
        """However long that takes."""
        declare(rig, worker, part=0, parts=2, number=1)
        worker.granted(1, range(4))
        rig.tick(LIMITS.declare_grace_ms)
        assert declare(rig, worker, part=1, parts=2, number=1) == Declared(lost=[])
        assert rig.core.report().held_pages == 1

    @pytest.mark.parametrize(("part", "parts"), [(2, 2), (0, LIMITS.declare_parts_max + 1)])
    def test_impossible_parts_are_malformed(
        self, rig: Rig, worker: Worker, part: int, parts: int
    ) -> None:
        answer = declare(rig, worker, part=part, parts=parts)
        assert isinstance(answer, Refused) and answer.code == "Malformed"


def test_what_passes_while_the_pager_itself_is_stopped_is_nobodys_silence(rig: Rig) -> None:
    worker, other = Worker(rig, "w", 1), Worker(rig, "other", 2)
    lease = worker.granted(1, range(8))
    offered = other.offered(other.granted(2, range(20, 28)), fill_of(range(20, 28)))
    rig.now_ms += 60_000
    rig.handle(Tick(away_ms=59_900))
    assert isinstance(worker.heartbeat(lease), Ok)
    assert worker.redeemed(key_of(2), offered).lease == offered.handle.lease
    assert not rig.taken(Revoke)
    rig.tick(LIMITS.session_ttl_ms)
    assert {revoke.reason for revoke in rig.taken(Revoke)} == {"session_expired"}


def test_who_was_to_let_go_has_the_time_for_it_that_the_pager_was_stopped(rig: Rig) -> None:
    slow = Worker(rig, "slow", 1)
    slow.granted(1, range(60), 64)
    rig.tick(LIMITS.session_ttl_ms)
    asking = Worker(rig, "asking", 2)
    rig.now_ms += LIMITS.drain_ms_max + 100
    assert is_queued(asking.admit(2, range(8)))
    assert KillHolder(1) not in rig.handle(Tick(away_ms=LIMITS.drain_ms_max))
    rig.now_ms += LIMITS.drain_ms_max - 100
    asking.heartbeat()
    assert is_queued(asking.admit(2, range(8)))
    assert KillHolder(1) in rig.tick()


def test_a_bus_that_goes_again_and_again_keeps_no_ticket_for_longer_than_it_was_away(
    rig: Rig, worker: Worker
) -> None:
    """Of each outage it is told late, and so counted from before the last tick on."""
    offered = worker.offered(worker.granted(1, range(8)), fill_of(range(8)))
    rig.tick()
    heard_ms = 0
    while heard_ms < offered.handle.ttl_ms:
        assert rig.core.books.tickets
        rig.tick(50)
        rig.now_ms += 50
        rig.handle(Tick(away_ms=50 + 2_300))
        heard_ms += 50
    assert not rig.core.books.tickets


def test_who_was_heard_just_now_has_no_more_time_for_what_nobody_was_heard_before(
    rig: Rig, worker: Worker
) -> None:
    """It would be found dead that much later."""
    worker.granted(1, range(8))
    rig.handle(Tick(away_ms=60_000))
    rig.tick(LIMITS.session_ttl_ms)
    assert [revoke.reason for revoke in rig.taken(Revoke)] == ["session_expired"]
