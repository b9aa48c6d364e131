"""Who gives pages when some are wanted: whoever has the most for its share, page by page."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemesh.pager.eviction import Lru
from pagemesh.pager.pages.pool import PagePool
from pagemesh.pager.tree.accounts import Account, Accounts
from pagemesh.pager.tree.leaving import Why
from pagemesh.pager.tree.radix import Forest, Node
from pagemesh.wire.cache_terms import CacheTerms
from pagemesh.wire.tokens import pack

TOTAL = 400


class Tenants:
    """Trees of tenants with these quotas (0: none), and what each has cached, in edges."""

    def __init__(self, quotas: list[int], edges: list[list[int]]) -> None:
        self.pool = PagePool(TOTAL, 0)
        self.accounts = Accounts(TOTAL, Lru(), lambda _pages: Lru(), 8)
        self.forest = Forest(self.pool, 1, self.accounts)
        for index, (quota, counts) in enumerate(zip(quotas, edges, strict=True)):
            tree = self.forest.plant(bytes([index]) * 32, index)
            terms = CacheTerms(tenant=f"t{index}", pages_max=quota) if quota else CacheTerms()
            self.accounts.assign(tree, terms, lambda: (0, 0))
            for number, count in enumerate(counts):
                tokens = pack(range(1_000 * number, 1_000 * number + count))
                self.forest.pin(tree.root)
                pages = self.pool.take(count)[0]
                made = self.forest.insert(tree.root, tokens, pages, grow=False)
                self.forest.unpin(tree.root)
                self.forest.unpin(made.node)

    def share(self, account: Account) -> float:
        others = sum(one.quota_pages for one in self.accounts.by_tenant.values())
        common = account is self.accounts.common
        quota_pages = max(TOTAL - others, 1) if common else account.quota_pages
        return (account.used_pages + account.idle_pages) / quota_pages


edges = st.lists(st.integers(1, 9), max_size=6)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), edges), min_size=1, max_size=6), st.data())
def test_at_each_edge_that_goes_nobody_has_more_for_its_share(
    tenants: list[tuple[int, list[int]]], data: st.DataObject
) -> None:
    made = Tenants([quota for quota, _ in tenants], [counts for _, counts in tenants])
    gave: list[int] = []

    def leaving(node: Node, page_count: int, why: Why) -> None:
        gave.append(page_count)
        with_idle = [one for one in made.accounts if one.idle_pages]
        assert made.share(node.account) == max(made.share(one) for one in with_idle)

    made.forest.on_leave(leaving)
    while made.pool.idle:
        count = data.draw(st.integers(1, made.pool.idle))
        for pages, _ in made.forest.reuse(count, 0)[0]:
            made.pool.give(pages)
    assert sum(gave) == sum(sum(counts) for _, counts in tenants)


@pytest.mark.sources
def test_many_edges_of_one_tenant_go_after_one_look_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Tenants([50] * 5, [[4] * 10, *[[4]] * 4])
    looks: list[Account] = []
    richest = made.accounts.richest

    def look() -> tuple[Account, float]:
        found = richest()
        looks.append(found[0])
        return found

    monkeypatch.setattr(made.accounts, "richest", look)
    made.forest.reuse(32, 0)
    assert [account.tenant for account in looks] == ["t0"]
    assert made.accounts.by_tenant["t0"].idle_pages == 8
