"""What the benchmark of the time between tokens makes of what it saw."""

from __future__ import annotations

from ops.bench.bench_latency import Seen, gaps_ms, percentiles, report

from pagemesh.cli.benching.client import Reply


def reply(first_s: float, *gaps_s: float) -> Reply:
    arrivals = [first_s]
    for gap_s in gaps_s:
        arrivals.append(arrivals[-1] + gap_s)
    return Reply(0.0, tuple(arrivals), arrivals[-1], "", 1, len(arrivals), 0)


def streams(gap_s: float, *, stalls: int = 0, stall_s: float = 0.0) -> Seen:
    gaps = [gap_s] * (101 - stalls) + [stall_s] * stalls
    return Seen(streams=[reply(0.1, *gaps)])


def test_the_way_to_the_second_token_counts_and_that_to_the_first_does_not() -> None:
    assert [round(gap) for gap in gaps_ms([reply(0.1, 0.5, 0.01, 0.02)])] == [500, 10, 20]


def test_percentiles_are_values_that_were_seen() -> None:
    assert percentiles([float(value) for value in range(101)]) == {
        "p50": 50.0, "p99": 99.0, "count": 101,
    }  # fmt: skip
    assert percentiles([]) == {"p50": 0.0, "p99": 0.0, "count": 0}


def test_the_aim_is_twice_the_idle_time_and_one_chunk() -> None:
    idle = streams(0.01)
    kept = report(idle, streams(0.01, stalls=3, stall_s=0.049), chunk_ms=30.0)
    assert (kept["aim_p99"], kept["kept"], kept["ratio_p99"]) == (50.0, True, 4.9)
    missed = report(idle, streams(0.01, stalls=3, stall_s=0.051), chunk_ms=30.0)
    assert missed["kept"] is False
    rare = report(idle, streams(0.01, stalls=1, stall_s=0.9), chunk_ms=30.0)
    assert rare["kept"] is True, "one gap of a hundred may be longer"
