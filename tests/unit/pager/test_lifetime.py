"""What is cached for a time: until when it is served, and when its pages are free again."""

from __future__ import annotations

import msgspec
import pytest
from tests.unit.pager.rig import ROOT, Rig, Worker, fill_of, key_of
from tests.unit.pager.test_recovery import declare, line

from pagemesh.pager import books
from pagemesh.pager.eviction import Lru
from pagemesh.pager.pages.pool import PagePool
from pagemesh.pager.pages.runs import Run
from pagemesh.pager.tree.accounts import Accounts
from pagemesh.pager.tree.leaving import Why
from pagemesh.pager.tree.lifetime import FOREVER_MS, Lifetimes
from pagemesh.pager.tree.radix import Forest, Node
from pagemesh.wire.cache_messages import PinPrefix, UnpinPrefix
from pagemesh.wire.cache_terms import CacheTerms

FIRST, SECOND = list(range(8)), list(range(8, 16))
MINUTE = CacheTerms(ttl_s=60)
SOON = CacheTerms(ttl_s=10)
NEVER = CacheTerms()


def cache(worker: Worker, number: int, tokens: list[int], terms: CacheTerms) -> None:
    """A request that computes ``tokens``, and one more, and ends at once."""
    lease = worker.granted(number, [*tokens, 99], terms=terms)
    worker.release(lease, tokens)


def cached(worker: Worker, number: int, tokens: list[int]) -> int:
    """Tokens of a prompt that are cached."""
    lease = worker.granted(number, [*tokens, 99], terms=CacheTerms(ttl_s=1))
    worker.release(lease)
    return lease.cached_tokens


def planted() -> Node:
    """The root of an empty tree."""
    accounts = Accounts(8, Lru(), lambda _pages: Lru(), 8)
    return Forest(PagePool(8, 0), 4, accounts).plant(b"r" * 32, 0).root


def later(rig: Rig, after_ms: int) -> None:
    """Time passes, without a tick."""
    rig.now_ms += after_ms


def test_what_is_over_is_not_served_though_no_tick_came(rig: Rig, worker: Worker) -> None:
    cache(worker, 1, FIRST, MINUTE)
    later(rig, 59_999)
    assert cached(worker, 2, FIRST) == 8
    later(rig, 1)
    assert cached(worker, 3, FIRST) == 8, "looking was a use, for a second"
    later(rig, 1_000)
    assert cached(worker, 4, FIRST) == 0


def test_a_match_stops_where_what_is_over_begins(rig: Rig, worker: Worker) -> None:
    cache(worker, 1, FIRST, NEVER)
    cache(worker, 2, FIRST + SECOND, MINUTE)
    later(rig, 60_000)
    granted = worker.granted(3, [*FIRST, *SECOND, 99])
    assert granted.cached_tokens == 8
    assert granted.waterfall.lost == {"expired": 8} and granted.waterfall.available_tokens == 16


def test_pages_that_are_over_are_free_within_two_seconds_and_leave_as_expired(
    rig: Rig, worker: Worker
) -> None:
    cache(worker, 1, FIRST, MINUTE)
    cache(worker, 2, SECOND, NEVER)
    later(rig, 59_000)
    worker.open()
    rig.tick()
    assert rig.core.books.pool.idle == 4
    for _ in range(3):
        rig.tick(1_000)
    assert rig.core.books.pool.idle == 2
    assert rig.core.books.forest.left_pages[Why.EXPIRED] == 2
    assert not len(rig.core.books.forest.lifetimes)


def test_whoever_uses_it_starts_its_time_anew(rig: Rig, worker: Worker) -> None:
    cache(worker, 1, FIRST, MINUTE)
    for number in range(2, 5):
        later(rig, 50_000)
        worker.open()
        cache(worker, number, FIRST, MINUTE)
    later(rig, 59_000)
    worker.open()
    assert cached(worker, 9, FIRST) == 8


def test_its_time_starts_when_the_last_user_has_ended(rig: Rig, worker: Worker) -> None:
    lease = worker.granted(1, [*FIRST, 99], terms=SOON)
    worker.committed(lease, FIRST)
    for _ in range(4):
        rig.tick(4_000)
        worker.open()
    other = worker.granted(2, [*FIRST, 99], terms=SOON)
    assert other.cached_tokens == 8, "it is in use, so it is not over"
    worker.release(lease, FIRST)
    worker.release(other, FIRST)
    later(rig, 9_000)
    assert worker.granted(3, [*FIRST, 99], terms=SOON).cached_tokens == 8


def test_the_time_of_what_took_long_to_compute_starts_when_that_is_done(
    rig: Rig, worker: Worker
) -> None:
    lease = worker.granted(1, [*FIRST, 99], terms=SOON)
    for _ in range(4):
        rig.tick(4_000)
        worker.heartbeat(lease)
    worker.release(lease, FIRST)
    later(rig, 9_999)
    worker.open()
    assert cached(worker, 2, FIRST) == 8


def test_what_was_over_while_it_was_pinned_is_reclaimed_once_it_is_not(
    rig: Rig, worker: Worker
) -> None:
    cache(worker, 1, FIRST, SOON)
    rig.ask(PinPrefix(root=ROOT.hex(), tokens=FIRST))
    later(rig, 20_000)
    rig.tick()
    worker.open()
    assert cached(worker, 2, FIRST) == 8, "what is in use is never over"
    rig.tick(20_000)
    rig.ask(UnpinPrefix(pin=None))
    rig.tick(2_000)
    assert rig.core.books.pool.free == 16


@pytest.mark.parametrize("order", [(MINUTE, SOON), (SOON, MINUTE)])
def test_of_two_who_share_a_prefix_the_longer_life_counts(
    rig: Rig, worker: Worker, order: tuple[CacheTerms, CacheTerms]
) -> None:
    for number, terms in enumerate(order, 1):
        cache(worker, number, FIRST, terms)
    for _ in range(4):
        rig.tick(10_000)
        worker.open()
    assert cached(worker, 3, FIRST) == 8


def test_what_somebody_keeps_for_ever_keeps_all_above_it(rig: Rig, worker: Worker) -> None:
    cache(worker, 1, FIRST, SOON)
    cache(worker, 2, FIRST + SECOND, NEVER)
    for _ in range(4):
        rig.tick(10_000)
        worker.open()
    assert cached(worker, 3, FIRST + SECOND) == 16
    assert not len(rig.core.books.forest.lifetimes)


def test_what_a_timed_request_adds_to_what_is_kept_for_ever_is_timed(
    rig: Rig, worker: Worker
) -> None:
    growing = worker.granted(1, [*FIRST, *SECOND, 99], terms=SOON)
    worker.committed(growing, FIRST)
    cache(worker, 2, FIRST, NEVER)
    worker.release(growing, FIRST + SECOND)
    later(rig, 10_000)
    worker.open()
    assert cached(worker, 3, FIRST + SECOND) == 8


def test_only_the_part_of_an_edge_that_is_used_lives_on(rig: Rig, worker: Worker) -> None:
    cache(worker, 1, FIRST + SECOND, SOON)
    later(rig, 5_000)
    worker.open()
    cache(worker, 2, FIRST, MINUTE)
    for _ in range(5):
        rig.tick(2_000)
        worker.open()
    assert rig.core.books.pool.idle == 2
    assert cached(worker, 3, FIRST + SECOND) == 8


def test_what_is_over_and_computed_again_lives_again(rig: Rig, worker: Worker) -> None:
    cache(worker, 1, FIRST, SOON)
    later(rig, 10_000)
    worker.open()
    lease = worker.granted(2, [*FIRST, 99], terms=MINUTE)
    assert lease.cached_tokens == 0
    worker.release(lease, FIRST)
    for _ in range(5):
        rig.tick(10_000)
        worker.open()
    assert cached(worker, 3, FIRST) == 8


def test_a_fork_and_a_handover_keep_the_time_to_live(rig: Rig, worker: Worker) -> None:
    lease = worker.granted(1, [*FIRST, 99], terms=SOON)
    (child,) = worker.forked(lease, fill_of(FIRST), [1], reserve=12).children
    offered = worker.offered(lease, fill_of(FIRST))
    other = worker.redeemed(key_of(1), offered)
    worker.release(other, [*FIRST, 99])
    worker.release(child, FIRST)
    later(rig, 10_000)
    worker.open()
    assert cached(worker, 3, FIRST) == 0


def test_a_sequence_that_goes_on_over_a_restart_keeps_its_time_to_live(
    rig: Rig, worker: Worker
) -> None:
    lease = worker.granted(1, [*FIRST, 99], reserve=16, terms=SOON)
    worker.committed(lease, FIRST)
    rig.restart([worker.holder])
    held = msgspec.structs.replace(line(lease, 1, FIRST), terms=SOON)
    assert declare(rig, worker, held) == []
    worker.release(lease, [*FIRST, 99, 98, 97, 96])
    assert cached(worker, 2, FIRST) == 8
    later(rig, 10_000)
    worker.open()
    assert cached(worker, 3, FIRST) == 0


def test_what_a_timed_request_computes_page_by_page_is_one_edge(worker: Worker) -> None:
    lease = worker.granted(1, [*FIRST, *SECOND, 99], terms=MINUTE)
    for filled in (4, 8, 12, 16):
        worker.commit(lease, fill_of([*FIRST, *SECOND], filled))
    [tree] = worker.rig.core.books.forest.trees.values()
    assert [len(node.pages) for node in tree.root.below()] == [4]


def test_what_is_over_goes_with_all_that_hangs_below_it(rig: Rig, worker: Worker) -> None:
    cache(worker, 1, FIRST + SECOND, MINUTE)
    cache(worker, 2, [*FIRST, *range(50, 58)], MINUTE)
    later(rig, 62_000)
    rig.tick()
    assert rig.core.report().free_pages == 16


def test_what_a_tick_had_no_time_for_is_reclaimed_by_a_later_one(
    rig: Rig, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(books, "_RECLAIMED_PAGES_MAX", 1)
    cache(worker, 1, FIRST, MINUTE)
    cache(worker, 2, SECOND, MINUTE)
    later(rig, 62_000)
    rig.tick()
    assert rig.core.report().idle_pages == 2
    rig.tick(1_000)
    assert rig.core.report().idle_pages == 0


def test_a_tick_reclaims_no_more_than_its_share_and_the_next_goes_on() -> None:
    lifetimes, root = Lifetimes(), planted()
    nodes = [Node(root, bytes([number]), Run(0, 1)) for number in range(5)]
    for node in nodes:
        node.expires_ms = 0
        lifetimes.keep(node, 3_000)
    assert lifetimes.over(3_000, 2) == [], "they may be a second late, and are never early"
    parts = [lifetimes.over(4_000, 2) for _ in range(3)]
    assert [len(part) for part in parts] == [2, 2, 1]
    assert [node for part in parts for node in part] == nodes
    lifetimes.again(nodes[0], 4_000)
    lifetimes.check()
    assert lifetimes.over(5_000, 2) == nodes[:1] and not len(lifetimes)


def test_what_is_looked_at_long_afterwards_is_found() -> None:
    lifetimes, root = Lifetimes(), planted()
    node = Node(root, b"a", Run(0, 1))
    node.expires_ms = 0
    lifetimes.keep(node, 1_000)
    lifetimes.keep(Node(root, b"b", Run(0, 1)), FOREVER_MS)
    assert len(lifetimes) == 1
    late = [lifetimes.over(30 * 86_400_000, 8) for _ in range(2)]
    assert late == [[node], []]


def test_what_is_over_and_in_use_keeps_nothing_else_that_is_over(rig: Rig, worker: Worker) -> None:
    cache(worker, 1, FIRST, SOON)
    cache(worker, 2, SECOND, SOON)
    user = worker.granted(3, [*FIRST, 99], terms=SOON)
    later(rig, 9_000)
    worker.heartbeat(user)
    rig.tick(3_000)
    assert rig.core.books.forest.left_pages[Why.EXPIRED] == len(SECOND) // 4


def test_of_a_long_chain_that_is_over_a_tick_drops_so_many_edges_and_the_next_one_goes_on() -> None:
    rig = Rig(700)
    worker, terms = Worker(rig, "w", 1), CacheTerms(tenant="alice", ttl_s=60)
    ids = list(range(4 * 600))
    for end in range(4, len(ids) + 1, 4):
        worker.release(worker.granted(end, ids[:end], terms=terms), ids[:end])
    idle = [rig.core.books.pool.idle]
    rig.tick(62_000)
    for _ in range(4):
        idle.append(rig.core.books.pool.idle)
        rig.tick(1_000)
    assert idle[0] - idle[1] == 256 and idle[-1] == 0
