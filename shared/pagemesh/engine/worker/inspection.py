"""A worker's account of what it holds, for whoever compares it with the pager's."""

from __future__ import annotations

from typing import Literal

from pagemesh.engine.worker.admission import reserve
from pagemesh.engine.worker.desk import Desk
from pagemesh.engine.worker.lease import Hold, Lease
from pagemesh.wire.pager_reports import WorkerLease, WorkerReport

_STATES: dict[Hold, Literal["held", "offered", "releasing", "lost"]] = {
    Hold.HELD: "held",
    Hold.OFFERED: "offered",
    Hold.RELEASING: "releasing",
    Hold.LOST: "lost",
}


def report(desk: Desk) -> WorkerReport:
    """Every lease, as it is right now. Traces are known to whoever keeps the spans."""
    return WorkerReport(
        worker=desk.identity.name,
        incarnation=desk.identity.incarnation,
        sequence_count=len(desk.live),
        debt_count=len(desk.debts),
        leases=[
            WorkerLease(
                lease=number,
                key=lease.key,
                state=_STATES[lease.hold],
                page_count=lease.page_count,
                pages_max=_pages_max(desk, lease),
            )
            for number, lease in desk.leases.items()
        ],
    )


def _pages_max(desk: Desk, lease: Lease) -> int:
    """What may have been asked for, though the answer is not here: what its sequence would ask for
    now, which only grows. A search asks for more and for less as it goes."""
    sequence = desk.live.get(lease.key)
    if sequence is None or sequence.lease is not lease or sequence.beams is not None:
        return 0
    wanted_pages = -(-reserve(desk, sequence) // desk.page_size)
    return max(wanted_pages, lease.reserved_pages, lease.page_count)
