"""What is taken and holds nothing, kept up to date with every grant, fill and release.

    internal      slots behind the last token, in a page that has some
    reservation   slots of granted pages that have no token yet: of a prompt that is being computed,
                  and ahead of growth
    external      none: all pages are alike, so any free one will do
    contiguous    what sequences would waste whose slots had to lie side by side, up to the most
                  that each of them can come to: what paging saves

Counted over standing leases, in slots. The pager hears of tokens when pages are committed, so what
was drawn since counts as reservation still: the true waste is a little less.
"""

from __future__ import annotations

from pagemesh.pager.lease import Lease


class Waste:
    """Sums over the leases that stand, for pages of ``page_size`` slots."""

    __slots__ = ("_page_size", "contiguous_slots", "internal_slots", "unfilled_slots")

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self.unfilled_slots = 0
        """Granted and without a token: internal and reservation."""
        self.internal_slots = 0
        self.contiguous_slots = 0

    @property
    def reservation_slots(self) -> int:
        return self.unfilled_slots - self.internal_slots

    def enter(self, lease: Lease) -> None:
        """``lease`` stands from now on."""
        slots = lease.page_count * self._page_size
        if lease.tokens_max < slots:
            lease.tokens_max = slots
        self.unfilled_slots += slots - lease.filled_tokens
        self.internal_slots += -lease.filled_tokens % self._page_size
        self.contiguous_slots += lease.tokens_max - lease.filled_tokens

    def leave(self, lease: Lease) -> None:
        """``lease`` stands no longer."""
        self.unfilled_slots -= lease.page_count * self._page_size - lease.filled_tokens
        self.internal_slots -= -lease.filled_tokens % self._page_size
        self.contiguous_slots -= lease.tokens_max - lease.filled_tokens

    def grow(self, lease: Lease, page_count: int) -> None:
        """``lease`` got so many more pages."""
        self.unfilled_slots += page_count * self._page_size
        more = lease.page_count * self._page_size - lease.tokens_max
        if more > 0:
            lease.tokens_max += more
            self.contiguous_slots += more

    def fill(self, lease: Lease, filled_tokens: int) -> None:
        """Slots of ``lease``, from the first on, hold tokens."""
        before, size = lease.filled_tokens, self._page_size
        lease.filled_tokens = filled_tokens
        self.unfilled_slots -= filled_tokens - before
        self.internal_slots += -filled_tokens % size - -before % size
        self.contiguous_slots -= filled_tokens - before

    def same_as(self, other: Waste) -> bool:
        """Whether both have the same sums."""
        return all(getattr(self, name) == getattr(other, name) for name in self.__slots__)
