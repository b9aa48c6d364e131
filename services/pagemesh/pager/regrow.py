"""The prefix tree of an earlier pager life, grown again from page headers.

A page is believed only if its header is whole, its parent is believed and under the same root, and
no other child of that parent holds the same tokens. Identities grow with commits, so sorting by
them puts every parent before its children.

Python steps are spent on edges, not on pages. A *run* is pages adjacent in the order of identities,
each the parent of the next, as one commit makes them. A *chain* is runs, each the only continuation
of the one before it, as an answer leaves them that is committed page by page beside others. Every
chain becomes one edge, or several if its first pages are kept for longer than the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagemesh.pager.events import HeaderTable
from pagemesh.pager.pages.runs import as_run, where
from pagemesh.pager.tree.lifetime import FOREVER_MS
from pagemesh.pager.tree.radix import Forest, Node, Tree
from pagemesh.wire.pool_format import HeaderState
from pagemesh.wire.tokens import U32

_Index = NDArray[np.intp]
_Numbers = NDArray[np.uint64]
_Times = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Edge:
    """An edge that was grafted, its tree and the identity of its last page."""

    node: Node
    tree: Tree
    last_identity: int


@dataclass(frozen=True, slots=True)
class _Chain:
    """Pages that may become an edge below the page with identity ``parent`` (0: the root)."""

    pages: U32
    parent: int
    root: int
    last_identity: int
    until_ms: int


def regrow(forest: Forest, headers: HeaderTable, page_size: int) -> list[Edge]:
    """Graft every page whose path to the root is whole. Returns the edges, parents first."""
    trees = {tree.index: tree for tree in forest.trees.values()}
    ends: dict[int, Edge] = {}
    """By the identity of its last page."""
    edges: list[Edge] = []
    for chain in _chains(headers, page_size):
        tree = trees.get(chain.root)
        if tree is None:
            continue
        above = tree.root
        if chain.parent:
            end = ends.get(chain.parent)
            if end is None or end.tree is not tree:
                continue
            above = end.node
        pages = as_run(chain.pages)
        grafted = forest.graft(above, headers.tokens[where(pages)].tobytes(), pages)
        if grafted is not None:
            edge = Edge(grafted, tree, chain.last_identity)
            edges.append(edge)
            if chain.until_ms < FOREVER_MS:
                forest.lifetimes.resume(grafted, max(chain.until_ms, forest.now_ms))
            elif above.expires_ms < FOREVER_MS:  # a pager died before it wrote that
                forest.lifetimes.keep(above, FOREVER_MS)
            ends[chain.last_identity] = edge
    return edges


def by_last_use(edges: list[Edge]) -> list[Node]:
    """The nodes of ``edges`` (parents first): the ones that grew last at the end, and each after
    everything below it. Headers do not tell when a page was last read."""
    newest: dict[Node, int] = {}
    for edge in reversed(edges):
        node = edge.node
        newest[node] = last = max(edge.last_identity, newest.get(node, 0))
        if not node.parent.is_root:
            newest[node.parent] = max(last, newest.get(node.parent, 0))
    return sorted(newest, key=lambda node: (newest[node], -node.depth))


def _chains(headers: HeaderTable, page_size: int) -> Iterator[_Chain]:
    """All chains, parents before children."""
    full = (headers.states == HeaderState.COMMITTED) & (headers.counts == page_size)
    candidates = np.flatnonzero(full)
    order = candidates[np.argsort(headers.identities[candidates], kind="stable")]
    if not len(order):
        return
    identities = headers.identities[order]
    parents, roots = headers.parents[order], headers.roots[order]
    follows = np.zeros(len(order), bool)
    follows[1:] = (parents[1:] == identities[:-1]) & (roots[1:] == roots[:-1])
    follows[1:] &= parents[1:] != 0
    # Where other runs branch off, a run is cut: an edge ends where its children start.
    branches = np.isin(identities, parents[~follows])
    follows[1:] &= ~branches[:-1]
    starts = np.flatnonzero(~follows)
    ends = np.append(starts[1:], len(order))
    firsts, lasts = identities[starts], identities[ends - 1]
    heads, places = _linked(parents[starts], firsts, lasts, roots[starts])
    by_chain = np.lexsort((places, heads))
    counts = (ends - starts)[by_chain]
    offsets = np.repeat(starts[by_chain] - np.cumsum(counts) + counts, counts)
    table = order[offsets + np.arange(len(order))].astype("<u4")
    heads_at = np.append(0, np.cumsum(counts))[np.flatnonzero(places[by_chain] == 0)]
    until_ms = _until_ms(headers.until_ms[table], heads_at)
    changes = np.flatnonzero(until_ms[1:] != until_ms[:-1]) + 1
    borders = np.union1d(heads_at, changes)
    stops = np.append(borders[1:], len(table))
    first, last = table[borders], table[stops - 1]
    columns = (
        stops, headers.parents[first], headers.roots[first], headers.identities[last],
        until_ms[borders],
    )  # fmt: skip
    at = 0
    for stop, parent, root, end, kept_ms in zip(*(c.tolist() for c in columns), strict=True):
        yield _Chain(table[at:stop], parent, root, end, kept_ms)
        at = stop


def _until_ms(own: _Times, heads_at: _Index) -> _Times:
    """Until when pages are kept, given what the header of each says (``own``). Using a page uses
    all pages before it, so each is kept at least as long as those after it in its chain.
    ``heads_at``: where chains start."""
    if (own == FOREVER_MS).all():
        return own
    times, ranks = np.unique(own, return_inverse=True)
    chains = np.zeros(len(own), np.intp)
    chains[heads_at] = 1
    # Accumulated from the end; ``before`` grows towards the front, so that the maximum so far is
    # never one of another chain.
    before = (len(heads_at) - np.cumsum(chains)) * len(times)
    ranks = np.maximum.accumulate((before + ranks)[::-1])[::-1] - before
    return times[ranks]


def _linked(
    parents: _Numbers, firsts: _Numbers, lasts: _Numbers, roots: U32
) -> tuple[_Index, _Index]:
    """For each run, the run that starts its chain, and how many runs it is from there. All are
    given by identity: ``parents``, the page that each run continues from; ``firsts`` and ``lasts``,
    its first and last page."""
    runs = np.arange(len(parents))
    order = np.argsort(lasts)
    at = np.minimum(np.searchsorted(lasts[order], parents), len(runs) - 1)
    above = order[at]
    found = (lasts[above] == parents) & (parents != 0)
    children = np.bincount(above[found], minlength=len(runs))
    # Parents are older than children; a damaged header that says otherwise must not make a ring.
    only = found & (children[above] == 1) & (roots[above] == roots) & (parents < firsts)
    heads = np.where(only, above, runs)
    places = only.astype(np.intp)
    # Pointer jumping: each round doubles the reach, so the longest chain takes few.
    while True:
        further = heads[heads]
        if np.array_equal(further, heads):
            return heads, places
        places = places + places[heads]
        heads = further
