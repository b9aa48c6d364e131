"""Chain keys are kept at edges, which grow, are cut and get shorter."""

from __future__ import annotations

import pytest

from pagemesh.pager.eviction import Lru
from pagemesh.pager.leases.waiting import WaitList
from pagemesh.pager.pages.runs import NO_PAGES, Run
from pagemesh.pager.tiers.chain_keys import EdgeChains, chain_at, chain_keys, root_chain
from pagemesh.pager.tree.accounts import Account
from pagemesh.pager.tree.node import Node
from pagemesh.wire.tokens import pack

KEY, ROOT, WIDTH = b"k" * 32, bytes(range(32)), 16
TOKENS = pack(range(16))
"""Of four pages."""
START = root_chain(KEY, ROOT)
KEYS = list(chain_keys(START, TOKENS, 0, len(TOKENS), WIDTH))


def edge(parent: Node, first: int, stop: int) -> Node:
    return Node(parent, TOKENS[first * WIDTH : stop * WIDTH], Run(first, stop))


@pytest.mark.parametrize("known", range(1, 5))
@pytest.mark.parametrize("cut", range(1, 4))
def test_a_key_that_was_made_before_an_edge_grew_and_was_cut_is_that_of_its_tokens(
    known: int, cut: int
) -> None:
    root = Node(None, b"", NO_PAGES)
    root.account = Account("", 4, Lru(), WaitList(0))
    upper = edge(root, 0, cut)
    lower = edge(upper, cut, 4)
    lower.chain = (known, KEYS[known - 1])
    assert chain_at(lower, START, WIDTH) == KEYS[3]
    assert lower.chain == (4, KEYS[3])
    assert chain_at(upper, START, WIDTH) == KEYS[cut - 1]


@pytest.mark.parametrize("kept", range(4))
def test_keys_of_an_edge_that_got_shorter_and_grew_otherwise_are_those_of_its_tokens(
    kept: int,
) -> None:
    root = Node(None, b"", NO_PAGES)
    root.account = Account("", 4, Lru(), WaitList(0))
    node, chains = edge(root, 0, 4), EdgeChains(WIDTH)
    assert chains.of(node, START) == [START, *KEYS]
    chains.shorten(node, kept)
    node.tokens, node.pages = TOKENS[: kept * WIDTH] + TOKENS[:WIDTH], Run(0, kept + 1)
    node.depth = kept + 1
    wanted = chain_keys(START, node.tokens, 0, len(node.tokens), WIDTH)
    assert chains.of(node, START) == [START, *wanted]


def test_keys_of_an_edge_that_was_cut_are_those_of_what_is_left() -> None:
    root = Node(None, b"", NO_PAGES)
    root.account = Account("", 4, Lru(), WaitList(0))
    lower, chains = edge(root, 0, 4), EdgeChains(WIDTH)
    chains.of(lower, START)
    lower.parent = edge(root, 0, 2)
    lower.tokens, lower.pages = TOKENS[2 * WIDTH :], Run(2, 4)
    assert chains.of(lower, START) == KEYS[1:]


def test_of_many_edges_the_keys_of_some_are_kept() -> None:
    root = Node(None, b"", NO_PAGES)
    root.account = Account("", 4, Lru(), WaitList(0))
    chains = EdgeChains(WIDTH)
    for _ in range(200):
        assert chains.of(edge(root, 0, 4), START) == [START, *KEYS]
        assert len(chains._kept) <= 64


def test_where_keys_start_is_told_by_the_key_and_the_root_together_alone() -> None:
    starts = {root_chain(key, root) for key in (KEY, b"o" * 32) for root in (ROOT, b"r" * 32)}
    assert len(starts) == 4
    assert int.from_bytes(ROOT[:8], "little") not in starts, "clients know their root"
