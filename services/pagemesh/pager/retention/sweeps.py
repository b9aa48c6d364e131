"""Freeing what was invalidated, in parts: one turn of the pager frees some, and others have theirs.

    retired, or idle when asked --> swept, from leaves to roots --> free
                                     |  somebody uses it: it stays, and goes when that is over
                                     v
                                    a tree that is retired is swept again if anything idle was left

What the disk has of it is forgotten in the same turns (``tiers.Tiers.sweep``).
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
"""In one turn: of edges that are looked at, and of pages that are freed, but for the last edge."""


class _Sweep(msgspec.Struct, eq=False):
    """``newest``: pages with a greater identity stay."""

    tree: Tree
    newest: int
    nodes: Iterator[Node | None]


class Sweeps:
    """Trees that are being freed, the one asked for first first."""

    def __init__(self, books: Books, tiers: Tiers) -> None:
        self._books, self._tiers = books, tiers
        self._open: OrderedDict[Node, _Sweep] = OrderedDict()
        """By the root of the tree, whose line of the root table may be another's before its turn
        comes."""
        self.freed_pages = 0
        """Of the pool, since there was nothing to sweep."""

    @property
    def is_going_on(self) -> bool:
        """Something is not freed yet that nobody uses, or nobody knows to be used."""
        return bool(self._open) or self._tiers.is_sweeping

    @property
    def is_due(self) -> bool:
        """A turn would free something: not while somebody may still read it whom this pager has
        not heard."""
        return bool(self._open and self._books.may_evict()) or self._tiers.is_sweeping

    def add(self, tree: Tree, newest: int) -> None:
        """Free what is idle of ``tree``, but for pages with an identity above ``newest``."""
        if not self.is_going_on:
            self.freed_pages = 0
        self._begin(tree, newest)

    def _begin(self, tree: Tree, newest: int) -> None:
        """From the leaves again if the tree is being swept, which then keeps its turn."""
        tree.has_left = False
        self._open[tree.root] = _Sweep(tree, newest, _upwards(tree.root))

    def work(self) -> int:
        """A turn's worth. Returns how many pages of the pool it freed: nobody waits for them, since
        they were idle, and so to be had, before."""
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
        """Sweep again what is retired and left something idle. What is in use alone is not walked:
        a walk of a large tree takes many turns, and would free nothing."""
        books = self._books
        for tree in books.forest.retired.values() if books.may_evict() else ():
            if tree.has_left and tree.root not in self._open:
                self._begin(tree, books.pool.last_sequence)
        if self.is_due:
            self.work()

    def check(self) -> None:
        """Raise ``AssertionError`` if nothing will free what is idle of a retired tree."""
        for tree in self._books.forest.retired.values():
            if not (tree.has_left or tree.root in self._open):
                assert not tree.is_unused, "a retired tree keeps its line of the root table"
                assert all(node.pins for node in tree.root.below()), "what is retired stays idle"

    def _free(self, sweep: _Sweep, node: Node) -> None:
        books = self._books
        if books.pool.identity_of(last_of(node.pages)) <= sweep.newest:
            books.drop(node, node.depth - len(node.pages), Why.INVALIDATED)


def _upwards(root: Node) -> Iterator[Node | None]:
    """Every node below ``root``, each after its children; None for steps in between. What hangs
    below a node is looked up when it is come to. What is gone meanwhile is passed over, and of an
    edge that was cut meanwhile both parts are come to."""
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
