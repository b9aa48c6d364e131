"""What is taken and holds nothing, counted when somebody asks.

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

from collections.abc import Iterable
from dataclasses import dataclass

from pagemesh.pager.leases.lease import Lease
from pagemesh.pager.leases.states import LeaseState

_REVOKED = LeaseState.REVOKED


@dataclass(frozen=True, slots=True)
class Waste:
    """Sums over leases that stand. ``unfilled_slots``: granted and without a token, which is
    internal and reservation."""

    unfilled_slots: int
    internal_slots: int
    contiguous_slots: int

    @property
    def reservation_slots(self) -> int:
        return self.unfilled_slots - self.internal_slots


def waste_of(leases: Iterable[Lease], page_size: int) -> Waste:
    """The waste of those of ``leases`` that stand, with pages of ``page_size`` slots."""
    unfilled = internal = contiguous = 0
    for lease in leases:
        if lease.life.state is _REVOKED:
            continue
        slots, filled = lease.page_count * page_size, lease.filled_tokens
        unfilled += slots - filled
        internal += -filled % page_size
        contiguous += (lease.tokens_max if lease.tokens_max > slots else slots) - filled
    return Waste(unfilled, internal, contiguous)
