"""The prefix tree, alone with its ledger."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemesh.pager.audit import check_forest
from pagemesh.pager.eviction import Lru
from pagemesh.pager.pages.pool import PagePool
from pagemesh.pager.pages.runs import Run, part
from pagemesh.pager.tree.accounts import Accounts
from pagemesh.pager.tree.leaving import Why
from pagemesh.pager.tree.radix import EDGE_PAGES_MAX, Forest, Node, Tree
from pagemesh.wire.tokens import pack, unpack

SIZE = 4


class Garden:
    """One tree; sequences are put in the way leases do it."""

    def __init__(self, page_count: int = 64) -> None:
        self.pool = PagePool(page_count, 0)
        self.forest = Forest(
            self.pool, SIZE, Accounts(self.pool.total, Lru(), lambda _pages: Lru(), 8)
        )
        self.tree: Tree = self.forest.plant(b"r" * 32, 0)
        self.anchors: list[Node] = []

    def put(self, tokens: Sequence[int], *, pinned: bool = False) -> Node:
        """Insert the full pages of ``tokens``, each computed anew."""
        count = len(tokens) // SIZE
        pages = self.pool.take(count)[0]
        self.forest.pin(self.tree.root)
        made = self.forest.insert(self.tree.root, pack(tokens[: count * SIZE]), pages, grow=False)
        self.forest.unpin(self.tree.root)
        if made.known_pages:
            self.pool.give(part(pages, 0, made.known_pages))
        if pinned:
            self.anchors.append(made.node)
        else:
            self.forest.unpin(made.node)
        return made.node

    def find(self, tokens: Sequence[int]) -> int:
        """Cached tokens of ``tokens``."""
        return SIZE * self.forest.match(self.tree.root, pack(tokens), len(tokens) // SIZE).pages

    def evict(self, count: int) -> None:
        """Take ``count`` idle pages from the trees, for nobody."""
        for pages, _ in self.forest.reuse(count, 0)[0]:
            self.pool.give(pages)

    def check(self) -> None:
        self.pool.check()
        check_forest(self.forest, self.pool, self.anchors)


@pytest.fixture
def garden() -> Garden:
    return Garden()


def test_a_match_ends_at_the_first_page_that_differs(garden: Garden) -> None:
    garden.put(range(16))
    assert garden.find(range(16)) == 16
    assert garden.find([*range(11), 99, *range(12, 16)]) == 8
    assert garden.find([99, *range(1, 16)]) == 0
    assert garden.find(range(7)) == 4
    garden.check()


def test_a_match_says_how_many_tokens_of_the_next_page_agree(garden: Garden) -> None:
    garden.put(range(16))
    tokens = [*range(11), 99, *range(12, 16)]
    inside = garden.forest.match(garden.tree.root, pack(tokens), 4)
    assert (inside.pages, garden.forest.near_tokens(inside, pack(tokens))) == (2, 3)
    at_border = garden.forest.match(garden.tree.root, pack([0, 1, 99, 99]), 1)
    assert (at_border.pages, garden.forest.near_tokens(at_border, pack([0, 1, 99, 99]))) == (0, 2)


def test_pinning_a_match_cuts_the_edge_and_leaves_other_anchors_where_they_were(
    garden: Garden,
) -> None:
    deep = garden.put(range(16), pinned=True)
    match = garden.forest.match(garden.tree.root, pack([*range(8), 99]), 2)
    upper = garden.forest.pin_match(match)
    garden.anchors.append(upper)
    garden.check()
    assert (upper.depth, deep.depth, deep.parent) == (2, 4, upper)
    assert len(garden.forest.table(deep)) == 4
    assert (garden.pool.pinned, garden.pool.idle) == (4, 0)


def test_whatever_leaves_is_told_of_before_it_has_left_with_its_reason(garden: Garden) -> None:
    told: list[tuple[list[int], int, Why]] = []

    def leaver(node: Node, page_count: int, why: Why) -> None:
        garden.check()  # nothing has changed yet
        assert garden.forest.tree_of(node) is garden.tree
        path = unpack(b"".join(n.tokens for n in path_to(node))).tolist()
        told.append((path, page_count, why))

    garden.put(range(8))
    other = garden.put([0, 1, 2, 3, 9, 9, 9, 9])
    garden.forest.on_leave(leaver)
    garden.forest.trim(other, 1, Why.EXPIRED)
    garden.evict(1)
    assert told == [
        ([0, 1, 2, 3, 9, 9, 9, 9], 1, Why.EXPIRED),
        ([*range(8)], 1, Why.EVICTED),
    ]
    assert garden.forest.left_pages == {
        Why.EVICTED: 1, Why.EXPIRED: 1, Why.QUOTA: 0, Why.INVALIDATED: 0,
    }  # fmt: skip
    garden.check()


def path_to(node: Node) -> list[Node]:
    above: list[Node] = []
    while not node.is_root:
        above.append(node)
        node = node.parent
    return above[::-1]


def test_inserting_what_is_there_keeps_the_first_pages_and_reports_the_rest(
    garden: Garden,
) -> None:
    first = garden.put(range(12))
    before = garden.forest.table(first).tolist()
    again = garden.put([*range(12), 50, 51, 52, 53])
    assert garden.forest.table(again).tolist()[:3] == before
    assert (garden.pool.idle, garden.pool.held) == (4, 0)
    garden.check()


def test_a_leaf_that_only_its_maker_knows_grows_in_place(garden: Garden) -> None:
    node = garden.put(range(8), pinned=True)
    pages = garden.pool.take(1)[0]
    made = garden.forest.insert(node, pack([8, 9, 10, 11]), pages, grow=True)
    garden.forest.unpin(node)
    assert made.node is node and node.depth == 3
    garden.check()
    other = garden.put([*range(12), 1, 2, 3, 4], pinned=True)
    assert other.parent is node, "a second lease must not lengthen it"
    more = garden.pool.take(1)[0]
    made = garden.forest.insert(node, pack([7, 7, 7, 7]), more, grow=True)
    garden.forest.unpin(node)
    garden.anchors[0] = made.node
    assert made.node is not node
    garden.check()


def test_an_edge_stops_growing_at_its_limit() -> None:
    garden = Garden(EDGE_PAGES_MAX + 1)
    node = garden.put(list(range(SIZE * EDGE_PAGES_MAX)), pinned=True)
    made = garden.forest.insert(node, pack([1, 2, 3, 4]), garden.pool.take(1)[0], grow=True)
    garden.forest.unpin(node)
    garden.anchors[0] = made.node
    assert made.node.parent is node
    garden.check()


def test_eviction_takes_the_oldest_leaf_from_its_end(garden: Garden) -> None:
    garden.put(range(16))
    garden.put([*range(8), 90, 91, 92, 93])
    garden.find(range(16))
    garden.evict(1)
    assert garden.pool.evicted == 1
    assert garden.find(range(16)) == 12
    assert garden.find([*range(8), 90, 91, 92, 93]) == 12
    garden.evict(2)
    assert garden.find(range(16)) == 8
    garden.check()


def test_an_edge_that_is_little_longer_than_what_is_wanted_goes_whole() -> None:
    garden = Garden(64)
    garden.put(range(16))
    garden.put(range(100, 108))
    [(pages, _)], spare = garden.forest.reuse(3, 1)
    assert (pages, spare) == (Run(1, 4), [Run(0, 1)])
    garden.put(range(200, 240))
    garden.evict(2)
    [(part, _)], [beside] = garden.forest.reuse(1, 2)
    assert (len(part), len(beside)) == (1, 2) and garden.find(range(200, 240)) == 28
    garden.check()


def test_an_edge_that_is_evicted_whole_is_held_again_as_the_run_it_was() -> None:
    garden = Garden(16)
    garden.put(range(16))
    garden.put(range(100, 124))
    before = garden.pool.last_sequence
    grants, spare = garden.forest.reuse(4, 0)
    assert grants == [(Run(0, 4), Run(before + 1, before + 5))] and spare == []
    assert garden.pool.sequences[:4].tolist() == list(grants[0][1])
    assert (garden.pool.held, garden.pool.idle, garden.pool.free) == (4, 6, 6)
    grants, spare = garden.forest.reuse(2, 3)
    assert [pages for pages, _ in grants] == [Run(8, 10)] and spare == [Run(5, 8)]
    assert (garden.pool.held, garden.pool.idle, garden.pool.free) == (6, 1, 9)
    garden.check()


def test_a_parent_goes_only_after_its_children(garden: Garden) -> None:
    garden.put(range(8))
    garden.put([*range(8), 1, 2, 3, 4])
    garden.put([*range(8), 5, 6, 7, 8])
    for left in (3, 2, 1, 0):
        garden.evict(1)
        assert garden.pool.idle == left
        garden.check()
    assert not garden.tree.root.children


def test_what_hangs_below_one_leaf_hangs_below_no_other(garden: Garden) -> None:
    first, second = garden.put(range(4)), garden.put(range(100, 104))
    assert first.children is second.children, "leaves have no tables of their own"
    child = garden.put(range(8))
    assert list(first.children.values()) == [child] and not second.children
    garden.forest.trim(child, 1, Why.EVICTED)
    assert not first.children and not garden.tree.root.children.keys() & {child.tokens}
    assert garden.put(range(8)).parent is first


def test_what_unpinning_would_free_is_told_exactly(garden: Garden) -> None:
    first = garden.put(range(16), pinned=True)
    second = garden.put([*range(8), 90, 91, 92, 93], pinned=True)
    assert garden.forest.try_unpin(first, {}) == 2
    taken: dict[Node, int] = {}
    both = garden.forest.try_unpin(first, taken) + garden.forest.try_unpin(second, taken)
    assert both == 5
    garden.forest.unpin(first)
    garden.forest.unpin(second)
    garden.anchors.clear()
    assert garden.pool.idle == 5
    garden.check()


texts = st.lists(st.integers(0, 2), min_size=0, max_size=24)


@settings(deadline=None)
@given(st.lists(texts, max_size=8), texts)
def test_a_match_is_the_longest_common_run_of_full_pages(
    known: list[list[int]], wanted: list[int]
) -> None:
    garden = Garden()
    for tokens in known:
        garden.put(tokens)
    garden.check()
    longest = 0
    for tokens in known:
        for count in range(1, min(len(tokens), len(wanted)) // SIZE + 1):
            if tokens[: count * SIZE] == wanted[: count * SIZE]:
                longest = max(longest, count * SIZE)
    assert garden.find(wanted) == longest


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200),
    st.data(),
)
def test_one_changed_token_never_over_matches(tokens: list[int], data: st.DataObject) -> None:
    garden = Garden(64)
    garden.put(tokens)
    at = data.draw(st.integers(0, len(tokens) - 1))
    changed = list(tokens)
    changed[at] ^= data.draw(st.sampled_from([1, 1 << 8, 1 << 16, 1 << 31]))
    assert garden.find(changed) == min(at // SIZE, len(tokens) // SIZE) * SIZE
    match = garden.forest.match(garden.tree.root, pack(changed), len(tokens) // SIZE)
    near = garden.forest.near_tokens(match, pack(changed))
    assert match.pages * SIZE + near <= at or at >= len(tokens) // SIZE * SIZE


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(texts, st.booleans(), st.integers(0, 3)), max_size=12))
def test_any_mix_of_inserts_pins_and_evictions_balances(
    steps: list[tuple[list[int], bool, int]],
) -> None:
    garden = Garden(48)
    for tokens, pinned, evictions in steps:
        if garden.pool.free < len(tokens) // SIZE:
            garden.evict(min(garden.pool.idle, len(tokens) // SIZE))
        if garden.pool.free >= len(tokens) // SIZE:
            garden.put(tokens, pinned=pinned)
        garden.evict(min(evictions, garden.pool.idle))
        garden.check()
    while garden.anchors:
        garden.forest.unpin(garden.anchors.pop())
        garden.check()
    garden.evict(garden.pool.idle)
    assert garden.pool.free == 48 and not garden.tree.root.children


def test_finding_one_mismatch_in_a_long_edge_compares_pages_by_halving() -> None:
    garden = Garden(4096)
    tokens = np.arange(4096 * SIZE, dtype=np.uint32).tolist()
    garden.put(tokens)
    for at in (0, 1, SIZE, 2047 * SIZE, 4095 * SIZE + 3):
        changed = list(tokens)
        changed[at] += 1 << 20
        assert garden.find(changed) == at // SIZE * SIZE
