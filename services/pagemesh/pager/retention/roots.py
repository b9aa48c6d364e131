"""Roots: planting and uprooting trees, each of which takes a line of the pool's root table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from pagemesh.pager.events import StoreRoot
from pagemesh.pager.pages.runs import Pages, as_run, table_of, where
from pagemesh.pager.tree.leaving import Why
from pagemesh.pager.tree.radix import Node, Tree
from pagemesh.wire.cache_terms import CacheTerms

if TYPE_CHECKING:
    from pagemesh.pager.books import Books

_QUICK_EDGES = 128
"""A tree with at most this many edges is freed in a few milliseconds."""
_LARGE_EDGES, _TREES_LOOK_MAX = 256, 64
"""Edges are counted up to here, and this many trees are looked at to find a quick one."""


def has_root_place(books: Books, digest: bytes) -> bool:
    """Whether ``tree_of`` can find or plant a tree for ``digest``."""
    trees = books.forest.trees
    is_free = digest in trees or bool(books.root_lines.free)
    return is_free or any(_may_go(books, one) for one in trees.values())


def tree_of(books: Books, digest: bytes, terms: CacheTerms) -> Tree:
    """The tree of a root, which from now on belongs to the tenant in ``terms``. It is planted when
    the root is new; ``has_root_place`` must hold. That may displace a tree that no lease uses: an
    empty one, else the least recently requested one of the tenant with the most trees. So roots
    seen once do not displace those in use, nor many salts of one tenant the trees of others. A
    small tree is preferred to a large one, since it is freed at once while everybody waits."""
    trees = books.forest.trees
    tree = trees.pop(digest, None)
    if tree is not None:
        trees[digest] = tree
        if terms.has_quota or tree.root.account is not books.accounts.common:
            books.accounts.assign(tree, terms, partial(_pages_in_hand, books, tree))
        return tree
    if not books.root_lines.free:
        spare = _spare_tree(books)
        assert spare is not None, "has_root_place was not asked"
        uproot(books, spare, Why.EVICTED)
    tree = books.forest.plant(digest, books.root_lines.free.pop())
    books.out.append(StoreRoot(tree.index, digest, True))
    if terms.has_quota:
        books.accounts.assign(tree, terms, lambda: (0, 0))
    return tree


def uproot(books: Books, tree: Tree, why: Why) -> None:
    """Remove a tree that no lease uses, with all that is cached in it."""
    for node in reversed(list(tree.root.below())):
        books.drop(node, 0, why)
    books.forest.fell(tree)
    books.root_lines.give(tree.index)
    books.out.append(StoreRoot(tree.index, tree.digest, False))
    books.freed = True


def leave_retired(books: Books, tree: Tree, anchor: Node) -> None:
    """Free the nodes of the retired ``tree`` that only the user of ``anchor``, which is gone, still
    needed. A later sweep frees those that cannot be freed now, since a worker that has not declared
    may read them, or a sweep has not freed yet what is below them."""
    books.drop(anchor, 0, Why.INVALIDATED)
    if tree.is_unused:
        return uproot(books, tree, Why.INVALIDATED)
    node = anchor
    while not (len(node.pages) or node.is_root):  # this node was dropped
        node = node.parent
    if not node.pins:
        tree.has_left = True


def _pages_in_hand(books: Books, tree: Tree) -> tuple[int, int]:
    """Pages held by leases of ``tree`` or being read from disk for it, and pages promised to these
    leases."""
    leases = [one for one in books.leases.values() if one.tree is tree]
    held_pages = sum(len(one.held_pages) for one in leases)
    held_pages += sum(len(one.pages) for one in books.loads.values() if one.tree is tree)
    return held_pages, sum(one.promised_pages for one in leases)


def _may_go(books: Books, tree: Tree) -> bool:
    if books.root_lines.is_named(tree.index):
        return False  # its line would be kept, not free, and a lease of it may yet be declared
    return tree.is_unused or (tree.is_spare and books.may_evict())


def _spare_tree(books: Books) -> Tree | None:
    trees = books.forest.trees.values()  # the longest unused first
    for tree in trees:
        if tree.is_unused and _may_go(books, tree):
            return tree
    counts = Counter(tree.tenant for tree in trees)
    spare = [tree for tree in trees if _may_go(books, tree)]
    most = max((counts[tree.tenant] for tree in spare), default=0)
    return _quickest(tree for tree in spare if counts[tree.tenant] == most)


def _quickest(trees: Iterable[Tree]) -> Tree | None:
    """The first of ``trees`` that is freed quickly, else the one with the fewest edges of those
    looked at."""
    found: Tree | None = None
    fewest = _LARGE_EDGES
    for tree in islice(trees, _TREES_LOOK_MAX):
        count = sum(1 for _ in islice(tree.root.below(), fewest))
        if found is None or count < fewest:
            found, fewest = tree, count
        if count <= _QUICK_EDGES:
            break
    return found


def hide(books: Books, pages: Pages) -> None:
    """Note that routers do not (or no longer) take ``pages``, of a retired root, for cached."""
    books.hidden[where(pages)] = True


def unhidden(books: Books, pages: Pages) -> Pages:
    """Those of ``pages``, which are leaving the tree, that routers take for cached. All of
    ``pages`` stop being hidden."""
    at, table = where(pages), table_of(pages)
    there = table[~books.hidden[at]]
    books.hidden[at] = False
    return as_run(there)
