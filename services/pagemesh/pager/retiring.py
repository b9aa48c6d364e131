"""Roots that are not to be used any more.

    invalidated --> nothing new matches it; idle pages are free at once
                     | sequences that run go on with their own pages, cached for nobody
                     v
                    the last of them ends: its tree and its place in the root table are free

The root table says so at once (the line is not live), so a later pager does not believe the pages
either; until the last page is free no other root takes the line. The same root may be planted
anew meanwhile, in another line: what is computed from then on shares nothing with what was.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagemesh.pager.books import Books
from pagemesh.pager.events import PagesDropped, StoreRoot
from pagemesh.pager.leaving import Why
from pagemesh.pager.pins import Pins
from pagemesh.pager.radix import Tree
from pagemesh.pager.roots import sweep_retired
from pagemesh.pager.runs import join_all


@dataclass(frozen=True, slots=True)
class Retired:
    """``used_pages`` are freed when the sequences that use them end."""

    freed_pages: int
    used_pages: int
    pins: tuple[str, ...]


class Retiring:
    """Retires trees, and drops what is idle."""

    def __init__(self, books: Books, pins: Pins) -> None:
        self._books = books
        self._pins = pins

    def retire(self, tree: Tree) -> Retired:
        """Nothing new matches ``tree`` from now on; on disk it has been retired already."""
        books, forest = self._books, self._books.forest
        ended = list(self._pins.of(tree))
        self._pins.unpin(ended)
        for lease in books.leases.values():
            if lease.tree is tree:
                books.in_flight.leave(lease)
        freed = self.drop_idle(tree)
        left = [node.pages for node in tree.root.below()]
        if left:
            books.late.append(PagesDropped(join_all(left)))
        forest.retire(tree)
        books.out.append(StoreRoot(tree.index, tree.digest, False))
        sweep_retired(books)
        return Retired(freed, sum(map(len, left)), tuple(pin.name for pin in ended))

    def drop_idle(self, tree: Tree) -> int:
        """Free the idle pages of ``tree``, and say how many; none while somebody may still read
        them whom this pager has not heard."""
        books = self._books
        before = books.pool.free
        for node in reversed(list(tree.root.below())):
            books.drop(node, node.depth - len(node.pages), Why.INVALIDATED)
        freed = books.pool.free - before
        books.freed = books.freed or freed > 0
        return freed
