"""Between workers and the pager of their host.

Requests are idempotent: each carries what makes a repeat harmless (a sequence key, an
absolute count, a ticket id), so a lost reply is answered by asking again.

    worker -> pager                reply                        later, pager -> worker
    OpenSession                    SessionOpened
    Heartbeat                      Ok | DeclareWanted
    Declare                        Declared
    Admit                          Granted | Queued             Granted (when queued)
    Extend                         Extended | Queued            Extended (when queued)
    Commit                         Committed
    Fork                           Forked
    Release                        Ok
    Offer                          Offered                      TicketClosed
    Redeem                         Granted
    Withdraw, CancelTicket         Ok
    AckRevoke                      Ok                           (answers Revoke)

Any of them may be answered ``Refused``. What a pager tells of itself is in ``pager_reports``.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from pagemesh.wire.cache_terms import NO_TERMS, CacheTerms
from pagemesh.wire.declarations import Declare as Declare
from pagemesh.wire.declarations import Declared as Declared
from pagemesh.wire.declarations import DeclareWanted as DeclareWanted
from pagemesh.wire.declarations import HeldLease as HeldLease
from pagemesh.wire.messages import (
    U32,
    U64,
    Count,
    Digest,
    Message,
    Millis,
    Name,
    Order,
    Packed,
    RequestId,
    SequenceKey,
    ShortText,
    Value,
    registered,
)
from pagemesh.wire.tokens import PageCopy


class PoolSpec(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A page of ``page_size`` slots. Pools with equal digests in one ``place`` are alike."""

    layout_digest: Digest
    page_size: Annotated[int, Meta(ge=1, le=256)]
    page_bytes: Annotated[int, Meta(ge=1, le=1 << 34)]
    group: U32 = 0
    place: ShortText = ""


class Handle(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where pages are and how to tell that they are still those pages.

    A page whose ledger sequence is above ``granted_at`` was given out anew: stale.
    """

    host: Name
    pool_incarnation: U64
    pool: U32
    group: U32
    layout_digest: Digest
    lease: U64
    granted_at: U64
    extents: Packed
    token_count: Count
    """Slots whose K and V are written, from the start of the sequence."""
    ttl_ms: Millis


class Waterfall(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What became of each cached token: available -> selected -> delivered. Selected is what was
    to be used, waited for or read from disk too; delivered what the sequence began with.

    ``lost`` maps a reason (see ``pager.waterfall``) to tokens that are, or were lately, there. Of
    the delivered ``awaited_tokens`` were in flight, ``fetched_tokens`` on disk: ``awaited_ms``."""

    available_tokens: Count = 0
    selected_tokens: Count = 0
    delivered_tokens: Count = 0
    lost: dict[ShortText, Count] = {}
    awaited_tokens: Count = 0
    fetched_tokens: Count = 0
    awaited_ms: Count = 0


@registered("pager.open_session")
class OpenSession(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker incarnation asks for the right to hold leases. ``lock_name`` is the file in the pool
    folder that it keeps locked for as long as it lives."""

    worker: Name
    incarnation: U64
    role: Literal["prefill", "decode"]
    model: ShortText = ""
    lock_name: Name
    pool: PoolSpec


@registered("pager.session_opened")
class SessionOpened(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: Name
    epoch: U64
    pool_incarnation: U64
    pool: U32
    pool_path: ShortText
    page_count: Count
    session_ttl_ms: Millis
    heartbeat_ms: Millis


@registered("pager.heartbeat")
class Heartbeat(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keeps a session alive. ``lease_digest``: the XOR of the lease ids held, so a difference shows
    without listing them."""

    worker: Name
    incarnation: U64
    epoch: U64
    lease_count: Count
    lease_digest: U64


class AskedAs(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """In the name of which life of a worker pages were asked for, and which life of the pager."""

    incarnation: U64
    epoch: U64


@registered("pager.admit")
class Admit(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Match the longest cached prefix of ``tokens``, pin it, reserve the rest.

    ``tokens`` are all tokens known so far (prompt, then generated); ``reserve_tokens`` is
    how many slots the lease shall have, at least ``len(tokens)``. The last token is never
    matched, since its logits are wanted. ``tokens_max``: slots it may ever fill. ``first_tokens``:
    slots beyond the match that are wanted at once; 0: all. The others are *promised*: nobody else
    is admitted to them, and ``Extend`` gets them without waiting. ``again``: it, or
    another choice of its prompt, was admitted before, so that the prompt is no new one.
    """

    key: SequenceKey
    order: Order
    worker: Name
    incarnation: U64
    epoch: U64
    root: Digest
    tokens: Packed
    reserve_tokens: Count
    read_cache: bool = True
    terms: CacheTerms = NO_TERMS
    tokens_max: Count = 0
    first_tokens: Count = 0
    again: bool = False
    deadline_ms: Millis

    @property
    def asked_as(self) -> AskedAs:
        return AskedAs(incarnation=self.incarnation, epoch=self.epoch)


@registered("pager.granted")
class Granted(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A lease: its page table, of which the first ``cached_tokens`` slots are filled. The word at
    ``lease_slot`` of the pool's revocation table holds ``lease`` for as long as the lease stands.
    Pages past the committed ones are writable by this holder alone."""

    key: SequenceKey
    lease: U64
    lease_slot: Count
    granted_at: U64
    extents: Packed
    cached_tokens: Count
    """Slots already filled: matched prefix on admit, all filled slots on redeem."""
    waterfall: Waterfall = Waterfall()
    asked_as: AskedAs | None = None
    """Of one that comes later: how whoever was queued had asked."""


@registered("pager.queued")
class Queued(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Not now. The reply comes later, as a message to the worker; asking again is harmless and
    keeps the place in the queue. Who is silent for twice ``ask_again_ms`` is forgotten."""

    key: SequenceKey
    ahead_count: Count
    ask_again_ms: Millis


@registered("pager.extend")
class Extend(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Let the lease have ``page_count`` pages in all; ``have_pages`` are known already."""

    key: SequenceKey
    worker: Name
    incarnation: U64
    lease: U64
    have_pages: Count
    page_count: Count


@registered("pager.extended")
class Extended(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pages of the lease from index ``first_index`` of its page table on."""

    key: SequenceKey
    lease: U64
    granted_at: U64
    first_index: Count
    extents: Packed


class Fill(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far a lease is written: slots ``[0, filled_tokens)`` hold K and V. ``tokens`` are
    the ids from position ``first_token`` on that the pager may not know yet."""

    filled_tokens: Count
    first_token: Count
    tokens: Packed = b""


@registered("pager.commit")
class Commit(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Make the full pages below ``fill.filled_tokens`` immutable and matchable."""

    key: SequenceKey
    worker: Name
    incarnation: U64
    lease: U64
    fill: Fill


@registered("pager.committed")
class Committed(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    lease: U64
    committed_tokens: Count
    known_tokens: Count
    """Token ids the pager knows; a later ``first_token`` above it is ``Malformed``."""


@registered("pager.fork")
class Fork(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Give each of ``children`` a lease of its own over the same filled slots. Full pages are
    shared; a partly filled last page is new for each child, and the worker copies it before it
    writes there. All or nothing: never queued, refused with ``NoCapacity``."""

    key: SequenceKey
    worker: Name
    incarnation: U64
    lease: U64
    fill: Fill
    children: Annotated[list[SequenceKey], Meta(max_length=1023)]
    reserve_tokens: Count


@registered("pager.forked")
class Forked(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    lease: U64
    children: list[Granted]
    copies: list[PageCopy]


NO_LEASE = 0
"""No lease has that number."""


@registered("pager.release")
class Release(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Commit what is full, then give everything back. What is not there is ``Ok`` when it was once
    this worker's, ``Gone`` otherwise. ``NO_LEASE``: the sequence waits for pages, and wants none
    any more."""

    key: SequenceKey
    worker: Name
    incarnation: U64
    lease: U64
    fill: Fill
    cache: bool = True
    """False: keep nothing that it wrote or read and that nobody else uses, since no numbers came
    of it. No request can ask for that."""


@registered("pager.offer")
class Offer(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Commit what is full and move the lease to ``ticket``, unguessable; a repeat is one offer."""

    key: SequenceKey
    worker: Name
    incarnation: U64
    epoch: U64
    lease: U64
    ticket: RequestId
    fill: Fill
    ttl_ms: Millis


@registered("pager.offered")
class Offered(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    ticket: RequestId
    handle: Handle


@registered("pager.redeem")
class Redeem(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Take a ticket's lease over: ownership, the tail's write right and growth pages in one
    round trip. Idempotent by (ticket, incarnation). The lease keeps its id; ``granted_at`` is new.
    Growth pages that are not to be had are simply missing: ``Extend`` then. ``Gone`` when the
    ticket was withdrawn or cancelled, ``TicketOver`` when it has expired or its lease is over,
    ``Stale`` when it is not known (yet): it is of another life, or long over."""

    key: SequenceKey
    worker: Name
    incarnation: U64
    epoch: U64
    ticket: RequestId
    handle: Handle
    reserve_tokens: Count


@registered("pager.withdraw")
class Withdraw(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The offerer takes its lease back. ``Gone`` when it was redeemed, ``Stale`` when it has
    expired or is of another life."""

    worker: Name
    incarnation: U64
    ticket: RequestId


@registered("pager.cancel_ticket")
class CancelTicket(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whoever holds the ticket does not want it: its lease is released."""

    worker: Name
    incarnation: U64
    ticket: RequestId


@registered("pager.ticket_closed")
class TicketClosed(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """To the offerer: forget the ticket."""

    ticket: RequestId
    outcome: Literal["redeemed", "cancelled", "expired"]


@registered("pager.revoke")
class Revoke(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """To the holder: the lease ends now. Its revocation word is already changed. Its
    writable pages stay unused until ``AckRevoke`` or the holder's proven death."""

    key: SequenceKey
    lease: U64
    reason: Literal["preempted", "session_expired", "ticket_expired", "stale"]
    usage: ShortText = ""


@registered("pager.ack_revoke")
class AckRevoke(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """No step of mine reads or writes these pages any more."""

    worker: Name
    incarnation: U64
    leases: list[U64]
