"""Trace context: passed on as it is, never believed blindly."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemesh.runtime import trace

GOOD = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_hop_is_a_child_of_its_caller() -> None:
    mine = trace.accept({"traceparent": GOOD})
    assert f"{mine.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert f"{mine.parent_id:016x}" == "b7ad6b7169203331"
    assert mine.span_id not in (0, mine.parent_id)
    assert mine.sampled


@pytest.mark.parametrize(("flags", "sampled"), [("00", False), ("03", True), ("fe", False)])
def test_flags_are_bits(flags: str, sampled: bool) -> None:
    assert trace.accept({"traceparent": GOOD[:-2] + flags}).sampled is sampled


@pytest.mark.parametrize(
    "broken",
    [
        "",
        "garbage",
        GOOD.upper(),
        GOOD + "-extra",
        "ff" + GOOD[2:],
        GOOD.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32),
        GOOD.replace("b7ad6b7169203331", "0" * 16),
        GOOD + "x" * 1_000_000,
        "01" + GOOD[2:] + "-" + "x" * 1_000_000,
        "00-" + "\u0661" * 32 + "-b7ad6b7169203331-01",
        GOOD + "\n",
        '{"a": 1}',
    ],
    ids=range(12),
)
def test_a_forged_huge_or_broken_traceparent_starts_a_new_trace(broken: str) -> None:
    mine = trace.accept({"traceparent": broken})
    assert mine.parent_id == 0
    assert f"{mine.trace_id:032x}" not in broken


@given(st.text())
def test_no_traceparent_raises(text: str) -> None:
    mine = trace.accept({"traceparent": text})
    assert trace.parse(mine.traceparent) is not None


def test_a_later_version_with_more_fields_is_understood() -> None:
    assert trace.accept({"traceparent": "01" + GOOD[2:] + "-more"}).parent_id != 0


@pytest.mark.parametrize(("ratio", "sampled"), [(0.0, 0), (1.0, 200)])
def test_the_head_decides_what_is_sampled(ratio: float, sampled: int) -> None:
    contexts = [trace.accept({}, ratio=ratio) for _ in range(200)]
    assert sum(context.sampled for context in contexts) == sampled
    assert all(context.child().sampled == context.sampled for context in contexts)


def test_who_is_worked_for_is_so_until_that_is_over() -> None:
    with trace.use(trace.new_trace()) as outer:
        with trace.use(outer.child()) as inner:
            assert trace.current() == inner
        assert trace.current() == outer
    assert trace.current() is None


async def test_headers_carry_the_current_span_of_their_own_task() -> None:
    async def work() -> str:
        with trace.use(trace.new_trace()) as mine:
            await asyncio.sleep(0)
            assert trace.inject({"a": "1"}) == {"a": "1", "traceparent": mine.traceparent}
            return mine.traceparent

    first, second = await asyncio.gather(work(), work())
    assert first != second
    assert trace.inject() == {}
    assert trace.current() is None
