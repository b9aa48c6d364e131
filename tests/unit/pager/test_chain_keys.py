"""Chain keys are kept at edges, which grow, are cut and get shorter."""

from __future__ import annotations

import pytest

from pagemesh.pager.eviction import Lru
from pagemesh.pager.leases.waiting import WaitList
from pagemesh.pager.pages.runs import NO_PAGES, Run
from pagemesh.pager.tiers.chain_keys import chain_at, chain_keys, root_chain
from pagemesh.pager.tree.accounts import Account
from pagemesh.pager.tree.node import Node
from pagemesh.wire.tokens import pack

ROOT, WIDTH = bytes(range(32)), 16
TOKENS = pack(range(16))
"""Of four pages."""
KEYS = list(chain_keys(root_chain(ROOT), TOKENS, 0, len(TOKENS), WIDTH))


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
    assert chain_at(lower, ROOT, WIDTH) == KEYS[3]
    assert lower.chain == (4, KEYS[3])
    assert chain_at(upper, ROOT, WIDTH) == KEYS[cut - 1]
