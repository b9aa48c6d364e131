"""How a worker tells a pager that is new, or whose records differ, what it holds (see
``pager_messages``)."""

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
    """The pager is new, or its records differ from the worker's: declare everything."""

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
    """Further pages that were promised at its admission and are not granted yet."""
    tokens_max: Count = 0
    """``Admit.tokens_max`` of its admission."""
    trace: ShortText = ""
    """The trace of its sequence; empty if there is none."""
    ticket: RequestId | None = None
    """Set while the lease is offered and the offer is not known to be closed."""


@registered("pager.declare")
class Declare(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a worker holds. The pager releases leases that are not listed, and answers with
    the ones it cannot confirm (``Declared.lost``). A declaration also asserts that no step of the
    worker uses any other page, so the worker first waits for the steps of revoked leases.

    A declaration may come in parts (``part`` of ``parts``). Each is processed when it arrives; all
    but the last to arrive are answered ``Ok``. ``number`` counts an incarnation's declarations
    from 1: parts of different ones are never combined, and late ones are ``Stale``.
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
    """The worker no longer has the ``lost`` leases: forget their pages and admit again."""

    lost: list[U64]
