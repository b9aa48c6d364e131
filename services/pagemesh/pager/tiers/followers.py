"""Which pages on disk directly follow which page, by chain key.

    page --> one page that follows it: usually there is only one
             and others, where prompts branch

This tells what cannot be found any more when a page is lost, and which pages nothing follows.
"""

from __future__ import annotations


class Followers:
    """The followers of all pages of one tree."""

    __slots__ = ("_first", "_others")

    def __init__(self) -> None:
        self._first: dict[int, int] = {}
        self._others: dict[int, set[int]] = {}
        """Only for pages that more than one page follows."""

    def __contains__(self, chain: int) -> bool:
        """Whether anything follows ``chain``."""
        return chain in self._first

    def one_of(self, chain: int) -> tuple[int, bool]:
        """A page that follows ``chain``, and whether it is the only one. Raises ``KeyError``."""
        return self._first[chain], chain not in self._others

    def of(self, chain: int) -> list[int]:
        """All pages that follow ``chain``."""
        first = self._first.get(chain)
        return [] if first is None else [first, *self._others.get(chain, ())]

    def add(self, before: int, chain: int) -> None:
        """``chain``, which was not there, follows ``before``."""
        if self._first.setdefault(before, chain) != chain:
            self._others.setdefault(before, set()).add(chain)

    def remove(self, before: int, chain: int) -> None:
        """``chain`` does not follow ``before`` any more."""
        others = self._others.get(before)
        if self._first[before] != chain:
            assert others is not None
            others.remove(chain)
        elif others is None:
            del self._first[before]
        else:
            self._first[before] = others.pop()
        if others is not None and not others:
            del self._others[before]
