"""Queues of idle nodes whose first leaf is found in amortised constant time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, Generic, TypeVar

from pagemesh.pager.eviction.policy import Edge

N = TypeVar("N", bound=Edge)


class LeafQueue(Generic[N]):
    """In the order of ``add``. What reaches the front and is no idle leaf is put aside, and
    comes back to the front by ``recall``: nothing still in the queue is older."""

    __slots__ = ("_aside", "add", "nodes")

    def __init__(self) -> None:
        # Not a plain dict: finding its first key is linear after removals at the front.
        self.nodes: OrderedDict[N, None] = OrderedDict()
        """Those that were not put aside. Only to be looked at."""
        self._aside: set[N] = set()
        self.add: Callable[[N], None] = self.nodes.setdefault
        """Put a node, which is not in it, last. The dictionary's own method, without a call in
        Python: every edge that becomes idle comes here."""

    def remove(self, node: N) -> None:
        """Take ``node`` out, wherever it is. Raises ``KeyError``."""
        if node in self._aside:
            self._aside.remove(node)
        else:
            del self.nodes[node]

    def recall(self, node: N) -> None:
        """``node``, which is in it, is an idle leaf now."""
        if node in self._aside:
            self._aside.remove(node)
            self.nodes[node] = None
            self.nodes.move_to_end(node, last=False)

    def first(self) -> N | None:
        """The first idle leaf."""
        queue = self.nodes
        while queue:
            node = next(iter(queue))
            if not node.children and not node.pins:
                return node
            del queue[node]
            self._aside.add(node)
        return None

    def __iter__(self) -> Iterator[N]:
        return (node for node in self.nodes if not node.children and not node.pins)


class LeafQueues(Generic[N]):
    """What policies have in common that take the first leaf of the first queue with any. The
    ``note`` of a node is the index of its queue."""

    def __init__(self, queue_count: int) -> None:
        self._queues: list[LeafQueue[N]] = [LeafQueue() for _ in range(queue_count)]

    def add(self, node: N) -> None:
        self._queues[node.note].add(node)

    def remove(self, node: N) -> None:
        self._queues[node.note].remove(node)

    def shrink(self, node: N, keep: int) -> None:
        if not keep:
            self._queues[node.note].remove(node)
            parent = bared(node)
            if parent is not None:
                self._queues[parent.note].recall(parent)

    def tidy(self) -> None:
        pass  # nothing is put off

    def victim(self) -> tuple[N, int]:
        for queue in self._queues:
            node = queue.first()
            if node is not None:
                return node, len(node.pages)
        raise LookupError("nothing is idle")

    def __iter__(self) -> Iterator[N]:
        return chain.from_iterable(self._queues)


def bared(node: Edge) -> Any | None:
    """The parent of ``node``, gone just now, if that made it an idle leaf."""
    parent = node.parent
    return None if parent.is_root or parent.pins or parent.children else parent
