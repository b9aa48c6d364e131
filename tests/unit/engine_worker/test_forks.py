"""Several choices of one prompt, when something of what they share goes wrong."""

from __future__ import annotations

from dataclasses import replace

import msgspec
from tests.unit.engine_worker.bench import (
    DECODE,
    POOL_PAGES,
    PREFILL,
    Bench,
    at_fork,
    child_of,
    key,
    opened,
    result_of,
    submit,
)

from pagemesh.engine.worker import events as ev
from pagemesh.engine.worker.costs import StepCosts, StepShape
from pagemesh.engine.worker.settings import RoleSettings
from pagemesh.wire.pager_messages import (
    Admit,
    Declare,
    Fork,
    Forked,
    Granted,
    OpenSession,
    Release,
    Revoke,
)
from pagemesh.wire.tokens import U32, PageCopy, unpack, unpack_extents
from pagemesh.wire.work_messages import Abort


def _pages(granted: Granted) -> U32:
    return unpack_extents(granted.extents, page_count_max=POOL_PAGES)


def _busy_with_copies_waiting(role: RoleSettings = DECODE) -> tuple[Bench, int]:
    """A step of another request runs, so the copy for the second choice waits for the next;
    also the lease of that choice."""
    bench = Bench(role).start()
    bench.ask(msgspec.structs.replace(submit(6, max_tokens=30), request="2" * 32))
    bench.grant(pages=9)
    bench.step(50)
    bench.ask(submit(10, choices=2, decode="d"))
    granted = bench.grant(cached=8)
    bench.step(51)
    bench.step(51)
    fork = bench.asked(Fork)
    child = bench.granted(child_of(fork, fork.children[0]), cached=10, pages=3)
    copy = PageCopy(
        source_page=int(_pages(granted)[2]),
        target_page=int(_pages(child)[2]),
    )
    bench.answer(Fork, Forked(lease=fork.lease, children=[child], copies=[copy]))
    return bench, child.lease


def test_a_leader_whose_copies_go_unmade_is_sent_on() -> None:
    bench, child = _busy_with_copies_waiting()
    bench.notice(Revoke(key=key(1), lease=child, reason="preempted"))
    bench.tick()
    assert bench.step().copies == ()
    assert bench.plan is not None
    assert key(0) in [row.key for row in bench.plan.rows], "nobody copies from it any more"


def test_a_leader_waits_for_the_copies_that_are_being_made() -> None:
    bench, _ = _busy_with_copies_waiting()
    bench.tick()
    bench.step()
    assert bench.plan is not None and len(bench.plan.copies) == 1
    assert key(0) not in [row.key for row in bench.plan.rows]
    bench.step()
    assert {key(0), key(1)} < {row.key for row in bench.plan.rows}


def test_a_step_with_copies_is_no_run() -> None:
    bench, _ = _busy_with_copies_waiting()
    bench.step()
    assert bench.plan is not None and len(bench.plan.copies) == 1
    assert bench.plan.rows and bench.plan.repeat_count == 0


def test_nothing_is_handed_over_while_its_tail_is_copied() -> None:
    """Whoever has a leader's pages by then would write into what the others copy."""
    bench, _ = _busy_with_copies_waiting(PREFILL)
    bench.step()
    assert bench.plan is not None and bench.plan.copies
    bench.tick()
    assert "Offer" not in bench.open_kinds()
    bench.step()
    assert bench.open_kinds().count("Offer") == 2


def test_a_choice_whose_leader_goes_before_its_tail_was_copied_computes_that_itself() -> None:
    bench, _ = _busy_with_copies_waiting()
    bench.ask(Abort(request=key().request, attempt=1, choice=0, reason="stop"))
    bench.tick()
    bench.step()
    assert bench.plan is not None and not bench.plan.copies
    (row,) = (row for row in bench.plan.rows if row.key == key(1))
    assert (row.start, row.tokens.tolist()) == (8, [108, 109, 51])


def test_a_tail_that_is_computed_token_by_token_is_no_run() -> None:
    """Its rows draw nothing but the last."""
    bench = Bench(replace(DECODE, step_tokens_max=1, chunk_tokens_max=1)).start()
    bench.ask(submit(10, choices=2, max_tokens=20))
    granted = bench.grant(cached=8)
    bench.step(51)
    bench.step(51)
    fork = bench.asked(Fork)
    child = bench.granted(child_of(fork, fork.children[0]), cached=10, pages=9)
    bench.ask(Abort(request=key().request, attempt=1, choice=0, reason="stop"))
    copy = PageCopy(source_page=int(_pages(granted)[2]), target_page=int(_pages(child)[2]))
    bench.answer(Fork, Forked(lease=fork.lease, children=[child], copies=[copy]))
    bench.tick()
    assert bench.plan is not None
    (row,) = bench.plan.rows
    assert (row.key, row.start, row.samples) == (key(1), 8, ())
    assert bench.plan.repeat_count == 0


def test_a_tail_that_waits_to_be_copied_is_not_declared_as_filled() -> None:
    """A pager that began anew would grant it to decode, and cache it for everybody."""
    bench, child = _busy_with_copies_waiting(PREFILL)
    bench.handle(ev.PagerChanged(2))
    bench.tick()
    bench.answer(OpenSession, opened(epoch=2))
    bench.tick()
    assert "Declare" not in bench.open_kinds()
    bench.step()
    assert bench.plan is not None and bench.plan.copies
    bench.step()
    bench.tick()
    declared = {held.lease: held for held in bench.asked(Declare).leases}
    assert len(unpack(declared[child].tokens)) == 10


def test_a_share_of_more_than_the_prompt_is_not_used() -> None:
    """The tokens after it are not the same for every choice."""
    bench, fork = at_fork()
    child = bench.granted(child_of(fork, key(1)), cached=11)
    bench.answer(Fork, Forked(lease=fork.lease, children=[child], copies=[]))
    assert bench.asked(Release).lease == child.lease
    bench.tick()
    assert bench.asked(Admit).key == key(1)


def test_what_a_step_takes_that_copies_pages_is_not_taken_for_what_its_rows_cost() -> None:
    class Seen(StepCosts):
        def observe(self, shape: StepShape, duration_us: float) -> None:
            seen.append(duration_us)

    seen: list[float] = []
    bench, _ = _busy_with_copies_waiting()
    bench.core._batching.costs = Seen()
    for took_us in (1_000, 2_000, 3_000):
        plan, bench.plan = bench.plan, None
        assert plan is not None and bool(plan.copies) == (took_us == 2_000)
        bench.handle(ev.StepsFinished((replace(result_of(plan, 52), took_us=(took_us,)),)))
    assert seen == [1_000, 3_000]
