"""The ledger of pages."""

from __future__ import annotations

import numpy as np
import pytest

from pagemesh.pager.pages.ledger_error import LedgerError
from pagemesh.pager.pages.pool import PagePool
from pagemesh.pager.pages.runs import Run, part, table_of
from pagemesh.wire.pool_format import HeaderState


def counts(pool: PagePool) -> tuple[int, int, int, int, int]:
    pool.check()
    return (pool.free, pool.held, pool.pinned, pool.idle, pool.draining)


def test_a_page_goes_round_its_states_and_the_sum_stays() -> None:
    pool = PagePool(8, 0)
    pages = pool.take(3)[0]
    assert counts(pool) == (5, 3, 0, 0, 0)
    pool.commit(part(pages, 0, 2))
    assert counts(pool) == (5, 1, 2, 0, 0)
    pool.unpin(2)
    assert counts(pool) == (5, 1, 0, 2, 0)
    pool.pin(1)
    pool.unpin(1)
    pool.drain(part(pages, 2, len(pages)))
    assert counts(pool) == (5, 0, 0, 2, 1)
    pool.resume(part(pages, 2, len(pages)))
    pool.drain(part(pages, 2, len(pages)))
    pool.settle(part(pages, 2, len(pages)))
    pool.evict(part(pages, 0, 2))
    assert counts(pool) == (8, 0, 0, 0, 0) and pool.evicted == 2


def test_a_fresh_pool_gives_contiguous_ascending_runs() -> None:
    pool = PagePool(32, 0)
    assert list(pool.take(5)[0]) == [0, 1, 2, 3, 4]
    assert list(pool.take(3)[0]) == [5, 6, 7]


def test_pages_that_came_back_in_disorder_go_out_in_order_after_tidying() -> None:
    pool = PagePool(16, 0)
    pages = pool.take(16)[0]
    for page in np.random.default_rng(3).permutation(table_of(pages)):
        pool.give(np.array([page], np.uint32))
    pool.tidy()
    assert list(pool.take(16)[0]) == list(range(16))


@pytest.mark.parametrize("move", ["give", "commit", "evict", "settle", "resume"])
def test_a_free_page_cannot_be_moved_as_if_it_were_not(move: str) -> None:
    pool = PagePool(4, 0)
    with pytest.raises(LedgerError):
        getattr(pool, move)(np.array([1], np.uint32))


def test_giving_a_page_back_twice_is_a_bug_that_shows() -> None:
    pool = PagePool(4, 0)
    pages = pool.take(1)[0]
    pool.give(pages)
    with pytest.raises(LedgerError):
        pool.give(pages)


def test_pages_beyond_the_pool_are_none_of_it() -> None:
    pool = PagePool(4, 0)
    pool.take(4)
    for pages in (Run(3, 6), Run(4, 5), Run(4, 20)):
        with pytest.raises(LedgerError, match=r"pages Run\(\d, \d+\) are"):
            pool.give(pages)
    pool.check()


def test_more_than_is_free_cannot_be_taken() -> None:
    with pytest.raises(LedgerError, match="5 pages taken of 4"):
        PagePool(4, 0).take(5)


def test_a_page_given_out_anew_has_a_larger_sequence_than_any_before() -> None:
    pool = PagePool(4, 1 << 40)
    seen = 1 << 40
    for _ in range(5):
        pages = pool.take(4)[0]
        assert int(pool.sequences[table_of(pages)].min()) > seen
        seen = pool.last_sequence
        pool.give(pages)


def test_identities_grow_with_commits_whatever_the_order_of_grants() -> None:
    pool = PagePool(4, 0)
    (early, _), (late, _) = pool.take(1), pool.take(1)
    pool.commit(late)
    pool.commit(early)
    assert int(pool.identities[early[0]]) > int(pool.identities[late[0]])


def test_states_of_an_earlier_life_are_taken_over() -> None:
    pool = PagePool(6, 0)
    states = np.array([0, 3, 3, 4, 0, 0], np.uint8)
    pool.adopt(states)
    assert counts(pool) == (3, 0, 0, 2, 1)
    assert list(pool.take(3)[0]) == [0, 4, 5]


def test_the_states_that_others_see_cannot_be_written() -> None:
    pool = PagePool(2, 0)
    with pytest.raises(ValueError, match="read-only"):
        pool.states[0] = HeaderState.HELD


def test_a_wrong_count_does_not_pass_the_check() -> None:
    pool = PagePool(4, 0)
    taken = pool.take(1)[0]
    pool.held += 1
    with pytest.raises(LedgerError):
        pool.check()
    assert len(taken) == 1
