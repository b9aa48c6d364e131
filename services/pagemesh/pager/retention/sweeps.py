"""Sweeps: free invalidated pages in parts, one part per turn, so that requests are served between.

    retired, or idle when asked --> swept, from leaves to roots --> free
                                     |  in use: it stays, and is freed when that is over
                                     v
                                    a retired tree is swept again if idle nodes were left

Copies on disk are forgotten in the same turns (``tiers.Tiers.sweep``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import msgspec

from pagemesh.pager.books import Books
from pagemesh.pager.pages.runs import last_of
from pagemesh.pager.retention.roots import uproot
from pagemesh.pager.tiers.traffic import Tiers
from pagemesh.pager.tree.leaving import Why
from pagemesh.pager.tree.radix import Node, Tree

_EDGES_MAX, _PAGES_MAX = 128, 8_192
"""Per turn: edges that are looked at, and pages that are freed, not counting those of the last
edge."""


class _Sweep(msgspec.Struct, eq=False):
    """``newest``: pages with a greater identity stay."""

    tree: Tree
    newest: int
    nodes: Iterator[Node | None]


class Sweeps:
    """The trees that are being freed, in the order of requests."""

    def __init__(self, books: Books, tiers: Tiers) -> None:
        self._books, self._tiers = books, tiers
        self._open: OrderedDict[Node, _Sweep] = OrderedDict()
        """By root node, since the tree's line of the root table may be reused before its turn."""
        self.freed_pages = 0
        """Pages of the pool that were freed since there last was nothing to sweep."""

    @property
    def is_going_on(self) -> bool:
        """Whether pages are still to be freed that are not known to be in use."""
        return bool(self._open) or self._tiers.is_sweeping

    @property
    def is_due(self) -> bool:
        """Whether a turn would free something. Pages are not freed while a worker that has not
        declared to this pager may still read them."""
        return bool(self._open and self._books.may_evict()) or self._tiers.is_sweeping

    def add(self, tree: Tree, newest: int) -> None:
        """Free the idle pages of ``tree``, except those with an identity above ``newest``."""
        if not self.is_going_on:
            self.freed_pages = 0
        self._begin(tree, newest)

    def _begin(self, tree: Tree, newest: int) -> None:
        """Begin a sweep. A tree that is being swept starts again from its leaves, but keeps its
        place in the order."""
        tree.has_left = False
        self._open[tree.root] = _Sweep(tree, newest, _upwards(tree.root))

    def work(self) -> int:
        """Do one turn's work. Returns how many pages of the pool it freed. No waiter needs to be
        served for these, since they were idle, and so available, before."""
        books = self._books
        self._tiers.sweep()
        before, edges = books.pool.free, _EDGES_MAX
        while self._open and books.may_evict() and edges > 0:
            sweep = next(iter(self._open.values()))
            for node in sweep.nodes:
                edges -= 1
                if node is not None:
                    self._free(sweep, node)
                if edges <= 0 or books.pool.free - before >= _PAGES_MAX:
                    edges = 0
                    break
            else:
                tree = sweep.tree
                del self._open[tree.root]
                if books.forest.retired.get(tree.index) is tree and tree.is_unused:
                    uproot(books, tree, Why.INVALIDATED)
        freed = books.pool.free - before
        self.freed_pages += freed
        return freed

    def tick(self) -> None:
        """Sweep again the retired trees in which idle nodes were left. Trees whose nodes are all in
        use are not walked: that takes many turns for a large tree, and would free nothing."""
        books = self._books
        for tree in books.forest.retired.values() if books.may_evict() else ():
            if tree.has_left and tree.root not in self._open:
                self._begin(tree, books.pool.last_sequence)
        if self.is_due:
            self.work()

    def check(self) -> None:
        """Raise ``AssertionError`` if nothing will free the idle pages of a retired tree."""
        for tree in self._books.forest.retired.values():
            if not (tree.has_left or tree.root in self._open):
                assert not tree.is_unused, "a retired tree keeps its line of the root table"
                assert all(node.pins for node in tree.root.below()), "what is retired stays idle"

    def _free(self, sweep: _Sweep, node: Node) -> None:
        books = self._books
        if books.pool.identity_of(last_of(node.pages)) <= sweep.newest:
            books.drop(node, node.depth - len(node.pages), Why.INVALIDATED)


def _upwards(root: Node) -> Iterator[Node | None]:
    """Every node below ``root``, each after its children; None for steps in between. The tree may
    change during the walk: children are looked up when their parent is reached, nodes that are gone
    are skipped, and both parts of an edge that was cut are visited."""
    path = [(root, list(root.children.values()))]
    while path:
        node, below = path[-1]
        if below:
            child = below.pop()
            while child.parent is not node:
                child = child.parent
            path.append((child, list(child.children.values())))
            yield None
        else:
            path.pop()
            if len(node.pages):
                yield node
