"""Which slots of the disk tier should be in memory, as far as the core can tell.

``page_memory`` keeps what was written or read last, on threads of its own; this class follows it by
the events that reach the core. It only serves to predict how long a read will take: the reader
itself finds out where a page is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class RecentSlots:
    """The ``count_max`` slots that were written or read last."""

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._slots: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, slot: int) -> bool:
        return slot in self._slots

    def used(self, slots: Iterable[int]) -> None:
        """``slots`` were written or read, in this order."""
        if not self._count_max:
            return
        for slot in slots:
            self._slots[slot] = None
            self._slots.move_to_end(slot)
            if len(self._slots) > self._count_max:
                self._slots.popitem(last=False)

    def forget(self, slot: int) -> None:
        """``slot`` holds nothing any more."""
        self._slots.pop(slot, None)
