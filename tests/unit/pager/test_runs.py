"""Lists of pages, as runs and as arrays: both are the same list."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemesh.pager.pages.runs import (
    Pages,
    Run,
    first_of,
    join,
    join_all,
    join_extents,
    last,
    last_extents,
    last_of,
    own,
    pack_runs,
    part,
    table_of,
    where,
)
from pagemesh.wire.tokens import unpack_extents

runs = st.builds(
    lambda first, count: Run(first, first + count), st.integers(0, 99), st.integers(0, 9)
)
arrays = st.lists(st.integers(0, 99), max_size=9).map(lambda ids: np.array(ids, "<u4"))
pages = runs | arrays


def listed(extents: bytes) -> list[int]:
    return [int(page) for page in unpack_extents(extents, page_count_max=1_000)]


@given(runs)
def test_a_run_holds_what_a_range_would(run: Run) -> None:
    same = range(run.start, run.stop)
    assert (list(run), len(run)) == (list(same), len(same))
    assert [run[at] for at in range(-len(same), len(same))] == [*same, *same]
    for beyond in (len(same), -len(same) - 1):
        with pytest.raises(IndexError, match=f"no place {beyond} in Run"):
            run[beyond]
    assert run == Run(run.start, run.stop) != Run(run.start, run.stop + 1)
    assert len({run, Run(run.start, run.stop)}) == 1


@given(pages, st.data())
def test_a_part_is_a_slice(whole: Pages, data: st.DataObject) -> None:
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(whole))] * 2)))
    assert list(part(whole, start, stop)) == list(whole)[start:stop]
    assert list(last(whole)) == list(whole)[-1:]
    if len(whole):
        ends = first_of(whole), last_of(whole)
        assert ends == (int(whole[0]), int(whole[-1])) and {*map(type, ends)} == {int}


@given(st.lists(pages, max_size=6))
def test_packed_runs_unpack_to_the_same_pages_in_order(parts: list[Pages]) -> None:
    flat = [int(page) for part in parts for page in part]
    assert listed(pack_runs(parts)) == flat == join_all(parts).tolist()


@given(pages, pages)
def test_joining_keeps_order_and_count(left: Pages, right: Pages) -> None:
    both = [*map(int, left), *map(int, right)]
    assert list(map(int, join(left, right))) == both
    assert listed(join_extents(pack_runs([left]), pack_runs([right]))) == both


@given(st.lists(pages, max_size=6), st.data())
def test_the_last_pages_of_a_packed_table_are_cut_off_exactly(
    parts: list[Pages], data: st.DataObject
) -> None:
    table = join_all(parts).tolist()
    count = data.draw(st.integers(0, len(table)))
    assert listed(last_extents(pack_runs(parts), count)) == table[len(table) - count :]


def test_neighbouring_runs_are_one_extent() -> None:
    assert len(pack_runs([Run(4, 8), Run(8, 20)])) == 8
    assert len(join_extents(pack_runs([Run(4, 8)]), pack_runs([Run(8, 9)]))) == 8
    assert join(Run(4, 8), Run(8, 9)) == Run(4, 9)


@given(runs)
def test_a_run_and_its_table_pick_the_same_of_the_pool(run: Run) -> None:
    pool = np.arange(200) * 3
    assert pool[where(run)].tolist() == pool[where(table_of(run))].tolist() == [3 * i for i in run]


def test_what_is_kept_of_a_table_does_not_keep_all_of_it() -> None:
    table = np.array([1, 5, 9], "<u4")
    kept = own(table[1:])
    assert isinstance(kept, np.ndarray) and kept.base is None
    assert table_of(own(Run(0, 3))).tolist() == [0, 1, 2]
