"""What a pager tells of itself: its books to whoever asks, and its cache to routers.

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
    """Ask for the ledger and the list of leases, of those with ids above ``after`` (audit, tests):
    whatever stands while a long list is read, part by part, is in it once."""

    after: U64 = 0


class LeaseLine(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    lease: U64
    key: SequenceKey
    owner: ShortText
    state: ShortText
    page_count: Count
    filled_tokens: Count
    held_pages: Count = 0
    """Of these, pages that are this lease's alone."""
    incarnation: U64 = 0
    """Of its holder, or while it is offered of the offerer."""
    expires_in_ms: Count = 0
    """Of an offered one: until its ticket ends. 0: it is over, or there is none."""
    trace: ShortText = ""
    """The trace of who was admitted, if there is one."""


class LedgerFault(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something in the pager's books that does not add up: a bug, and what it is about."""

    what: ShortText
    page_count: Count = 0
    pages: list[Count] = []
    """The first few of them."""
    root: ShortText = ""
    """Where they are cached: the first digits of its root, its tenant and model if known, and where
    the prefix ends."""
    lease: U64 = 0
    key: SequenceKey | None = None
    owner: ShortText = ""
    """Whose lease it is; without one who wrote these pages last, as far as their headers say."""
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
    """Who has a session, open or not, and is not proven dead."""
    ticket_count: Count
    waiter_count: Count
    disk_slots: Count = 0
    """0: pages are not kept on disk, or not any more."""
    disk_pages: Count = 0
    unclaimed_pages: Count = 0
    """Held or draining pages that no lease has: they wait for workers of an earlier life of the
    pager to say what they hold, or are being read from disk."""
    leased_pages: Count = 0
    """Held or draining pages that leases have."""
    lease_count: Count = 0
    offered_count: Count = 0
    """Of these, offered ones."""
    faults: list[LedgerFault] = []
    """What a count of pages and pins by their owners finds, at most 32; none in later parts."""
    are_pins_counted: bool = True
    """False: too much is pinned to count it in one turn."""
    leases: list[LeaseLine]
    """Those with ids above what was asked for, ascending, not more than 4,096."""
    more: bool = False
    """There are others after these."""


@registered("worker.inspect")
class InspectWorker(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ask for the leases that a worker believes in (audit)."""


class WorkerLease(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    lease: U64
    key: SequenceKey
    state: Literal["held", "offered", "releasing", "lost"]
    page_count: Count
    pages_max: Count = 0
    """What it may have asked for, in pages: the answer may be under way. 0: not said."""
    trace: ShortText = ""


@registered("worker.report")
class WorkerReport(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``debt_count``: what the worker owes the pager and has not had answered yet (releases,
    acknowledgements): until then both may differ."""

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
