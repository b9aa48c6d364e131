"""Which root has which line of the pool's root table, and so a tree of its own."""

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
"""A tree with no more of them is freed in a few milliseconds."""
_LARGE_EDGES, _TREES_LOOK_MAX = 256, 64
"""Trees that have so many edges are alike, and so many trees are looked at to find a quick one."""


def has_root_place(books: Books, digest: bytes) -> bool:
    """Whether ``tree_of`` can answer."""
    trees = books.forest.trees
    is_free = digest in trees or bool(books.root_lines.free)
    return is_free or any(_may_go(books, one) for one in trees.values())


def tree_of(books: Books, digest: bytes, terms: CacheTerms) -> Tree:
    """The tree of a root, planted when it is new (``has_root_place`` holds), and from now on
    that of the tenant in ``terms``. It may take the place of a tree that no lease uses: an empty
    one, else of the tenant with the most trees the one that was not asked for the longest, so that
    roots seen once do not drive out those in use, nor many salts of one tenant what others have. A
    large one is passed over if a small one is there: it is freed at once, and everybody waits."""
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
    """Forget a tree that no lease uses, with all it caches."""
    for node in reversed(list(tree.root.below())):
        books.drop(node, 0, why)
    books.forest.fell(tree)
    books.root_lines.give(tree.index)
    books.out.append(StoreRoot(tree.index, tree.digest, False))
    books.freed = True


def leave_retired(books: Books, tree: Tree, anchor: Node) -> None:
    """Free what of the retired ``tree`` was needed by ``anchor``'s user only, who is gone. What
    cannot be freed now, since somebody unheard may read it or a sweep has not freed yet what hangs
    below it, a later sweep frees."""
    books.drop(anchor, 0, Why.INVALIDATED)
    if tree.is_unused:
        return uproot(books, tree, Why.INVALIDATED)
    node = anchor
    while not (len(node.pages) or node.is_root):  # it is gone
        node = node.parent
    if not node.pins:
        tree.has_left = True


def _pages_in_hand(books: Books, tree: Tree) -> tuple[int, int]:
    """Held by leases of ``tree`` or being read for it, and promised to these leases."""
    leases = [one for one in books.leases.values() if one.tree is tree]
    held_pages = sum(len(one.held_pages) for one in leases)
    held_pages += sum(len(one.pages) for one in books.loads.values() if one.tree is tree)
    return held_pages, sum(one.promised_pages for one in leases)


def _may_go(books: Books, tree: Tree) -> bool:
    if books.root_lines.is_named(tree.index):
        return False  # its line would be kept, and a lease of it may be declared
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
    """The first of ``trees`` that is freed quickly, else of those looked at the one with the fewest
    edges."""
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
    """Routers do not take ``pages``, of a retired root, for cached (any more)."""
    books.hidden[where(pages)] = True


def unhidden(books: Books, pages: Pages) -> Pages:
    """Those of ``pages``, which leave, that routers take for cached."""
    at, table = where(pages), table_of(pages)
    there = table[~books.hidden[at]]
    books.hidden[at] = False
    return as_run(there)
