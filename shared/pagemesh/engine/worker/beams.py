"""Sequences with a beam search: their rows, and what is done with the results.

    PREFILL  all of the prompt but its last token, in chunks like any other
       |
       v     here, or after a handover at the decode worker
    DECODE   the last token; then a row for each beam, in every step --> DONE, all at once

Prefill draws nothing for them, so no beam is ever handed over: the worker that searches forks
the beams within its own lease (``beam_pages``). Gateways get no tokens before the answer, so
after a crash or a preemption the search starts again from the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

from pagemesh.engine.worker import admission, ending, frames, handover
from pagemesh.engine.worker.desk import Desk, Row
from pagemesh.engine.worker.lease import Lease
from pagemesh.engine.worker.plan import RowResult, StepRow
from pagemesh.engine.worker.sequence import Phase, Sequence


def searches(sequence: Sequence) -> bool:
    """Whether its rows are beams now."""
    return sequence.beams is not None and sequence.phase is Phase.DECODE


def wished(sequence: Sequence, lease: Lease) -> int:
    """Prompt tokens that could be computed now; in DECODE, 1 if all beams can go on, else 0."""
    group = sequence.beams
    assert group is not None
    if sequence.phase is Phase.PREFILL:
        return min(sequence.prompt_count - 1, lease.capacity) - lease.filled
    return int(group.ready(lease))


def start_and_rows(sequence: Sequence, lease: Lease) -> tuple[int, int]:
    """The next position to compute and the number of rows that takes; call ``wished`` before."""
    group = sequence.beams
    if group is not None and searches(sequence):
        return group.length, group.row_count
    return lease.filled, 1


def rows(sequence: Sequence) -> tuple[Row, list[StepRow], list[tuple[int, int]]]:
    """The row of ``sequence``, its beams' rows in the plan, and the pages to copy first."""
    group, lease = sequence.beams, sequence.lease
    assert group is not None and lease is not None
    made, copies = group.rows(lease)
    return Row(sequence, lease, 1, True, (), beam_count=len(made)), made, copies


def computed(desk: Desk, sequence: Sequence, outcomes: Rows[RowResult]) -> None:
    """``outcomes``: one for each beam; empty for a chunk of the prompt."""
    group, lease = sequence.beams, sequence.lease
    assert group is not None and lease is not None
    if not outcomes:
        admission.commit(desk, sequence, 1)
        if lease.filled >= sequence.prompt_count - 1:
            frames.tell(desk, sequence, 0)  # only this worker knows what was cached
            handover.route(desk, sequence)
            admission.extend(desk, sequence)
        return
    if group.is_fresh:
        admission.commit(desk, sequence, 1)
    group.take(outcomes)
    if group.hypotheses is None:
        admission.extend(desk, sequence)
    else:
        ending.finish(desk, sequence, group.hypotheses[0].finish, first_position=0)
