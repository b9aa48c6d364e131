"""The pager's event stream: which keyed prefix ids are cached.

Keys are derived here, after the answer is out: cryptography stays off the path of requests. It
takes two to three microseconds a page, so what a restart finds is worked off a part at a time,
while the pager serves.
Changes are collected and published together a few times a second; a gap in their sequence,
or a late listener, is mended by a snapshot.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from pagemesh.pager.events import PagesDropped, PagesStored
from pagemesh.pager.limits import PoolFacts
from pagemesh.pager.pages.runs import first_of, where
from pagemesh.wire.identity import prefix_keys
from pagemesh.wire.pager_reports import PagesChanged, PagesSnapshot

SNAPSHOT_KEYS_MAX = 65_536
CHANGED_KEYS_MAX = 65_536
_KEYS_PER_DROP, _DROPPED_PER_KEY = 2, 32
"""Pages whose keys are known are dropped as quickly as two keys are made, and one more for every 32
pages."""


class PageEvents:
    """Keys by page, and what changed since the last event."""

    def __init__(self, facts: PoolFacts, secret: bytes) -> None:
        self._facts = facts
        self._secret = secret
        self._keys: NDArray[np.uint64] = np.zeros(facts.page_count, np.uint64)
        self._cached = np.zeros(facts.page_count, bool)
        self._changes: list[tuple[NDArray[np.uint64], bool]] = []
        """Keys and whether they were cached by that, in order; since the last event."""
        self._changed_count = 0
        self._noted: deque[PagesStored | PagesDropped] = deque()
        """What ``work`` has to do, in order. It grows at a restart, whose pages have no keys yet;
        what a turn of a sweep frees is worked off in that turn."""
        self.sequence = 0

    @property
    def is_behind(self) -> bool:
        """There is more to ``work`` off."""
        return bool(self._noted)

    @property
    def has_news(self) -> bool:
        """Something changed that nobody was told."""
        return bool(self._changes)

    @property
    def is_full(self) -> bool:
        """So much has changed that it should be published now."""
        return self._changed_count >= CHANGED_KEYS_MAX

    def note(self, command: PagesStored | PagesDropped) -> None:
        """Pages were stored or dropped: listeners hear of it once ``work`` came to it."""
        self._noted.append(command)

    def work(self, pages_max: int) -> None:
        """Take up what was noted, in order, for as long as it takes to make the keys of
        ``pages_max`` pages, or a little longer: what came in one command stays together."""
        while self._noted and pages_max > 0:
            command = self._noted.popleft()
            if isinstance(command, PagesStored):
                pages_max -= len(command.pages)
                self._stored(command)
            else:
                pages_max -= _KEYS_PER_DROP + len(command.pages) // _DROPPED_PER_KEY
                self._dropped(command)

    def take(self) -> PagesChanged | None:
        """The next event, or None when nothing changed."""
        if not self._changes:
            return None
        self.sequence += 1
        stored, removed = _settled(self._changes)
        self._changes, self._changed_count = [], 0
        return PagesChanged(
            host=self._facts.host,
            epoch=self._facts.epoch,
            sequence=self.sequence,
            stored=stored.astype("<u8").tobytes(),
            removed=removed.astype("<u8").tobytes(),
        )

    def snapshot(self, first: int) -> PagesSnapshot:
        """A part of the listing as it is now; ``take`` has just been called."""
        keys = self._keys[self._cached]
        part = keys[first : first + SNAPSHOT_KEYS_MAX]
        return PagesSnapshot(
            host=self._facts.host,
            epoch=self._facts.epoch,
            sequence=self.sequence,
            first=first,
            keys=part.astype("<u8").tobytes(),
            more=first + len(part) < len(keys),
        )

    def _stored(self, command: PagesStored) -> None:
        parent = int(self._keys[first_of(command.after)]) if len(command.after) else 0
        keys = prefix_keys(
            self._secret, command.root, np.frombuffer(command.tokens, "<u4"),
            self._facts.page_size, parent=parent,
        )  # fmt: skip
        pages = where(command.pages)
        self._keys[pages] = keys
        self._cached[pages] = True
        self._change(keys, True)

    def _dropped(self, command: PagesDropped) -> None:
        pages = where(command.pages)
        self._cached[pages] = False
        self._change(self._keys[pages].copy(), False)  # the pages are soon those of other keys

    def _change(self, keys: NDArray[np.uint64], cached: bool) -> None:
        if len(keys):
            self._changes.append((keys, cached))
            self._changed_count += len(keys)


def _settled(
    changes: list[tuple[NDArray[np.uint64], bool]],
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """The keys that are cached and those that are not in the end, each in the order of the last
    changes."""
    keys = np.concatenate([part for part, _ in changes])
    cached = np.repeat([cached for _, cached in changes], [len(part) for part, _ in changes])
    ordered = np.sort(keys)
    if (ordered[1:] != ordered[:-1]).all():  # as a rule; to find which came last takes long
        return keys[cached], keys[~cached]
    from_end = np.unique(keys[::-1], return_index=True)[1]
    last = np.sort(len(keys) - 1 - from_end)
    return keys[last][cached[last]], keys[last][~cached[last]]
