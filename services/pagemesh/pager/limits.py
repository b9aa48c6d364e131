"""What a pager is told when it is made: the pool it keeps, and the limits it keeps to."""

from __future__ import annotations

from dataclasses import dataclass

from pagemesh.wire.pool_format import EPOCH_SHIFT, LEASE_SLOT_COUNT_MAX


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """The pool of one pager life. ``epoch`` is the life of the pager, ``incarnation`` that
    of the pool's memory; ``group``, ``layout_digest`` and ``path`` only travel."""

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
"""A few bursts: a prompt's next part takes some dozens of pages from others at once."""


@dataclass(frozen=True, slots=True)
class PagerLimits:
    """Times in milliseconds; every table of the pager has a bound here."""

    session_ttl_ms: int = 5_000
    heartbeat_ms: int = 1_000
    ask_again_ms: int = 1_000
    """Told to waiters; one that was silent for twice as long is forgotten."""
    ticket_ttl_ms_max: int = 60_000
    revoke_again_ms: int = 500
    probe_again_ms: int = 500
    settle_late_ms: int = 10_000
    """For so long after the start nothing is taken back for want of pages that may be evicted once
    every worker has declared what it holds."""
    drain_late_ms: int = 1_000
    """How long after it was told a holder may be busy with a step; from then on nobody counts on
    what it was told to let go of, if others can give as much."""
    drain_ms_max: int = 5_000
    """How long a holder that is silent may leave pages draining, others waiting, before it is
    killed."""
    step_ms_max: int = 300_000
    """What a step of a worker may take, which lets go of what was taken from it when it ends."""
    declare_grace_ms: int = 3_000
    """A lease younger than this is not missed in a declaration: its grant may be under way."""
    session_count_max: int = 256
    lease_count_max: int = LEASE_SLOT_COUNT_MAX
    ticket_count_max: int = 4_096
    waiter_count_max: int = 4_096
    in_flight_together_ms: int = 100
    """Sequences that arrived at gateways within it are all the same age when one waits for
    what another computes."""
    in_flight_stall_ms_max: int = 10_000
    """How long a worker whose prefix is waited for may commit nothing."""
    pin_share_max: float = 0.25
    """Of the pool, that operators may pin in all."""
    pin_count_max: int = 256
    ended_count_max: int = 8_192
    """Ended leases and closed tickets that are remembered, so that repeats are answered."""
    staged_bytes_max: int = 0
    """Of pages that were evicted and wait to be written to disk. 0: what fits pages and pool."""
    mover_rest_ms: int = 5_000
    """How long a worker that did not move pages of a device is not asked to."""
    mover_slow_ms: int = 2_000
    """One that has been filling pages for so long is given no others."""
    declare_parts_max: int = 4_096
    declare_leases_max: int = 4 * LEASE_SLOT_COUNT_MAX
    """In all parts of a declaration, whose numbers are kept until the last one comes."""

    @property
    def busy_drain_ms_max(self) -> int:
        """How long a holder that beats may: as much longer as its step may take."""
        return self.step_ms_max + self.drain_ms_max

    def staged_pages_max(self, facts: PoolFacts) -> int:
        """How many pages may wait to be written. Unless a limit is given: room for 128, at most 1
        GiB and half of the pool, but 64 MiB of any pool."""
        staged_bytes = self.staged_bytes_max
        if not staged_bytes:
            pool_bytes = facts.page_count * facts.page_bytes
            few_bursts = min(_STAGED_PAGES * facts.page_bytes, _STAGED_BYTES_MAX, pool_bytes // 2)
            staged_bytes = max(few_bursts, _STAGED_BYTES_MIN)
        return max(1, staged_bytes // facts.page_bytes)
