"""Numbers of pages: what goes in by runs and what goes in by arrays is one column."""

from __future__ import annotations

from array import array

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.support.ledger_numbers import each_of

from pagemesh.pager.pages.column import Column
from pagemesh.pager.pages.pool import PagePool
from pagemesh.pager.pages.runs import Pages, Run, table_of

_COUNT = 12
runs = st.builds(
    lambda first, count: Run(first, first + count), st.integers(0, 8), st.integers(1, 4)
)
scattered = st.lists(st.integers(0, _COUNT - 1), min_size=1, unique=True).map(
    lambda ids: np.array(ids, "<u4")
)
lists = runs | scattered


@given(st.lists(lists), lists)
def test_pages_have_what_was_put_last(puts: list[Pages], asked: Pages) -> None:
    column, known, number = Column(_COUNT), dict.fromkeys(range(_COUNT), 0), 1 << 62
    for pages in puts:
        numbers = memoryview(array("Q", range(number, number + len(pages))))
        number += len(pages)
        if len(pages) == 1:
            column.put_one(int(pages[0]), numbers[0])
        else:
            column.put(pages, numbers)
        known |= zip(table_of(pages).tolist(), numbers, strict=True)
    assert column.numbers.tolist() == list(known.values())
    wanted = [known[page] for page in table_of(asked).tolist()]
    assert each_of(column.of(asked)) == wanted
    assert column.one(int(asked[0])) == wanted[0]


def test_what_was_read_stays_as_it_was() -> None:
    column = Column(4)
    before = column.of(Run(0, 3)), column.of(np.array([0, 2], "<u4"))
    column.put(Run(0, 4), memoryview(array("Q", range(1, 5))))
    assert [each_of(one) for one in before] == [[0, 0, 0], [0, 0]]


@given(st.lists(st.integers(1, 5_000), max_size=12))
def test_a_pool_counts_up_without_a_gap_whatever_is_taken(counts: list[int]) -> None:
    pool, first = PagePool(5_000, 1 << 50), (1 << 50) + 1
    for count in counts:
        pages, numbers = pool.take(count)
        assert list(numbers) == list(range(first, first + count))
        assert pool.sequences[table_of(pages)].tolist() == list(numbers)
        first += count
        pool.give(pages)
