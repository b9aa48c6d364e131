"""A pager's reports on itself: its books to operators, and its cached prefixes to routers.

operator -> pager     InspectPager      reply: PagerReport (on ``subjects.pager_report``)
operator -> worker    InspectWorker     reply: WorkerReport (on ``subjects.worker_report``)
gateway -> pager      SnapshotWanted    reply: PagesSnapshot, in parts
pager -> gateways     PagesChanged      (a message on ``subjects.pages``)
"""

from __future__ import annotations

from typing import Literal

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
    """Ask for the ledger and the leases with ids above ``after`` (audit, tests). A long list is
    read in parts; a lease that exists throughout is in it exactly once."""

    after: U64 = 0


class LeaseLine(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    lease: U64
    key: SequenceKey
    owner: ShortText
    state: ShortText
    page_count: Count
    filled_tokens: Count
    held_pages: Count = 0
    """Of these, the pages that belong to this lease alone."""
    incarnation: U64 = 0
    """Incarnation of the holder; while the lease is offered, of the offerer."""
    expires_in_ms: Count = 0
    """For an offered lease, the time until its ticket ends; 0: it is over, or there is none."""
    trace: ShortText = ""
    """The trace of the admitted sequence, if there is one."""


class LedgerFault(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An inconsistency in the pager's books, which is a bug, and what it concerns."""

    what: ShortText
    page_count: Count = 0
    pages: list[Count] = []
    """The first few of the pages."""
    root: ShortText = ""
    """Where the pages are cached: the first digits of the root, its model and tenant if known, and
    where the prefix ends."""
    lease: U64 = 0
    key: SequenceKey | None = None
    owner: ShortText = ""
    """The holder of the lease; without one, the last writers of the pages, from their headers."""
    trace: ShortText = ""


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
    workers: list[ShortText] = []
    """Workers that have a session, open or not, and are not proven dead."""
    ticket_count: Count
    waiter_count: Count
    disk_slots: Count = 0
    """0: no pages are kept on disk, or no longer."""
    disk_pages: Count = 0
    unclaimed_pages: Count = 0
    """Held or draining pages that belong to no lease: either workers from an earlier life of the
    pager have yet to declare or let go of them, or they are being read from disk."""
    leased_pages: Count = 0
    """Held or draining pages that belong to leases."""
    lease_count: Count = 0
    offered_count: Count = 0
    """Of these, the leases that are offered."""
    faults: list[LedgerFault] = []
    """Found by recounting pages and pins by owner, at most 32; only in the first part of a list."""
    are_pins_counted: bool = True
    """False: too much is pinned to count in one turn of the pager."""
    leases: list[LeaseLine]
    """Those with ids above ``InspectPager.after``, ascending, at most 4,096."""
    more: bool = False
    """More leases follow."""


@registered("worker.inspect")
class InspectWorker(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ask for the leases that a worker believes it has (audit)."""


class WorkerLease(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    lease: U64
    key: SequenceKey
    state: Literal["held", "offered", "releasing", "lost"]
    page_count: Count
    pages_max: Count = 0
    """Pages that it may have asked for; the answer may be under way. 0: not stated."""
    trace: ShortText = ""


@registered("worker.report")
class WorkerReport(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``debt_count``: messages that the worker owes the pager and that are not answered yet
    (releases, acknowledgements); until they are, the two reports may differ."""

    worker: Name
    incarnation: U64
    sequence_count: Count
    debt_count: Count
    leases: list[WorkerLease]


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
    """Ask for every cached prefix id, from page ``first`` of the pool on."""

    first: Count = 0


@registered("pager.pages_snapshot")
class PagesSnapshot(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of the listing as it was at ``sequence``; ``more``: other parts follow. ``keys``: one
    for each page from ``first`` on, 0 if it is not cached."""

    host: Name
    epoch: U64
    sequence: U64
    first: Count
    keys: bytes
    more: bool
