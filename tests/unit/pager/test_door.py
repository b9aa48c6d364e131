"""What operators see of the cache, keep in it and drop from it."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from tests.unit.pager.rig import ROOT, Rig, Worker, code_of, fill_of, is_queued, table_of
from tests.unit.pager.steps import OTHER, cache, invalidated, pin, pinned, stats
from tests.unit.pager.test_recovery import declare, line

from pagemesh.pager import door
from pagemesh.pager.retention.pins import name_of
from pagemesh.wire.cache_messages import (
    AskCacheStats,
    AskCacheTop,
    AskCacheTree,
    CacheLine,
    CacheTop,
    CacheTree,
    InvalidateCache,
    PrefixPinned,
    PrefixUnpinned,
    UnpinPrefix,
)
from pagemesh.wire.cache_terms import CacheTerms
from pagemesh.wire.messages import Refused
from pagemesh.wire.pager_messages import Extended, Granted, Revoke
from pagemesh.wire.tokens import pack


def lines(rig: Rig, first: int = 0, limit: int = 100, root: str = "") -> list[CacheLine]:
    answer = rig.ask(AskCacheTree(root=root, first=first, limit=limit))
    assert isinstance(answer, CacheTree)
    return answer.lines


# Looking


def test_statistics_are_the_ledger_and_what_was_hit(rig: Rig, worker: Worker) -> None:
    cache(worker, 1, range(9))
    worker.granted(2, range(12))
    told = stats(rig)
    assert (told.total_pages, told.pinned_pages, told.held_pages) == (16, 2, 1)
    assert (told.prompt_tokens, told.cached_tokens, told.root_count) == (21, 8, 1)
    assert told.left_pages == {"evicted": 0, "expired": 0, "quota": 0, "invalidated": 0}


def test_the_tree_lists_each_edge_after_the_one_above_it_in_parts(rig: Rig, worker: Worker) -> None:
    cache(worker, 1, range(12))
    cache(worker, 2, [0, 1, 2, 3, 9, 9, 9, 9])
    cache(worker, 3, range(50, 54), root=OTHER)
    rig.tick(5_000)
    whole = lines(rig)
    assert [(line.root, line.level, line.depth_pages, line.pages) for line in whole] == [
        (ROOT.hex(), 0, 1, 1), (ROOT.hex(), 1, 3, 2), (ROOT.hex(), 1, 2, 1), (OTHER.hex(), 0, 1, 1),
    ]  # fmt: skip
    assert [lines(rig, first, 1)[0] for first in range(4)] == whole
    assert not lines(rig, 4) and lines(rig, root=OTHER.hex()[:8]) == whole[3:]


def test_a_listing_ends_where_looking_would_take_too_long(
    rig: Rig, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "_EDGES_MAX", 2)
    for number in (1, 2, 3):
        cache(worker, number, range(50 * number, 50 * number + 4))
    answer = rig.ask(AskCacheTree(first=1, limit=5))
    assert isinstance(answer, CacheTree) and len(answer.lines) == 1 and answer.more
    refused = rig.ask(AskCacheTree(first=2))
    assert isinstance(refused, Refused) and refused.code == "Malformed"
    assert refused.message == "a listing ends after 2 edges: ask for that of one root (--root)"


def test_an_edge_is_as_old_as_its_last_commit(rig: Rig, worker: Worker) -> None:
    rig.tick()
    cache(worker, 1, range(8))
    rig.tick(1_000)
    rig.tick(30_000)
    [line] = lines(rig)
    assert line.age_s == 30


def test_what_an_earlier_pager_cached_has_no_age(rig: Rig, worker: Worker) -> None:
    cache(worker, 1, range(8))
    rig.restart()
    rig.tick(1_000)
    [line] = lines(rig)
    assert line.age_s is None


def test_the_top_edges_are_those_that_saved_the_most_prefill(rig: Rig, worker: Worker) -> None:
    cache(worker, 1, range(13))
    cache(worker, 2, range(50, 55))
    for number in range(3, 6):
        cache(worker, number, [*range(8), number, number, number, number])
    cache(worker, 7, range(50, 55))
    answer = rig.ask(AskCacheTop(limit=2))
    assert isinstance(answer, CacheTop) and answer.complete
    assert [(line.pages, line.uses) for line in answer.lines] == [(2, 3), (1, 1)]
    longest = rig.ask(AskCacheTop(by="size", limit=1))
    assert isinstance(longest, CacheTop) and longest.lines[0].depth_pages == 3


# Pinning


def test_a_pinned_prefix_survives_what_evicts_everything_else(worker: Worker, rig: Rig) -> None:
    cache(worker, 1, range(8))
    assert pinned(rig, range(10)).tokens == 8
    for number in range(2, 6):
        cache(worker, number, range(100 * number, 100 * number + 56))
    assert worker.granted(9, range(9)).cached_tokens == 8
    [line] = stats(rig).pins
    assert (line.pages, line.expires_in_s) == (2, None)


def test_a_pin_ends_with_its_lifetime_or_when_it_is_unpinned(rig: Rig, worker: Worker) -> None:
    cache(worker, 1, range(8))
    cache(worker, 2, range(50, 54))
    pinned(rig, range(8), ttl_s=2)
    kept = pinned(rig, range(50, 54))
    rig.tick(1_999)
    assert len(stats(rig).pins) == 2
    rig.now_ms += 3_000
    assert [line.expires_in_s for line in stats(rig).pins] == [0, None], "no tick has come yet"
    rig.tick(1)
    assert [line.pin for line in stats(rig).pins] == [kept.pin]
    answer = rig.ask(UnpinPrefix(pin=kept.pin))
    assert answer == PrefixUnpinned(host="host", pins=[kept.pin])
    assert rig.core.books.pool.pinned == 0
    assert code_of(rig.ask(UnpinPrefix(pin=kept.pin))) == "Gone"


def test_pinning_again_takes_what_was_cached_since_and_the_new_lifetime(
    rig: Rig, worker: Worker
) -> None:
    cache(worker, 1, range(4))
    first = pinned(rig, range(12), ttl_s=5)
    assert (first.pages, first.asked_tokens) == (1, 12)
    cache(worker, 2, range(12))
    again = pinned(rig, range(12), ttl_s=50)
    assert (again.pin, again.pages, again.expires_in_s) == (first.pin, 3, 50)
    assert first.before is None and again.before is not None
    assert (again.before.pages, again.before.expires_in_s) == (1, 5)
    assert rig.core.books.pool.pinned == 3 and len(stats(rig).pins) == 1
    assert first.pin == name_of(ROOT, pack(range(12)), 16)


def test_what_is_not_cached_cannot_be_pinned(rig: Rig, worker: Worker) -> None:
    assert code_of(pin(rig, range(8))) == "Gone"
    cache(worker, 1, range(8))
    assert code_of(pin(rig, range(8), root=OTHER)) == "Gone"
    assert code_of(pin(rig, range(3))) == "Malformed"


def test_pins_take_no_more_than_their_share_of_the_pool(rig: Rig, worker: Worker) -> None:
    cache(worker, 1, range(12))
    cache(worker, 2, [*range(8), 9, 9, 9, 9, 8, 8, 8, 8])
    pinned(rig, range(12))  # 3 of the 4 pages that a quarter of the pool is
    assert code_of(pin(rig, [*range(8), 9, 9, 9, 9, 8, 8, 8, 8])) == "NoCapacity"
    assert pinned(rig, [*range(8), 9, 9, 9, 9]).pages == 3  # of which two are kept already


def test_a_pin_gives_way_to_a_sequence_that_nothing_else_makes_room_for(
    rig: Rig, worker: Worker
) -> None:
    cache(worker, 1, range(16))
    pinned(rig, range(16))
    small = worker.granted(2, range(100, 104))
    assert is_queued(worker.admit(3, range(200, 256)))
    assert len(stats(rig).pins) == 1, "somebody else holds pages and will give them back"
    worker.release(small, range(100, 104))
    rig.tick()
    [granted] = rig.taken(Granted)
    assert len(table_of(granted)) == 14
    assert (stats(rig).pins, stats(rig).pins_given_way) == ([], 1)


def test_a_pin_gives_way_when_it_and_what_the_younger_hold_are_wanted(
    rig: Rig, worker: Worker
) -> None:
    cache(worker, 1, range(16))
    pinned(rig, range(16))
    old, young = worker.granted(2, range(100, 116)), worker.granted(3, range(200, 216))
    assert is_queued(worker.extend(old, 14, 4)), "free and the younger's pages are two too few"
    assert is_queued(worker.extend(young, 5, 4)), "an older one waits"
    rig.tick()
    assert [revoke.key for revoke in rig.taken(Revoke)] == [young.key]
    worker.ack(young)
    [extended] = rig.taken(Extended)
    assert extended.key == old.key and not stats(rig).pins


def test_a_pin_gives_way_to_its_tenant_and_that_of_another_stays(rig: Rig, worker: Worker) -> None:
    cache(worker, 1, range(4))
    kept = pinned(rig, range(4))
    eight = CacheTerms(tenant="alice", pages_max=8)
    lease = worker.granted(2, range(12), root=OTHER, terms=eight)
    worker.release(lease, range(12))
    assert isinstance(pin(rig, range(12), root=OTHER), PrefixPinned)
    assert is_queued(worker.admit(3, range(100, 124), root=OTHER, terms=eight))
    rig.tick()
    [granted] = rig.taken(Granted)
    assert len(table_of(granted)) == 6
    assert [line.pin for line in stats(rig).pins] == [kept.pin]


def test_a_pin_never_takes_a_tenant_over_its_quota(rig: Rig, worker: Worker) -> None:
    five = CacheTerms(tenant="alice", pages_max=5)
    cache(worker, 1, range(8), root=OTHER, terms=five)
    lease = worker.granted(2, range(100, 116), root=OTHER, terms=five)
    refused = pin(rig, range(8), root=OTHER)
    assert isinstance(refused, Refused) and refused.code == "NoCapacity"
    assert "2 pages more" in refused.message and "5 that alice may use" in refused.message
    assert isinstance(pin(rig, range(4), root=OTHER), PrefixPinned), "one page more it may use"
    worker.release(lease, range(100, 116))
    assert isinstance(pin(rig, range(8), root=OTHER), PrefixPinned)


# Invalidating


@pytest.mark.parametrize("what", ["root", "model", "tenant"])
def test_nothing_new_matches_what_was_invalidated(rig: Rig, worker: Worker, what: str) -> None:
    lease = worker.granted(1, range(9), terms=CacheTerms(tenant="alice"))
    worker.release(lease, range(9))
    name = {"root": ROOT.hex()[:8], "model": "a-model", "tenant": "alice"}[what]
    done = invalidated(rig, what, name)
    assert (done.roots, done.freed_pages, done.used_pages) == ([ROOT.hex()], 2, 0)
    assert done.unknown_root_count == 0
    assert worker.granted(2, range(9)).cached_tokens == 0
    assert not rig.cached


def test_another_model_or_tenant_is_left_alone(rig: Rig, worker: Worker) -> None:
    lease = worker.granted(1, range(9), terms=CacheTerms(tenant="alice"))
    worker.release(lease, range(9))
    assert invalidated(rig, "tenant", "bob").roots == []
    assert invalidated(rig, "model", "another").roots == []
    assert worker.granted(2, range(9)).cached_tokens == 8


def test_a_root_that_nobody_used_since_a_restart_counts_as_everybodys(
    rig: Rig, worker: Worker
) -> None:
    cache(worker, 1, range(8))
    rig.restart()
    done = invalidated(rig, "tenant", "bob")
    assert (done.roots, done.unknown_root_count) == ([ROOT.hex()], 1)


def test_a_start_that_several_roots_share_names_none(rig: Rig, worker: Worker) -> None:
    cache(worker, 1, range(4), root=bytes([7]) + OTHER[1:])
    cache(worker, 2, range(4), root=bytes([7]) * 32)
    assert code_of(rig.ask(InvalidateCache(what="root", name="07"))) == "Malformed"
    assert code_of(rig.ask(InvalidateCache(what="root", name="08"))) == "Gone"
    assert code_of(rig.ask(InvalidateCache(what="tenant"))) == "Malformed"
    assert stats(rig).root_count == 2


def test_what_is_idle_goes_and_what_is_used_or_pinned_stays(rig: Rig, worker: Worker) -> None:
    cache(worker, 1, range(8))
    cache(worker, 2, range(50, 58))
    cache(worker, 3, range(90, 98))
    pinned(rig, range(50, 58))
    used = worker.granted(4, range(9))
    done = invalidated(rig, "idle")
    assert (done.freed_pages, done.roots) == (2, [])
    assert stats(rig).left_pages["invalidated"] == 2
    worker.release(used, range(9))
    assert worker.granted(5, range(9)).cached_tokens == 8
    assert worker.granted(6, range(50, 59)).cached_tokens == 8


def test_sequences_of_an_invalidated_root_go_on_with_their_own_pages_until_they_end(
    rig: Rig, worker: Worker
) -> None:
    cache(worker, 1, range(8))
    running = worker.granted(2, range(13), 24)
    done = invalidated(rig, "root", ROOT.hex())
    assert (done.freed_pages, done.used_pages) == (0, 2)
    assert not rig.cached, "routers were not told"
    worker.committed(running, range(16))
    assert not rig.cached, "what a retired root caches is announced"
    fresh = worker.granted(3, range(13))
    assert fresh.cached_tokens == 0
    assert not set(table_of(fresh)) & set(table_of(running))
    worker.committed(fresh, range(13))
    assert stats(rig).retired_root_count == 1
    worker.release(running, range(16))
    assert (stats(rig).retired_root_count, stats(rig).root_count) == (0, 1)
    worker.release(fresh, range(13))
    assert rig.core.books.pool.idle == 3 and len(rig.cached) == 3
    assert worker.granted(4, range(13)).cached_tokens == 12


def test_pins_end_with_their_root(rig: Rig, worker: Worker) -> None:
    cache(worker, 1, range(8))
    name = pinned(rig, range(8)).pin
    done = invalidated(rig, "root", ROOT.hex())
    assert (done.pins, done.freed_pages, stats(rig).pins) == ([name], 2, [])


def test_who_waits_for_pages_of_an_invalidated_root_computes_them(rig: Rig, worker: Worker) -> None:
    worker.granted(1, range(13))
    assert is_queued(worker.admit(2, range(13)))
    invalidated(rig, "root", ROOT.hex())
    [granted] = rig.taken(Granted)
    assert (granted.key.request[-1], granted.cached_tokens) == ("2", 0)


def test_a_ticket_of_an_invalidated_root_is_redeemed_as_ever(rig: Rig, worker: Worker) -> None:
    lease = worker.granted(1, range(9))
    offered = worker.offered(lease, fill_of(range(9)))
    invalidated(rig, "root", ROOT.hex())
    other = Worker(rig, "d", 2)
    redeemed = other.redeemed(lease.key, offered)
    assert table_of(redeemed) == table_of(lease)
    other.release(redeemed, range(9))
    assert rig.core.books.pool.free == 16


def test_a_restarted_pager_does_not_bring_an_invalidated_root_back(
    rig: Rig, worker: Worker
) -> None:
    cache(worker, 1, range(8))
    running = worker.granted(2, range(13))
    worker.committed(running, range(13))
    invalidated(rig, "root", ROOT.hex())
    index = next(iter(rig.core.books.forest.retired))
    rig.restart([worker.holder])
    assert not rig.cached
    worker.open()
    fresh = worker.granted(3, range(13))
    assert fresh.cached_tokens == 0
    assert rig.core.books.forest.trees[ROOT].index != index, "its pages name that line still"
    assert not set(table_of(fresh)) & set(table_of(running))
    rig.die(worker.incarnation)
    assert rig.core.books.pool.free == 16 and not rig.core.books.root_lines.kept


@pytest.mark.parametrize("what", ["root", "model", "tenant"])
@pytest.mark.parametrize("is_meant", [True, False])
def test_a_lease_of_before_a_restart_is_lost_once_it_was_invalidated_since(
    rig: Rig, worker: Worker, what: str, is_meant: bool
) -> None:
    terms = CacheTerms(tenant="alice")
    running = worker.granted(1, range(13), terms=terms)
    rig.restart([worker.holder])
    worker.open()
    name = {"root": ROOT.hex(), "model": "a-model", "tenant": "alice"}[what]
    if is_meant:
        invalidated(rig, what, name)
    elif what != "root":
        cache(worker, 2, range(100, 108), terms=terms)  # now it is known whose the root is
        invalidated(rig, what, "another")
    held = msgspec.structs.replace(line(running, 1, list(range(13))), terms=terms)
    assert declare(rig, worker, held) == ([running.lease] if is_meant else [])
    if not is_meant:
        worker.committed(running, range(13))
    again = worker.granted(3, range(13), terms=terms)
    assert again.cached_tokens == (0 if is_meant else 12)


@pytest.mark.parametrize("what", ["model", "tenant"])
def test_what_was_said_to_be_invalidated_since_nobody_knew_whose_it_was_is_lost_too(
    rig: Rig, worker: Worker, what: str
) -> None:
    """A lease that is declared then says whose it is, but its root was retired by then."""
    terms = CacheTerms(tenant="alice")
    running = worker.granted(1, range(13), terms=terms)
    rig.restart([worker.holder])
    done = invalidated(rig, what, "another")
    assert (done.roots, done.unknown_root_count) == ([ROOT.hex()], 1)
    worker.open()
    held = msgspec.structs.replace(line(running, 1, list(range(13))), terms=terms)
    assert declare(rig, worker, held) == [running.lease]


def test_a_lease_of_an_invalidated_root_is_lost_with_the_pager_that_knew_it(
    rig: Rig, worker: Worker
) -> None:
    running = worker.granted(1, range(13))
    worker.committed(running, range(13))
    invalidated(rig, "root", ROOT.hex())
    rig.restart([worker.holder])
    assert declare(rig, worker, line(running, 1, [*range(13)])) == [running.lease]
    worker.ack(running)
    assert rig.core.books.pool.free == 16 and not rig.core.books.forest.trees


def test_no_answer_to_an_operator_has_tokens_in_it(rig: Rig, worker: Worker) -> None:
    ids = np.random.default_rng(3).integers(1 << 20, 1 << 30, 8).tolist()
    cache(worker, 1, ids)
    asks = (AskCacheStats(), AskCacheTree(), AskCacheTop(by="size"), InvalidateCache(what="idle"))
    answers = [repr(one) for one in (pinned(rig, ids), *map(rig.ask, asks))]
    shown = [text for token in ids for text in (str(token), repr(pack([token]))[2:-1])]
    assert not any(text in answer for text in shown for answer in answers)
