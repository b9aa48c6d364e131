"""Why a prefix is not cached any more, for the hit waterfall.

What leaves the tree leaves marks: 64-bit hashes (XXH3) of everything from the root to the end of
some of its pages, with the reason. They are chained: each goes on from the one before, and the
first from the hash of the path to the run.

    root ------ path ------> [ 0 | 1 | 2 | 3 | 4 | 5 | 6 ]   run of pages that left
                             1   2       4           7       marks after so many

A prompt is looked up from where its match ends, mark by mark. So what is told has left indeed,
up to one hash in 2**64 or so; what a prompt shares only in part with a run is told to the last
mark, at least half of it. Marks are kept in a table of fixed size; a newer one takes the place of
an older one, which is then forgotten. Nothing is decided by them.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import xxhash
from xxhash import xxh3_64_intdigest

from pagemesh.pager.leaving import Why
from pagemesh.pager.radix import Forest, Match, Node

MARK_COUNT = 1 << 16
"""12 bytes each."""
_PATHS_MAX = 1_024
"""What is hashed up to edges above those that left lately is kept for the next of them."""
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
        self._paths: dict[Node, tuple[int, int]] = {}
        """The depth of an edge above what left lately, and the hash up to its end. Edges only grow
        at that end, and one that gets shorter is forgotten."""

    def leaving(self, node: Node, page_count: int, why: Why) -> None:
        """The last ``page_count`` pages of ``node`` leave the tree (a ``Leaver``)."""
        width = self._width
        at = len(node.tokens) - page_count * width
        self._paths.pop(node, None)
        key = self._path(node.parent) if not at else self._hash(node.parent, node.tokens[:at])
        note = page_count << _CODE_BITS | _REASONS[why]
        self._is_empty = False
        keys, notes, mask = self._keys, self._notes, self._mask
        run = memoryview(node.tokens)[at:]
        for part in _between_marks(page_count, width):
            key = xxh3_64_intdigest(run[part], key)
            place = key & mask
            keys[place] = key
            notes[place] = note

    def _path(self, node: Node) -> int:
        """The hash of all tokens from the root to the end of ``node``."""
        known = self._paths.get(node)
        if known is not None and known[0] == node.depth:
            return known[1]
        key = self._hash(node, b"")
        if len(self._paths) >= _PATHS_MAX:
            self._paths.clear()
        if node.depth:  # nobody says when a root is gone
            self._paths[node] = (node.depth, key)
        return key

    def _hash(self, node: Node, rest: bytes) -> int:
        """As ``_path``, with ``rest`` behind it."""
        parts, above = [rest], node
        while (further := above.parent) is not above:
            parts.append(above.tokens)
            above = further
        seed = _seed(self._forest.tree_of(above).digest)
        return xxh3_64_intdigest(b"".join(reversed(parts)), seed)

    def lost_pages(
        self, root: bytes, tokens: bytes, match: Match, pages_max: int
    ) -> list[tuple[Why, int]]:
        """Why the pages of ``tokens`` after ``match``, up to ``pages_max`` in all, are not cached,
        as far as that is known: reasons and page counts, in order."""
        lost: list[tuple[Why, int]] = []
        if self._is_empty:
            return lost
        width, view = self._width, memoryview(tokens)
        first, hashed = match.pages, 0
        known = None if match.edge_pages else self._paths.get(match.node)
        path = None
        for _ in range(_RUNS_MAX):
            if first >= pages_max:
                break
            at = first * width
            if known is not None and known[0] == first:
                key = known[1]
            else:
                path = path or xxhash.xxh3_64(seed=_seed(root))
                path.update(view[hashed:at])
                key, hashed = path.intdigest(), at
            key = xxh3_64_intdigest(view[at : at + width], key)
            note = self._note(key)
            if not note:
                break
            run, done = view[at:], 1
            for part in _between_marks(min(note >> _CODE_BITS, pages_max - first), width)[1:]:
                key = xxh3_64_intdigest(run[part], key)
                if not self._note(key):
                    break
                done = part.stop // width
            lost.append((_WHY[note & ((1 << _CODE_BITS) - 1)], done))
            first += done
        return lost

    def _note(self, key: int) -> int:
        """What is noted of ``key``; 0: nothing."""
        at = key & self._mask
        return self._notes[at] if self._keys[at] == key else 0

    def check(self) -> None:
        """Raise ``AssertionError`` unless each path that is kept has the hash of its tokens."""
        assert len(self._paths) <= _PATHS_MAX
        for node, (depth, key) in self._paths.items():
            assert depth != node.depth or key == self._hash(node, b""), "another path's hash"


@lru_cache(maxsize=1_024)
def _between_marks(page_count: int, width: int) -> tuple[slice, ...]:
    """The bytes between the marks of a run, one after the other."""
    parts, done, pages = [], 0, 1
    while done < page_count:
        parts.append(slice(done * width, pages * width))
        done, pages = pages, min(2 * pages, page_count)
    return tuple(parts)


def _seed(root: bytes) -> int:
    return int.from_bytes(root[:8], "little")
