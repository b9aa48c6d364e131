"""From a submit to its last token."""

from __future__ import annotations

import msgspec
from tests.unit.engine_worker.bench import Bench, at_fork, attach, child_of, of_kind, submit

from pagemesh.engine.worker import events as ev
from pagemesh.wire.pager_messages import (
    Admit,
    Commit,
    Committed,
    Extend,
    Extended,
    Fork,
    Forked,
    Redeem,
    Release,
)
from pagemesh.wire.tokens import PageCopy, pack_extents, unpack
from pagemesh.wire.work_messages import Accepted


def test_a_submit_is_accepted_at_once_and_waits_for_the_session() -> None:
    bench = Bench()
    assert isinstance(bench.ask(submit()), Accepted)
    assert bench.open_kinds() == []
    bench.start()
    bench.tick()
    assert bench.asked(Admit).reserve_tokens == 14


def test_a_prompt_is_computed_in_chunks_and_each_full_page_committed() -> None:
    bench = Bench().start()
    bench.ask(submit(10))
    bench.grant()
    assert bench.step().rows[0].tokens.tolist() == list(range(100, 108))
    assert bench.asked(Commit).fill.filled_tokens == 8
    row = bench.step(token=51).rows[0]
    assert (row.start, len(row.tokens), len(row.samples)) == (8, 2, 1)
    assert bench.tokens() == [51]


def test_cached_tokens_are_not_computed_again() -> None:
    bench = Bench().start()
    bench.ask(submit(10))
    bench.grant(cached=8)
    assert bench.step().rows[0].start == 8


def test_a_sequence_ends_at_its_limit_and_gives_its_pages_back_with_what_was_written() -> None:
    bench = Bench().start()
    bench.ask(submit(10, max_tokens=3))
    bench.grant(cached=8)
    for token in (51, 52, 53):
        bench.step(token)
    last = bench.frames[-1]
    assert bench.tokens() == [51, 52, 53] and last.finish == "length"
    release = bench.asked(Release)
    assert release.fill.filled_tokens == 12, "nothing was written for the last token"
    bench.settle()
    assert bench.core.idle


def test_a_stop_token_ends_a_sequence_and_is_named() -> None:
    bench = Bench().start()
    bench.ask(submit(10, stop=9))
    bench.grant(cached=8)
    bench.step(51)
    bench.step(9)
    assert (bench.frames[-1].finish, bench.frames[-1].stop_token) == ("stop", 9)
    assert bench.plan is None


def test_growth_is_asked_ahead_and_a_sequence_without_a_slot_sits_out() -> None:
    bench = Bench().start()
    bench.ask(submit(7, max_tokens=30))
    bench.grant(pages=2)
    bench.step()
    extend = bench.asked(Extend)
    assert extend.page_count == 3
    bench.step()
    assert bench.plan is None, "two pages hold eight slots, and all are written"
    bench.answer(
        Extend,
        Extended(
            key=extend.key, lease=extend.lease, granted_at=500, first_index=2,
            extents=pack_extents([40]),
        ),
    )  # fmt: skip
    assert bench.plan is not None and bench.plan.rows[0].page_table.tolist()[-1] == 40
    assert bench.plan.rows[0].granted_at == 500


def test_a_redeemed_prompt_that_lacks_pages_asks_for_them_until_it_has_them() -> None:
    bench = Bench().start()
    bench.ask(attach(10, filled=4, pages=1))
    bench.answer(Redeem, bench.granted(bench.asked(Redeem), cached=4, pages=1))
    bench.fail(Extend, "Busy")
    assert bench.plan is None
    bench.tick(500)
    assert bench.asked(Extend).page_count == 4


def test_rows_that_draw_go_before_prompts_and_prompts_share_the_rest() -> None:
    bench = Bench().start()
    bench.ask(submit(10, choices=1))
    bench.grant(cached=8)
    bench.step()
    bench.ask(msgspec.structs.replace(submit(30), request="2" * 32))
    bench.grant()
    bench.step()
    assert bench.plan is not None
    assert [len(row.tokens) for row in bench.plan.rows] == [1, 8]


def test_choices_share_one_prompt_and_copy_the_tail_before_they_write() -> None:
    bench = Bench().start()
    bench.ask(submit(10, choices=3, max_tokens=4))
    granted = bench.grant(cached=8)
    plan = bench.step(51)
    assert [one.key.choice for one in plan.rows[0].samples] == [0, 1, 2]
    assert [bench.tokens(choice) for choice in range(3)] == [[51]] * 3
    fork = bench.asked(Fork)
    assert [child.choice for child in fork.children] == [1, 2]
    assert bench.plan is None, "the leader must not write what the others copy"
    shared = unpack(granted.extents).tolist()
    children = [bench.granted(child_of(fork, child), cached=10, pages=3) for child in fork.children]
    tails = [unpack(child.extents).tolist()[0] + 2 for child in children]
    copies = [PageCopy(source_page=shared[0] + 2, target_page=tail) for tail in tails]
    bench.answer(Fork, Forked(lease=fork.lease, children=children, copies=copies))
    step = bench.step()
    assert step.rows == () and len(step.copies) == 2
    assert bench.plan is not None and [row.start for row in bench.plan.rows] == [10, 10, 10]


def test_choices_that_cannot_fork_ask_for_pages_of_their_own() -> None:
    bench = Bench().start()
    bench.ask(submit(10, choices=2))
    bench.grant(cached=8)
    bench.step(51)
    bench.fail(Fork, "NoCapacity")
    bench.tick()
    admit = bench.asked(Admit)
    assert admit.key.choice == 1 and unpack(admit.tokens).tolist()[-1] == 51
    assert bench.plan is not None, "the leader goes on"


def test_a_child_whose_copy_never_came_computes_its_tail_again() -> None:
    bench, fork = at_fork()
    child = bench.granted(child_of(fork, fork.children[0]), cached=10, pages=3)
    bench.answer(Fork, Forked(lease=fork.lease, children=[child], copies=[]))
    assert bench.plan is not None
    starts = {row.key.choice: row.start for row in bench.plan.rows}
    assert starts == {0: 10, 1: 8}


def test_a_resubmitted_choice_goes_on_where_its_client_is() -> None:
    bench = Bench().start()
    bench.ask(submit(10, generated=(61, 62), max_tokens=4))
    assert len(unpack(bench.asked(Admit).tokens)) == 12
    bench.grant(cached=8)
    bench.step(63)
    assert [frame.first_position for frame in bench.frames] == [2]


def test_a_choice_that_was_complete_before_ends_at_once() -> None:
    bench = Bench().start()
    bench.ask(submit(10, generated=(61, 62), max_tokens=2))
    assert bench.frames[-1].finish == "length" and bench.open_kinds() == []


def test_prompt_scores_do_not_read_the_cache_and_cover_every_chunk() -> None:
    bench = Bench().start()
    bench.ask(submit(10, prompt_logprobs=True))
    assert bench.asked(Admit).read_cache is False
    bench.grant()
    first, last = bench.step().rows[0], bench.step().rows[0]
    assert (first.score_from, first.score_next) == (0, 108)
    assert (last.score_from, last.score_next) == (8, None)


def test_choices_that_want_nothing_but_the_prompts_scores_have_them_computed_once() -> None:
    bench = Bench().start()
    bench.ask(submit(8, choices=3, max_tokens=0, prompt_logprobs=True))
    bench.grant()
    bench.step()
    assert [frame.finish for frame in bench.frames] == ["length"] * 3
    assert bench.plan is None and "Admit" not in bench.open_kinds()


def test_whoever_has_a_token_reads_the_cache_though_its_prompt_was_scored() -> None:
    bench = Bench().start()
    message = submit(6, generated=(61,))
    bench.ask(msgspec.structs.replace(message, read_cache=False))
    assert bench.asked(Admit).read_cache is True


def test_a_resubmitted_choice_whose_prompt_scores_were_lost_is_scored_again() -> None:
    bench = Bench().start()
    bench.ask(submit(6, generated=(61,), prompt_logprobs=True))
    assert bench.asked(Admit).read_cache is False
    bench.grant()
    row = bench.step().rows[0]
    assert (row.start, len(row.tokens), row.score_from) == (0, 6, 0), "the prompt and no more"


def test_commits_are_not_waited_for_and_tell_what_the_pager_does_not_know() -> None:
    bench = Bench().start()
    bench.ask(submit(6, max_tokens=20))
    bench.grant()
    bench.step(51)
    assert bench.asked(Commit).fill.filled_tokens == 6
    bench.answer(Commit, Committed(lease=101, committed_tokens=4, known_tokens=6))
    bench.step(52)
    bench.step(53)
    fill = bench.asked(Commit).fill
    assert (fill.first_token, unpack(fill.tokens).tolist()) == (6, [51, 52])


def test_the_rest_of_a_prompt_is_committed_as_soon_as_the_commit_before_it_is_answered() -> None:
    bench = Bench().start()
    bench.ask(submit(14, max_tokens=20))
    bench.grant()
    bench.step()
    bench.step(51)
    assert bench.asked(Commit).fill.filled_tokens == 8, "one commit at a time"
    bench.answer(Commit, Committed(lease=101, committed_tokens=8, known_tokens=14))
    assert bench.asked(Commit).fill.filled_tokens == 14
    bench.answer(Commit, Committed(lease=101, committed_tokens=12, known_tokens=14))
    bench.step(52)
    assert "Commit" not in bench.open_kinds(), "answers are committed a few pages at a time"


def test_a_step_runs_alone() -> None:
    bench = Bench().start()
    bench.ask(submit(10))
    bench.grant()
    assert of_kind(bench.tick(), ev.RunStep) == []
    assert bench.plan is not None
