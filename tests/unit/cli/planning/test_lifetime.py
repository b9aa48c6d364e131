"""Waste over time, against figures worked out by hand and against the pager itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ops.bench import bench_waste
from tests.unit.cli.planning.test_memory import PACE

from pagemesh.cli.planning.lifetime import Pace, WasteOverTime, waste_over_time
from pagemesh.cli.planning.walk import Walk
from pagemesh.engine.worker.settings import WorkerLimits

SMALL = Pace(
    answer_tokens=3, prompt_tokens_s=8, answer_tokens_s=1, chunk_tokens=8, prompt_chunks=1,
    growth_pages=1,
)  # fmt: skip
"""With pages of 4, 18 tokens are computed and 3 drawn as follows, in slots:

    filled   seconds   held   tail   growth   prompt
    0             1      16      0        0       16     a chunk and the next one
    8             1      24      0        4       12     the rest, with a page of growth
    16          1/4      24      0        4        4
    18            1      24      2        4        0
    19            1      24      1        4        0
    20            1      24      0        4        0
    21            1      24      3        0        0     all it comes to
"""


def shares(waste: WasteOverTime) -> tuple[float, float, float]:
    return waste.tail, waste.growth, waste.prompt


def test_the_kinds_of_waste_are_those_worked_out_by_hand() -> None:
    held = 16 + 24 + 24 / 4 + 4 * 24
    wanted = (6 / held, (4 + 4 / 4 + 12) / held, (16 + 12 + 4 / 4) / held)
    waste = waste_over_time([21], 4, SMALL)
    assert shares(waste) == pytest.approx(wanted)
    assert waste.total == pytest.approx(sum(wanted))
    assert shares(waste_over_time([21, 21, 21], 4, SMALL)) == pytest.approx(wanted)


def test_a_shared_beginning_is_neither_computed_nor_counted() -> None:
    held = 16 + 16 / 4 + 4 * 16
    wanted = (6 / held, (4 + 4 / 4 + 12) / held, (12 + 4 / 4) / held)
    assert shares(waste_over_time([21], 4, SMALL, shared_tokens=10)) == pytest.approx(wanted)
    least = waste_over_time([21], 4, SMALL, shared_tokens=1_000)
    assert 0 < least.prompt < wanted[2], "the last token is always computed"


@pytest.mark.parametrize(("tokens", "is_shared"), [(17, False), (18, True)])
def test_the_last_token_of_a_prompt_is_computed_even_if_all_of_it_is_shared(
    tokens: int, is_shared: bool
) -> None:
    pace = Pace(
        answer_tokens=1, prompt_tokens_s=1_000, answer_tokens_s=100, chunk_tokens=64,
        prompt_chunks=2, growth_pages=1,
    )  # fmt: skip
    alone, shared = (waste_over_time([tokens], 16, pace, count) for count in (0, 16))
    assert (shared != alone) is is_shared


@pytest.mark.parametrize("growth_pages", [0, 1, 3])
@pytest.mark.parametrize("prompt_chunks", [0, 1, 2])
@pytest.mark.parametrize("chunk_tokens", [1, 3, 100, 256])
@pytest.mark.parametrize("page_size", [1, 4, 7, 256])
def test_cycles_taken_at_once_come_to_what_their_steps_do(
    monkeypatch: pytest.MonkeyPatch,
    page_size: int,
    chunk_tokens: int,
    prompt_chunks: int,
    growth_pages: int,
) -> None:
    pace = Pace(2_000, 900, 7, chunk_tokens, prompt_chunks, growth_pages)
    cases = [([tokens], page_size, pace, shared) for tokens in (30, 9_001) for shared in (0, 700)]
    at_once = [waste_over_time(*case) for case in cases]
    monkeypatch.setattr(Walk, "_skip", lambda _walk, _before, now, _until: now[:2])
    assert [waste_over_time(*case) for case in cases] == at_once


def test_a_length_beyond_all_reason_takes_no_time() -> None:
    for page_size in (1, 16, 256):
        pace = replace(PACE, answer_tokens=1 << 24, chunk_tokens=1)
        assert 0 < waste_over_time([1 << 32], page_size, pace).total < 0.01


def test_lengths_count_by_the_slots_and_the_time_they_take() -> None:
    short, long = waste_over_time([21], 4, SMALL), waste_over_time([2_100], 4, SMALL)
    both = waste_over_time([21, 2_100], 4, SMALL)
    assert long.total < both.total < short.total
    assert both.total == pytest.approx(long.total, rel=0.05)


def test_a_prompt_whose_pages_all_come_at_once_wastes_most_of_all() -> None:
    at_once = waste_over_time([8_192], 16, replace(PACE, prompt_chunks=0))
    in_parts = waste_over_time([8_192], 16, PACE)
    assert at_once.prompt > 3 * in_parts.prompt
    faster = waste_over_time([8_192], 16, replace(PACE, prompt_tokens_s=50_000))
    assert faster.prompt < in_parts.prompt / 2


@pytest.mark.parametrize("answer_tokens", [0, 1, 256, 5_000])
@pytest.mark.parametrize("page_size", [1, 16, 256])
def test_there_are_shares_for_every_length(answer_tokens: int, page_size: int) -> None:
    pace = replace(PACE, answer_tokens=answer_tokens)
    for tokens in (1, 2, 15, 16, 17, 257, 1_025, 5_001):
        waste = waste_over_time([tokens], page_size, pace)
        assert min(shares(waste)) >= 0 and waste.total < 1


@pytest.mark.parametrize("page_size", [4, 16, 256])
@pytest.mark.parametrize("prompt_chunks", [0, 1, 2])
@pytest.mark.parametrize(("tokens", "answer_tokens"), [(2_300, 256), (700, 65), (90, 0), (5, 9)])
def test_the_pager_comes_to_the_same(
    monkeypatch: pytest.MonkeyPatch,
    page_size: int,
    prompt_chunks: int,
    tokens: int,
    answer_tokens: int,
) -> None:
    """The benchmark counts slots of the production pager; here a token at a time."""
    monkeypatch.setattr(bench_waste, "PAGE_SIZE", page_size)
    monkeypatch.setattr(bench_waste, "POOL_PAGES", 1_024)
    monkeypatch.setattr(bench_waste, "DRAWN_TOKENS", 1)
    pace = replace(PACE, answer_tokens=answer_tokens, prompt_chunks=prompt_chunks)
    assert pace.chunk_tokens == bench_waste.CHUNK_TOKENS
    prompt_tokens = pace.prompt_tokens(tokens)
    line = bench_waste.Line(0.0, (), prompt_tokens, tokens - prompt_tokens + 1)
    speed = bench_waste.Speed("this", pace.prompt_tokens_s, 1_000 / pace.answer_tokens_s)
    limits = WorkerLimits(prompt_chunks=prompt_chunks, growth_pages=pace.growth_pages)
    found = bench_waste.Replay([line], speed, limits).run()
    waste = waste_over_time([tokens], page_size, pace)
    assert shares(waste) == pytest.approx((found["tail"], found["growth"], found["prompt"]))
