"""What a pager finds when it counts pages and pins by those who have them."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from tests.unit.pager.rig import ROOT, Rig, Worker, fill_of, key_of, order_of, table_of
from tests.unit.pager.steps import cache, pinned
from tests.unit.pager.test_lost_leases import lost_lease
from tests.unit.pager.test_recovery import declare, line

from pagemesh.pager import audit, recount
from pagemesh.pager.events import Asked
from pagemesh.pager.pages.runs import Run
from pagemesh.pager.tree.node import Node
from pagemesh.wire.cache_messages import InvalidateCache
from pagemesh.wire.cache_terms import CacheTerms
from pagemesh.wire.pager_messages import Admit
from pagemesh.wire.pager_reports import LedgerFault, PagerReport
from pagemesh.wire.pool_format import HeaderState
from pagemesh.wire.tokens import pack

TRACE = "c" * 32


def faults(rig: Rig) -> list[LedgerFault]:
    return rig.core.report().faults


def traced(rig: Rig, worker: Worker, number: int, tokens: list[int]) -> None:
    """Admit a sequence that is sampled."""
    message = Admit(
        key=key_of(number), order=order_of(number), worker=worker.name,
        incarnation=worker.incarnation, epoch=rig.epoch, root=ROOT, tokens=pack(tokens),
        reserve_tokens=len(tokens), deadline_ms=1_000,
    )  # fmt: skip
    rig.handle(Asked(0, message, TRACE))


def edge(rig: Rig, depth: int) -> Node:
    """The only edge that ends there."""
    [node] = [one for one in rig.core.books.forest.trees[ROOT].root.below() if one.depth == depth]
    return node


# Pins


def test_a_pin_that_nobody_needs_is_found_and_named_by_its_place(rig: Rig, worker: Worker) -> None:
    cache(worker, 1, range(12), terms=CacheTerms(tenant="acme"))
    rig.core.books.forest.pin(edge(rig, 3))
    [fault] = faults(rig)
    assert fault.what == "a prefix has too many pins: 1 for 0 who need it"
    assert fault.root == f"root {ROOT.hex()[:12]}, model a-model, tenant acme, up to page 3"
    assert (fault.page_count, fault.pages) == (3, list(edge(rig, 3).pages))


def test_a_pin_too_many_is_found_where_others_need_the_same_edge(rig: Rig, worker: Worker) -> None:
    cache(worker, 1, range(8))
    worker.granted(2, range(9))
    pinned(rig, range(8))
    assert faults(rig) == []
    rig.core.books.forest.pin(edge(rig, 2))
    [fault] = faults(rig)
    assert fault.what == "a prefix has too many pins: 3 for 2 who need it"


def test_a_pin_that_nobody_needs_is_found_far_below_what_is_needed(
    rig: Rig, worker: Worker
) -> None:
    cache(worker, 1, range(16))
    for end in (4, 8, 12):  # cuts the edge
        worker.release(worker.granted(end, range(end + 1)))
    worker.granted(2, range(5))
    rig.core.books.forest.pin(edge(rig, 4))
    [fault] = faults(rig)
    assert fault.what == "a prefix has too many pins: 1 for 0 who need it"
    assert fault.root.endswith("up to page 4")


def test_a_pin_that_is_missing_is_found_before_the_pages_are_given_away(
    rig: Rig, worker: Worker
) -> None:
    cache(worker, 1, range(8))
    worker.granted(2, range(9))
    rig.core.books.forest.unpin(edge(rig, 2))
    [fault] = faults(rig)
    assert fault.what == "a prefix has too few pins: 0 for 1 who need it"


def test_a_count_of_pinned_pages_that_is_off_is_found(rig: Rig, worker: Worker) -> None:
    cache(worker, 1, range(8))
    rig.core.books.pool.pin(1)
    assert [fault.what for fault in faults(rig)] == ["pages counted as pinned: 1, found: 0"]


def test_more_edges_than_a_turn_has_time_for_are_not_counted_and_that_is_said(
    rig: Rig, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache(worker, 1, range(12))
    worker.granted(2, range(13))
    assert rig.core.report().are_pins_counted
    monkeypatch.setattr(recount, "_EDGES_MAX", 1)
    told = rig.core.report()
    assert not told.are_pins_counted and told.faults == []


def test_a_pin_that_nobody_needs_is_named_under_a_root_that_was_invalidated_too(
    rig: Rig, worker: Worker
) -> None:
    cache(worker, 1, range(8))
    rig.core.books.forest.pin(edge(rig, 2))
    gone = InvalidateCache(what="root", name=ROOT.hex())
    rig.core.handle(Asked(0, gone), rig.now_ms)  # not by the rig, which would find it
    assert not rig.core.books.forest.trees
    told = [fault.what for fault in faults(rig)]
    assert "a prefix has too many pins: 1 for 0 who need it" in told


# Pages


@pytest.mark.parametrize("state", [HeaderState.HELD, HeaderState.DRAINING])
def test_a_page_that_nobody_has_is_named(rig: Rig, worker: Worker, state: HeaderState) -> None:
    pool = rig.core.books.pool
    [page], _ = pool.take(1)
    if state is HeaderState.DRAINING:
        pool.drain(Run(page, page + 1))
    [fault] = faults(rig)
    assert fault.what == f"pages are {state.name.lower()}, and nobody's"
    assert (fault.pages, fault.page_count) == ([page], 1)


def test_pages_of_two_leases_are_named_with_both_and_their_traces(rig: Rig, worker: Worker) -> None:
    traced(rig, worker, 1, list(range(8)))
    other = worker.granted(2, range(50, 54))
    first, second = rig.core.books.leases.values()
    second.writable = [first.writable[0]]
    both = [fault for fault in faults(rig) if fault.what == "pages that somebody else has too"]
    assert [(fault.lease, fault.owner, fault.trace) for fault in both] == [
        (first.id, "w", TRACE), (second.id, "w", ""),
    ]  # fmt: skip
    assert both[0].pages == both[1].pages == list(first.writable[0])
    assert both[0].key == key_of(1)
    [lost] = [fault for fault in faults(rig) if fault.what == "pages are held, and nobody's"]
    assert lost.pages == table_of(other)


def test_a_page_that_a_lease_counts_on_and_that_is_free_is_named_with_the_lease(
    rig: Rig, worker: Worker
) -> None:
    lease = worker.granted(1, range(8))
    rig.core.books.pool.give(Run(1, 2))
    [fault] = faults(rig)
    assert fault.what == "pages that should be held are not"
    assert (fault.lease, fault.pages) == (lease.lease, [1])


def test_a_page_that_is_read_and_not_cached_any_more_is_named(rig: Rig, worker: Worker) -> None:
    cache(worker, 1, range(8))
    worker.granted(2, range(9))
    [page, *_] = edge(rig, 2).pages
    view = np.frombuffer(rig.core.books.pool._states, np.uint8)
    view[page] = HeaderState.FREE
    told = {fault.what: fault for fault in faults(rig)}
    assert told["pages that should be cached are not"].pages == [page]
    assert f"root {ROOT.hex()[:12]}" in told["pages that should be cached are not"].root
    assert "pages counted as cached: 2, found: 1" in told


def test_more_pages_in_a_state_than_are_counted_are_found(rig: Rig) -> None:
    """Held by nobody and counted as free, they would be given away."""
    np.frombuffer(rig.core.books.pool._states, np.uint8)[0] = HeaderState.HELD
    told = {fault.what for fault in faults(rig)}
    assert {
        "pages counted as held: 0, found: 1", "pages counted as free: 16, found: 15",
    } <= told  # fmt: skip


def test_faults_without_end_are_cut_off(
    rig: Rig, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(8):
        cache(worker, number + 1, range(100 * number, 100 * number + 4))
    for node in rig.core.books.forest.trees[ROOT].root.below():
        rig.core.books.forest.pin(node)
    assert len(faults(rig)) == 8
    monkeypatch.setattr(recount, "FAULTS_MAX", 5)
    assert len(faults(rig)) == 5


# Leases in parts


def test_leases_are_told_by_id_in_parts_and_each_once_whatever_ends_meanwhile(
    rig: Rig, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "_LINES_MAX", 2)
    leases = [worker.granted(number, [number]) for number in range(1, 6)]
    ids = [lease.lease for lease in leases]
    first = audit.report(rig.core.books)
    assert [one.lease for one in first.leases] == ids[:2] and first.more and first.lease_count == 5
    worker.release(leases[0])  # an index would now point beyond the next one
    second = audit.report(rig.core.books, first.leases[-1].lease)
    last = audit.report(rig.core.books, second.leases[-1].lease)
    assert [one.lease for one in [*second.leases, *last.leases]] == ids[2:] and not last.more


def test_sums_are_of_all_leases_and_in_the_first_part(rig: Rig, worker: Worker) -> None:
    worker.granted(1, range(8))
    offered = worker.granted(2, range(20, 25))
    worker.offered(offered, fill_of(range(20, 25)))
    told: PagerReport = rig.core.report()
    assert (told.leased_pages, told.offered_count, told.ticket_count) == (3, 1, 1)
    assert [one.owner for one in told.leases] == ["w", "ticket of w"]


def test_a_ticket_is_told_with_the_time_that_it_has_left(rig: Rig, worker: Worker) -> None:
    worker.granted(1, range(8))
    worker.offered(worker.granted(2, range(20, 25)), fill_of(range(20, 25)))
    rig.tick(4_000)
    assert [one.expires_in_ms for one in rig.core.report().leases] == [0, 6_000]


def test_pages_of_a_lease_that_is_lost_are_told_as_nobodys_until_they_are_let_go_of(
    rig: Rig, worker: Worker
) -> None:
    lost = lost_lease(rig, worker)
    assert rig.core.report().unclaimed_pages == 3
    assert declare(rig, worker, line(lost, 1, [])) == [lost.lease]
    assert rig.core.report().unclaimed_pages == 3
    worker.ack(lost)
    assert rig.core.report().unclaimed_pages == 0


def test_a_lease_that_was_taken_up_again_keeps_its_trace_and_its_root_its_name(
    rig: Rig, worker: Worker
) -> None:
    lease = worker.granted(1, range(8))
    rig.restart([worker.holder])
    terms = CacheTerms(tenant="acme")
    held = msgspec.structs.replace(line(lease, 1, []), trace=TRACE, terms=terms)
    assert declare(rig, worker, held) == []
    [told] = rig.core.report().leases
    assert (told.lease, told.owner, told.trace) == (lease.lease, "w", TRACE)
    tree = rig.core.books.forest.trees[ROOT]
    assert (tree.model, tree.tenant) == ("a-model", "acme")
