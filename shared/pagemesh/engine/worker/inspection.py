"""A worker's account of what it holds, for whoever compares it with the pager's."""

from __future__ import annotations

from typing import Literal

from pagemesh.engine.worker.desk import Desk
from pagemesh.engine.worker.lease import Hold
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
            )
            for number, lease in desk.leases.items()
        ],
    )
