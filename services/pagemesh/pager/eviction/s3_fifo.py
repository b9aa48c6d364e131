"""S3-FIFO (Yang and others, 2023) on a prefix tree: FIFO queues in which a use moves nothing.

    new -----> small --unused--> ghosts      a return from the ghosts enters main
                 `--used--> main --unused--> gone
                            ^  `--used--.
                            `-----------'    one use less each time around

A node in use keeps its place in its queue, and is skipped at the front.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from pagemesh.pager.eviction.ghosts import Ghost, GhostBudget, Ghosts, place_of
from pagemesh.pager.eviction.leaves import LeafQueue, bared, check_queued
from pagemesh.pager.tree.node import Node

USES_MAX = 3
_SMALL_SHARE = 10
_GHOST_COUNT_MIN, _PAGES_PER_GHOST = 1_024, 8


@dataclass(slots=True)
class _Note:
    place: int
    is_small: bool
    use_count: int = 0


class S3Fifo:
    """Operations are amortised O(1), since each time around costs a node one use. ``page_count``:
    pages of the pool; remembers within ``budget``."""

    def __init__(self, page_count: int, budget: GhostBudget | None = None) -> None:
        self._small = LeafQueue()
        self._main = LeafQueue()
        self._small_pages, self._small_pages_max = 0, page_count // _SMALL_SHARE
        count_max = max(_GHOST_COUNT_MIN, page_count // _PAGES_PER_GHOST)
        self._ghosts = Ghosts(page_count, count_max, lambda _ghost: None, budget)

    def add(self, node: Node) -> None:
        note: _Note | None = node.note
        if note is None:
            note = node.note = _Note(_place(node), True)
            note.is_small = self._ghosts.take(note.place) is None
            self._put(node, note)
        self._queue(note).recall(node)

    def remove(self, node: Node) -> None:
        note: _Note = node.note
        note.use_count = min(USES_MAX, note.use_count + 1)

    def forget(self, node: Node) -> None:
        note: _Note | None = node.note
        if note is not None:  # a node in use is in its queue as well
            self._queue(note).remove(node)
            if note.is_small:
                self._small_pages -= len(node.pages)

    def cut(self, upper: Node, lower: Node) -> None:
        note: _Note | None = lower.note
        if note is None:
            return
        upper.note = _Note(note.place, note.is_small, note.use_count)
        if not lower.pins:
            upper.note.use_count = min(USES_MAX, note.use_count + 1)
        note.place = _place(lower)
        if note.is_small:
            self._small_pages -= len(upper.pages)  # ``_put`` counts them again
        self._put(upper, upper.note)

    def shrink(self, node: Node, keep: int) -> None:
        note: _Note = node.note
        if note.is_small:
            self._small_pages -= len(node.pages) - keep
        if keep:
            return
        self._queue(note).remove(node)
        if note.is_small:
            self._ghosts.put(Ghost(note.place, note.place, 0, 0, 0, len(node.pages)))
        parent = bared(node)
        if parent is not None:
            self._queue(parent.note).recall(parent)

    def tidy(self) -> None:
        pass  # nothing is put off

    def close(self) -> None:
        self._ghosts.close()

    def victim(self) -> tuple[Node, int]:
        while True:
            small, main = self._small.first(), self._main.first()
            if small is not None and (main is None or self._small_pages > self._small_pages_max):
                note: _Note = small.note
                if not note.use_count:
                    return small, len(small.pages)
                self._small.remove(small)
                self._small_pages -= len(small.pages)
                note.is_small, note.use_count = False, 0
                self._main.add(small)
            elif main is not None:
                note = main.note
                if not note.use_count:
                    return main, len(main.pages)
                note.use_count -= 1
                self._main.remove(main)
                self._main.add(main)
            else:
                raise LookupError("nothing is idle")

    def __iter__(self) -> Iterator[Node]:
        return chain(self._small, self._main)

    def check(self, nodes: Iterable[Node]) -> None:
        known = list(nodes)
        assert all(node.note is not None for node in known if not node.pins), "it was not told"
        known = [node for node in known if node.note is not None]
        check_queued([(node, self._queue(node.note)) for node in known], [self._small, self._main])
        small_pages = sum(len(node.pages) for node in known if node.note.is_small)
        assert small_pages == self._small_pages, "the small queue counts other pages"
        self._ghosts.check()

    def _queue(self, note: _Note) -> LeafQueue:
        return self._small if note.is_small else self._main

    def _put(self, node: Node, note: _Note) -> None:
        if note.is_small:
            self._small_pages += len(node.pages)
        self._queue(note).add(node)


def _place(node: Node) -> int:
    above = node.parent.note
    page_bytes = len(node.tokens) // len(node.pages)
    return place_of(above.place if above is not None else 0, node.tokens[:page_bytes])
