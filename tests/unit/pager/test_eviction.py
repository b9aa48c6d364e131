"""Eviction policies, driven by a prefix tree over a small pool."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterable, Sequence
from typing import get_args, get_type_hints

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemesh.pager.audit import check_forest
from pagemesh.pager.eviction import POLICIES, EvictionPolicy, Lru, make_policy
from pagemesh.pager.eviction.ghosts import Ghost, Ghosts
from pagemesh.pager.eviction.learned import Learned
from pagemesh.pager.pages.pool import PagePool
from pagemesh.pager.tree.accounts import Accounts
from pagemesh.pager.tree.radix import Forest, Node
from pagemesh.runtime.settings import PagerConfig
from pagemesh.wire.errors import ConfigError
from pagemesh.wire.tokens import pack

Prompt = Sequence[int]


class Cache:
    """A pool of one-token pages under a policy; prompts come one after the other."""

    def __init__(self, page_count: int, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.pool = PagePool(page_count, 0)
        self.forest = Forest(
            self.pool, 1, Accounts(self.pool.total, policy, lambda _pages: Lru(), 8)
        )
        self.root = self.forest.plant(b"r" * 32, 0).root
        self.anchors: list[Node] = []

    def begin(self, prompt: Prompt) -> int:
        """Cache ``prompt`` and keep it pinned. Returns how many pages of it were there."""
        tokens = pack(prompt)
        match = self.forest.match(self.root, tokens, len(prompt))
        node = self.forest.pin_match(match)
        known = node.depth
        short = len(prompt) - known - self.pool.free
        if short > 0:
            self.evict(short)
        if known < len(prompt):
            pages = self.pool.take(len(prompt) - known)[0]
            made = self.forest.insert(node, tokens[4 * known :], pages, grow=False)
            self.forest.unpin(node)
            node = made.node
        self.anchors.append(node)
        return known

    def end(self, index: int = 0) -> None:
        self.forest.unpin(self.anchors.pop(index))

    def serve(self, prompt: Prompt) -> int:
        known = self.begin(prompt)
        self.end(-1)
        return known

    def hits(self, prompts: Iterable[Prompt]) -> int:
        return sum(self.serve(prompt) for prompt in prompts)

    def holds(self, prompt: Prompt) -> int:
        return self.forest.match(self.root, pack(prompt), len(prompt)).pages

    def evict(self, count: int) -> None:
        for pages, _ in self.forest.reuse(count, 0)[0]:
            self.pool.give(pages)

    def take(self, step: Prompt | int | None) -> None:
        """A prompt begins, while fewer than three are there; the first one ends (None); or so many
        pages are evicted."""
        if step is None:
            if self.anchors:
                self.end()
        elif isinstance(step, int):
            self.evict(min(step, self.pool.idle))
        elif len(self.anchors) < 3:
            self.begin(step)

    def check(self) -> None:
        self.pool.check()
        check_forest(self.forest, self.pool, self.anchors)


def fresh(first: int, count: int = 4) -> range:
    """A prompt that shares nothing with others."""
    return range(first * 1_000, first * 1_000 + count)


def chats(count: int, seed: int) -> list[Prompt]:
    """Few system prompts, most asked once by somebody new, some chats that go on and on."""
    rng, talk = random.Random(seed), [1]
    prompts: list[Prompt] = []
    for number in range(count):
        system = fresh(1 + min(int(rng.expovariate(0.35)), 20), 6)
        prompts.append([*system, *fresh(100 + number, rng.randint(2, 6))])
        if number % 4 == 0:
            talk = [1, *talk[-20:], number] if len(talk) > 30 else [*talk, number, number + 1]
            prompts.append(list(talk))
    return prompts


@pytest.fixture(params=POLICIES)
def name(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


def test_the_setting_offers_exactly_the_policies_there_are() -> None:
    assert set(get_args(get_type_hints(PagerConfig)["eviction"])) == set(POLICIES)
    assert PagerConfig().eviction == next(iter(POLICIES))


def test_an_unknown_policy_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="'mru'; there are learned, lru"):
        make_policy("mru", 8)


steps = st.lists(
    st.one_of(
        st.lists(st.integers(0, 2), min_size=1, max_size=7).map(tuple),
        st.integers(0, 3),
        st.none(),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=150)
@given(steps)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_names_idle_leaves_only_and_loses_none(
    policy: str, steps: list[tuple[int, ...] | int | None]
) -> None:
    cache = Cache(24, make_policy(policy, 24))
    for step in steps:
        cache.take(step)
        if cache.pool.idle:
            node, pages_max = cache.policy.victim()
            assert not node.pins and not node.children and 1 <= pages_max <= len(node.pages)
        else:
            with pytest.raises(LookupError):
                cache.policy.victim()
        cache.check()
    while cache.anchors:
        cache.end()
    cache.evict(cache.pool.idle)
    assert cache.pool.free == 24 and not list(cache.policy)


def test_a_policy_forgets_what_is_used_again_until_it_is_idle(name: str) -> None:
    cache = Cache(16, make_policy(name, 16))
    cache.serve(fresh(1))
    cache.serve(fresh(2))
    cache.begin(fresh(1))
    cache.evict(4)
    assert (cache.holds(fresh(1)), cache.holds(fresh(2))) == (4, 0)
    with pytest.raises(LookupError):
        cache.policy.victim()
    cache.end()
    cache.evict(4)
    assert not cache.holds(fresh(1))


@pytest.mark.parametrize("policy", ["lru", "lfu", "priority"])
def test_an_edge_that_waits_in_a_queue_takes_no_memory_for_it(policy: str) -> None:
    cache = Cache(2_000, make_policy(policy, 2_000))
    cache.serve(fresh(0))
    for number in range(1, 400):
        cache.begin(fresh(number))
    tracemalloc.start()
    try:
        for anchor in cache.anchors:
            cache.forest.unpin(anchor)
        grown = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert cache.pool.idle == 1_600 and grown < 2_000
    cache.anchors.clear()
    cache.check()


def test_what_is_in_no_queue_cannot_be_taken_out_of_one() -> None:
    cache = Cache(8, Lru())
    cache.begin(fresh(1))
    with pytest.raises(AssertionError, match="in no queue"):
        cache.policy.remove(cache.anchors[0])


def test_lru_evicts_pages_in_the_order_of_their_last_use() -> None:
    """Against the plainest model there is: every page with the time of its last use."""
    rng = random.Random(3)
    cache, used = Cache(40, Lru()), dict[tuple[int, ...], int]()
    for now in range(600):
        prompt = tuple(rng.choices(range(3), k=rng.randint(1, 9)))
        known = cache.serve(prompt)
        places = [prompt[:end] for end in range(1, len(prompt) + 1)]
        assert known == sum(place in used for place in places)
        used |= dict.fromkeys(places, now)
        for _ in range(len(used) - 40):
            # Of pages used at the same time, the deepest goes first.
            del used[min(used, key=lambda place: (used[place], -len(place)))]
    assert cache.pool.evicted > 500


def test_lfu_keeps_what_was_used_more_often_however_long_ago() -> None:
    cache = Cache(8, make_policy("lfu", 8))
    for _ in range(3):
        cache.serve(fresh(1))
    cache.hits(fresh(number) for number in range(2, 12))
    assert cache.holds(fresh(1)) == 4
    cache.evict(8)
    assert not cache.holds(fresh(1))


def test_s3_fifo_lets_what_is_asked_once_pass_by() -> None:
    cache = Cache(40, make_policy("s3-fifo", 40))
    for number in (1, 2, 3, 1, 2, 3):
        cache.serve(fresh(number))
    cache.hits(fresh(number) for number in range(10, 60))
    assert [cache.holds(fresh(number)) for number in (1, 2, 3)] == [4, 4, 4]


def test_s3_fifo_takes_what_it_evicted_too_early_for_good_the_second_time() -> None:
    cache = Cache(40, make_policy("s3-fifo", 40))
    cache.hits(fresh(number) for number in range(1, 12))
    assert not cache.holds(fresh(1))
    cache.serve(fresh(1))
    cache.hits(fresh(number) for number in range(20, 60))
    assert cache.holds(fresh(1)) == 4


def test_s3_fifo_has_what_was_used_at_first_used_again_before_it_stays_for_longer() -> None:
    """What it counted in the small queue brought it into the main one, and is spent by that."""
    cache = Cache(40, make_policy("s3-fifo", 40))
    for number in (1, 1, 1, 1, 2, 2, 3, 4):
        cache.serve(fresh(number))
    cache.evict(4)
    assert [cache.holds(fresh(number)) for number in (1, 2, 3, 4)] == [4, 4, 0, 4]
    cache.evict(4)
    assert [cache.holds(fresh(number)) for number in (1, 2, 3, 4)] == [0, 4, 0, 4]


def test_priority_evicts_by_rank_and_then_by_age() -> None:
    cache = Cache(12, make_policy("priority", 12))
    for number, rank in ((1, 1), (2, -1), (3, 0)):
        cache.begin(fresh(number))
        cache.forest.used(cache.anchors[-1], 0, rank)
        cache.end()
    for gone, left in ((2, (1, 3)), (3, (1,)), (1, ())):
        cache.evict(4)
        assert not cache.holds(fresh(gone)) and all(cache.holds(fresh(one)) for one in left)


def test_cost_evicts_first_what_is_quick_to_compute_again_but_not_for_ever() -> None:
    deep, shallow = [*fresh(1, 600)], [*fresh(2, 100)]
    cache = Cache(1_000, make_policy("cost", 1_000))
    cache.serve(deep)
    cache.serve(shallow)
    cache.evict(50)
    assert (cache.holds(deep), cache.holds(shallow)) == (600, 50)
    cache.hits(fresh(number, 100) for number in range(3, 40))
    assert not cache.holds(deep)


def test_learned_is_lru_where_nothing_comes_again() -> None:
    lru, learned = Cache(64, Lru()), Cache(64, Learned(64))
    for number in range(200):
        for cache in (lru, learned):
            cache.serve(fresh(number, 1 + number % 7))
    for number in range(200):
        prompt = fresh(number, 1 + number % 7)
        assert lru.holds(prompt) == learned.holds(prompt)


@pytest.mark.parametrize(("page_count", "gain"), [(60, 1.05), (120, 1.05), (240, 1.0), (480, 1.0)])
def test_learned_hits_more_than_lru_where_few_prompts_come_often(
    page_count: int, gain: float
) -> None:
    prompts = chats(1_500, seed=page_count)
    lru, learned = Cache(page_count, Lru()), Cache(page_count, Learned(page_count))
    assert learned.hits(prompts) > gain * lru.hits(prompts)
    learned.check()


def test_learned_evicts_last_pages_first_once_it_saw_that_next_turns_replace_them() -> None:
    cache = Cache(800, Learned(800))
    talks = [list(fresh(number)) for number in range(1, 31)]
    ends = iter(range(1_000_000, 2_000_000))
    for turn in range(6):
        for talk in talks:
            talk += [talk[0] + 100 + turn, talk[0] + 200 + turn]
            cache.serve([*talk, next(ends)])
    bodies = [cache.holds(talk) for talk in talks]
    cache.evict(100)
    assert [cache.holds(talk) for talk in talks] == bodies
    cache.check()


@pytest.mark.parametrize("page_count", [400, 800])
def test_learned_keeps_what_it_can_of_documents_that_come_in_turns_and_do_not_all_fit(
    page_count: int,
) -> None:
    documents = [fresh(number, 10) for number in range(1, 101)]
    ends = iter(range(1_000_000, 2_000_000))
    rounds = [[*document, next(ends)] for _ in range(30) for document in documents]
    lru, learned = Cache(page_count, Lru()), Cache(page_count, Learned(page_count))
    assert lru.hits(rounds) == 0, "what was used longest ago comes next"
    learned.hits(rounds[:1_500])
    assert learned.hits(rounds[1_500:]) > 0.85 * (page_count - 11) / 1_000 * 15_000
    learned.check()


def test_learned_knows_what_comes_back_from_before_it_was_evicted() -> None:
    cache = Cache(64, Learned(64))
    for _ in range(5):
        cache.serve(fresh(1))
    cache.evict(cache.pool.idle)
    cache.serve(fresh(1))
    cache.serve(fresh(2))
    cache.policy.tidy()
    [known, new] = sorted((n.note.use_count for n in cache.root.children.values()), reverse=True)
    assert (known, new) == (5, 0)


@settings(deadline=None, max_examples=150)
@given(steps)
def test_learned_puts_off_what_it_is_told_and_comes_to_the_same(
    steps: list[tuple[int, ...] | int | None],
) -> None:
    """Two tokens a step make chains, branches, cuts and returns; only one cache tidies at once."""
    late, soon = Cache(24, Learned(24)), Cache(24, Learned(24))
    for step in steps:
        for cache in (late, soon):
            cache.take(step)
            if cache is soon:
                cache.policy.tidy()
        assert np.array_equal(late.pool.states, soon.pool.states)
    for cache in (late, soon):
        while cache.anchors:
            cache.end()
    order = [[node.tokens for node in cache.policy] for cache in (late, soon)]
    assert order[0] == order[1]
    late.check()


def test_ghosts_are_bounded_in_number_and_in_pages() -> None:
    forgotten: list[int] = []
    ghosts = Ghosts(100, 8, lambda ghost: forgotten.append(ghost.place))
    for place in range(20):
        ghosts.put(Ghost(place, place, 0, 0, 0, 10))
    assert len(ghosts) == 8 and forgotten == list(range(12))
    ghosts.put(Ghost(99, 99, 0, 0, 0, 95))
    assert len(ghosts) == 1 and ghosts.take(99) is not None
