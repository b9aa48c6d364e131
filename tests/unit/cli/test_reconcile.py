"""What an audit finds in what pagers and workers say."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import pytest

from pagemesh.cli.reconcile import Look, reconcile
from pagemesh.wire.messages import SequenceKey
from pagemesh.wire.pager_reports import (
    LeaseLine,
    LedgerFault,
    PagerReport,
    WorkerLease,
    WorkerReport,
)

KEY = SequenceKey(request="a" * 32, attempt=1, choice=0)


def line(lease: int = 7, **how: Any) -> LeaseLine:
    known: dict[str, Any] = {
        "lease": lease, "key": KEY, "owner": "w", "state": "held", "page_count": 3,
        "filled_tokens": 0, "held_pages": 2, "incarnation": 1, "trace": "f" * 32,
    }  # fmt: skip
    return LeaseLine(**(known | how))


def pager(*leases: LeaseLine, **how: Any) -> PagerReport:
    held = sum(lease.held_pages for lease in leases)
    known: dict[str, Any] = {
        "host": "h", "epoch": 1, "pool_incarnation": 1, "page_size": 16, "page_bytes": 4096,
        "total_pages": 16, "free_pages": 16 - held, "held_pages": held, "pinned_pages": 0,
        "idle_pages": 0, "draining_pages": 0, "evicted_pages": 0, "preempted_count": 0,
        "session_count": 1, "ticket_count": sum(lease.state == "offered" for lease in leases),
        "offered_count": sum(lease.state == "offered" for lease in leases), "leased_pages": held,
        "waiter_count": 0, "lease_count": len(leases), "leases": list(leases),
    }  # fmt: skip
    return PagerReport(**(known | how))


def worker(
    *leases: int, debt_count: int = 0, state: Literal["held", "releasing"] = "held",
    page_count: int = 3, pages_max: int = 0, trace: str = "",
) -> WorkerReport:  # fmt: skip
    return WorkerReport(
        worker="w", incarnation=1, sequence_count=len(leases), debt_count=debt_count,
        leases=[
            WorkerLease(
                lease=number, key=KEY, state=state, page_count=page_count, pages_max=pages_max,
                trace=trace,
            )
            for number in leases
        ],
    )  # fmt: skip


def findings(look: Look, before: Look | None = None) -> list[str]:
    return [finding.text for finding in reconcile(before or look, look)]


def test_what_adds_up_is_no_finding() -> None:
    assert findings(Look(pager(line()), (worker(7),))) == []


def test_a_lease_that_its_holder_does_not_know_is_named_with_owner_and_trace() -> None:
    [text] = findings(Look(pager(line()), (worker(),)))
    assert text == (
        "h: its holder does not know it; lease 7 of w; "
        f"request {'a' * 32}, trace {'f' * 32}; next: look again in a minute; "
        "if it stays, restart that pager, which frees what nobody declares"
    )  # fmt: skip


def test_a_trace_that_the_pager_was_never_told_is_had_from_the_worker() -> None:
    elsewhere = line(incarnation=2, owner="v", trace="")
    orphan, used = findings(Look(pager(elsewhere), (worker(7, trace="e" * 32),)))
    assert "lease 7 of v" in orphan and f"trace {'e' * 32}" in orphan
    assert "lease 7 of w" in used and f"trace {'e' * 32}" in used


def test_a_lease_whose_holder_is_gone_is_an_orphan_and_that_of_a_silent_one_is_not() -> None:
    [text] = findings(Look(pager(line()), ()))
    assert "its holder is not there" in text
    assert findings(Look(pager(line()), (), frozenset({"w"}))) == []


@pytest.mark.parametrize("leases", [(), (line(7, incarnation=2, owner="v"),)])
def test_what_a_worker_uses_and_the_pager_does_not_give_it_is_found(
    leases: tuple[LeaseLine, ...],
) -> None:
    texts = findings(Look(pager(*leases), (worker(7),)))
    assert any("a worker uses it" in text for text in texts)
    assert findings(Look(pager(), (worker(7, state="releasing"),))) == []


def test_pages_that_a_worker_uses_and_was_not_given_are_found() -> None:
    [text] = findings(Look(pager(line()), (worker(7, page_count=4),)))
    assert "it has 3 pages, and its holder uses 4; lease 7 of w" in text
    ended = Look(pager(line()), (worker(7, page_count=4, state="releasing"),))
    assert findings(ended) == []


def test_pages_that_a_worker_did_not_ask_for_are_found_and_those_under_way_to_it_are_not() -> None:
    given = pager(line(page_count=9))
    [text] = findings(Look(given, (worker(7, page_count=3, pages_max=8),)))
    assert "it has 9 pages, and its holder asked for 8 at most; lease 7 of w" in text
    assert findings(Look(given, (worker(7, page_count=3, pages_max=9),))) == []
    assert findings(Look(given, (worker(7, page_count=3),))) == []


def test_page_counts_that_change_from_look_to_look_are_no_finding() -> None:
    before = Look(pager(line(page_count=3)), (worker(7, page_count=4),))
    assert findings(Look(pager(line(page_count=4)), (worker(7, page_count=5),)), before) == []


def test_what_was_under_way_in_one_look_is_no_finding() -> None:
    before = Look(pager(line(6)), (worker(7),))
    assert findings(Look(pager(line()), (worker(7),)), before) == []
    assert findings(Look(pager(line()), (worker(),)), before) == []
    owing = Look(pager(line()), (worker(debt_count=1),))
    assert findings(owing) == []


def test_a_ticket_that_is_over_and_stays_is_found() -> None:
    over = Look(pager(line(state="offered", owner="ticket of w")), (worker(),))
    fresh = Look(pager(line(state="offered", expires_in_ms=5)), (worker(),))
    assert "a ticket that is over" in findings(over)[0]
    assert findings(over, fresh) == findings(fresh) == []


def test_a_ledger_that_does_not_add_up_is_found_at_once() -> None:
    good = Look(pager(line()), (worker(7),))
    lost = msgspec.structs.replace(good.pager, free_pages=13)
    after = "; next: restart that pager: it counts anew from the pool, and sequences go on"
    assert findings(Look(lost, good.workers), good) == [
        "h: 15 pages are accounted for, not 16" + after
    ]
    nobodys = msgspec.structs.replace(good.pager, free_pages=13, draining_pages=1)
    assert findings(Look(nobodys, good.workers), good) == [
        "h: 3 pages are held or draining, 2 have an owner" + after
    ]
    waiting = msgspec.structs.replace(nobodys, unclaimed_pages=1)
    assert findings(Look(waiting, good.workers), good) == []
    twice = msgspec.structs.replace(good.pager, unclaimed_pages=1)
    assert findings(Look(twice, good.workers), good) == [
        "h: 2 pages are held or draining, 3 have an owner" + after
    ]
    offered = msgspec.structs.replace(good.pager, offered_count=1)
    assert findings(Look(offered, good.workers)) == ["h: 0 tickets for 1 offered leases" + after]
    left = msgspec.structs.replace(good.pager, ticket_count=1)
    assert findings(Look(left, good.workers)) == ["h: 1 tickets for 0 offered leases" + after]


def test_what_the_pager_finds_by_itself_is_told_with_pages_place_owner_and_trace() -> None:
    pinned = LedgerFault(
        what="a prefix has too many pins: 2 for 1 who need it", page_count=9, pages=[4, 5],
        root="root abcd, tenant t, up to page 9", owner="w",
    )  # fmt: skip
    twice = LedgerFault(
        what="pages that somebody else has too", page_count=1, pages=[4], lease=7, key=KEY,
        owner="w", trace="f" * 32,
    )  # fmt: skip
    first, second = findings(Look(pager(faults=[pinned, twice]), ()))
    assert first.startswith(
        "h: a prefix has too many pins: 2 for 1 who need it; 9 pages: 4, 5, ...; "
        "root abcd, tenant t, up to page 9; last written by w; next: restart that pager"
    )
    assert second.startswith(
        f"h: pages that somebody else has too; 1 page: 4; lease 7 of w; request {'a' * 32}, "
        f"trace {'f' * 32}; next: "
    )


def test_pages_that_are_named_are_not_told_as_a_difference_of_sums_too() -> None:
    lost = LedgerFault(what="pages are held, and nobody's", page_count=1, pages=[4])
    look = Look(pager(line(), free_pages=13, draining_pages=1, faults=[lost]), (worker(7),))
    [text] = findings(look)
    assert "1 page: 4" in text
