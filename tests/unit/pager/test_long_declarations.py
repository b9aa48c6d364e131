"""What a worker holds comes in parts after a restart, and others have their turns in between."""

from __future__ import annotations

from collections.abc import Iterable

from tests.unit.pager.rig import ROOT, Rig, Worker, code_of, fill_of, order_of, table_of

from pagemesh.wire.messages import Message
from pagemesh.wire.pager_messages import Declare, Declared, Granted, HeldLease, TicketClosed
from pagemesh.wire.tokens import pack


def line(
    lease: Granted, number: int, tokens: Iterable[int] = (), ticket: str | None = None
) -> HeldLease:
    return HeldLease(
        lease=lease.lease, lease_slot=lease.lease_slot, key=lease.key, order=order_of(number),
        root=ROOT, granted_at=lease.granted_at, tokens=pack(tokens), extents=lease.extents,
        ticket=ticket,
    )  # fmt: skip


def declare(
    rig: Rig, worker: Worker, part: int, *lines: HeldLease, parts: int = 2, number: int = 1
) -> Message:
    return rig.ask(
        Declare(
            worker=worker.name, incarnation=worker.incarnation, epoch=rig.epoch, number=number,
            part=part, parts=parts, leases=list(lines),
        )
    )  # fmt: skip


def restarted(rig: Rig, *workers: Worker) -> None:
    rig.restart([worker.holder for worker in workers])
    for worker in workers:
        worker.open()


def test_a_part_is_taken_up_when_it_comes(rig: Rig, worker: Worker) -> None:
    one, two = worker.granted(1, range(8)), worker.granted(2, range(100, 108))
    restarted(rig, worker)
    assert code_of(declare(rig, worker, 0, line(one, 1))) == "Ok"
    assert (rig.core.report().held_pages, rig.core.report().draining_pages) == (2, 2)
    assert declare(rig, worker, 1, line(two, 2)) == Declared(lost=[])
    assert rig.core.report().held_pages == 4


def test_a_part_that_comes_twice_is_taken_up_once(rig: Rig, worker: Worker) -> None:
    """What became of its leases since stays."""
    one = worker.granted(1, range(8))
    restarted(rig, worker)
    declare(rig, worker, 0, line(one, 1))
    worker.release(one)
    assert code_of(declare(rig, worker, 0, line(one, 1))) == "Ok"
    assert declare(rig, worker, 1) == Declared(lost=[])
    assert rig.core.report().free_pages == 16


def test_a_declaration_has_so_many_parts_at_most(rig: Rig, worker: Worker) -> None:
    most = rig.limits.declare_parts_max
    assert code_of(declare(rig, worker, most - 1, parts=most)) == "Ok"
    assert code_of(declare(rig, worker, most, parts=most + 1, number=2)) == "Malformed"


def test_pages_given_back_between_two_parts_are_whose_they_became(rig: Rig) -> None:
    """The last part frees what nobody claims; these another has, who has not let go of them."""
    worker, other = Worker(rig, "w", 1), Worker(rig, "other", 2)
    one = worker.granted(1, range(64))
    restarted(rig, worker, other)
    declare(rig, other, 0, parts=1)
    declare(rig, worker, 0, line(one, 1))
    worker.release(one)
    theirs = other.granted(2, range(100, 164))
    assert table_of(theirs) == table_of(one)
    rig.tick(rig.limits.session_ttl_ms - 1)
    worker.open()
    rig.tick(1)
    assert rig.core.report().draining_pages == 16, "the other one fell silent"
    assert declare(rig, worker, 1) == Declared(lost=[])
    assert rig.core.report().draining_pages == 16
    other.ack(theirs)
    assert rig.core.report().free_pages == 16


def test_a_lost_lease_that_is_released_between_two_parts_strands_no_page(
    rig: Rig, worker: Worker
) -> None:
    """Its holder hears that it is lost with the last part."""
    lease = worker.granted(1, range(12))
    rig.words[lease.lease_slot] = 0
    restarted(rig, worker)
    assert code_of(declare(rig, worker, 0, line(lease, 1))) == "Ok"
    assert code_of(worker.release(lease)) == "Ok"
    assert declare(rig, worker, 1) == Declared(lost=[lease.lease])
    assert rig.core.report().free_pages == 16


def test_an_offer_that_was_taken_up_when_a_declaration_broke_off_is_told_closed(
    rig: Rig, worker: Worker
) -> None:
    """Somebody redeemed it meanwhile, and is done with it: it was not lost."""
    decode = Worker(rig, "decode", 2)
    lease = worker.granted(1, range(10), 12)
    offered = worker.offered(lease, fill_of(range(10)))
    restarted(rig, worker, decode)
    held = line(lease, 1, range(10), offered.ticket)
    assert code_of(declare(rig, worker, 0, held)) == "Ok"
    decode.release(decode.redeemed(lease.key, offered), range(10))
    rig.taken(TicketClosed)
    assert declare(rig, worker, 0, held, parts=1, number=2) == Declared(lost=[])
    assert [closed.outcome for closed in rig.taken(TicketClosed)] == ["redeemed"]


def test_what_was_redeemed_between_two_parts_is_held_though_it_was_granted_long_ago(
    rig: Rig, worker: Worker
) -> None:
    decode = Worker(rig, "decode", 2)
    lease = worker.granted(1, range(10), 12)
    offered = worker.offered(lease, fill_of(range(10)))
    rig.tick(rig.limits.declare_grace_ms)
    assert code_of(declare(rig, decode, 0)) == "Ok"
    taken = decode.redeemed(lease.key, offered)
    assert declare(rig, decode, 1) == Declared(lost=[])
    assert decode.committed(taken, range(10)) == 8


def test_what_an_earlier_declaration_left_out_is_over_while_others_have_still_to_declare(
    rig: Rig, worker: Worker
) -> None:
    """All of it is cached, so that nobody else can have its pages yet."""
    other = Worker(rig, "other", 2)
    lease = worker.granted(1, range(8), 8)
    assert worker.committed(lease, range(8)) == 8
    restarted(rig, worker, other)
    assert declare(rig, worker, 0, parts=1) == Declared(lost=[])
    late = declare(rig, worker, 0, line(lease, 1, range(8)), parts=1, number=2)
    assert late == Declared(lost=[lease.lease])
