"""How many tokens a prompt shares with a cached page that it cannot use as a whole."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Final

_SIBLINGS_MAX: Final = 8


def nearest(pages: Iterable[bytes], rest: bytes) -> int:
    """The most leading tokens that any of the packed ``pages`` has in common with ``rest``; only
    the first few pages are compared."""
    near, first_token = 0, rest[:4]
    for page in islice(pages, _SIBLINGS_MAX):
        if page.startswith(first_token):
            near = max(near, common_tokens(page, rest))
    return near


def common_tokens(left: bytes, right: bytes) -> int:
    """The number of equal leading tokens of two short packed lists."""
    if left[:4] != right[:4]:
        return 0  # by far the most frequent case
    size = min(len(left), len(right))
    differing = int.from_bytes(left[:size], "little") ^ int.from_bytes(right[:size], "little")
    if not differing:
        return size // 4
    return ((differing & -differing).bit_length() - 1) // 32
