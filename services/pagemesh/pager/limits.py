"""What a pager is created with: the facts of its pool, and its limits."""

from __future__ import annotations

from dataclasses import dataclass

from pagemesh.wire.pool_format import EPOCH_SHIFT, LEASE_SLOT_COUNT_MAX


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """The pool of one pager life. ``epoch`` numbers the life of the pager, ``incarnation``
    identifies the pool's memory; ``group``, ``layout_digest`` and ``path`` are only passed on."""

    host: str
    epoch: int
    incarnation: int
    page_count: int
    page_size: int
    page_bytes: int
    layout_digest: bytes
    path: str
    pool: int = 0
    group: int = 0
    place: str = ""
    """Where the pages are; see ``wire.pool_format``."""

    @property
    def page_token_bytes(self) -> int:
        """Bytes of the packed token ids of one page."""
        return 4 * self.page_size

    @property
    def first_sequence(self) -> int:
        """Above every ledger number of earlier epochs."""
        return self.epoch << EPOCH_SHIFT

    def pages_for(self, tokens: int) -> int:
        """Pages that hold ``tokens`` slots."""
        return -(-tokens // self.page_size)


_STAGED_BYTES_MIN, _STAGED_BYTES_MAX = 64 << 20, 1 << 30
_STAGED_PAGES = 128
"""Room for a few bursts: the next part of a prompt evicts some dozens of pages at once."""


@dataclass(frozen=True, slots=True)
class PagerLimits:
    """Times in milliseconds; every table of the pager has a bound here."""

    session_ttl_ms: int = 5_000
    heartbeat_ms: int = 1_000
    ask_again_ms: int = 1_000
    """How soon waiters are told to ask again; one that is silent for twice as long is forgotten."""
    ticket_ttl_ms_max: int = 60_000
    revoke_again_ms: int = 500
    probe_again_ms: int = 500
    settle_late_ms: int = 10_000
    """While a worker has yet to declare what it holds, for this long at most, no lease is revoked
    for want of pages that can be evicted once it has."""
    drain_late_ms: int = 1_000
    """How long the holder of a revoked lease may be busy with a step. After that nobody counts on
    the pages that it is to let go of, if others can give as many."""
    drain_ms_max: int = 5_000
    """How long a silent holder may keep pages draining that others need before it is killed."""
    step_ms_max: int = 300_000
    """How long a worker's step may take; revoked pages are let go of when it ends."""
    declare_grace_ms: int = 3_000
    """A lease younger than this may be missing from a declaration: its grant may be under way."""
    session_count_max: int = 256
    lease_count_max: int = LEASE_SLOT_COUNT_MAX
    ticket_count_max: int = 4_096
    waiter_count_max: int = 4_096
    in_flight_together_ms: int = 100
    """Sequences that arrived at gateways within this time count as equally old when one is to wait
    for what another computes."""
    in_flight_stall_ms_max: int = 10_000
    """How long a worker may commit nothing of a prefix that others wait for."""
    pin_share_max: float = 0.25
    """The share of the pool that operators may pin in all."""
    pin_count_max: int = 256
    ended_count_max: int = 8_192
    """Ended leases and closed tickets that are remembered, so that repeats are answered."""
    staged_bytes_max: int = 0
    """Bytes of evicted pages that may wait to be written to disk. 0: see ``staged_pages_max``."""
    mover_rest_ms: int = 5_000
    """How long a worker that failed to move pages of a device is not asked again."""
    mover_slow_ms: int = 2_000
    """A worker that has been filling pages for longer than this is given no others."""
    declare_parts_max: int = 4_096
    declare_leases_max: int = 4 * LEASE_SLOT_COUNT_MAX
    """Leases in all parts of a declaration, whose ids are kept until the last part comes."""

    @property
    def busy_drain_ms_max(self) -> int:
        """``drain_ms_max`` for a holder that sends heartbeats: longer by what a step may take."""
        return self.step_ms_max + self.drain_ms_max

    def staged_pages_max(self, facts: PoolFacts) -> int:
        """How many pages may wait to be written. Unless ``staged_bytes_max`` is given: room for 128
        pages, at most 1 GiB and half of the pool, but never less than 64 MiB."""
        staged_bytes = self.staged_bytes_max
        if not staged_bytes:
            pool_bytes = facts.page_count * facts.page_bytes
            few_bursts = min(_STAGED_PAGES * facts.page_bytes, _STAGED_BYTES_MAX, pool_bytes // 2)
            staged_bytes = max(few_bursts, _STAGED_BYTES_MIN)
        return max(1, staged_bytes // facts.page_bytes)
