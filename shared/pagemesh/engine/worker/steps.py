"""Steps: what the next one computes, and what is done with its results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pagemesh.engine.worker import admission, beams, ending, fork, frames, handover, leases
from pagemesh.engine.worker.batching import PASSED_MAX, Batching, Wish, passed_over
from pagemesh.engine.worker.desk import Desk, Row, Step
from pagemesh.engine.worker.events import EndRun, RunStep
from pagemesh.engine.worker.lease import Hold, Lease
from pagemesh.engine.worker.plan import Drawn, RowResult, Sample, StepPlan, StepResult, StepRow
from pagemesh.engine.worker.sequence import RUNNABLE, Phase, Sequence
from pagemesh.wire.errors import GrammarRefused, Internal
from pagemesh.wire.work_messages import Finish


def launch(desk: Desk, batching: Batching) -> None:
    """Start a step if none is running and there is something to compute or to copy. End a run
    whose plan is outdated."""
    step = desk.step
    if step is not None:
        if step.may_repeat and _is_outdated(desk, step, batching):
            step.may_repeat = False
            desk.commands.append(EndRun())
        return
    wishes = list(_wishes(desk))
    chosen = batching.choose(wishes, desk.now) if wishes else []
    if not chosen and not desk.copies:
        return
    copies, desk.copies = tuple(desk.copies), []
    pairs = [(copy.source_page, copy.target_page) for copy in copies]
    rows: list[Row] = []
    plan: list[StepRow] = []
    for wish in chosen:
        if beams.searches(wish.sequence):
            row, step_rows, own_pairs = beams.rows(wish.sequence)
            plan += step_rows
            pairs += own_pairs
        else:
            row, step_row = _row(wish)
            plan.append(step_row)
        rows.append(row)
    for row in rows:
        row.lease.in_step = True
    for copy in copies:
        copy.source.in_step = copy.target.in_step = True
    desk.steps_count += 1
    passed = passed_over(wishes, chosen)
    repeat_count = 0 if copies else _repeats(desk, rows, passed)
    for wish in wishes:
        if wish.sequence not in passed:
            wish.sequence.passed_count = 0
    desk.step = Step(desk.steps_count, tuple(rows), copies, repeat_count > 0, passed)
    desk.commands.append(
        RunStep(StepPlan(desk.steps_count, tuple(plan), tuple(pairs), repeat_count))
    )
    for row in rows:
        if row.sequence.phase is Phase.PREFILL:  # for the step after this one
            admission.extend(desk, row.sequence, row.count)


def _is_outdated(desk: Desk, step: Step, batching: Batching) -> bool:
    """Whether there are pages to copy, a row of the run has lost its lease, or a new plan would
    include another sequence. Asked after most events; usually there is no other, which is quick
    to see. Other sequences that get no row count as passed over from now on."""
    if desk.copies or any(row.sequence.lease is not row.lease for row in step.rows):
        return True
    for sequence in desk.running:
        lease = sequence.lease
        if lease is not None and not lease.in_step and lease.hold is Hold.HELD:
            break
    else:
        return False
    wishes = list(_wishes(desk))
    chosen = batching.choose(wishes, desk.now)
    step.passed = passed_over(wishes, chosen)
    return any(
        wish.sequence.lease is not None and not wish.sequence.lease.in_step for wish in chosen
    )


def _repeats(desk: Desk, rows: list[Row], passed: frozenset[Sequence]) -> int:
    """Steps that may follow the one with ``rows`` without asking the scheduler: as long as every
    row only draws tokens, has slots and wants more, and none of those ``passed`` over has to go
    first."""
    count = desk.limits.run_steps_max - 1
    if passed:
        if any(row.sequence.passed_count >= PASSED_MAX for row in rows):
            return 0  # such a row goes first for this step alone
        count = min(count, PASSED_MAX - 1 - max(one.passed_count for one in passed))
    for row in rows:
        sequence, lease = row.sequence, row.lease
        draws = sequence.phase is Phase.DECODE and not row.beam_count
        if not draws or row.count > 1 or row.followers:
            return 0
        if lease.filled + 1 < sequence.tokens.length:  # part of a tail that was not copied
            return 0
        left = sequence.sampling.max_tokens - sequence.generated_count
        count = min(count, left - 1, lease.capacity - lease.filled - 1)
    return max(count, 0)


def _wishes(desk: Desk) -> Iterator[Wish]:
    for sequence in desk.running:
        lease = sequence.lease
        if lease is not None and lease.hold is Hold.HELD:
            count = _wished(sequence, lease)
            if count > 0:
                start, row_count = beams.start_and_rows(sequence, lease)
                left = sequence.tokens.length - start
                yield Wish(sequence, start, count, row_count, left)


def is_stuck(sequence: Sequence) -> bool:
    """Whether it could be in a step if it had more pages."""
    lease = sequence.lease
    if sequence.phase not in RUNNABLE or lease is None or lease.in_step:
        return False
    return _wished(sequence, lease) <= 0


def _wished(sequence: Sequence, lease: Lease) -> int:
    """Tokens that could be computed now."""
    if sequence.beams is not None:
        return beams.wished(sequence, lease)
    scored = lease.filled < sequence.prompt_count and sequence.scoring
    length = sequence.prompt_count if scored else sequence.tokens.length
    return min(length, lease.capacity) - lease.filled


def _row(wish: Wish) -> tuple[Row, StepRow]:
    sequence, lease = wish.sequence, wish.sequence.lease
    assert lease is not None
    start, end = wish.start, wish.start + wish.count
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
        stops=sequence.stops,
    )
    return Row(sequence, lease, wish.count, wish.draws, followers), step_row


def finish(desk: Desk, results: Iterable[StepResult], *, goes_on: bool) -> None:
    """Take the results of the running plan, in order; those of another plan are ignored. While
    the run goes on, its leases stay in use."""
    step = desk.step
    if step is None:
        return
    own = [result for result in results if result.step == step.number]
    if not own:
        return
    if not goes_on:
        desk.step = None
    for sequence in step.passed:
        sequence.passed_count += sum(len(result.took_us) for result in own)
    by_lease = [_by_lease(result) for result in own]
    # Pages and leases first, so that no decision below meets a lease that is still in use.
    counted: list[tuple[Row, list[RowResult]]] = []
    for row in step.rows:
        lease = row.lease
        if lease.hold is Hold.LOST:
            continue
        outcomes = [one for found in by_lease for one in found.get(lease.lease, ())]
        wanted_count = len(own) * max(row.beam_count, 1)
        if len(outcomes) < wanted_count or any(outcome.revoked for outcome in outcomes):
            admission.revoked(desk, lease, "revoked", is_told=False)
            continue
        if row.sequence.lease is not lease and any(one.poisoned for one in outcomes):
            lease.cache = False  # its sequence has ended; ``_computed`` does this for live ones
        if row.beam_count:
            row.sequence.computed_tokens += row.beam_count
            lease.filled = row.sequence.prompt_count
            counted.append((row, outcomes))
            continue
        count = row.count * len(outcomes) + sum(len(one.before) for one in outcomes)
        if row.sequence.lease is lease:
            lease.filled += count
            row.sequence.computed_tokens += count
            counted.append((row, outcomes))
        else:
            # Its sequence has ended: tokens that the run drew since were not appended.
            lease.filled = min(lease.filled + count, lease.tokens.length)
    if not goes_on:
        for lease in {id(row.lease): row.lease for row in step.rows}.values():
            leases.step_ended(desk, lease)
        _copied(desk, step)
    for row, outcomes in counted:
        if row.sequence.lease is row.lease:
            _computed(desk, row, outcomes)


def _by_lease(result: StepResult) -> dict[int, list[RowResult]]:
    found: dict[int, list[RowResult]] = {}
    for row in result.rows:
        found.setdefault(row.lease, []).append(row)
    return found


def _copied(desk: Desk, step: Step) -> None:
    touched = {id(lease): lease for copy in step.copies for lease in (copy.source, copy.target)}
    for lease in touched.values():
        if lease.in_step:
            leases.step_ended(desk, lease)
    if touched:
        choices = [desk.live.get(lease.key) for lease in touched.values()]
        fork.settle(desk, [choice for choice in choices if choice is not None])


def _computed(desk: Desk, row: Row, outcomes: list[RowResult]) -> None:
    """``outcomes``: of one step, or of several of a run, each of which drew one or more tokens."""
    sequence, lease, outcome = row.sequence, row.lease, outcomes[0]
    # If good tokens were drawn before, they are sent first, further below.
    spoiled = outcome.poisoned and not outcome.before
    if spoiled or (row.beam_count and any(one.poisoned for one in outcomes)):
        _spoiled(desk, row)
        return
    if sequence.beams is not None:
        beams.computed(desk, sequence, outcomes if row.beam_count else ())
        return
    if outcome.prompt_scores is not None:
        sequence.prompt_scores.append(outcome.prompt_scores)
    if lease.filled < sequence.tokens.length:
        admission.commit(desk, sequence, 1)
        admission.extend(desk, sequence)
        return
    prefilled = sequence.phase is Phase.PREFILL
    if not sequence.sampling.max_tokens:
        for child in tuple(sequence.followers):
            if child.phase is Phase.FOLLOWING:
                _share_prompt(sequence, child)
                ending.finish(desk, child, "length", first_position=0)
        ending.finish(desk, sequence, "length", first_position=0)
        return
    children = _first_tokens(desk, row, outcome) if row.followers else []
    first_position, reason = sequence.generated_count, None
    for outcome in outcomes:
        drawn = [Drawn(sequence.key, token) for token in outcome.before]
        own = None if outcome.poisoned else _own(outcome, sequence)
        if own is not None and not own.refusal:
            drawn.append(own)
        for one in drawn:
            assert reason is None, "a run went on beyond a sequence's end"
            reason = _append(sequence, one)
        if own is None:
            frames.tell(desk, sequence, first_position)
            _spoiled(desk, row)
            return
        if own.refusal:
            frames.tell(desk, sequence, first_position)
            _let_go(desk, sequence, children)
            ending.fail(desk, sequence, GrammarRefused(own.refusal))
            return
    if reason is not None:
        _let_go(desk, sequence, children)
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


def _let_go(desk: Desk, sequence: Sequence, children: list[Sequence]) -> None:
    """``sequence`` ends before its ``children`` have shared its pages: they ask for their own."""
    for child in children:
        child.leader = None
        sequence.followers.remove(child)
        desk.move(child, Phase.WAITING)


def _spoiled(desk: Desk, row: Row) -> None:
    """Fail the sequences that were to draw from a poisoned row, and cache none of its pages."""
    error = Internal(
        "the model computed values that are not numbers (NaN or infinity); if it repeats, check "
        "its weights"
    )
    row.lease.cache = False
    for follower in row.followers:
        if follower.phase is Phase.FOLLOWING:
            ending.fail(desk, follower, error)
    ending.fail(desk, row.sequence, error)


def _own(outcome: RowResult, sequence: Sequence) -> Drawn:
    return next(drawn for drawn in outcome.drawn if drawn.key == sequence.key)


def _first_tokens(desk: Desk, row: Row, outcome: RowResult) -> list[Sequence]:
    """Give the followers their first tokens. Returns those that want more."""
    wanting: list[Sequence] = []
    for child in row.followers:
        if child.phase is not Phase.FOLLOWING:
            continue
        _share_prompt(row.sequence, child)
        own = _own(outcome, child)
        if own.refusal:
            ending.fail(desk, child, GrammarRefused(own.refusal))
            continue
        reason = _append(child, own)
        if reason is not None:
            ending.finish(desk, child, reason, first_position=0)
        else:
            frames.tell(desk, child, 0)
            wanting.append(child)
    return wanting


def _share_prompt(leader: Sequence, child: Sequence) -> None:
    child.prompt_scores = leader.prompt_scores
    child.waterfall, child.cached_tokens = leader.waterfall, leader.cached_tokens
    child.is_again = True


def _append(sequence: Sequence, drawn: Drawn) -> Finish | None:
    """Append a token. Returns the reason to end there, if there is one."""
    sequence.tokens.append(drawn.token)
    if drawn.scores is not None:
        sequence.scores.append(drawn.scores)
    count = sequence.generated_count
    if drawn.token in sequence.stops and count > sequence.sampling.min_tokens:
        sequence.stop_token = drawn.token
        return "stop"
    return "length" if count >= sequence.sampling.max_tokens else None
