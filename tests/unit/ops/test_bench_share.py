"""What of a step is not arithmetic is told from what workers noted and clients saw."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from ops.bench.bench_share import Calls, row_of, split, windows_of
from ops.bench.step_clock.sitecustomize import FIELDS

from pagemesh.cli.benching.client import Reply


def reply(*arrivals_s: float) -> Reply:
    return Reply(0.0, arrivals_s, 99.0, "", 4, len(arrivals_s), None)


def calls(*noted: Sequence[float]) -> Calls:
    found: Calls = np.array(noted, np.float64)
    assert found.shape[1] == len(FIELDS)
    return found


def test_answers_at_once_are_looked_at_while_all_of_them_go_on() -> None:
    assert windows_of([reply(1, 5, 9), reply(3, 4, 8)], users=2) == [(3, 8)]


def test_answers_one_after_the_other_have_a_window_each() -> None:
    assert windows_of([reply(1, 2), reply(), reply(3, 4, 5)], users=1) == [(1, 2), (3, 5)]


def test_answers_that_were_never_all_there_have_none() -> None:
    assert windows_of([reply(1, 2), reply(3, 4)], users=2) == []


def test_the_time_of_a_window_is_told_apart_without_rest() -> None:
    found = split(
        calls([11, 14, 2, 2.5, 0, 0, 0, 0], [16, 18, 1, 0, 0.5, 0.25, 0.125, 0.5]), (10, 20)
    )
    assert found is not None
    assert (found.steps, found.wall_s, found.native_s) == (3, 10, 3.875)
    assert (found.executor_s, found.between_s, found.ends_s) == (1.125, 2, 3)
    assert found.native_s + found.executor_s + found.between_s + found.ends_s == found.wall_s
    assert found.parts_s == (0.5, 0.25, 0.125, 0.5)
    assert found.outside == pytest.approx(0.6125)


def test_of_a_call_that_the_window_cuts_the_part_within_counts() -> None:
    found = split(calls([0, 4, 4, 2, 0, 0, 0, 0], [9, 10, 1, 1, 0, 0, 0, 0]), (3, 8))
    assert found is not None
    assert (found.steps, found.native_s, found.executor_s, found.ends_s) == (1, 0.5, 0.5, 4)


def test_a_window_without_steps_tells_nothing() -> None:
    assert split(calls([0, 4, 4, 2, 0, 0, 0, 0]), (5, 8)) is None


def test_a_row_has_medians_a_step_and_parts_of_steps_by_themselves_alone() -> None:
    counted = [split(calls([0, 4, 2, run_s, 0, 0, 0, 0]), (0, 4)) for run_s in (3.0, 2.0, 1.0)]
    apart = [split(calls([0, 4, 4, 0, 2, 1, 0.4, 0.2]), (0, 5))]
    row = row_of([one for one in counted if one], [one for one in apart if one])
    assert (row["outside"], row["outside_min"], row["outside_max"]) == (0.5, 0.25, 0.75)
    assert row["step_ms"] == {
        "wall": 2000,
        "native": 1000,
        "executor": 1000,
        "between": 0,
        "ends": 0,
    }
    assert row["by_itself_ms"] == {"products": 500, "attention": 250, "rows": 100, "sampling": 50}
