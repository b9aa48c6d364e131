"""The pager's event stream: which keyed prefix ids are cached.

Keys are derived here, after the answer is sent, to keep cryptography off the path of requests. A
key takes two to three microseconds, so the pages that a restart finds are keyed in parts, while the
pager serves. Changes are collected and published together a few times a second; a listener that is
late or sees a gap in their sequence asks for a snapshot.
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
"""The cost of a drop, whose keys are known: that of making two keys, and one more for every 32
pages."""


class PageEvents:
    """Keys by page, and what changed since the last event."""

    def __init__(self, facts: PoolFacts, secret: bytes) -> None:
        self._facts = facts
        self._secret = secret
        self._keys: NDArray[np.uint64] = np.zeros(facts.page_count, np.uint64)
        self._cached = np.zeros(facts.page_count, bool)
        self._changes: list[tuple[NDArray[np.uint64], bool]] = []
        """Since the last event, in order: keys, and whether they became cached or ceased to be."""
        self._changed_count = 0
        self._noted: deque[PagesStored | PagesDropped] = deque()
        """What ``work`` has to do, in order. Gets long only after a restart, when pages have no
        keys yet; what one turn of a sweep frees is done in that turn."""
        self.sequence = 0

    @property
    def is_behind(self) -> bool:
        """Whether there is more for ``work`` to do."""
        return bool(self._noted)

    @property
    def has_news(self) -> bool:
        """Whether there are changes to publish."""
        return bool(self._changes)

    @property
    def is_full(self) -> bool:
        """Whether so much has changed that it should be published now."""
        return self._changed_count >= CHANGED_KEYS_MAX

    def note(self, command: PagesStored | PagesDropped) -> None:
        """Pages were stored or dropped: listeners hear of it after ``work`` has got to it."""
        self._noted.append(command)

    def work(self, pages_max: int) -> None:
        """Process what was noted, in order, for as long as it takes to make the keys of
        ``pages_max`` pages, or a little longer: a command is never split."""
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
        """A part of the cached keys as they are now. Call ``take`` first, so that no change
        waits. Each page has its place, or pages that come and go between two parts would shift the
        others from one part into another."""
        end = len(self._cached) - int(self._cached[::-1].argmax()) if self._cached.any() else 0
        there = slice(first, min(first + SNAPSHOT_KEYS_MAX, end))
        part = np.where(self._cached[there], self._keys[there], np.uint64(0))
        return PagesSnapshot(
            host=self._facts.host,
            epoch=self._facts.epoch,
            sequence=self.sequence,
            first=first,
            keys=part.astype("<u8").tobytes(),
            more=first + len(part) < end,
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
        self._change(self._keys[pages].copy(), False)  # these pages soon get other keys

    def _change(self, keys: NDArray[np.uint64], cached: bool) -> None:
        if len(keys):
            self._changes.append((keys, cached))
            self._changed_count += len(keys)


def _settled(
    changes: list[tuple[NDArray[np.uint64], bool]],
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """The keys that end up cached, and those that do not, each in the order of their last
    changes."""
    keys = np.concatenate([part for part, _ in changes])
    cached = np.repeat([cached for _, cached in changes], [len(part) for part, _ in changes])
    ordered = np.sort(keys)
    if (ordered[1:] != ordered[:-1]).all():  # the usual case; finding last changes takes long
        return keys[cached], keys[~cached]
    from_end = np.unique(keys[::-1], return_index=True)[1]
    last = np.sort(len(keys) - 1 - from_end)
    return keys[last][cached[last]], keys[last][~cached[last]]
