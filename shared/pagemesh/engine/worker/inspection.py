"""A worker's report of the leases it holds, to be compared with the pager's."""

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
    """Every lease, as of now. ``SequenceSpans.with_traces`` adds the trace ids."""
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
    """Pages that were perhaps asked for, although the answer is not here yet: what the sequence
    would ask for now, which only grows. 0 (not said) for a beam search, whose needs go up and
    down, and for a lease that no live sequence holds."""
    sequence = desk.live.get(lease.key)
    if sequence is None or sequence.lease is not lease or sequence.beams is not None:
        return 0
    wanted_pages = -(-reserve(desk, sequence) // desk.page_size)
    return max(wanted_pages, lease.reserved_pages, lease.page_count)
