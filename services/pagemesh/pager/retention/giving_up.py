"""What a lease read or wrote and nobody is to find again (``Release`` with ``cache=False``).

    idle in the tree --all have declared what they read--> free
                     \\--somebody has not--> limbo, out of the tree --all have--> free

Whoever declares a lease of an earlier life with such pages has lost it, so that they do not come
back with what it commits.
"""

from __future__ import annotations

import numpy as np

from pagemesh.pager.books import Books
from pagemesh.pager.pages.runs import table_of
from pagemesh.pager.tree.leaving import Why
from pagemesh.pager.tree.radix import Node
from pagemesh.wire.pool_format import HeaderState
from pagemesh.wire.tokens import U32


def give_up(books: Books, anchor: Node) -> None:
    """Have nothing found again of ``anchor`` and what is above it, as far as nothing else that is
    alive goes on from there."""
    now_ms, node = books.now_ms, anchor
    while not (node.is_root or node.pins):
        if any(child.pins or child.expires_ms > now_ms for child in node.children.values()):
            return
        above = node.parent
        for leaf in reversed([node, *node.below()]):  # what is below it is over
            if books.may_evict():
                books.drop(leaf, leaf.depth - len(leaf.pages), Why.INVALIDATED)
            else:
                _strand(books, leaf)
        node = above


def is_given_up(books: Books, pages: U32) -> bool:
    """Whether some of ``pages`` are."""
    return len(books.given_up) > 0 and bool(np.isin(pages, books.given_up).any())


def _strand(books: Books, leaf: Node) -> None:
    """Whoever has not declared yet may read ``leaf``: its pages are nobody's until all have. The
    next pager is not to believe them either."""
    pages = books.forest.strand(leaf, Why.INVALIDATED)
    books.set_states(pages, HeaderState.INVALID)
    books.tell_dropped(pages)
    table = table_of(pages)
    books.limbo = np.sort(np.concatenate([books.limbo, table]))
    books.given_up = np.concatenate([books.given_up, table])
