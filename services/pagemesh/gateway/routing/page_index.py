"""Which prefixes are cached on which host, as far as a gateway was told.

    BLANK -> LOADING -> FRESH        a snapshot was asked for; its last part came
               ^          |
               +----------+          a gap in the events, or a new epoch of the pager

A hint, never a promise: a wrong entry costs time and nothing else. So the index may forget keys (it
is bounded in bytes) and may apply events out of order. Pure.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pagemesh.wire.pager_reports import PagesChanged, PagesSnapshot

KEY_BYTES = 100
"""What one key costs in a dict of Python integers, measured with room to spare."""


class IndexState(enum.Enum):
    BLANK = "blank"
    LOADING = "loading"
    FRESH = "fresh"


class PageIndex:
    """The keys of one host, at most ``keys_max``. When it is full, new keys are not kept: prefixes
    that many prompts share were stored long ago, and keys that leave the cache make room by
    themselves."""

    def __init__(self, *, keys_max: int) -> None:
        self.state = IndexState.BLANK
        self._keys_max = keys_max
        self._keys: dict[int, int] = {}
        """Each with the number of the load that last reported it. A key that a later snapshot lacks
        has left the cache unnoticed."""
        self._load_number = 0
        self._removed: set[int] = set()
        self._listed_count = 0
        """Pages of the current snapshot that were received so far."""
        self._epoch = 0
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._keys)

    def announced(self, epoch: int, sequence: int) -> bool:
        """The pager announced its last event. True when a snapshot must be asked for."""
        known = self.state is not IndexState.BLANK and self._epoch == epoch
        if known and sequence <= self._sequence:
            return False
        self._reload(epoch, sequence)
        return True

    def changed(self, message: PagesChanged) -> bool:
        """Apply an event. True when a snapshot must be asked for."""
        if self.state is IndexState.BLANK or message.epoch != self._epoch:
            self._reload(message.epoch, message.sequence)
            return True
        if message.sequence <= self._sequence:
            return False
        gap = message.sequence > self._sequence + 1
        if gap:
            self._reload(message.epoch, message.sequence)
        self._sequence = message.sequence
        removed = _ints(message.removed)
        for key in removed:
            self._keys.pop(key, None)
        if self.state is IndexState.LOADING:
            self._removed.update(removed)
        self._add(_ints(message.stored))
        return gap

    def snapshot(self, message: PagesSnapshot) -> int:
        """Apply a part of a snapshot; returns the index at which the next part starts. 0: this was
        the last part, or it does not continue the ones before (another epoch of the pager)."""
        if self.state is not IndexState.LOADING:
            return 0
        if (message.epoch, message.first) != (self._epoch, self._listed_count):
            self.unload()
            return 0
        keys = _numbers(message.keys)
        self._add([key for key in keys[keys > 0].tolist() if key not in self._removed])
        if not message.first:  # of what changes between two parts, the events tell
            self._sequence = max(self._sequence, message.sequence)
        self._listed_count += len(keys)
        if message.more and len(keys):
            return self._listed_count
        self._removed.clear()
        number = self._load_number
        self._keys = {key: said for key, said in self._keys.items() if said == number}
        self.state = IndexState.FRESH
        return 0

    def unload(self) -> None:
        """The snapshot failed: the next announcement asks for another."""
        self.state = IndexState.BLANK
        self._removed.clear()

    def __contains__(self, key: int) -> bool:
        return key in self._keys

    def leading(self, keys: Sequence[int]) -> int:
        """How many of ``keys`` are known before the first that is not."""
        known = self._keys
        if all(map(known.__contains__, keys)):
            return len(keys)
        return next(count for count, key in enumerate(keys) if key not in known)

    def check(self) -> None:
        assert len(self._keys) <= self._keys_max
        assert self.state is IndexState.LOADING or not self._removed

    def _add(self, keys: list[int]) -> None:
        self._keys.update(dict.fromkeys(keys, self._load_number))
        while len(self._keys) > self._keys_max:
            self._keys.popitem()

    def _reload(self, epoch: int, sequence: int) -> None:
        if epoch != self._epoch:
            self._keys.clear()
        if self.state is not IndexState.LOADING:  # a snapshot that is on its way is good enough
            self._load_number += 1
        self._listed_count = 0  # but not if parts of it came before: it is begun anew
        self._removed.clear()
        self._epoch, self._sequence = epoch, sequence
        self.state = IndexState.LOADING


def _numbers(packed: bytes) -> NDArray[np.uint64]:
    usable = len(packed) - len(packed) % 8
    return np.frombuffer(packed[:usable], "<u8")


def _ints(packed: bytes) -> list[int]:
    keys: list[int] = _numbers(packed).tolist()
    return keys
