"""Why a prefix is not cached any more, for the hit waterfall.

What leaves the tree leaves marks: 64-bit hashes (XXH3) of everything from the root to the end of
some of its pages, with the reason.

    run of pages that left   [ 0 | 1 | 2 | 3 | 4 | 5 | 6 ]
    marks after              1   2       4           7       pages

A prompt is looked up from where its match ends, mark by mark. So what is told has left indeed,
up to one hash in 2**64 or so; what a prompt shares only in part with a run is told to the last
mark, at least half of it. Marks are kept in a table of fixed size; a newer one takes the place of
an older one, which is then forgotten. Nothing is decided by them.
"""

from __future__ import annotations

import numpy as np
import xxhash

from pagemesh.pager.leaving import Why
from pagemesh.pager.radix import Forest, Node

MARK_COUNT = 1 << 16
"""12 bytes each."""
_RUNS_MAX = 32
"""Runs that one prompt is followed through."""
_CODE_BITS = 3
_REASONS = {why: code for code, why in enumerate(Why, start=1)}
_WHY = {code: why for why, code in _REASONS.items()}


class Departed:
    """The marks of what left ``forest``, of pages of ``page_size`` tokens. ``mark_count`` is a
    power of two."""

    def __init__(self, forest: Forest, page_size: int, mark_count: int = MARK_COUNT) -> None:
        self._forest = forest
        self._width = 4 * page_size
        self._mask = mark_count - 1
        # Zeros take no memory before they are written to; views are quicker with single items.
        self._keys = np.zeros(mark_count, np.uint64).data
        self._notes = np.zeros(mark_count, np.uint32).data
        self._is_empty = True

    def leaving(self, node: Node, page_count: int, why: Why) -> None:
        """The last ``page_count`` pages of ``node`` leave the tree (a ``Leaver``)."""
        parts: list[bytes] = []
        above = node.parent
        while (further := above.parent) is not above:
            parts.append(above.tokens)
            above = further
        hashed = xxhash.xxh3_64(seed=_seed(self._forest.tree_of(node).digest))
        for part in reversed(parts):
            hashed.update(part)
        width, tokens = self._width, memoryview(node.tokens)
        at = len(tokens) - page_count * width
        hashed.update(tokens[:at])
        note = page_count << _CODE_BITS | _REASONS[why]
        self._is_empty = False
        keys, notes, mask = self._keys, self._notes, self._mask
        done = 0
        while done < page_count:
            pages = min(2 * done, page_count) if done else 1
            hashed.update(tokens[at + done * width : at + pages * width])
            key = hashed.intdigest()
            keys[key & mask], notes[key & mask] = key, note
            done = pages

    def lost_pages(
        self, root: bytes, tokens: bytes, first: int, pages_max: int
    ) -> list[tuple[Why, int]]:
        """Why the pages of ``tokens`` from index ``first`` on, up to ``pages_max``, are not
        cached, as far as that is known: reasons and page counts, in order."""
        lost: list[tuple[Why, int]] = []
        if self._is_empty:
            return lost
        width, view = self._width, memoryview(tokens)
        hashed = xxhash.xxh3_64(view[: first * width], seed=_seed(root))
        for _ in range(_RUNS_MAX):
            if first >= pages_max:
                break
            hashed.update(view[first * width : (first + 1) * width])
            note = self._note(hashed.intdigest())
            if not note:
                break
            run_pages = min(note >> _CODE_BITS, pages_max - first)
            done = 1
            while done < run_pages:
                pages = min(2 * done, run_pages)
                further = hashed.copy()
                further.update(view[(first + done) * width : (first + pages) * width])
                if not self._note(further.intdigest()):
                    break
                hashed, done = further, pages
            lost.append((_WHY[note & ((1 << _CODE_BITS) - 1)], done))
            first += done
        return lost

    def _note(self, key: int) -> int:
        """What is noted of ``key``; 0: nothing."""
        at = key & self._mask
        return self._notes[at] if self._keys[at] == key else 0


def _seed(root: bytes) -> int:
    return int.from_bytes(root[:8], "little")
