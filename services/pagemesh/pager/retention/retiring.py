"""Retiring roots: nothing that was computed under an invalidated root is used again.

    invalidated --> nothing new matches it; idle pages are freed, in parts (``sweeps``)
                     | running sequences go on with their pages, which nobody else can find
                     v
                    the last of them ends: its tree and its line of the root table are free

The root table marks the line as not live at once, so a later pager does not take the pages for
cached either; no other root gets the line until the last page is free. Meanwhile the same root may
be planted anew, in another line: pages computed from then on share nothing with the earlier ones. A
lease from an earlier pager life that is declared after that is lost, since it was filled before.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from pagemesh.pager.books import Books
from pagemesh.pager.events import PagesDropped, StoreRoot
from pagemesh.pager.retention.pins import Pins
from pagemesh.pager.retention.roots import hide
from pagemesh.pager.retention.sweeps import Sweeps
from pagemesh.pager.tree.radix import Node, Tree
from pagemesh.wire.tokens import U32


@dataclass(frozen=True, slots=True)
class Retired:
    """``used_pages``: freed when the sequences that use them end. ``pins``: names of those that
    ended."""

    used_pages: int
    pins: tuple[str, ...]


class Retiring:
    """Retires trees."""

    def __init__(self, books: Books, pins: Pins, sweeps: Sweeps) -> None:
        self._books = books
        self._pins = pins
        self._sweeps = sweeps

    def meant(self, root: bytes, pages: U32) -> bool:
        """Whether a lease from an earlier pager life, with these ``pages``, may be from before
        ``root`` was invalidated: true unless its pages belong to the tree that the root has now."""
        tree = self._books.forest.trees.get(root)
        return tree is None or not self._books.root_lines.are_of(tree.index, pages)

    def retire(self, trees: Collection[Tree]) -> Retired:
        """Let nothing new match ``trees``; on disk they must have been retired already."""
        books, forest = self._books, self._books.forest
        chosen = {tree.index for tree in trees}
        ended = [pin for pin in books.pins.values() if pin.tree.index in chosen]
        self._pins.unpin(ended)
        used: dict[Node, None] = {}
        for lease in books.leases.values():
            if lease.tree.index in chosen:
                books.in_flight.leave(lease)
                _note_path(used, lease.anchor)
        for load in books.loads.values():
            if load.tree.index in chosen:
                _note_path(used, load.anchor)
        for node in used:
            books.late.append(PagesDropped(node.pages))
            hide(books, node.pages)
        for tree in trees:
            forest.retire(tree)
            books.out.append(StoreRoot(tree.index, tree.digest, False))
            self._sweeps.add(tree, books.pool.last_sequence)
        used_pages = sum(len(node.pages) for node in used)
        return Retired(used_pages, tuple(pin.name for pin in ended))


def _note_path(used: dict[Node, None], node: Node) -> None:
    while not node.is_root and node not in used:
        used[node] = None
        node = node.parent
