"""What an audit finds in what pagers and workers say."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import pytest

from pagemesh.cli.reconcile import Look, reconcile
from pagemesh.wire.messages import SequenceKey
from pagemesh.wire.pager_reports import LeaseLine, PagerReport, WorkerLease, WorkerReport

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
        "waiter_count": 0, "lease_count": len(leases), "leases": list(leases),
    }  # fmt: skip
    return PagerReport(**(known | how))


def worker(
    *leases: int, debt_count: int = 0, state: Literal["held", "releasing"] = "held"
) -> WorkerReport:
    return WorkerReport(
        worker="w", incarnation=1, sequence_count=len(leases), debt_count=debt_count,
        leases=[
            WorkerLease(lease=number, key=KEY, state=state, page_count=3) for number in leases
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
        f"request {'a' * 32}, trace {'f' * 32}"
    )  # fmt: skip


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
    assert findings(Look(lost, good.workers), good) == ["h: 15 pages are accounted for, not 16"]
    nobodys = msgspec.structs.replace(good.pager, free_pages=13, draining_pages=1)
    assert findings(Look(nobodys, good.workers), good) == [
        "h: 3 pages are held or draining, 2 have an owner"
    ]
    waiting = msgspec.structs.replace(nobodys, unclaimed_pages=1)
    assert findings(Look(waiting, good.workers), good) == []
