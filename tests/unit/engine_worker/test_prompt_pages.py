"""Pages of long prompts: asked for a few chunks at a time, ahead of the steps that fill them."""

from __future__ import annotations

from tests.unit.engine_worker.bench import DECODE, PAGE_SIZE, PREFILL, Bench, key, opened, submit
from tests.unit.engine_worker.test_beams import asked as search

from pagemesh.engine.worker import events as ev
from pagemesh.wire.messages import Ok
from pagemesh.wire.pager_messages import (
    Admit,
    Commit,
    Declare,
    Extend,
    Extended,
    Offer,
    OpenSession,
    Queued,
    Revoke,
)
from pagemesh.wire.tokens import pack_extents

CHUNK = DECODE.chunk_tokens_max
PROMPT = 6 * CHUNK
WHOLE = (PROMPT + PAGE_SIZE) // PAGE_SIZE
"""Pages of the prompt and of growth."""


def started() -> Bench:
    """A prompt of six chunks has pages for two, and its first step runs."""
    bench = Bench().start()
    bench.ask(submit(PROMPT))
    bench.grant(pages=2 * CHUNK // PAGE_SIZE)
    return bench


def extend(bench: Bench) -> int:
    """Give what is asked for: pages in all."""
    asked = bench.asked(Extend)
    pages = range(32 + asked.have_pages, 32 + asked.page_count)
    bench.answer(
        Extend,
        Extended(
            key=asked.key, lease=asked.lease, granted_at=200, first_index=asked.have_pages,
            extents=pack_extents(pages),
        ),
    )  # fmt: skip
    return asked.page_count


def test_an_admission_wants_two_chunks_at_once_and_reserves_all() -> None:
    bench = Bench().start()
    bench.ask(submit(PROMPT))
    admit = bench.asked(Admit)
    assert admit.first_tokens == 2 * CHUNK and admit.reserve_tokens == PROMPT + PAGE_SIZE


def test_pages_are_asked_for_while_the_last_chunk_that_has_some_is_computed() -> None:
    bench = started()
    assert "Extend" not in bench.open_kinds(), "the next chunk has its pages"
    bench.step()
    assert extend(bench) == 4 * CHUNK // PAGE_SIZE
    bench.step()
    bench.answer(Commit, Ok())
    assert "Extend" not in bench.open_kinds()


def test_the_last_that_is_asked_for_is_the_rest_with_growth() -> None:
    bench = started()
    bench.step()
    extend(bench)
    bench.step()
    bench.step()
    assert extend(bench) == WHOLE
    for _ in range(3):
        bench.step(51)
    assert bench.tokens() == [51] and "Extend" not in bench.open_kinds()


def test_no_step_waits_for_pages_that_come_while_another_is_computed() -> None:
    bench = started()
    computed: list[int] = []
    while not bench.tokens():
        if "Extend" in bench.open_kinds():
            extend(bench)
        computed.append(len(bench.step(51).rows[0].tokens))
    assert computed == 6 * [CHUNK]


def test_a_prompt_whose_pages_are_late_waits_and_goes_on_when_they_come() -> None:
    bench = started()
    bench.step()
    bench.step()
    assert bench.plan is None and bench.asked(Extend)
    extend(bench)
    assert bench.plan is not None and bench.plan.rows[0].start == 2 * CHUNK


def test_pages_that_were_queued_are_asked_for_again_when_told() -> None:
    bench = started()
    bench.step()
    bench.answer(Extend, Queued(key=key(), ahead_count=1, ask_again_ms=1_000))
    bench.step()
    assert bench.plan is None and "Extend" not in bench.open_kinds()
    bench.notice(Extended(key=key(), lease=101, granted_at=9, first_index=0, extents=b""))
    extend(bench)
    assert bench.plan is not None


def test_an_extension_that_is_not_answered_is_asked_for_again() -> None:
    bench = started()
    bench.step()
    bench.fail(Extend, "DeadlineExceeded")
    bench.step()
    bench.tick()
    extend(bench)
    assert bench.plan is not None


def test_all_pages_are_asked_for_at_once_where_the_limit_says_so() -> None:
    bench = Bench(prompt_chunks=0).start()
    bench.ask(submit(PROMPT))
    assert bench.asked(Admit).first_tokens == 0
    bench.grant()
    for _ in range(6):
        assert "Extend" not in bench.open_kinds()
        bench.step(51)
    assert bench.tokens() == [51]


def test_a_search_has_all_its_pages_from_the_start() -> None:
    bench = Bench().start()
    bench.ask(search(PROMPT))
    assert bench.asked(Admit).first_tokens == 0


def test_a_prompt_that_is_taken_back_half_computed_begins_with_two_chunks_again() -> None:
    bench = started()
    bench.step()
    bench.notice(Revoke(key=key(), lease=101, reason="preempted", usage=""))
    bench.step()
    assert bench.asked(Admit).first_tokens == 2 * CHUNK
    bench.grant(cached=CHUNK, pages=3 * CHUNK // PAGE_SIZE)
    assert bench.plan is not None and bench.plan.rows[0].start == CHUNK


def test_a_new_pager_is_told_what_was_promised() -> None:
    bench = started()
    bench.handle(ev.PagerChanged(2))
    bench.tick()
    bench.answer(OpenSession, opened(epoch=2))
    bench.tick()
    (held,) = bench.asked(Declare).leases
    assert held.promised_pages == WHOLE - 2 * CHUNK // PAGE_SIZE


def test_a_prompt_is_handed_over_with_its_growth_and_nothing_is_asked_for_meanwhile() -> None:
    bench = Bench(PREFILL).start()
    bench.ask(submit(3 * CHUNK, decode="d"))
    bench.grant(pages=2 * CHUNK // PAGE_SIZE)
    bench.step()
    assert extend(bench) == 3 * CHUNK // PAGE_SIZE + 1
    bench.step()
    bench.step(51)
    assert bench.asked(Offer).fill.filled_tokens == 3 * CHUNK
    assert "Extend" not in bench.open_kinds()
