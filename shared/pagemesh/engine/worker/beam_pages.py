"""The pages of a beam search: one lease holds those of all beams, each of which has a page table.

    lease   p0 p1 p2 | p3 p4 p5 p6 p7 ...      the prompt's pages, then what the beams take
    beam 0  p0 p1 p2   p3                      full pages are shared by all that have them in
    beam 1  p0 p1 p2   p4 p6                   common; before a beam writes into a page that
    beam 2  p0 p1 p2   p4 p5                   others have too, it gets a copy of its own

So beams fork and end without calls to the pager: a page that no beam uses any more is reused by
another. Only the prompt's pages are in token order in the lease, so only they are cached. All
beams have the same number of slots; ``length`` counts those that are filled.

Pure. ``check`` raises ``AssertionError`` when an invariant is broken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from pagemesh.wire.tokens import U32


class BeamPages:
    """``table``: uint32 [pages], the lease's; its first ``prompt_tokens - 1`` slots are filled."""

    def __init__(self, table: U32, prompt_tokens: int, page_size: int) -> None:
        self._page_size = page_size
        self._shared_count = (prompt_tokens - 1) // page_size
        prompt_pages = -(-prompt_tokens // page_size)
        self._shared = table[: self._shared_count].copy()
        self._own: list[list[int]] = [table[self._shared_count : prompt_pages].tolist()]
        """Each beam's pages after the shared ones."""
        self._free: list[int] = []
        self._known_count = prompt_pages
        self._copies: list[tuple[int, int]] = []
        self.saved_count_max = 0
        """Pages saved by sharing, at the peak."""

    def learn(self, table: U32) -> None:
        """Take up pages that were added to the lease's table."""
        self._free += table[self._known_count :].tolist()
        self._known_count = max(self._known_count, len(table))

    def wanted_count(self, length: int, width: int) -> int:
        """Pages that the lease should have, so that ``width`` beams can fill their present page
        and the next."""
        index = length // self._page_size - self._shared_count
        before = {page for own in self._own for page in own[:index]}
        return self._shared_count + len(before) + 2 * width

    def prepare(self, length: int) -> bool:
        """Give each beam a page of its own for slot ``length``. False: there are too few pages,
        and nothing has changed."""
        index = length // self._page_size - self._shared_count
        users = Counter(own[index] for own in self._own if index < len(own))
        fresh = sum(index >= len(own) for own in self._own)
        if fresh + sum(users.values()) - len(users) > len(self._free):
            return False
        for own in self._own:
            if index >= len(own):
                own.append(self._free.pop())
            elif users[own[index]] > 1:
                users[own[index]] -= 1
                copy = self._free.pop()
                self._copies.append((own[index], copy))
                own[index] = copy
        alone = sum(self._shared_count + len(own) for own in self._own)
        held = self._shared_count + len({page for own in self._own for page in own})
        self.saved_count_max = max(self.saved_count_max, alone - held)
        return True

    def take_copies(self) -> list[tuple[int, int]]:
        """Pairs (source page, target page) to copy before the step that writes."""
        copies, self._copies = self._copies, []
        return copies

    def table(self, beam: int) -> U32:
        """uint32 [pages], a copy, which stays valid while a step reads it."""
        return np.concatenate((self._shared, np.array(self._own[beam], np.dtype("<u4"))))

    def fork(self, parents: Sequence[int]) -> None:
        """Replace the beams by ``len(parents)`` others, each with the slots of its parent."""
        assert not self._copies, "the step that copies has not run"
        before = {page for own in self._own for page in own}
        self._own = [list(self._own[parent]) for parent in parents]
        after = {page for own in self._own for page in own}
        self._free += sorted(before - after)

    def check(self) -> None:
        used = {page for own in self._own for page in own}
        count = self._shared_count + len(used) + len(self._free)
        assert count == self._known_count, (count, self._known_count)
        assert len(set(self._free)) == len(self._free) and not used & set(self._free)
        sources = {source for source, _ in self._copies}
        targets = [target for _, target in self._copies]
        assert len(set(targets)) == len(targets) and not sources & set(targets)
