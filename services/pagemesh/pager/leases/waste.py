"""Wasted KV memory (slots that are taken and hold no token), counted on request.

    internal      empty slots after the last token, in a page that is partly filled
    reservation   slots of granted pages without any token yet: of a prompt that is being computed,
                  or granted ahead of growth
    external      none: all pages are alike, so any free one will do
    contiguous    what contiguous allocation would waste, with slots reserved for the greatest
                  length of each sequence: the waste that paging saves

Counted in slots over all leases that are not revoked. The pager learns of tokens when pages are
committed, so tokens drawn since then still count as reservation: the true waste is a little less.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pagemesh.pager.leases.lease import Lease
from pagemesh.pager.leases.states import LeaseState

_REVOKED = LeaseState.REVOKED


@dataclass(frozen=True, slots=True)
class Waste:
    """Sums over leases that are not revoked. ``unfilled_slots``: granted slots without a token,
    internal and reservation together."""

    unfilled_slots: int
    internal_slots: int
    contiguous_slots: int

    @property
    def reservation_slots(self) -> int:
        return self.unfilled_slots - self.internal_slots


def waste_of(leases: Iterable[Lease], page_size: int) -> Waste:
    """The waste of ``leases``, except revoked ones, with pages of ``page_size`` slots."""
    unfilled = internal = contiguous = 0
    for lease in leases:
        if lease.life.state is _REVOKED:
            continue
        slots, filled = lease.page_count * page_size, lease.filled_tokens
        unfilled += slots - filled
        internal += -filled % page_size
        contiguous += (lease.tokens_max if lease.tokens_max > slots else slots) - filled
    return Waste(unfilled, internal, contiguous)
