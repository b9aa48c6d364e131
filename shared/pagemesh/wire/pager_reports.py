"""What a pager tells of itself: its books to whoever asks, and its cache to routers.

anybody -> pager      InspectPager      reply: PagerReport (on ``subjects.pager_report``)
gateway -> pager      SnapshotWanted    reply: PagesSnapshot, in parts
pager -> gateways     PagesChanged      (a message on ``subjects.pages``)
"""

from __future__ import annotations

from pagemesh.wire.messages import (
    U64,
    Count,
    Message,
    Name,
    SequenceKey,
    ShortText,
    Value,
    registered,
)


@registered("pager.inspect")
class InspectPager(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ask for the ledger and the list of leases (audit, tests, planner)."""


class LeaseLine(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    lease: U64
    key: SequenceKey
    owner: ShortText
    state: ShortText
    page_count: Count
    filled_tokens: Count


@registered("pager.report")
class PagerReport(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``free + held + pinned + idle + draining = total``, all in pages."""

    host: Name
    epoch: U64
    pool_incarnation: U64
    page_size: Count
    page_bytes: U64
    total_pages: Count
    free_pages: Count
    held_pages: Count
    pinned_pages: Count
    idle_pages: Count
    draining_pages: Count
    evicted_pages: U64
    preempted_count: U64
    session_count: Count
    ticket_count: Count
    waiter_count: Count
    disk_slots: Count = 0
    """0: pages are not kept on disk, or not any more."""
    disk_pages: Count = 0
    leases: list[LeaseLine]


@registered("pager.pages_changed")
class PagesChanged(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of the pager's event stream: keyed 64-bit prefix ids (packed
    little-endian uint64) that became or ceased to be cached. ``sequence`` counts up by one;
    after a gap ask for a ``PagesSnapshot``."""

    host: Name
    epoch: U64
    sequence: U64
    stored: bytes = b""
    removed: bytes = b""


@registered("pager.snapshot_wanted")
class SnapshotWanted(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ask for every cached prefix id, from index ``first`` of the listing on."""

    first: Count = 0


@registered("pager.pages_snapshot")
class PagesSnapshot(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of the listing as it was at ``sequence``; ``more`` says that it goes on."""

    host: Name
    epoch: U64
    sequence: U64
    first: Count
    keys: bytes
    more: bool
