"""What a worker holds, told to a pager that is new or counts otherwise (see ``pager_messages``)."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from pagemesh.wire.cache_terms import NO_TERMS, CacheTerms
from pagemesh.wire.messages import (
    U64,
    Count,
    Digest,
    Message,
    Name,
    Order,
    Packed,
    RequestId,
    SequenceKey,
    ShortText,
    Value,
    registered,
)


@registered("pager.declare_wanted")
class DeclareWanted(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Your holdings and the pager's differ (or the pager is new): declare them all."""

    epoch: U64


class HeldLease(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One lease as its holder knows it."""

    lease: U64
    lease_slot: Count
    key: SequenceKey
    order: Order
    root: Digest
    granted_at: U64
    extents: Packed
    tokens: Packed
    """Token ids of every filled slot, from the start."""
    terms: CacheTerms = NO_TERMS
    promised_pages: Count = 0
    """More that its admission reserved."""
    tokens_max: Count = 0
    """As its admission said."""
    trace: ShortText = ""
    """The trace of its sequence; empty: there is none."""
    ticket: RequestId | None = None
    """Set while the lease is offered and the offer is not known to be closed."""


@registered("pager.declare")
class Declare(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a worker holds; what the pager does not find here is released, what it cannot
    confirm is answered as lost. So it also says that no step of the worker uses any other page: it
    waits for the steps of revoked leases. May come in parts: ``part`` of ``parts``, each taken up
    when it comes, all but the last to arrive answered ``Ok``. ``number`` counts those of an
    incarnation from 1: parts of different ones are never put together, late ones are ``Stale``.
    """

    worker: Name
    incarnation: U64
    epoch: U64
    number: Annotated[int, Meta(ge=1, le=0xFFFF_FFFF)]
    part: Annotated[int, Meta(ge=0, le=65_535)] = 0
    parts: Annotated[int, Meta(ge=1, le=65_536)] = 1
    leases: list[HeldLease]


@registered("pager.declared")
class Declared(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``lost`` leases are not the worker's any more: forget their pages, admit again."""

    lost: list[U64]
