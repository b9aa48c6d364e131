"""Lowest rank first; the longest unused of these."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Generic, TypeVar

from pagemesh.pager.eviction.leaves import LeafQueue, bared
from pagemesh.pager.eviction.policy import Edge

N = TypeVar("N", bound=Edge)
RANK_MIN, RANK_MAX = -4, 4
"""A rank beyond these counts as the nearest of them."""


class Priority(Generic[N]):
    """The rank of a node when it becomes idle counts until it is used. Operations are amortised
    O(1). ``note`` is that rank."""

    def __init__(self) -> None:
        self._by_rank: list[LeafQueue[N]] = [LeafQueue() for _ in range(RANK_MIN, RANK_MAX + 1)]

    def add(self, node: N) -> None:
        node.note = max(RANK_MIN, min(RANK_MAX, node.rank))
        self._of(node).add(node)

    def remove(self, node: N) -> None:
        self._of(node).remove(node)

    def cut(self, upper: N, lower: N) -> None:
        pass  # lower keeps its place

    def shrink(self, node: N, keep: int) -> None:
        if not keep:
            self._of(node).remove(node)
            parent = bared(node)
            if parent is not None:
                self._of(parent).recall(parent)

    def victim(self) -> tuple[N, int]:
        for queue in self._by_rank:
            node = queue.first()
            if node is not None:
                return node, len(node.pages)
        raise LookupError("nothing is idle")

    def __iter__(self) -> Iterator[N]:
        return chain.from_iterable(self._by_rank)

    def _of(self, node: N) -> LeafQueue[N]:
        rank: int = node.note
        return self._by_rank[rank - RANK_MIN]
