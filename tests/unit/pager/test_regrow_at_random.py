"""What is believed of headers in any order and with any damage is what is believed page by page,
which is slow and simple."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from tests.unit.pager.plain_headers import blank
from tests.unit.pager.rig import PAGE_SIZE, Rig

from pagemesh.pager.events import HeaderTable, RootEntry
from pagemesh.pager.pages.runs import table_of
from pagemesh.pager.regrow import Edge, by_last_use
from pagemesh.pager.tree.node import Node
from pagemesh.wire.pool_format import HeaderState

_PAGES, _SEEDS = 40, 60


def grown(dice: Random) -> HeaderTable:
    """Edges of a few pages that were committed one after the other, under the roots 0 to 2."""
    headers, free = blank(_PAGES, PAGE_SIZE), list(range(_PAGES))
    dice.shuffle(free)
    ends: list[tuple[int, int]] = [(0, root) for root in range(3)]
    """Identities and roots of what edges may hang at."""
    taken: set[tuple[int, int, int]] = set()
    number = 100
    while len(free) > 4:
        parent, root = dice.choice(ends[-6:])
        for _ in range(min(dice.choice([1, 1, 2, 5]), len(free))):
            token = dice.randrange(5)
            if (parent, root, token) in taken:
                break
            taken.add((parent, root, token))
            page, number = free.pop(), number + dice.choice([1, 1, 1, 7])
            headers.states[page], headers.counts[page] = HeaderState.COMMITTED, PAGE_SIZE
            headers.sequences[page] = page + 1
            headers.identities[page], headers.parents[page] = number, parent
            headers.roots[page], headers.tokens[page] = root, token
            parent = number
            ends.append((number, root))
    return headers


def damage(headers: HeaderTable, dice: Random) -> None:
    page = dice.randrange(_PAGES)
    older = headers.identities[headers.identities < headers.identities[page]].tolist()
    match dice.randrange(6):
        case 0:
            headers.states[page] = HeaderState.INVALID
        case 1:
            headers.counts[page] -= min(1, headers.counts[page])
        case 2:
            headers.roots[page] = dice.randrange(4)
        case 3:
            headers.parents[page] = dice.choice(older or [0])
        case 4:
            headers.tokens[page] = dice.randrange(5)
        case _:
            headers.states[page] = HeaderState.HELD


def believed(headers: HeaderTable, live_roots: set[int]) -> set[int]:
    """Page by page, the oldest first."""
    found: dict[int, int] = {}
    taken = set()
    for page in np.argsort(headers.identities, kind="stable").tolist():
        parent, root = int(headers.parents[page]), int(headers.roots[page])
        above = root if not parent else found.get(parent)
        place = (parent, root, headers.tokens[page].tobytes())
        full = headers.states[page] == HeaderState.COMMITTED and headers.counts[page] == PAGE_SIZE
        if full and root in live_roots and above == root and place not in taken:
            taken.add(place)
            found[int(headers.identities[page])] = root
    return {page for page in range(_PAGES) if int(headers.identities[page]) in found}


def restarted(seed: int) -> tuple[Rig, set[int]]:
    """A pager that has found such headers, and the pages that it should have believed."""
    dice, rig = Random(seed), Rig(_PAGES)
    rig.headers = grown(dice)
    for _ in range(dice.choice([0, 0, 1, 2, 6])):
        damage(rig.headers, dice)
    live = {root for root in range(3) if dice.random() < 0.9}
    rig.roots = {root: RootEntry(root, bytes([root]) * 32, root in live) for root in range(3)}
    wanted = believed(rig.headers, live)  # before what is not believed is freed
    rig.restart()
    return rig, wanted


@pytest.mark.parametrize("seed", range(_SEEDS))
def test_what_is_believed_is_what_is_believed_page_by_page(seed: int) -> None:
    rig, wanted = restarted(seed)
    headers, found = rig.headers, set[int]()
    for tree in rig.core.books.forest.trees.values():
        for node in tree.root.below():
            pages = table_of(node.pages)
            last = headers.identities[table_of(node.parent.pages)[-1:]].tolist()
            above = [*(last or [0]), *headers.identities[pages[:-1]].tolist()]
            assert headers.tokens[pages].tobytes() == node.tokens
            assert (headers.roots[pages] == tree.index).all()
            assert headers.parents[pages].tolist() == above
            found.update(pages.tolist())
    assert found == wanted


@pytest.mark.parametrize("seed", range(10))
def test_what_is_evicted_first_has_nothing_below_it_that_is_not(seed: int) -> None:
    rig, _ = restarted(seed)
    edges = list[Edge]()
    for tree in rig.core.books.forest.trees.values():
        below: list[Node] = list(tree.root.below())
        for node in sorted(below, key=lambda node: node.depth):
            last = int(rig.headers.identities[node.pages[-1]])
            edges.append(Edge(node, tree, last))
    order = by_last_use(edges)
    places = {node: place for place, node in enumerate(order)}
    assert len(places) == len(edges)
    for node in order:
        assert all(places[child] < places[node] for child in node.children.values())
