"""Steps: what the next one computes, and what becomes of the result."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pagemesh.engine.worker import admission, ending, fork, frames, handover, leases
from pagemesh.engine.worker.batching import Batching, Wish
from pagemesh.engine.worker.desk import Desk, Row, Step
from pagemesh.engine.worker.events import RunStep
from pagemesh.engine.worker.lease import Hold
from pagemesh.engine.worker.plan import Drawn, RowResult, Sample, StepPlan, StepResult, StepRow
from pagemesh.engine.worker.sequence import Phase, Sequence
from pagemesh.wire.messages import SequenceKey
from pagemesh.wire.work_messages import Finish


def launch(desk: Desk, batching: Batching) -> None:
    """Start a step when none is running and there is something to compute or to copy."""
    if desk.step is not None:
        return
    chosen = batching.choose(_wishes(desk)) if desk.running else []
    if not chosen and not desk.copies:
        return
    copies, desk.copies = tuple(desk.copies), []
    rows: list[Row] = []
    plan: list[StepRow] = []
    for wish in chosen:
        row, step_row = _row(wish)
        rows.append(row)
        plan.append(step_row)
    for row in rows:
        row.lease.in_step = True
    for copy in copies:
        copy.source.in_step = copy.target.in_step = True
    desk.steps_count += 1
    desk.step = Step(desk.steps_count, tuple(rows), copies)
    pairs = tuple((copy.source_page, copy.target_page) for copy in copies)
    desk.commands.append(RunStep(StepPlan(desk.steps_count, tuple(plan), pairs)))


def _wishes(desk: Desk) -> Iterator[Wish]:
    for sequence in desk.running:
        lease = sequence.lease
        if lease is not None and lease.hold is Hold.HELD:
            scored = lease.filled < sequence.prompt_count and sequence.scoring
            length = sequence.prompt_count if scored else sequence.tokens.length
            count = min(length, lease.capacity) - lease.filled
            if count > 0:
                yield Wish(sequence, count)


def _row(wish: Wish) -> tuple[Row, StepRow]:
    sequence, lease = wish.sequence, wish.sequence.lease
    assert lease is not None
    start, end = lease.filled, lease.filled + wish.count
    samples: tuple[Sample, ...] = ()
    followers: tuple[Sequence, ...] = ()
    if end == sequence.tokens.length and sequence.sampling.max_tokens:
        followers = tuple(sequence.followers)
        tokens = sequence.tokens.view(0, end)
        samples = tuple(
            Sample(choice.key, choice.sampling, tokens, sequence.prompt_count)
            for choice in (sequence, *followers)
        )
    scored = start < sequence.prompt_count and sequence.scoring
    ahead = int(sequence.tokens.view(end, end + 1)[0]) if end < sequence.prompt_count else None
    step_row = StepRow(
        key=sequence.key,
        lease=lease.lease,
        lease_slot=lease.slot,
        granted_at=lease.granted_at,
        page_table=lease.table,
        tokens=sequence.tokens.view(start, end),
        start=start,
        samples=samples,
        score_from=start if scored else None,
        score_next=ahead if scored else None,
        score_width=max(sequence.sampling.logprobs or 0, 0) if scored else 0,
    )
    return Row(sequence, lease, wish.count, followers), step_row


def finish(desk: Desk, result: StepResult) -> None:
    """Take the results of the running step; one of another step is not listened to."""
    step = desk.step
    if step is None or result.step != step.number:
        return
    desk.step = None
    by_lease = {row.lease: row for row in result.rows}
    # First what happened to pages, so that no decision below meets a lease still in use.
    counted: list[tuple[Row, RowResult]] = []
    for row in step.rows:
        outcome = by_lease.get(row.lease.lease)
        if row.lease.hold is Hold.LOST:
            continue
        if outcome is None or outcome.revoked:
            admission.revoked(desk, row.lease, "revoked", "")
            continue
        row.lease.filled += row.count
        row.sequence.computed_tokens += row.count
        counted.append((row, outcome))
    for lease in {id(row.lease): row.lease for row in step.rows}.values():
        leases.step_ended(desk, lease)
    _copied(desk, step)
    for row, outcome in counted:
        if row.sequence.lease is row.lease:
            _computed(desk, row, outcome)


def _copied(desk: Desk, step: Step) -> None:
    touched = {id(lease): lease for copy in step.copies for lease in (copy.source, copy.target)}
    for lease in touched.values():
        if lease.in_step:
            leases.step_ended(desk, lease)
    if touched:
        choices = [desk.live.get(lease.key) for lease in touched.values()]
        fork.settle(desk, [choice for choice in choices if choice is not None])


def _computed(desk: Desk, row: Row, outcome: RowResult) -> None:
    sequence, lease = row.sequence, row.lease
    if outcome.prompt_scores is not None:
        sequence.prompt_scores.append(outcome.prompt_scores)
    if lease.filled < sequence.tokens.length:
        admission.commit(desk, sequence, 1)
        return
    prefilled = sequence.phase is Phase.PREFILL
    if not sequence.sampling.max_tokens:
        ending.finish(desk, sequence, "length", first_position=0)
        return
    drawn = {one.key: one for one in outcome.drawn}
    children = _first_tokens(desk, row, drawn) if row.followers else []
    first_position = sequence.generated_count
    reason = _append(desk, sequence, drawn[sequence.key])
    if reason is not None:
        for child in children:
            child.leader = None
            sequence.followers.remove(child)
            desk.move(child, Phase.WAITING)
        ending.finish(desk, sequence, reason, first_position=first_position)
        return
    frames.tell(desk, sequence, first_position)
    admission.commit(desk, sequence, 1 if prefilled else desk.limits.commit_pages)
    if children:
        fork.begin(desk, sequence, children)
    elif prefilled:
        handover.route(desk, sequence)
    if sequence.phase is Phase.DECODE:
        admission.extend(desk, sequence)


def _first_tokens(desk: Desk, row: Row, drawn: dict[SequenceKey, Drawn]) -> list[Sequence]:
    """Give the followers theirs; those that want more are returned."""
    wanting: list[Sequence] = []
    for child in row.followers:
        if child.phase is not Phase.FOLLOWING:
            continue
        child.prompt_scores = row.sequence.prompt_scores
        child.waterfall = row.sequence.waterfall
        child.cached_tokens = row.sequence.cached_tokens
        child.marks = replace(row.sequence.marks)
        reason = _append(desk, child, drawn[child.key])
        if reason is not None:
            ending.finish(desk, child, reason, first_position=0)
        else:
            frames.tell(desk, child, 0)
            wanting.append(child)
    return wanting


def _append(desk: Desk, sequence: Sequence, drawn: Drawn) -> Finish | None:
    """Add a token; the reason to end there, if there is one."""
    sequence.tokens.append(drawn.token)
    if drawn.scores is not None:
        sequence.scores.append(drawn.scores)
    if not sequence.marks.first_token_ms:
        sequence.marks.first_token_ms = desk.now
    count = sequence.generated_count
    if drawn.token in sequence.stops and count > sequence.sampling.min_tokens:
        sequence.stop_token = drawn.token
        return "stop"
    return "length" if count >= sequence.sampling.max_tokens else None
