"""Offers, tickets, redemption, withdrawal; forks."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest
from tests.unit.pager.rig import (
    LIMITS,
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

from pagemesh.wire.messages import Ok
from pagemesh.wire.pager_messages import Admit, Fill, Fork, Granted, Offered, Revoke, TicketClosed
from pagemesh.wire.tokens import pack

TOKENS = list(range(10))


@pytest.fixture
def prefill(rig: Rig) -> Worker:
    return Worker(rig, "prefill", 1)


@pytest.fixture
def decode(rig: Rig) -> Worker:
    return Worker(rig, "decode", 2)


@pytest.fixture
def lease(prefill: Worker) -> Granted:
    return prefill.granted(1, TOKENS, 12)


@pytest.fixture
def offered(prefill: Worker, lease: Granted) -> Offered:
    return prefill.offered(lease, fill_of(TOKENS))


def outcomes(rig: Rig) -> list[str]:
    return [n.outcome for n in rig.taken(TicketClosed)]


def test_redeeming_moves_ownership_the_write_right_and_brings_growth(
    rig: Rig, prefill: Worker, decode: Worker, lease: Granted, offered: Offered
) -> None:
    taken = decode.redeemed(lease.key, offered, 20)
    assert (taken.lease, taken.lease_slot) == (lease.lease, lease.lease_slot)
    assert taken.cached_tokens == 10 and len(table_of(taken)) == 5
    assert table_of(taken)[:3] == table_of(lease)
    assert rig.headers.writers[table_of(taken)[2:]].tolist() == [2, 2, 2]
    assert outcomes(rig) == ["redeemed"]
    assert code_of(prefill.commit(lease, fill_of(TOKENS))) == "Stale"
    assert decode.committed(taken, [*TOKENS, 10, 11]) == 12


def test_redeeming_fences_every_older_view_of_the_tail(
    rig: Rig, decode: Worker, lease: Granted, offered: Offered
) -> None:
    tail = table_of(lease)[2]
    before = int(rig.headers.sequences[tail])
    taken = decode.redeemed(lease.key, offered)
    assert before <= offered.handle.granted_at < int(rig.headers.sequences[tail])
    assert int(rig.headers.sequences[table_of(taken)].max()) <= taken.granted_at


def test_redeeming_again_gives_the_same_and_another_worker_gets_gone(
    rig: Rig, decode: Worker, lease: Granted, offered: Offered
) -> None:
    taken = decode.redeemed(lease.key, offered, 20)
    assert decode.redeemed(lease.key, offered, 20) == taken
    assert code_of(Worker(rig, "late", 3).redeem(lease.key, offered)) == "Gone"
    decode.release(taken)
    assert code_of(decode.redeem(lease.key, offered)) == "TicketOver"


def test_growth_that_is_not_to_be_had_is_simply_missing(
    rig: Rig, prefill: Worker, decode: Worker, lease: Granted, offered: Offered
) -> None:
    other = prefill.granted(2, range(100, 144))
    assert rig.core.books.pool.free == 2
    taken = decode.redeemed(lease.key, offered, 64)
    assert len(table_of(taken)) == 5
    prefill.release(other)


def test_growth_does_not_overtake_an_older_waiter(
    rig: Rig, prefill: Worker, decode: Worker
) -> None:
    late = prefill.granted(5, TOKENS, 12)
    offered = prefill.offered(late, fill_of(TOKENS))
    old = decode.granted(1, range(100, 140))
    assert is_queued(prefill.admit(2, range(200, 264)))  # wants all; the oldest is in its way
    taken = decode.redeemed(late.key, offered, 24)
    assert len(table_of(taken)) == 3
    decode.release(old)


@pytest.mark.parametrize(
    "change",
    [
        {"pool_incarnation": 78}, {"layout_digest": b"z" * 32}, {"granted_at": 3},
        {"token_count": 9}, {"extents": b""}, {"lease": 5},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_a_handle_that_is_not_the_one_offered_is_stale(
    rig: Rig, decode: Worker, lease: Granted, offered: Offered, change: dict[str, object]
) -> None:
    wrong = Offered(ticket=offered.ticket, handle=msgspec.structs.replace(offered.handle, **change))
    assert code_of(decode.redeem(lease.key, wrong)) == "Stale"
    assert code_of(decode.redeem(lease.key, offered)) == "Granted"


def test_an_offer_is_the_same_when_it_is_repeated(
    prefill: Worker, lease: Granted, offered: Offered
) -> None:
    assert prefill.offered(lease, fill_of(TOKENS)) == offered
    assert code_of(prefill.offer(lease, fill_of(TOKENS), ticket="b" * 32)) == "Stale"


def test_the_offerer_can_take_its_lease_back(
    rig: Rig, prefill: Worker, decode: Worker, lease: Granted, offered: Offered
) -> None:
    assert prefill.withdraw() == Ok()
    assert prefill.withdraw() == Ok()
    assert code_of(decode.redeem(lease.key, offered)) == "Gone"
    assert prefill.committed(lease, [*TOKENS, 10, 11]) == 12
    assert outcomes(rig) == []


def test_withdrawing_is_gone_once_redeemed_and_stale_once_expired(
    rig: Rig, prefill: Worker, decode: Worker, lease: Granted, offered: Offered
) -> None:
    decode.redeemed(lease.key, offered)
    assert code_of(prefill.withdraw()) == "Gone"
    other = prefill.granted(2, TOKENS, 12)
    prefill.offer(other, fill_of(TOKENS), ticket="b" * 32, ttl_ms=100)
    rig.tick(100)
    assert code_of(prefill.withdraw("b" * 32)) == "Stale"
    assert code_of(prefill.withdraw("c" * 32)) == "Stale"


class TestRefused:
    """The ticket stands as it did: whoever may have the lease gets it then."""

    def test_redeeming_for_a_sequence_that_holds_another_lease(
        self, decode: Worker, lease: Granted, offered: Offered
    ) -> None:
        another = decode.granted(1, TOKENS, 12)
        assert code_of(decode.redeem(lease.key, offered)) == "Stale"
        decode.release(another, cache=False)
        assert decode.redeemed(lease.key, offered).lease == lease.lease

    def test_taking_back_for_a_sequence_that_holds_another_lease(
        self, prefill: Worker, decode: Worker, lease: Granted, offered: Offered
    ) -> None:
        another = prefill.granted(1, TOKENS, 12)
        assert code_of(prefill.withdraw()) == "Stale"
        assert prefill.committed(another, [*TOKENS, 10, 11]) == 12
        assert decode.redeemed(lease.key, offered).lease == lease.lease

    def test_taking_back_what_another_offered(
        self, prefill: Worker, decode: Worker, offered: Offered
    ) -> None:
        assert code_of(decode.withdraw()) == "Stale"
        assert prefill.withdraw() == Ok()

    def test_offering_more_than_was_granted(
        self, rig: Rig, prefill: Worker, lease: Granted
    ) -> None:
        assert code_of(prefill.offer(lease, fill_of(range(13)))) == "Malformed"
        assert not rig.core.books.tickets
        assert prefill.committed(lease, range(12)) == 12


def test_tickets_are_bounded() -> None:
    rig = Rig(limits=dataclasses.replace(LIMITS, ticket_count_max=1))
    worker, other = Worker(rig, "a", 1), Worker(rig, "b", 2)
    offered = worker.offered(worker.granted(1, TOKENS), fill_of(TOKENS))
    second = worker.granted(2, TOKENS)
    assert code_of(worker.offer(second, fill_of(TOKENS), "b" * 32)) == "Busy"
    other.redeemed(key_of(1), offered)
    worker.offered(second, fill_of(TOKENS), "b" * 32)


def test_who_redeems_what_its_sequence_waits_for_waits_no_more(
    rig: Rig, prefill: Worker, decode: Worker, lease: Granted, offered: Offered
) -> None:
    full = prefill.granted(0, range(100, 152))
    assert is_queued(decode.admit(1, range(200, 208)))
    decode.redeemed(lease.key, offered)
    assert not rig.core.report().waiter_count
    prefill.release(full, cache=False)
    assert not rig.taken(Granted)


def test_who_redeems_a_sequence_that_waits_for_others_to_compute_waits_no_more(
    rig: Rig, prefill: Worker, decode: Worker, lease: Granted, offered: Offered
) -> None:
    computing = prefill.granted(2, range(100, 114))
    assert is_queued(decode.admit(1, range(100, 114)))
    taken = decode.redeemed(lease.key, offered)
    assert not rig.core.report().waiter_count
    prefill.committed(computing, range(100, 114))
    assert not rig.taken(Granted)
    assert decode.committed(taken, TOKENS) == 8


def test_a_ticket_that_nobody_redeems_expires_and_frees_its_pages_at_once(
    rig: Rig, prefill: Worker, decode: Worker, lease: Granted
) -> None:
    offered = prefill.offer(lease, fill_of(TOKENS), ttl_ms=100)
    assert isinstance(offered, Offered)
    rig.tick(99)
    assert outcomes(rig) == []
    rig.tick(1)
    assert outcomes(rig) == ["expired"]
    assert code_of(decode.redeem(lease.key, offered)) == "TicketOver"
    report = rig.core.report()
    assert (report.free_pages, report.idle_pages, report.draining_pages) == (14, 2, 0)


def test_cancelling_a_ticket_frees_the_lease_and_tells_the_offerer(
    rig: Rig, prefill: Worker, decode: Worker, lease: Granted, offered: Offered
) -> None:
    assert decode.cancel() == Ok()
    assert decode.cancel() == Ok()
    assert outcomes(rig) == ["cancelled"]
    assert code_of(decode.redeem(lease.key, offered)) == "Gone"
    assert rig.core.report().held_pages == 0


def test_cancelling_what_one_redeemed_without_knowing_takes_it_back_with_a_confirmation(
    rig: Rig, decode: Worker, lease: Granted, offered: Offered
) -> None:
    taken = decode.redeemed(lease.key, offered)
    assert decode.cancel() == Ok()
    assert rig.core.report().draining_pages == 1
    assert [type(n) for n in rig.taken(Revoke)] == [Revoke]
    decode.ack(taken)
    assert rig.core.report().draining_pages == 0


def test_cancelling_late_what_was_offered_again_since_takes_nothing_from_who_has_it(
    rig: Rig, decode: Worker, lease: Granted, offered: Offered
) -> None:
    third = Worker(rig, "third", 3)
    again = decode.offered(decode.redeemed(lease.key, offered, 12), fill_of(TOKENS), "b" * 32)
    has = third.redeemed(lease.key, again, 12)
    assert code_of(decode.cancel(offered.ticket)) == "Gone"
    assert rig.taken(Revoke) == []
    assert third.committed(has, TOKENS) == 8


def test_who_is_admitted_again_before_it_has_let_go_keeps_what_it_was_granted(
    rig: Rig, decode: Worker, lease: Granted, offered: Offered
) -> None:
    taken = decode.redeemed(lease.key, offered)
    decode.cancel()
    again = decode.granted(1, TOKENS)
    assert again.lease != taken.lease
    decode.ack(taken)
    assert decode.granted(1, TOKENS).lease == again.lease, "asked once more, it is the same"
    assert decode.committed(again, TOKENS) == 8


def test_a_ticket_outlives_its_offerer(
    rig: Rig, prefill: Worker, decode: Worker, lease: Granted, offered: Offered
) -> None:
    rig.die(1)
    assert decode.redeemed(lease.key, offered).cached_tokens == 10


class TestFork:
    def test_children_share_full_pages_and_copy_the_partly_filled_one(
        self, rig: Rig, prefill: Worker, lease: Granted
    ) -> None:
        forked = prefill.forked(lease, fill_of(TOKENS), [1, 2], 16)
        one, two = (table_of(child) for child in forked.children)
        assert one[:2] == two[:2] == table_of(lease)[:2]
        assert not set(one[2:]) & set(two[2:]) and len(one) == 4
        assert [(c.source_page, c.target_page) for c in forked.copies] == [
            (table_of(lease)[2], one[2]), (table_of(lease)[2], two[2]),
        ]  # fmt: skip
        assert all(child.cached_tokens == 10 for child in forked.children)
        assert rig.core.report().pinned_pages == 2

    def test_nothing_is_copied_at_a_page_border(self, prefill: Worker) -> None:
        lease = prefill.granted(2, range(8), 12)
        forked = prefill.forked(lease, fill_of(range(8)), [1], 12)
        assert forked.copies == [] and len(table_of(forked.children[0])) == 3

    def test_a_child_may_hold_nothing_but_shared_pages(self, rig: Rig, prefill: Worker) -> None:
        lease = prefill.granted(2, range(8), 12)
        [child] = prefill.forked(lease, fill_of(range(8)), [1], 8).children
        prefill.release(lease)
        assert table_of(child) == table_of(lease)[:2] and rig.core.report().pinned_pages == 2
        prefill.release(child)

    def test_forking_is_all_or_nothing_and_never_waits(
        self, rig: Rig, prefill: Worker, lease: Granted
    ) -> None:
        before = rig.core.report()
        assert code_of(prefill.fork(lease, fill_of(TOKENS), range(1, 6), 20)) == "NoCapacity"
        assert rig.core.report() == before and not rig.commands[:-1]

    def test_a_repeat_forks_nothing_new(self, rig: Rig, prefill: Worker, lease: Granted) -> None:
        forked = prefill.forked(lease, fill_of(TOKENS), [1, 2], 16)
        assert prefill.forked(lease, fill_of(TOKENS), [1, 2], 16) == forked
        assert len(rig.core.books.leases) == 3

    def test_a_child_that_waited_for_pages_of_its_own_waits_no_longer(
        self, rig: Rig, prefill: Worker, lease: Granted
    ) -> None:
        child = msgspec.structs.replace(lease.key, choice=1)
        asked = Admit(
            key=child, order=msgspec.structs.replace(order_of(1), choice=1), worker="prefill",
            incarnation=1, epoch=rig.epoch, root=ROOT, tokens=pack(range(50, 60)),
            reserve_tokens=60, deadline_ms=60_000,
        )  # fmt: skip
        assert is_queued(rig.ask(asked)), "15 of 13 pages"
        [forked] = prefill.forked(lease, fill_of(TOKENS), [1], 16).children
        prefill.release(lease)
        prefill.release(forked)
        assert not rig.taken(Granted) and not rig.core.books.waiting.count

    def test_children_go_their_own_ways_in_the_tree(
        self, rig: Rig, prefill: Worker, lease: Granted
    ) -> None:
        [child] = prefill.forked(lease, fill_of(TOKENS), [1], 16).children
        prefill.committed(lease, [*TOKENS, 50, 51])
        prefill.committed(child, [*TOKENS, 60, 61])
        assert prefill.granted(3, [*TOKENS, 60, 61, 0]).cached_tokens == 12
        assert prefill.granted(4, [*TOKENS, 50, 51, 0]).cached_tokens == 12

    def test_an_outdated_or_senseless_fork_is_refused(
        self, prefill: Worker, lease: Granted
    ) -> None:
        prefill.committed(lease, TOKENS)
        assert code_of(prefill.fork(lease, fill_of(TOKENS[:6]), [1], 16)) == "Stale"
        assert code_of(prefill.fork(lease, fill_of(TOKENS), [0], 16)) == "Malformed"
        assert code_of(prefill.fork(lease, fill_of(TOKENS), [1, 1], 16)) == "Malformed"
        assert code_of(prefill.fork(lease, fill_of(TOKENS), [1], 9)) == "Malformed"
        message = Fork(
            key=lease.key, worker="prefill", incarnation=1, lease=lease.lease,
            fill=fill_of(TOKENS), children=[key_of(7)], reserve_tokens=16,
        )  # fmt: skip
        assert code_of(prefill.rig.ask(message)) == "Malformed"


def test_offering_a_fork_leaves_its_siblings_alone(
    rig: Rig, prefill: Worker, decode: Worker, lease: Granted
) -> None:
    [child] = prefill.forked(lease, fill_of(TOKENS), [1], 16).children
    offered = prefill.offered(child, fill_of(TOKENS))
    taken = decode.redeemed(child.key, offered)
    assert np.array_equal(table_of(taken), table_of(child))
    assert prefill.committed(lease, [*TOKENS, 1, 2]) == 12


@pytest.mark.parametrize("copied", [True, False])
def test_a_forked_tail_is_handed_over_as_filled_only_when_its_holder_says_so(
    prefill: Worker, decode: Worker, lease: Granted, copied: bool
) -> None:
    [child] = prefill.forked(lease, fill_of(TOKENS), [1], 16).children
    whole = len(TOKENS) // 4 * 4
    assert child.cached_tokens == len(TOKENS) > whole
    said = len(TOKENS) if copied else whole
    offered = prefill.offered(child, Fill(filled_tokens=said, first_token=said))
    assert offered.handle.token_count == said
    assert decode.redeemed(child.key, offered).cached_tokens == said


def test_a_closed_ticket_is_remembered_without_what_its_lease_held(rig: Rig) -> None:
    worker = Worker(rig, "w", 5)
    lease = worker.granted(1, range(14), 16)
    offered = worker.offered(lease, fill_of(range(14)))
    taken = worker.redeemed(lease.key, offered)
    worker.release(taken, range(14))
    over = rig.core.books.closed[offered.ticket].lease
    assert over.anchor.is_root and not over.tokens and not over.table.size
    assert code_of(worker.redeem(lease.key, offered)) == "TicketOver"
