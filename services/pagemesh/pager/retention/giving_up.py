"""Uncaching what a lease read or wrote, so that no request finds it (``Release``, ``cache=False``).

    idle in the tree --all workers have declared what they read--> free
                     \\--one has not--> limbo, out of the tree --all have--> free

If a worker declares a lease from an earlier pager life that has such pages, that lease is lost, so
that its commits do not bring them back.
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
    """Uncache ``anchor`` and the nodes above it, up to the first one that is in use or has other
    children that are in use or have not expired."""
    now_ms, node = books.now_ms, anchor
    while not (node.is_root or node.pins):
        if any(child.pins or child.expires_ms > now_ms for child in node.children.values()):
            return
        above = node.parent
        for leaf in reversed([node, *node.below()]):  # what is below has expired
            if books.may_evict():
                books.drop(leaf, leaf.depth - len(leaf.pages), Why.INVALIDATED)
            else:
                _strand(books, leaf)
        node = above


def is_given_up(books: Books, pages: U32) -> bool:
    """Whether any of ``pages`` was given up before all workers had declared."""
    return len(books.given_up) > 0 and bool(np.isin(pages, books.given_up).any())


def _strand(books: Books, leaf: Node) -> None:
    """Take ``leaf`` out of the tree, which a worker that has not declared yet may still read: its
    pages drain until all have declared. The next pager must not take them for cached either."""
    pages = books.forest.strand(leaf, Why.INVALIDATED)
    books.set_states(pages, HeaderState.INVALID)
    books.tell_dropped(pages)
    table = table_of(pages)
    books.limbo = np.sort(np.concatenate([books.limbo, table]))
    books.given_up = np.concatenate([books.given_up, table])
