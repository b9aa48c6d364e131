"""Growths: the generations of a root, one of which ends whenever the root is invalidated.

The values in pages would not reveal a stale one: those computed before an invalidation are as right
as those computed after it. So each page records, in the pool and on disk, the growth of its root in
which it was computed, and a sequence may read only pages of the growth in which it was admitted.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

from pagemesh.wire.cache_messages import CacheInvalidated, InvalidateCache
from pagemesh.wire.messages import Message, Refused

DEAD = 0
"""The growth of pages that nobody may read any more."""
MODEL = "m"
"""The model that all workers serve."""


class Growths:
    """The current growths of one host's roots; a number is never used twice."""

    def __init__(self) -> None:
        self._numbers = count(DEAD + 1)
        self._now: dict[bytes, int] = {}

    def of(self, root: bytes) -> int:
        """The growth of what is computed under ``root`` now."""
        if root not in self._now:
            self._now[root] = next(self._numbers)
        return self._now[root]

    def end(self, roots: Iterable[bytes]) -> None:
        """Begin new growths: sequences admitted from now on read nothing older of ``roots``."""
        for root in roots:
            self._now[root] = next(self._numbers)


def meant(message: InvalidateCache, answer: Message, known: set[bytes]) -> set[bytes]:
    """Those of the ``known`` roots that are no longer served, according to ``answer``. That
    includes a root that is said not to exist."""
    if isinstance(answer, Refused):
        is_over = answer.code == "Gone" and message.what == "root"
        return {bytes.fromhex(message.name)} if is_over else set()
    assert isinstance(answer, CacheInvalidated)
    named = {bytes.fromhex(root) for root in answer.roots}
    match message.what:
        case "root":
            return named | {bytes.fromhex(message.name)}
        case "tenant":
            return named | {root for root in known if tenant_of(root) == message.name}
        case "model":
            return named | (known if message.name == MODEL else set())
        case _:
            return set()


def tenant_of(root: bytes) -> str:
    """The tenant of ``root``; each root belongs to another one."""
    return root[:1].decode()
