"""Messages between workers and the pager of their host.

Requests are idempotent: each carries what makes a repeat harmless (a sequence key, an
absolute count, a ticket id), so after a lost reply the worker simply asks again.

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

Any request may be answered ``Refused``. A pager's reports on itself are in ``pager_reports``.
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
    """The shape of a pool's pages, each of ``page_size`` slots. Pools with equal digests in one
    ``place`` are alike."""

    layout_digest: Digest
    page_size: Annotated[int, Meta(ge=1, le=256)]
    page_bytes: Annotated[int, Meta(ge=1, le=1 << 34)]
    group: U32 = 0
    place: ShortText = ""


class Handle(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where pages are, and how to tell that they are still the same pages.

    A page whose ledger sequence is above ``granted_at`` has been granted anew: the handle is stale.
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
    """What became of each cached token: available -> selected -> delivered. Selected tokens were
    meant to be used, including those to be waited for or read from disk; delivered tokens are
    those the sequence began with.

    ``lost`` maps a reason (see ``pager.leases.waterfall``) to tokens that are cached or were until
    lately. Of the delivered tokens, ``awaited_tokens`` were in flight and ``fetched_tokens`` on
    disk; the wait for them took ``awaited_ms``."""

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
    """Keeps a session alive. ``lease_digest`` is the XOR of the lease ids held, which reveals a
    difference without listing them."""

    worker: Name
    incarnation: U64
    epoch: U64
    lease_count: Count
    lease_digest: U64


class AskedAs(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """For which life of a worker pages were requested, and from which life of the pager."""

    incarnation: U64
    epoch: U64


@registered("pager.admit")
class Admit(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Match the longest cached prefix of ``tokens``, pin it, reserve the rest.

    ``tokens`` are all tokens known so far (prompt, then generated); ``reserve_tokens`` is how many
    slots the lease is to have, at least ``len(tokens)``. The last token is never matched, since
    its logits are wanted. ``tokens_max``: slots that the sequence may ever fill. ``first_tokens``:
    slots beyond the match that are wanted at once; 0: all. The others are *promised*: no other
    sequence is admitted to them, and ``Extend`` gets them without waiting. ``again``: this
    sequence, or another choice of its prompt, was admitted before, so the prompt is not new.
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
    """A lease: its page table, whose first ``cached_tokens`` slots are filled. The word at
    ``lease_slot`` of the pool's revocation table holds ``lease`` for as long as the lease is valid.
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
    """In a grant that comes after ``Queued``: ``Admit.asked_as`` of the request it answers."""


@registered("pager.queued")
class Queued(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Not now. The answer comes later, as a message to the worker. Asking again is harmless and
    keeps the place in the queue; a request not repeated for twice ``ask_again_ms`` is forgotten."""

    key: SequenceKey
    ahead_count: Count
    ask_again_ms: Millis


@registered("pager.extend")
class Extend(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Grow the lease to ``page_count`` pages in all; the worker knows the first ``have_pages``."""

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
    """How far a lease is written: slots ``[0, filled_tokens)`` hold K and V. ``tokens`` are the
    token ids from position ``first_token`` on, which the pager may not know yet."""

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
    """How many token ids the pager knows; a later ``first_token`` above it is ``Malformed``."""


@registered("pager.fork")
class Fork(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Give each of ``children`` a lease of its own over the same filled slots. Full pages are
    shared; in place of a partly filled last page each child gets a new one, into which the worker
    copies it before writing there. All or nothing: never queued, refused with ``NoCapacity``."""

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
"""Never the id of a lease."""


@registered("pager.release")
class Release(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Commit full pages, then give everything back. For a lease that no longer exists the answer is
    ``Ok`` if it was once this worker's, ``Gone`` otherwise. ``NO_LEASE``: the sequence was waiting
    for pages and no longer wants any."""

    key: SequenceKey
    worker: Name
    incarnation: U64
    lease: U64
    fill: Fill
    cache: bool = True
    """False: keep nothing that the lease wrote or read and that nothing else uses, since the model
    produced no valid numbers from it. Clients cannot request this."""


@registered("pager.offer")
class Offer(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Commit full pages and move the lease to ``ticket``, an unguessable id. Repeating it makes no
    second offer."""

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
    """Take over a ticket's lease: ownership, the right to write the tail, and growth pages, in one
    round trip. Idempotent by (ticket, incarnation). The lease keeps its id; ``granted_at`` is new.
    Growth pages that are not available are left out: ``Extend`` then. ``Gone`` when the ticket was
    withdrawn, cancelled or redeemed by another worker, ``TicketOver`` when it has expired or its
    lease has ended, ``Stale`` when it is unknown: not yet known, of another life, or long over."""

    key: SequenceKey
    worker: Name
    incarnation: U64
    epoch: U64
    ticket: RequestId
    handle: Handle
    reserve_tokens: Count


@registered("pager.withdraw")
class Withdraw(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The offerer takes its lease back. ``Gone`` when the ticket was redeemed or cancelled,
    ``Stale`` when it has expired or is of another life."""

    worker: Name
    incarnation: U64
    ticket: RequestId


@registered("pager.cancel_ticket")
class CancelTicket(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The worker that was given the ticket does not want it: release its lease."""

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
    """To the holder: the lease ends now. Its revocation word has already been changed. Its
    writable pages are not reused until ``AckRevoke`` or the holder's proven death."""

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
