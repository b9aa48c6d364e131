"""A tree that goes to another tenant's account goes to another eviction policy."""

from __future__ import annotations

from functools import partial

import pytest
from tests.unit.pager.test_eviction import fresh

from pagemesh.pager.audit import check_forest
from pagemesh.pager.eviction import POLICIES, make_policy
from pagemesh.pager.eviction.learned import Learned
from pagemesh.pager.pages.pool import PagePool
from pagemesh.pager.tree.accounts import Accounts
from pagemesh.pager.tree.radix import Forest
from pagemesh.wire.cache_terms import CacheTerms
from pagemesh.wire.tokens import pack


def test_a_tenant_that_takes_a_tree_over_gets_what_the_policy_before_had_put_off() -> None:
    pool = PagePool(16, 0)
    accounts = Accounts(16, Learned(16), Learned, 8)
    forest = Forest(pool, 1, accounts)
    tree = forest.plant(b"r" * 32, 0)
    for first in (1, 2, 1):
        tokens = pack(fresh(first))
        node = forest.pin_match(forest.match(tree.root, tokens, 4))
        if not node.depth:
            made = forest.insert(node, tokens, pool.take(4)[0], grow=False)
            forest.unpin(node)
            node = made.node
        forest.unpin(node)
    accounts.assign(tree, CacheTerms(tenant="t", pages_max=8), lambda: (0, 0))
    check_forest(forest, pool, [])
    assert [node.note.use_count for node in tree.root.below()] == [0, 0]


@pytest.mark.parametrize("stays", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_tree_that_changes_hands_leaves_its_policy_and_no_trace(policy: str, stays: bool) -> None:
    """With edges in use between edges of others, whatever the policy keeps of them."""
    pool = PagePool(48, 0)
    accounts = Accounts(48, make_policy(policy, 48), partial(make_policy, policy), 8)
    forest = Forest(pool, 1, accounts)
    trees = [forest.plant(digest * 32, index) for index, digest in enumerate((b"r", b"s"))]
    anchors = []
    for number, first in enumerate((1, 2, 3, 1, 4, 2)):
        prompt = [*fresh(first), *fresh(100 + number, 2)]
        tokens, root = pack(prompt), trees[number % 2].root
        node = forest.pin_match(forest.match(root, tokens, 6))
        missing = pool.take(6 - node.depth)[0]
        made = forest.insert(node, tokens[4 * node.depth :], missing, grow=False)
        forest.unpin(node)
        anchors.append(made.node)
    for anchor in anchors[1:]:
        forest.unpin(anchor)
    kept = [anchors[0], *anchors[2:4]]
    for anchor in kept[1:]:  # once idle, and used again
        forest.pin(anchor)
    tree = trees[not stays]
    accounts.assign(tree, CacheTerms(tenant="t", pages_max=24), lambda: (0, 0))
    check_forest(forest, pool, kept)
    assert accounts.common.idle_pages and accounts.by_tenant["t"].idle_pages
    for pages, _ in forest.reuse(pool.idle, 0)[0]:
        pool.give(pages)
    check_forest(forest, pool, kept)
    while kept:
        forest.unpin(kept.pop())
    for pages, _ in forest.reuse(pool.idle, 0)[0]:
        pool.give(pages)
    check_forest(forest, pool, kept)
    assert pool.free == 48
