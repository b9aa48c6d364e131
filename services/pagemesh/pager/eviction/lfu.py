"""Least frequently used first; the longest unused of these."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Generic, TypeVar

from pagemesh.pager.eviction.leaves import LeafQueue, bared
from pagemesh.pager.eviction.policy import Edge

N = TypeVar("N", bound=Edge)
USES_MAX = 31
"""Counting ends here: beyond it, age alone decides."""


@dataclass(slots=True)
class _Note:
    use_count: int


class Lfu(Generic[N]):
    """Uses are counted while a node is cached. Operations are amortised O(1)."""

    def __init__(self) -> None:
        self._by_uses: list[LeafQueue[N]] = [LeafQueue() for _ in range(USES_MAX + 1)]

    def add(self, node: N) -> None:
        note: _Note | None = node.note
        if note is None:
            note = node.note = _Note(0)
        self._by_uses[note.use_count].add(node)

    def remove(self, node: N) -> None:
        note: _Note = node.note
        self._by_uses[note.use_count].remove(node)
        note.use_count = min(USES_MAX, note.use_count + 1)

    def cut(self, upper: N, lower: N) -> None:
        note: _Note | None = lower.note
        if note is not None:
            # An idle edge is used in its upper part just now; a used one was counted.
            upper.note = _Note(min(USES_MAX, note.use_count + (not lower.pins)))

    def shrink(self, node: N, keep: int) -> None:
        if not keep:
            self._by_uses[node.note.use_count].remove(node)
            parent = bared(node)
            if parent is not None:
                self._by_uses[parent.note.use_count].recall(parent)

    def victim(self) -> tuple[N, int]:
        for queue in self._by_uses:
            node = queue.first()
            if node is not None:
                return node, len(node.pages)
        raise LookupError("nothing is idle")

    def __iter__(self) -> Iterator[N]:
        return chain.from_iterable(self._by_uses)
