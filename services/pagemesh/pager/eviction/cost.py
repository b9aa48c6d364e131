"""Cheapest to lose first: pages that are rarely used, quick to compute again, and long unused.

Greedy dual size with frequency (Cherkasova, 1998), for pages: each is worth its number of uses
times the cost of computing it again, plus a level that rises to the worth of what was evicted last.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pagemesh.pager.eviction.leaves import bared
from pagemesh.pager.tree.node import Node

_DEPTH_PAGES = 512
"""A page with this many pages before it, to which it attends, costs twice as much as the first."""
_STALE_SHARE, _STALE_MIN = 2, 64


@dataclass(slots=True)
class _Note:
    use_count: int = 1
    worth: float = 0.0
    stamp: int = 0
    """The stamp of the node's valid heap entry; 0: none, since the node is in use or gone."""


class Cost:
    """Operations are O(log n) amortised; outdated heap entries are removed when they pile up."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, _Note, Node]] = []
        self._level = 0.0
        self._stamp = 0
        self._idle_count = 0

    def add(self, node: Node) -> None:
        note: _Note | None = node.note
        if note is None:
            note = node.note = _Note()
        self._idle_count += 1
        note.worth = self._level + note.use_count * (1 + node.depth / _DEPTH_PAGES)
        self._push(node, note)

    def remove(self, node: Node) -> None:
        note: _Note = node.note
        self._idle_count -= 1
        note.stamp = 0
        note.use_count += 1

    def forget(self, node: Node) -> None:
        if not node.pins:
            self.remove(node)

    def cut(self, upper: Node, lower: Node) -> None:
        note: _Note | None = lower.note
        if note is not None:
            upper.note = _Note(note.use_count + (not lower.pins))

    def shrink(self, node: Node, keep: int) -> None:
        note: _Note = node.note
        self._level = max(self._level, note.worth)
        if not keep:
            self._idle_count -= 1
            note.stamp = 0
            parent = bared(node)
            if parent is not None:
                self._push(parent, parent.note)

    def tidy(self) -> None:
        pass  # nothing is put off

    def close(self) -> None:
        pass  # nothing is shared

    def victim(self) -> tuple[Node, int]:
        heap = self._heap
        while heap:
            _, stamp, note, node = heap[0]
            if stamp == note.stamp and not node.children:
                return node, len(node.pages)
            heapq.heappop(heap)  # a parent is pushed again when it is a leaf
        raise LookupError("nothing is idle")

    def __iter__(self) -> Iterator[Node]:
        return (n for _, stamp, note, n in self._heap if stamp == note.stamp and not n.children)

    def check(self, nodes: Iterable[Node]) -> None:
        idle = {node for node in nodes if not node.pins}
        assert self._idle_count == len(idle), "it counts others"
        counts = [node for _, stamp, note, node in self._heap if stamp == note.stamp]
        assert len(set(counts)) == len(counts) and idle.issuperset(counts), "an entry is stale"
        assert {node for node in idle if not node.children} <= set(counts), "a leaf has no entry"

    def _push(self, node: Node, note: _Note) -> None:
        self._stamp += 1
        note.stamp = self._stamp
        heapq.heappush(self._heap, (note.worth, note.stamp, note, node))
        if len(self._heap) > _STALE_SHARE * self._idle_count + _STALE_MIN:
            self._heap = [entry for entry in self._heap if entry[1] == entry[2].stamp]
            heapq.heapify(self._heap)
