"""Which idle pages go first.

A policy knows the idle nodes of the prefix tree. The tree reports a node as idle only after
all nodes below it, and takes nodes from the leaves up, so a policy that keeps that order
(as LRU does) always names a leaf; any other must look for one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

N = TypeVar("N")


class EvictionPolicy(Protocol[N]):
    """Keeps the idle nodes and names the next to go."""

    def add(self, node: N) -> None:
        """``node`` became idle: nothing refers to it or to what is below it."""

    def remove(self, node: N) -> None:
        """``node`` is referenced again, or gone."""

    def victim(self) -> N:
        """An idle node without children. Raises ``LookupError`` when no node is idle."""

    def __iter__(self) -> Iterator[N]:
        """Every idle node."""

    def __len__(self) -> int: ...


class Lru(Generic[N]):
    """Least recently used first. Every operation is O(1)."""

    def __init__(self) -> None:
        # Not a plain dict: finding its first key is linear after removals at the front.
        self._idle: OrderedDict[N, None] = OrderedDict()

    def add(self, node: N) -> None:
        self._idle[node] = None

    def remove(self, node: N) -> None:
        del self._idle[node]

    def victim(self) -> N:
        for node in self._idle:
            return node
        raise LookupError("nothing is idle")

    def __iter__(self) -> Iterator[N]:
        return iter(self._idle)

    def __len__(self) -> int:
        return len(self._idle)
