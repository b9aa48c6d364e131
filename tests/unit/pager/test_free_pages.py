"""Free pages, and how grants stay contiguous."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemesh.pager.pages.free_pages import RUN_PAGES_MIN, FreePages
from pagemesh.pager.pages.runs import Run, part, run_of


def test_a_fresh_pool_gives_contiguous_ascending_runs() -> None:
    free = FreePages(64)
    assert free.pop(5) == Run(0, 5)
    assert free.pop(30) == Run(5, 35)
    assert free.count == 29


def test_growth_by_single_pages_does_not_tear_what_prompts_will_take() -> None:
    free = FreePages(256)
    prompts = []
    for _ in range(4):
        prompt, growth = free.pop(32), free.pop(1)
        prompts.append(prompt)
        free.push(growth)
    assert all(isinstance(prompt, Run) for prompt in prompts)


def test_a_run_that_fits_is_preferred_to_pieces_of_others() -> None:
    free = FreePages(64)
    free.pop(64)
    free.push(Run(40, 60))
    free.push(Run(10, 19))
    assert free.pop(20) == Run(40, 60)


def test_single_pages_become_a_run_again_after_tidying() -> None:
    free = FreePages(64)
    free.pop(64)
    free.push(Run(16, 40))
    for page in np.random.default_rng(3).permutation(np.arange(16, dtype=np.uint32)):
        free.push(np.array([page], np.uint32))
    free.tidy()
    assert (free.pop(20), free.pop(20)) == (Run(0, 20), Run(20, 40))


def test_tidying_when_nothing_is_free_does_nothing() -> None:
    free = FreePages(8)
    free.push(free.pop(3))
    free.pop(8)
    free.tidy()
    assert free.count == 0 and not free.table().size


def test_what_is_short_of_a_run_is_gathered_ascending() -> None:
    free = FreePages(64)
    free.pop(64)
    for first in (48, 0, 24):
        free.push(Run(first, first + RUN_PAGES_MIN))
    free.push(np.array([63, 20, 33], np.uint32))
    taken = free.pop(3 * RUN_PAGES_MIN + 3)
    assert list(taken) == sorted([*range(8), *range(24, 32), *range(48, 56), 20, 33, 63])
    assert free.count == 0


steps = st.lists(st.tuples(st.sampled_from(["take", "give", "tidy", "reset"]), st.integers(1, 40)))


@settings(deadline=None)
@given(steps)
def test_no_page_is_lost_or_given_out_twice(moves: list[tuple[str, int]]) -> None:
    free, out = FreePages(96), []
    for move, count in moves:
        if move == "take" and count <= free.count:
            out.append(free.pop(count))
            assert list(out[-1]) == sorted(out[-1]) and len(out[-1]) == count
        elif move == "give" and out:
            pages = out.pop(count % len(out))
            cut = count % (len(pages) + 1)
            free.push(part(pages, 0, cut))
            free.push(part(pages, cut, len(pages)))
        elif move == "tidy":
            free.tidy()
        elif move == "reset":
            free.reset(np.sort(free.table()))
        held = [page for pages in out for page in pages]
        assert sorted([*held, *free.table().tolist()]) == list(range(96))
        assert free.count == 96 - len(held)


def test_an_ascending_table_without_gaps_is_a_run() -> None:
    assert run_of(np.arange(3, 9, dtype=np.uint32)) == Run(3, 9)
    torn = np.array([3, 4, 6], np.uint32)
    assert run_of(torn) is torn
    assert run_of(torn[:0]) == Run(0, 0)
