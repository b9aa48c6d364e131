"""Least recently used first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

from pagemesh.pager.eviction.policy import Edge

N = TypeVar("N", bound=Edge)


class Lru(Generic[N]):
    """Every operation is O(1). Nodes are told of children before parents, and used from the
    leaves' end up, so the first in order is always a leaf."""

    def __init__(self) -> None:
        # Not a plain dict: finding its first key is linear after removals at the front.
        self._idle: OrderedDict[N, None] = OrderedDict()

    def add(self, node: N) -> None:
        self._idle[node] = None

    def remove(self, node: N) -> None:
        del self._idle[node]

    def cut(self, upper: N, lower: N) -> None:
        pass  # lower keeps its age

    def shrink(self, node: N, keep: int) -> None:
        if not keep:
            del self._idle[node]

    def tidy(self) -> None:
        pass  # nothing is put off

    def victim(self) -> tuple[N, int]:
        for node in self._idle:
            return node, len(node.pages)
        raise LookupError("nothing is idle")

    def __iter__(self) -> Iterator[N]:
        return (node for node in self._idle if not node.children)
