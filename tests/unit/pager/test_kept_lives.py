"""What is cached for a time, over a restart of the pager: as warm as before, and never beyond."""

from __future__ import annotations

import msgspec
import pytest
from tests.unit.pager.rig import Rig, Worker, table_of
from tests.unit.pager.steps import lives
from tests.unit.pager.test_lifetime import FIRST, MINUTE, NEVER, SECOND, SOON, cache, cached
from tests.unit.pager.test_recovery import declare, line

from pagemesh.pager.events import Command, KeepUntil
from pagemesh.pager.tree.lifetime import FOREVER_MS
from pagemesh.wire.cache_terms import CacheTerms
from pagemesh.wire.pool_format import HeaderState

THIRD = list(range(16, 24))


def again(rig: Rig, after_ms: int = 0) -> Worker:
    """The pager is killed, and another starts; nobody else lived."""
    rig.restart(after_ms=after_ms)
    return Worker(rig, f"w{rig.epoch}", rig.epoch)


def test_a_cache_with_a_time_to_live_is_as_warm_as_before(rig: Rig, worker: Worker) -> None:
    cache(worker, 1, FIRST, MINUTE)
    cache(worker, 2, SECOND, NEVER)
    before = lives(rig)
    worker = again(rig)
    assert lives(rig) == before
    assert cached(worker, 3, FIRST) == 8 and cached(worker, 4, SECOND) == 8


def test_what_was_over_while_no_pager_ran_is_not_served(rig: Rig, worker: Worker) -> None:
    cache(worker, 1, FIRST, MINUTE)
    worker = again(rig, 60_000)
    assert cached(worker, 2, FIRST) == 0
    for _ in range(3):
        rig.tick(1_000)
    assert rig.core.books.pool.free == 16
    assert not rig.headers.tokens.any(), "nor do its tokens lie in the headers"


def test_its_time_goes_on_and_does_not_start_anew(rig: Rig, worker: Worker) -> None:
    cache(worker, 1, FIRST, MINUTE)
    for _ in range(5):
        worker = again(rig, 11_900)
    assert cached(worker, 2, FIRST) == 8
    cache(again(rig), 3, SECOND, SOON)
    worker = again(rig, 9_999)
    assert cached(worker, 4, SECOND) == 8
    assert cached(again(rig, 1_000), 5, SECOND) == 0


def test_what_others_cached_below_it_is_there_with_all_above(rig: Rig, worker: Worker) -> None:
    cache(worker, 1, FIRST, SOON)
    cache(worker, 2, FIRST + SECOND, NEVER)
    cache(worker, 3, FIRST + SECOND + THIRD, SOON)
    worker = again(rig, 10_000)
    assert cached(worker, 4, FIRST + SECOND + THIRD) == 16
    assert sorted(lives(rig).values()) == [11_000] * 2 + [FOREVER_MS] * 4


def test_of_one_chain_the_part_that_was_used_longer_lives_longer(rig: Rig, worker: Worker) -> None:
    cache(worker, 1, FIRST + SECOND, SOON)
    cache(worker, 2, FIRST, MINUTE)
    before = lives(rig)
    assert len(set(before.values())) == 2
    worker = again(rig)
    assert lives(rig) == before
    assert cached(again(rig, 10_000), 3, FIRST + SECOND) == 8


def test_what_was_used_again_says_so_though_its_end_was_evicted(rig: Rig, worker: Worker) -> None:
    cache(worker, 1, FIRST + SECOND, SOON)
    rig.now_ms += 5_000
    cache(worker, 2, FIRST + SECOND, SOON)
    other = worker.granted(3, range(100, 154))  # fourteen pages: two of the four are evicted
    worker.release(other, cache=False)
    before = lives(rig)
    assert len(before) == 2
    again(rig)
    assert lives(rig) == before


def test_what_is_left_of_an_edge_that_was_cut_lives_as_long_as_that_did(
    rig: Rig, worker: Worker
) -> None:
    cache(worker, 1, FIRST + SECOND, SOON)
    rig.now_ms += 5_000
    cache(worker, 2, FIRST + SECOND, SOON)
    assert cached(worker, 3, FIRST) == 8, "a shorter use, which prolongs nothing"
    worker.release(worker.granted(4, range(100, 154)), cache=False)
    before = lives(rig)
    assert before == dict.fromkeys(before, 16_000) and len(before) == 2
    again(rig)
    assert lives(rig) == before


def test_a_pager_that_dies_before_it_has_said_so_leaves_nothing_below_what_is_over(
    rig: Rig, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever uses a page uses those above: what the lower one says holds for all."""
    cache(worker, 1, FIRST, SOON)
    cache(worker, 2, FIRST + SECOND[:4], SOON)
    perform = rig.perform

    def all_but_lives(command: Command) -> None:
        if not isinstance(command, KeepUntil):
            perform(command)

    monkeypatch.setattr(rig, "perform", all_but_lives)
    cache(worker, 3, FIRST + SECOND, MINUTE)
    cache(worker, 4, FIRST + THIRD, NEVER)
    monkeypatch.undo()
    again(rig, 10_000)
    assert sorted(set(lives(rig).values())) == [61_000, FOREVER_MS]


def test_what_is_in_use_stays_with_whoever_says_so_though_its_time_is_over(
    rig: Rig, worker: Worker
) -> None:
    lease = worker.granted(1, [*FIRST, 99], reserve=16, terms=SOON)
    worker.committed(lease, FIRST)
    rig.restart([worker.holder], after_ms=20_000)
    late = Worker(rig, "late", 2)
    assert cached(late, 2, FIRST) == 0, "nobody has said that it is in use"
    held = msgspec.structs.replace(line(lease, 1, FIRST), terms=SOON)
    assert declare(rig, worker, held) == []
    assert cached(late, 3, FIRST) == 8
    worker.release(lease, [*FIRST, 99, 98, 97, 96])
    rig.now_ms += 9_999
    late.open()
    assert cached(late, 4, FIRST) == 8


def test_what_was_committed_page_by_page_for_a_time_is_one_edge_again(
    rig: Rig, worker: Worker
) -> None:
    """Though each page was kept a while longer than the one before it."""
    lease = worker.granted(1, [*FIRST, *SECOND, 99], terms=SOON)
    for count in (4, 8, 12, 16):
        rig.now_ms += 1_000
        worker.committed(lease, (FIRST + SECOND)[:count])
    cache(worker, 2, THIRD, NEVER)
    again(rig)
    [tree] = rig.core.books.forest.trees.values()
    assert sorted(len(node.pages) for node in tree.root.below()) == [2, 4]


def test_what_was_in_use_when_all_died_is_kept_from_its_last_page_on(
    rig: Rig, worker: Worker
) -> None:
    lease = worker.granted(1, FIRST + SECOND[:1], reserve=16, terms=SOON)
    worker.committed(lease, FIRST)
    rig.now_ms += 4_000
    worker.committed(lease, FIRST + SECOND[:4])
    worker = again(rig, 9_999)
    assert cached(worker, 2, FIRST + SECOND[:4]) == 12
    assert cached(again(rig, 1_001), 3, FIRST) == 0


def test_a_page_below_a_torn_one_is_not_believed_and_leaves_no_tokens(
    rig: Rig, worker: Worker
) -> None:
    lease = worker.granted(1, FIRST, terms=MINUTE)
    first, then = table_of(lease)
    worker.release(lease, FIRST)
    rig.headers.states[first] = HeaderState.INVALID
    rig.restart()
    assert rig.core.books.pool.free == 16
    assert not rig.headers.tokens[then].any()


def test_what_was_over_for_hours_delays_nothing_that_is_over_now(rig: Rig, worker: Worker) -> None:
    cache(worker, 1, FIRST, MINUTE)
    cache(worker, 2, SECOND, CacheTerms(ttl_s=18_000))
    again(rig, 17_999_000)
    rig.tick(2_000)
    assert rig.core.books.pool.free == 16
