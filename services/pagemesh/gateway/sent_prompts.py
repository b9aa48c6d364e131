"""Prompts that were sent to a host lately: what of another prompt is on its way there.

Pages show in an index once they are computed. Until then prompts that begin alike and come
together would look new to a router, each of them whole; on the host all but one wait for the
pages of the first. Like the index this is a hint. Pure.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from pagemesh.wire.tokens import U32

LIFE_MS = 10_000
"""Longer than most prompts take; whatever was computed is in the index by then."""
TOKEN_COUNT_MAX = 1 << 20
"""Four megabytes."""
ALIKE_COUNT_MAX = 8
"""Of prompts with the same first page; looking at one takes two microseconds."""
_Head = tuple[str, bytes, bytes]
"""Host, root, and the tokens of the first page."""


@dataclass(frozen=True, slots=True)
class _Sent:
    tokens: U32
    until_ms: int


class SentPrompts:
    def __init__(self, *, token_count_max: int = TOKEN_COUNT_MAX) -> None:
        self._token_count_max = token_count_max
        self._token_count = 0
        self._sent: OrderedDict[_Head, list[_Sent]] = OrderedDict()

    def note(self, host: str, root: bytes, tokens: U32, page_size: int, now_ms: int) -> None:
        """``tokens`` goes to ``host``; what is shorter than a page is nothing to others."""
        if len(tokens) < page_size or len(tokens) > self._token_count_max:
            return
        head = _head(host, root, tokens, page_size)
        alike = self._sent.setdefault(head, [])
        self._sent.move_to_end(head)
        alike.append(_Sent(tokens, now_ms + LIFE_MS))
        self._token_count += len(tokens)
        if len(alike) > ALIKE_COUNT_MAX:
            self._token_count -= len(alike.pop(0).tokens)
        while self._token_count > self._token_count_max:
            self._forget(next(iter(self._sent)))

    def coming_pages(self, host: str, root: bytes, tokens: U32, page_size: int, now_ms: int) -> int:
        """How many whole pages ``tokens`` has in common with a prompt that was sent there."""
        head = _head(host, root, tokens, page_size)
        alike = self._sent.get(head)
        if alike is None:
            return 0
        if alike[-1].until_ms <= now_ms:
            self._forget(head)
            return 0
        fresh = (sent.tokens for sent in alike if sent.until_ms > now_ms)
        return max(_common_count(other, tokens) for other in fresh) // page_size

    def _forget(self, head: _Head) -> None:
        self._token_count -= sum(len(sent.tokens) for sent in self._sent.pop(head))

    def check(self) -> None:
        """Raises ``AssertionError`` when an invariant is broken."""
        counted = sum(len(sent.tokens) for alike in self._sent.values() for sent in alike)
        assert counted == self._token_count <= self._token_count_max
        assert all(0 < len(alike) <= ALIKE_COUNT_MAX for alike in self._sent.values())


def _head(host: str, root: bytes, tokens: U32, page_size: int) -> _Head:
    return host, root, tokens[:page_size].tobytes()


def _common_count(left: U32, right: U32) -> int:
    """How many tokens the two begin with alike."""
    count = min(len(left), len(right))
    unlike = left[:count] != right[:count]
    first = int(unlike.argmax()) if count else 0
    return first if count and unlike[first] else count
