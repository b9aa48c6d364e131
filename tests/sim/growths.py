"""What may be read with what: every root grows anew once it was invalidated.

Values would not tell: what was computed before is as right as what is computed after. So each
page says in which growth of which root it was computed, in the pool and on disk, and a sequence
reads pages of the growth in which it was admitted and no others.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

from pagemesh.wire.cache_messages import CacheInvalidated, InvalidateCache
from pagemesh.wire.messages import Message, Refused

DEAD = 0
"""The growth of what nobody may read any more."""
MODEL = "m"
"""What all workers serve."""


class Growths:
    """The growths of one host's roots, by numbers that are used once."""

    def __init__(self) -> None:
        self._numbers = count(DEAD + 1)
        self._now: dict[bytes, int] = {}

    def of(self, root: bytes) -> int:
        """What is computed now under ``root`` is of this one."""
        if root not in self._now:
            self._now[root] = next(self._numbers)
        return self._now[root]

    def end(self, roots: Iterable[bytes]) -> None:
        """Nothing of ``roots`` is read from now on by whoever comes."""
        for root in roots:
            self._now[root] = next(self._numbers)


def meant(message: InvalidateCache, answer: Message, known: set[bytes]) -> set[bytes]:
    """The roots, of the ``known`` ones, of which ``answer`` tells an operator that nothing is
    served any more. Also what is said not to be there is not served."""
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
    """Each root is of another tenant."""
    return root[:1].decode()
