"""The hit waterfall: how many tokens of a prompt were cached, and why the others were not.

The reason for the tokens right after the match is given by the first of these rows that applies.
A row with several reasons may give several of them, each with its number of tokens.

    not_read                      the request may not read the cache, so nothing matches
    in_flight                     another lease is computing it, and could not be waited for
    on_disk                       reading it would take longer than computing it
    corrupt                       it was on disk, in a damaged page or after one
    expired                       it is still in the tree, but its lifetime is over
    evicted expired quota         it was cached recently and has left the tree; consecutive pages
    invalidated                   may have left for different reasons
    other_root                    it is cached for the same tenant under another root: another
                                  model, other weights or types, another salt
    abandoned                     it was waited for and did not come: the lease that computed it
                                  ended or was too slow, or a page read from disk was damaged
    partial_page last_token       the cache agrees for part of the next page, but only whole pages
                                  are shared; if it agrees to the end of the prompt, one of these
                                  tokens is the last, which is always computed
"""

from __future__ import annotations

from itertools import islice

from pagemesh.pager.books import Books
from pagemesh.pager.leases.in_flight import Found, Wait
from pagemesh.pager.tiers.traffic import OnDisk, Tiers
from pagemesh.pager.tree.departed import Departed, mark_count_for
from pagemesh.pager.tree.leaving import Why
from pagemesh.pager.tree.radix import Match
from pagemesh.wire.pager_messages import Admit, Waterfall

_ROOTS_MAX = 8
"""How many of the most recently used roots are searched for ``other_root``."""


class Waterfalls:
    """Makes the waterfall of each admission."""

    def __init__(self, books: Books, tiers: Tiers) -> None:
        self._books, self._tiers = books, tiers
        self._page_size = books.facts.page_size
        self._width = books.facts.page_token_bytes
        facts = books.facts
        self._departed = Departed(books.forest, facts.page_size, mark_count_for(facts.page_count))
        books.forest.on_leave(self._departed.leaving)

    def of(
        self, message: Admit, match: Match, found: Found | None, on_disk: OnDisk | None
    ) -> Waterfall:
        """The waterfall of ``message``, for which ``match`` is about to be pinned. ``found`` and
        ``on_disk``: what follows the match and is not waited for."""
        if not message.read_cache:
            return self._not_read(message)
        size = self._page_size
        matched = match.pages * size
        wait = None
        if self._books.in_flight.waits:
            wait = self._books.in_flight.end_wait((message.incarnation, message.key))
        selected = matched if wait is None else max(matched, wait.pages * size)
        lost: dict[str, int] = {}
        near = 0
        if found is not None:
            lost["in_flight"] = found.pages * size
        elif on_disk is not None:
            lost["on_disk"] = len(on_disk.records) * size
        elif self._gone(message, match, lost):
            pass
        elif selected > matched:
            lost["abandoned"] = selected - matched
        else:
            near = self._books.forest.near_tokens(match, message.tokens)
        available = matched + near
        if lost:
            available += sum(lost.values())
        if near and available == len(message.tokens) // 4:
            lost["last_token"] = 1
            near -= 1
        if near:
            lost["partial_page"] = near
        saved, fetched = self._gained(wait, matched)
        return Waterfall(
            available_tokens=max(available, selected),
            selected_tokens=selected,
            delivered_tokens=matched,
            lost=lost,
            awaited_tokens=saved,
            fetched_tokens=fetched,
            awaited_ms=0 if wait is None else wait.waited_ms,
        )

    def check(self) -> None:
        """Raise ``AssertionError`` unless the record of departed pages is consistent."""
        self._departed.check()

    def _not_read(self, message: Admit) -> Waterfall:
        tree = self._books.forest.trees.get(message.root)
        if tree is None:
            return Waterfall()
        pages_max = len(message.tokens) // self._width
        unread = self._books.forest.match(tree.root, message.tokens, pages_max).pages
        unread *= self._page_size
        return Waterfall(available_tokens=unread, lost={"not_read": unread} if unread else {})

    def _gone(self, message: Admit, match: Match, lost: dict[str, int]) -> bool:
        """Note in ``lost`` why whole pages after ``match`` are not cached. Returns whether a reason
        is known for any."""
        pages_max = (len(message.tokens) // 4 - 1) // self._page_size
        if match.pages >= pages_max:
            return False
        damaged = self._tiers.damaged_pages(match, message)
        if damaged:
            lost["corrupt"] = damaged * self._page_size
            return True
        over = self._books.forest.over_pages(match, message.tokens, pages_max)
        if over:
            lost[Why.EXPIRED.value] = over * self._page_size
            return True
        gone = self._departed.lost_pages(message.root, message.tokens, match, pages_max)
        for why, pages in gone:
            lost[why.value] = lost.get(why.value, 0) + pages * self._page_size
        if not gone and message.terms.tenant:
            pages = self._elsewhere(message, pages_max) - match.pages
            if pages > 0:
                lost["other_root"] = pages * self._page_size
        return bool(lost)

    def _elsewhere(self, message: Admit, pages_max: int) -> int:
        """The most pages of the prompt that are cached under one other root of its tenant, among
        the most recently used roots."""
        most, first_page = 0, message.tokens[: self._width]
        forest = self._books.forest
        for tree in islice(reversed(forest.trees.values()), _ROOTS_MAX + 1):
            if (
                tree.tenant == message.terms.tenant
                and tree.digest != message.root
                and first_page in tree.root.children
            ):
                most = max(most, forest.match(tree.root, message.tokens, pages_max).pages)
        return most

    def _gained(self, wait: Wait | None, matched_tokens: int) -> tuple[int, int]:
        """Tokens that the sequence need not compute thanks to ``wait``: first those that others
        computed, then those read from disk."""
        if wait is None:
            return 0, 0
        gained_tokens = max(matched_tokens - wait.start_pages * self._page_size, 0)
        fetched_tokens = min(wait.fetched_pages * self._page_size, gained_tokens)
        self._books.in_flight.saved_tokens += gained_tokens - fetched_tokens
        return gained_tokens - fetched_tokens, fetched_tokens
